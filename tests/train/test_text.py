"""Text for a training: documents of files and data sets, rows of them, and what the target writes itself."""

import json
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.errors import MissingDependencyError, SpecConfigError
from hf_specdec.training.text import (
    continue_prompts,
    draw_prompts,
    find_sources,
    load_documents,
    pack,
    rows_of,
    split,
)
from tests.helpers.models import VOCAB_SIZE, letter_tokenizer, tiny_llama


TOKENIZER = letter_tokenizer()
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}-{{ message['content'] }}_{% endfor %}"
    "{% if add_generation_prompt %}a-{% endif %}"
)


def texts(*sources, **how):
    documents = load_documents([str(source) for source in sources], TOKENIZER, **how)
    return [TOKENIZER.decode(tokens) for tokens in documents["tokens"]]


def test_documents_of_files_folders_and_records(tmp_path):
    datasets = pytest.importorskip("datasets")
    for name in ("b.md", "a/c.py", "a/d.txt", "a/e.bin", "f.txt"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name[0] * 3}_{name[0]}")
    (tmp_path / "data" / "empty.txt").write_text("")
    records = [{"text": "one", "body": "three"}, {"content": "two", "body": "four"}]
    (tmp_path / "data" / "g.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n")
    read = texts(tmp_path / "data" / "f.txt", tmp_path / "data")
    assert read == ["fff_f", "aaa_a", "aaa_a", "bbb_b", "fff_f", "one", "two"]
    datasets.Dataset.from_list(records).to_parquet(str(tmp_path / "g.parquet"))
    assert texts(tmp_path / "g.parquet", column="body", max_tokens=5) == ["three"]
    # Prompts alone are for the target to continue, where a record has no more.
    records = [{"question": "ask", "text": None}, {"question": "ask", "text": "all"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(SpecConfigError, match=r"Record 1 of .*p.jsonl' has no text or chat"):
        texts(tmp_path / "p.jsonl")
    documents = load_documents([str(tmp_path / "p.jsonl")], TOKENIZER, takes_prompts=True)
    assert list(documents["prompt_length"]) == [len(TOKENIZER("ask")["input_ids"]), 0]
    # Streamed, as far as is asked for.
    assert texts(tmp_path / "data" / "f.txt", tmp_path / "data", max_tokens=11) == ["fff_f", "aaa_a", "aaa_a"]


def test_documents_of_chats_end_with_the_last_answer(tmp_path):
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = TEMPLATE
    ask, answer = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "yes", "thinking": "no"}
    path = tmp_path / "chats.jsonl"
    chats = [{"messages": [ask, answer, ask, answer, ask]}, {"messages": [ask]}]
    chats += [{"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "yes"}]}]
    path.write_text("\n".join(map(json.dumps, chats)))
    for limit in (None, 1000):
        found = load_documents([str(path)], tokenizer, max_tokens=limit)
        decoded = [[tokenizer.decode(one["tokens"][:end]) for end in (None, one["prompt_length"])] for one in found]
        assert decoded == [
            ["u-ask_a-yes_u-ask_a-yes_", "u-ask_a-yes_u-ask_a-"],
            ["u-ask_a-", "u-ask_a-"],
            ["u-ask_a-yes_", "u-ask_a-"],
        ]
    # All before any again, up to half a row of each.
    prompts = {tokenizer.decode(prompt) for prompt in draw_prompts(found, 3, 32, seed=0)}
    assert prompts == {"u-ask_a-yes_u-ask_a-"[-16:], "u-ask_a-"}
    path.write_text('{"messages": [{"speaker": "me"}]}')
    with pytest.raises(SpecConfigError, match="no list of messages with role and content"):
        load_documents([str(path)], tokenizer)


def test_data_sets_of_the_hub_are_streamed_where_a_part_is_asked_for(monkeypatch):
    datasets, asked = pytest.importorskip("datasets"), []

    def load_dataset(path, split, streaming=False):
        asked.append((path, split, streaming))
        records = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
        return records.to_iterable_dataset() if streaming else records

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert texts("some/set", "set:test") == ["one", "two"] * 2
    assert texts("some/set", "set:test", max_tokens=4) == ["one", "two"]
    assert asked == [("some/set", "train", False), ("set", "test", False), ("some/set", "train", True)]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match="pip install 'hf-specdec\\[train\\]'"):
        find_sources(["some/set"])


def test_libraries_that_run_code_of_data_sets_are_refused(monkeypatch):
    monkeypatch.setattr(pytest.importorskip("datasets"), "__version__", "3.6.0")
    with pytest.raises(MissingDependencyError, match="found datasets 3.6.0"):
        find_sources(["some/set"])


BAD_FILES = [
    ("a.jsonl", '{"text": "x"}\nno json', "a.jsonl' cannot be read: JSON parse error"),
    ("a.jsonl", "[" * 100_000, "a.jsonl' cannot be read: "),
    ("a.parquet", "PAR1" + "x" * 50 + "PAR1", "a.parquet' cannot be read: "),
    ("a.jsonl", '{"title": "x"}', "no text or chat in messages or .* it has: title"),
    ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}', "has no chat template"),
    ("a.bin", "x", "no files of a known kind"),
]


def test_wrong_files_and_sources_are_refused(tmp_path):
    for data, message in (([], "no training data"), ([str(tmp_path)], "no files of a known"), (["./no"], "no file")):
        with pytest.raises(SpecConfigError, match=message):
            find_sources(data)
    for name, content, message in BAD_FILES:
        (tmp_path / name).write_text(content)
        for limit in (None, 10):
            with pytest.raises(SpecConfigError, match=message):
                texts(tmp_path / name, max_tokens=limit)


# Rows


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=8),
    *(st.integers(1, 7), st.none() | st.integers(1, 60), st.sampled_from([0, None])),
)
def test_rows_keep_every_token_in_order(contents, length, max_tokens, end):
    stream = [token for content in contents for token in [*content, *([] if end is None else [end])]][:max_tokens]
    documents = rows_of({"tokens": tokens, "prompt_length": 0} for tokens in contents)
    if len(stream) < length:
        with pytest.raises(SpecConfigError, match="fewer than one row"):
            pack(documents, length, end, max_tokens)
        return
    rows = pack(documents, length, end, max_tokens)
    assert sum(rows["tokens"], []) == stream[: len(stream) // length * length]
    assert set(rows["prompt_length"]) == {0}


def test_rows_are_held_out_by_the_seed_alone():
    rows = rows_of({"tokens": [number], "prompt_length": 0} for number in range(6))
    rest, held_out = split(rows, 0.4, seed=1)
    assert len(held_out) == 2
    assert sorted([*rest["tokens"], *held_out["tokens"]]) == list(rows["tokens"])
    assert list(split(rows, 0.4, seed=1)[1]["tokens"]) == list(held_out["tokens"])
    with pytest.raises(SpecConfigError, match="at least two"):
        split(rows.select([0]), 0.3, seed=1)


# What the target writes


def test_continuations_are_what_the_target_writes():
    target, generator = tiny_llama(), torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, VOCAB_SIZE, (size,), generator=generator).tolist() for size in (9, 4, 4, 12, 6)]
    rows = continue_prompts(target, prompts, 20, sampled_share=0.0, batch_size=2)
    short = continue_prompts(target, prompts, 20, sampled_share=0.0, max_new_tokens=10)
    for row, start, prompt in zip(rows, short, sorted(prompts, key=len)):
        expected = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20 - len(prompt))[
            0
        ].tolist()
        assert row == {"tokens": expected, "prompt_length": len(prompt)}
        assert start == row | {"tokens": expected[: len(prompt) + 10]}
    prompt = list(range(1, 8))
    written = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=13)[0]
    target.generation_config.eos_token_id = int(written[12])
    end = written[7:].tolist().index(int(written[12])) + 8
    rows = continue_prompts(target, [prompt], 20, sampled_share=0.0)
    assert rows == [{"tokens": written[:end].tolist(), "prompt_length": 7}]
