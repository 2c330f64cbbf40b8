"""Text for a training: documents of files and data sets, rows of them, and what the target writes itself."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.errors import SpecConfigError
from hf_specdec.training.continuations import continue_prompts
from hf_specdec.training.reading import Rows
from hf_specdec.training.text import Document, find_sources, load_documents, pack
from tests.helpers.models import VOCAB_SIZE, letter_tokenizer, tiny_llama


TOKENIZER = letter_tokenizer()
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}-{{ message['content'] }}_{% endfor %}"
    "{% if add_generation_prompt %}a-{% endif %}"
)


def texts(*sources, **how):
    found = load_documents([str(source) for source in sources], TOKENIZER, **how)
    return [TOKENIZER.decode(document.tokens) for document in found]


def test_documents_of_files_folders_and_records(tmp_path):
    for name in ("b.md", "a/c.py", "a/d.txt", "a/e.bin", "f.txt"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name[0] * 3)
    (tmp_path / "data" / "empty.txt").write_text("")
    assert texts(tmp_path / "data" / "f.txt", tmp_path / "data") == ["fff", "aaa", "aaa", "bbb", "fff"]
    path = tmp_path / "records.jsonl"
    records = ["plain", {"text": "one", "id": 1}, {"content": "two"}]
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    assert texts(path) == ["plain", "one", "two"]
    path.write_text(json.dumps({"text": "one", "body": "two"}))
    assert texts(path, column="body") == ["two"]


def test_documents_of_chats_end_with_the_last_answer(tmp_path):
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = TEMPLATE
    ask, answer = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "yes"}
    path = tmp_path / "chats.jsonl"
    chats = [{"messages": [ask, answer, ask, answer, ask]}, {"messages": [ask]}]
    chats += [{"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "yes"}]}]
    path.write_text("\n".join(map(json.dumps, chats)))
    found = load_documents([str(path)], tokenizer)
    assert [(tokenizer.decode(one.tokens), tokenizer.decode(one.tokens[: one.prompt_length])) for one in found] == [
        ("u-ask_a-yes_u-ask_a-yes_", "u-ask_a-yes_u-ask_a-"),
        ("u-ask_a-", "u-ask_a-"),
        ("u-ask_a-yes_", "u-ask_a-"),
    ]
    path.write_text('{"messages": [{"speaker": "me"}]}')
    with pytest.raises(SpecConfigError, match="no list of messages with role and content"):
        list(load_documents([str(path)], tokenizer))


def test_documents_of_data_sets_and_parquet(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, split, streaming):
        asked.append((name, split, streaming))
        return iter([{"text": "one"}, {"text": "two"}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert texts("some/set", "set:test") == ["one", "two"] * 2
    assert asked == [("some/set", "train", True), ("set", "test", True)]
    pyarrow, path = pytest.importorskip("pyarrow"), tmp_path / "a.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": ["one", "two"]}), path)
    assert texts(path) == ["one", "two"]
    path.write_bytes(b"PAR1" + bytes(50) + b"PAR1")
    with pytest.raises(SpecConfigError, match="cannot be read as parquet"):
        texts(path)


BAD_FILES = [
    ("a.jsonl", '{"text": "x"}\nno json', "Line 2 of '.*' is no JSON"),
    ("a.jsonl", "[" * 100_000, "Line 1 of .* is no JSON"),
    ("a.jsonl", '{"title": "x"}', "no text or chat in messages or .* it has: title"),
    ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}', "has no chat template"),
    ("a.bin", "x", "is of no known kind"),
]


def test_wrong_files_and_sources_are_refused(tmp_path):
    for data, message in (([], "no training data"), ([str(tmp_path)], "no files of a known"), (["./no"], "no file")):
        with pytest.raises(SpecConfigError, match=message):
            find_sources(data)
    for name, content, message in BAD_FILES:
        (tmp_path / name).write_text(content)
        with pytest.raises(SpecConfigError, match=message):
            texts(tmp_path / name)


# Rows


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=8),
    *(st.integers(1, 7), st.none() | st.integers(1, 60), st.sampled_from([0, None])),
)
def test_rows_keep_every_token_in_order(contents, length, max_tokens, end):
    stream = [token for content in contents for token in [*content, *([] if end is None else [end])]][:max_tokens]
    documents = map(Document, contents)
    if len(stream) < length:
        with pytest.raises(SpecConfigError, match="fewer than one row"):
            pack(documents, length, end, max_tokens)
        return
    rows = pack(documents, length, end, max_tokens)
    assert rows.tokens.flatten().tolist() == stream[: len(stream) // length * length]
    assert rows.counted.all()


def test_rows_are_held_out_or_seen_once_in_every_pass_in_a_new_order():
    rows = Rows.of(torch.arange(6)[:, None].expand(6, 3))
    rest, held_out = rows.split(0.4, seed=1)
    assert len(held_out) == 2
    assert sorted([*rest.tokens[:, 0].tolist(), *held_out.tokens[:, 0].tolist()]) == list(range(6))
    assert rows.split(0.4, seed=1)[1].tokens.equal(held_out.tokens)
    with pytest.raises(SpecConfigError, match="at least two"):
        rows[:1].split(0.3, seed=1)

    def orders():
        batches = rows.batches(2, seed=3)
        return [torch.cat([next(batches).tokens[:, 0] for _ in range(3)]).tolist() for _ in range(3)]

    assert [sorted(order) for order in orders()] == [list(range(6))] * 3
    assert orders()[0] != orders()[1]
    assert orders() == orders()
    batch = next(rows.batches(4, seed=0))
    assert batch.tokens.equal(rows.tokens[batch.index])


# What the target writes


def test_continuations_are_what_the_target_writes():
    target, generator = tiny_llama(), torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, VOCAB_SIZE, (size,), generator=generator).tolist() for size in (9, 4, 4, 12, 6)]
    steps = []
    rows = continue_prompts(target, prompts, 20, sampled_share=0.0, batch_size=2, on_step=steps.append)
    assert steps == [2, 4, 5]
    short = continue_prompts(target, prompts, 20, sampled_share=0.0, max_new_tokens=10)
    for row, prompt in enumerate(sorted(prompts, key=len)):
        expected = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20 - len(prompt))
        assert rows.tokens[row].tolist() == expected[0].tolist()
        assert rows.counted[row].tolist() == [False] * len(prompt) + [True] * (20 - len(prompt))
        assert short.counted[row].sum() == min(10, 20 - len(prompt))
        assert torch.equal(short.tokens[row, : len(prompt) + 8], rows.tokens[row, : len(prompt) + 8])
    prompt = list(range(1, 8))
    written = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=13)[0]
    target.generation_config.eos_token_id = int(written[12])
    end = written[7:].tolist().index(int(written[12])) + 8
    rows = continue_prompts(target, [prompt], 20, sampled_share=0.0)
    assert rows.tokens[0].tolist() == written[:end].tolist() + [0] * (20 - end)
    assert rows.counted[0].sum() == end - 7
