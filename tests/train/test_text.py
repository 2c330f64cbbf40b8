import builtins
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.errors import MissingDependencyError, SpecConfigError
from hf_specdec.training.continuations import continue_prompts, draw_prompts
from hf_specdec.training.reading import Rows
from hf_specdec.training.text import Document, find_sources, load_documents, pack
from tests.helpers.models import VOCAB_SIZE, letter_tokenizer, tiny_llama


TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}-{{ message['content'] }}_{% endfor %}"
    "{% if add_generation_prompt %}a-{% endif %}"
)


@pytest.fixture
def tokenizer():
    return letter_tokenizer()


def texts(documents, tokenizer):
    return [tokenizer.decode(document.tokens) for document in documents]


class TestDocuments:
    def test_of_files_and_folders_in_order(self, tmp_path, tokenizer):
        for name in ("b.md", "a/c.py", "a/d.txt", "a/e.bin", "f.txt"):
            path = tmp_path / "data" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name[0] * 3)
        (tmp_path / "data" / "empty.txt").write_text("")
        found = load_documents([str(tmp_path / "data" / "f.txt"), str(tmp_path / "data")], tokenizer)
        assert texts(found, tokenizer) == ["fff", "aaa", "aaa", "bbb", "fff"]

    def test_of_records(self, tmp_path, tokenizer):
        path = tmp_path / "records.jsonl"
        records = ["plain", {"text": "one", "id": 1}, {"content": "two"}]
        path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
        assert texts(load_documents([str(path)], tokenizer), tokenizer) == ["plain", "one", "two"]
        path.write_text(json.dumps({"text": "one", "body": "two"}))
        assert texts(load_documents([str(path)], tokenizer, column="body"), tokenizer) == ["two"]

    def test_of_chats_end_with_the_last_answer(self, tmp_path, tokenizer):
        tokenizer.chat_template = TEMPLATE
        ask, answer = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "yes"}
        path = tmp_path / "chats.jsonl"
        chats = [{"messages": [ask, answer, ask, answer, ask]}, {"messages": [ask]}]
        chats += [{"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "yes"}]}]
        path.write_text("\n".join(map(json.dumps, chats)))
        whole, unanswered, other = load_documents([str(path)], tokenizer)
        assert tokenizer.decode(whole.tokens) == "u-ask_a-yes_u-ask_a-yes_"
        assert tokenizer.decode(whole.tokens[: whole.prompt_length]) == "u-ask_a-yes_u-ask_a-"
        assert tokenizer.decode(unanswered.tokens) == "u-ask_a-"
        assert unanswered.prompt_length == len(unanswered.tokens)
        assert tokenizer.decode(other.tokens) == "u-ask_a-yes_"

    def test_of_parquet(self, tmp_path, tokenizer):
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "a.parquet")
        assert texts(load_documents([str(tmp_path / "a.parquet")], tokenizer), tokenizer) == ["one", "two"]

    def test_of_data_sets(self, tokenizer, monkeypatch):
        asked = []

        def load_dataset(name, split, streaming):
            asked.append((name, split, streaming))
            return iter([{"text": "one"}, {"text": "two"}])

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
        found = texts(load_documents(["some/set", "set:test"], tokenizer), tokenizer)
        assert found == ["one", "two"] * 2
        assert asked == [("some/set", "train", True), ("set", "test", True)]


class TestErrors:
    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.jsonl", '{"text": "x"}\nno json', "Line 2 of '.*' is no JSON"),
            ("a.jsonl", '{"title": "x"}', "no text or chat in messages or .* it has: title"),
            ("a.jsonl", "17", "it has: int"),
            ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}', "has no chat template"),
            ("a.bin", "x", "is of no known kind"),
        ],
    )
    def test_of_files(self, name, content, message, tmp_path, tokenizer):
        (tmp_path / name).write_text(content)
        with pytest.raises(SpecConfigError, match=message):
            list(load_documents([str(tmp_path / name)], tokenizer))

    def test_a_chat_that_is_none(self, tmp_path, tokenizer):
        tokenizer.chat_template = TEMPLATE
        (tmp_path / "a.jsonl").write_text('{"messages": [{"speaker": "me"}]}')
        with pytest.raises(SpecConfigError, match="no list of messages with role and content"):
            list(load_documents([str(tmp_path / "a.jsonl")], tokenizer))

    def test_sources_are_checked_at_once(self, tmp_path, monkeypatch):
        for data, message in (
            ([], "no training data"),
            ([str(tmp_path)], "no files of a known kind"),
            ([str(tmp_path / "missing.txt")], "There is no file or folder"),
            (["./missing"], "There is no file or folder"),
        ):
            with pytest.raises(SpecConfigError, match=message):
                find_sources(data)
        hide(monkeypatch, "datasets")
        with pytest.raises(MissingDependencyError, match="pip install datasets"):
            find_sources(["someone/something"])

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.parquet", b"PAR1" + bytes(50) + b"PAR1", "cannot be read as parquet"),
            ("a.parquet", b"garbage", "cannot be read as parquet"),
            ("a.jsonl", b"[" * 100_000, "Line 1 of .* is no JSON"),
        ],
    )
    def test_garbage(self, tmp_path, tokenizer, name, content, message):
        if name.endswith("parquet"):
            pytest.importorskip("pyarrow")
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SpecConfigError, match=message):
            list(load_documents([str(tmp_path / name)], tokenizer))

    def test_parquet_without_its_package(self, tmp_path, tokenizer, monkeypatch):
        (tmp_path / "a.parquet").write_bytes(b"PAR1")
        hide(monkeypatch, "pyarrow")
        with pytest.raises(MissingDependencyError, match="pip install pyarrow"):
            list(load_documents([str(tmp_path / "a.parquet")], tokenizer))


def hide(monkeypatch, package):
    """Acts as if a package were not installed."""
    original = builtins.__import__

    def importing(name, *args, **kwargs):
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", importing)


class TestPacking:
    @given(
        st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=8),
        st.integers(1, 7),
        st.none() | st.integers(1, 60),
    )
    def test_keeps_every_token_in_order(self, contents, length, max_tokens):
        stream = [token for content in contents for token in [*content, 0]][:max_tokens]
        documents = map(Document, contents)
        if len(stream) < length:
            with pytest.raises(SpecConfigError, match="fewer than one row"):
                pack(documents, length, 0, max_tokens)
            return
        rows = pack(documents, length, 0, max_tokens)
        assert rows.tokens.flatten().tolist() == stream[: len(stream) // length * length]
        assert rows.counted.all()

    def test_without_an_end_token(self):
        rows = pack([Document([1, 2]), Document([3, 4])], 4, None)
        assert rows.tokens.tolist() == [[1, 2, 3, 4]]

    def test_the_held_out_rows_are_not_trained_on(self):
        tokens = torch.arange(10)[:, None].expand(10, 4)
        rows = Rows(tokens, torch.ones_like(tokens, dtype=torch.bool))
        rest, held_out = rows.split(0.3, seed=1)
        assert len(held_out) == 3
        assert sorted([*rest.tokens[:, 0].tolist(), *held_out.tokens[:, 0].tolist()]) == list(range(10))
        assert rows.split(0.3, seed=1)[1].tokens.equal(held_out.tokens)
        with pytest.raises(SpecConfigError, match="at least two"):
            rows[:1].split(0.3, seed=1)

    def test_every_pass_has_all_rows_in_a_new_order(self):
        tokens = torch.arange(6)[:, None].expand(6, 3)
        rows = Rows(tokens, torch.ones_like(tokens, dtype=torch.bool))
        batches = rows.batches(2, seed=3)
        passes = [torch.cat([next(batches).tokens[:, 0] for _ in range(3)]).tolist() for _ in range(3)]
        assert [sorted(order) for order in passes] == [list(range(6))] * 3
        assert passes[0] != passes[1]
        again = rows.batches(2, seed=3)
        assert torch.cat([next(again).tokens[:, 0] for _ in range(3)]).tolist() == passes[0]
        batch = next(rows.batches(4, seed=0))
        assert batch.tokens.equal(rows.tokens[batch.index])


class TestContinuations:
    def test_are_what_the_target_writes(self):
        target = tiny_llama()
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(1, VOCAB_SIZE, (size,), generator=generator).tolist() for size in (9, 4, 4, 12, 6)]
        steps = []
        rows = continue_prompts(target, prompts, 20, sampled_share=0.0, batch_size=2, on_step=steps.append)
        assert steps == [2, 4, 5]
        for prompt, tokens, counted in zip(sorted(prompts, key=len), rows.tokens, rows.counted):
            expected = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20 - len(prompt))
            assert tokens.tolist() == expected[0].tolist()
            assert counted.tolist() == [False] * len(prompt) + [True] * (20 - len(prompt))
        short = continue_prompts(target, prompts, 20, sampled_share=0.0, max_new_tokens=10)
        for prompt, whole, tokens, counted in zip(sorted(prompts, key=len), rows.tokens, short.tokens, short.counted):
            assert counted.sum() == min(10, 20 - len(prompt))
            assert torch.equal(tokens[: len(prompt) + 8], whole[: len(prompt) + 8])

    def test_end_with_the_end_token(self):
        target = tiny_llama()
        prompt = list(range(1, 8))
        written = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=13)[0]
        target.generation_config.eos_token_id = int(written[12])
        end = written[7:].tolist().index(int(written[12])) + 8
        rows = continue_prompts(target, [prompt], 20, sampled_share=0.0)
        assert rows.tokens[0].tolist() == written[:end].tolist() + [0] * (20 - end)
        assert rows.counted[0].sum() == end - 7

    def test_sampled_share(self, monkeypatch):
        target = tiny_llama()
        sampled = []
        original = type(target).generate

        def generate(model, *args, do_sample, **kwargs):
            sampled.append(do_sample)
            return original(model, *args, do_sample=do_sample, **kwargs)

        monkeypatch.setattr(type(target), "generate", generate)
        continue_prompts(target, [[1, 2, 3]] * 8, 6, sampled_share=0.25, batch_size=1)
        assert sampled == [False, False, False, True] * 2

    def test_chats_are_drawn_in_turn(self):
        chats = [Document([first, *range(30)], prompt_length=9) for first in range(100, 107)]
        drawn = [prompt[0] for prompt in draw_prompts(chats, 20, 32, seed=0)]
        assert [sorted(drawn[start : start + 7]) for start in (0, 7)] == [list(range(100, 107))] * 2
        assert drawn[:7] != sorted(drawn[:7])

    def test_prompts_are_pieces_of_text_and_beginnings_of_chats(self):
        text, chat = Document(list(range(100, 160))), Document(list(range(40)), prompt_length=30)
        prompts = draw_prompts([text, chat], 60, 32, seed=0)
        assert prompts == draw_prompts([text, chat], 60, 32, seed=0)
        chats = [prompt for prompt in prompts if prompt[0] < 100]
        assert all(prompt == list(range(14, 30)) for prompt in chats)
        pieces = [prompt for prompt in prompts if prompt[0] >= 100]
        assert chats
        assert pieces
        for piece in pieces:
            assert 2 <= len(piece) <= 16
            assert piece == list(range(piece[0], piece[0] + len(piece)))
