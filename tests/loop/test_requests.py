"""What requests, arguments and journals of a run of many requests may be, and which error is whose."""

from __future__ import annotations

import json
import os

import pytest
import torch
from transformers import GenerationConfig

from hf_specdec import SpecConfigError, SpeculativeBatchingManager, generate_batch, generate_many
from hf_specdec.many.files import Journal
from hf_specdec.many.row import RequestResult, TokenLogprobs
from tests.helpers.arrivals import NGRAM, Raises, prompt, run_many, said_alone
from tests.helpers.levels import full
from tests.helpers.models import VOCAB_SIZE, letter_tokenizer, nothing_runs


CHATS = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if thinking %}t{% endif %}{% if add_generation_prompt %}g{% endif %}"
)


@pytest.fixture
def chat_tokenizer():
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = CHATS
    return tokenizer


def test_texts_ids_chats_and_dicts(model, chat_tokenizer):
    ids, messages = chat_tokenizer("abg")["input_ids"], [{"role": "user", "content": "ab"}]
    forms = ["abg", ids, torch.tensor([ids]), torch.tensor(ids), {"text": "abg"}, {"input_ids": ids}]
    forms += [messages, {"messages": messages}, {"conversations": [{"from": "human", "value": "ab"}]}]
    forms += [{"question": "abg"}, {"turns": ["abg", "b"]}]
    results = run_many(model, forms, tokenizer=chat_tokenizer)
    assert {tuple(result.tokens) for result in results} == {tuple(said_alone(model, ids))}
    text = chat_tokenizer.decode(results[0].tokens, skip_special_tokens=True)
    assert {result.text for result in results} == {text}
    # What chat templates are told.
    told = [{"thinking": True}, {"add_generation_prompt": False}, {"continue_final_message": True}]
    requests = [{"messages": messages, "chat_template_kwargs": one} for one in told]
    expected = [said_alone(model, chat_tokenizer(text)["input_ids"]) for text in ("abtg", "ab", "ab")]
    assert [result.tokens for result in run_many(model, requests, tokenizer=chat_tokenizer)] == expected


NO_PROMPTS = [
    *([], [1.5, 2], {"input_ids": {5: 1}}, {5, 6}, [{"x": 1}, 2], {"seed": 3}, None, 3, [VOCAB_SIZE], torch.tensor(3)),
    *(b"abc", bytearray(b"abc"), [{"role": "user", "content": [{"type": "image", "url": "x"}]}]),
    {"messages": [], "tools": [{}]},
    *({"messages": [{"role": "user"}], "chat_template_kwargs": own} for own in (3, {"tokenize": True})),
    {"input_ids": [1], "num_beams": 2},
    *({"input_ids": [1], name: "suffix"} for name in ("spec_method", "spec_model", "speculative")),
]


def test_prompts_that_cannot_be_read_are_the_error_of_their_request(model, chat_tokenizer):
    with nothing_runs(model):
        results = run_many(model, NO_PROMPTS, tokenizer=chat_tokenizer)
    for result, request in zip(results, NO_PROMPTS):
        assert isinstance(result.error, SpecConfigError), request
        assert (result.finish_reason, result.tokens) == ("error", [])
    without_tokenizer, unknown, right = run_many(model, ["abc", {"input_ids": [1], "id": 3}, prompt(1)])
    assert isinstance(without_tokenizer.error, SpecConfigError)
    assert isinstance(unknown.error, ValueError)
    assert right.tokens == said_alone(model, prompt(1))


IMPOSSIBLE = {
    "max_new_tokens": [2**63, float("inf"), float("nan"), 2.5, "8", True, 0],
    "seed": [1.5, "x", 2**64],
    "stop_strings": [3, [], ["a", 3], ""],
    "stopping_criteria": ["x", [None]],
    "forced_bos_token_id": ["x", {1}, -1, 10**6],
    "position_ids": [[[0, 1, 2, 3, 4]], torch.arange(5)[None]],
    "chat_template_kwargs": [{"thinking": True}, 3],
    "top_logprobs": [-1],
    **dict.fromkeys(["max_time", "guidance_scale", "is_assistant", "eos_token_id"], ["x"]),
    **dict.fromkeys(["logits_processor", "prefix_allowed_tokens_fn", "begin_suppress_tokens"], [3]),
    **dict.fromkeys(["model", "inputs", "self", "custom_generate", "", 3], [[1]]),
}


def test_impossible_settings_are_the_error_of_their_request(model):
    cases = [(name, value) for name, values in IMPOSSIBLE.items() for value in values]
    requests = [{"input_ids": prompt(1), "do_sample": True, name: value} for name, value in cases]
    *wrong, right = run_many(model, [*requests, prompt(2)], tokenizer=letter_tokenizer())
    for result, (name, value) in zip(wrong, cases):
        assert isinstance(result.error, SpecConfigError), (name, value)
        assert str(name) in str(result.error)
    assert right.tokens == said_alone(model, prompt(2))


BAD_ARGUMENTS = {
    "batch_size": [0, 10**9, True],
    "generation_config": [GenerationConfig(max_new_tokens=2**63), {"max_new_tokens": 3}],
    "shard": [3, (0.5, 2), (2, 2), (-1, 2)],
    "requests": ["abc", 3, {}, torch.tensor(3), None],
    "position_ids": [torch.zeros(1, 1, dtype=torch.long)],
    **dict.fromkeys(("max_tokens_in_flight", "prefill_chunk_size"), [0]),
    **dict.fromkeys(("num_return_sequences", "num_beams"), [2]),
    **dict.fromkeys(("stop_strings", "tokenizer", "journal", "seed", "max_new_tokens", "streamer"), [1.5]),
    **dict.fromkeys(("spec_method", "max_time", "is_assistant"), ["nonsense"]),
}
BAD_ARGUMENTS_OF_BATCHES = {
    "batch_size": [-1, "x"],
    "num_return_sequences": ["x"],
    "inputs": ["abc", ["abc"], b"abc", [b"abc"], [3], range(3), [[1], 3]],
    **dict.fromkeys(("record_timestamps", "in_order", "progress", "shard"), [True]),
}


def test_bad_arguments_are_refused_before_anything_runs(model):
    wrapped = (None, torch.nn.Linear(1, 1), torch.compile(model), torch.nn.DataParallel(model))
    cases = {**BAD_ARGUMENTS, "model": wrapped}
    of_files = ("requests", "journal", "shard")
    for function, bad, more in (
        (generate_many, cases, {"requests": [[1]]}),
        (SpeculativeBatchingManager, {name: bad for name, bad in cases.items() if name not in of_files}, {}),
        (generate_batch, BAD_ARGUMENTS_OF_BATCHES, {"inputs": [[1]], **NGRAM}),
    ):
        for name, value in ((name, value) for name, values in bad.items() for value in values):
            with nothing_runs(model), pytest.raises(SpecConfigError):
                function(**{"model": model, **more, name: value})
    with nothing_runs(model), pytest.raises(ValueError, match="nonsense"):
        generate_many(model, [[1]], nonsense=3)


def test_run_that_was_stopped_goes_on(model, tmp_path):
    path, requests = tmp_path / "results.jsonl", [prompt(index) for index in range(6)]
    requests[4] = {"input_ids": prompt(4), "stopping_criteria": [Raises(1)]}
    requests[5] = {"input_ids": prompt(5), "sequence_bias": {(3,): 4.0, (5, 6): -1.0}}
    first = generate_many(model, requests, 2, journal=path, do_sample=False, max_new_tokens=6, **NGRAM)
    seen = {next(first).index for _ in range(3)}
    first.close()
    with path.open("a") as file:
        file.write('{"index": 5, "key')
    again = run_many(model, requests, journal=path, max_new_tokens=6)
    texts = [own.tokens for own in again[:4]]
    assert texts == [said_alone(model, prompt(index), max_new_tokens=6) for index in range(4)]
    assert all(again[index].stats.num_committed_tokens == 6 for index in seen)
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(entry["index"] for entry in entries if entry["error"] is None) == [0, 1, 2, 3, 5]
    with nothing_runs(model):
        known = run_many(model, requests[:4], journal=path, max_new_tokens=6)
    assert [own.tokens for own in known] == texts
    # What has failed is tried again.
    requests[4]["stopping_criteria"] = [Raises(1)]
    assert isinstance(run_many(model, requests, journal=path, max_new_tokens=6)[4].error, ZeroDivisionError)
    assert len(path.read_text().splitlines()) == len(entries) + 1
    with pytest.raises(SpecConfigError, match="other settings"):
        run_many(model, requests, journal=path, max_new_tokens=7)
    requests[5]["sequence_bias"] = {(3,): 4.5}
    with pytest.raises(SpecConfigError, match="other settings"):
        run_many(model, requests, journal=path, max_new_tokens=6)


def test_log_probabilities_and_their_journal(model, tmp_path):
    requests = [{"input_ids": prompt(index), "top_logprobs": index} for index in (0, 2)] + [prompt(1)]
    zero, two, without = run_many(model, requests, journal=tmp_path / "journal", repetition_penalty=1.2)
    assert without.logprobs is None
    assert [top for _, top in zero.logprobs] == [[]] * 12
    with torch.no_grad():
        logs = model(torch.tensor([prompt(2) + two.tokens])).logits[0, 4:-1].log_softmax(-1)
    for scores, token, (own, top) in zip(logs, two.tokens, two.logprobs):
        assert own == pytest.approx(scores[token].item(), abs=1e-4)
        assert [pair[0] for pair in top] == scores.topk(2).indices.tolist()
        assert [pair[1] for pair in top] == pytest.approx(scores.topk(2).values.tolist(), abs=1e-4)
    again = run_many(model, requests, journal=tmp_path / "journal", repetition_penalty=1.2)
    assert [result.logprobs for result in again] == [zero.logprobs, two.logprobs, None]
    settings = {"do_sample": False, "max_new_tokens": 12, "repetition_penalty": 1.2, **NGRAM}
    (output,) = generate_batch(model, [prompt(2)], top_logprobs=1, **settings).values()
    assert output.logprobs == pytest.approx([own for own, _ in two.logprobs], abs=1e-5)
    assert [top[0][0] for top in output.top_logprobs] == [top[0][0] for _, top in two.logprobs]


DAMAGES = [
    *({"logprobs": own} for own in ([[-1.0, [[3]]], [-2.0, []]], [-1.0, -2.0], [["low", []], [-2.0, []]])),
    *({"logprobs": own} for own in ([[-1.0, [["a", -1.0]]], [-2.0, []]], [[-1.0, []]], [[10**400, []], [-2.0, []]])),
    *({"stats": own} for own in (3, {"num_drafts": 1})),
    *({"tokens": own} for own in ({}, [1, 2.5])),
    {"text": []},
    {"error": 3},
    {"index": "1"},
]


def test_damaged_journals_are_told_by_their_line(tmp_path):
    path = tmp_path / "results.jsonl"
    # Two runs with one journal leave it readable.
    journals = [Journal(path) for _ in range(2)]
    scores = [TokenLogprobs(-1.0, [(3, -0.5)]), TokenLogprobs(-2.0, [])]
    for index in range(6):
        journals[index % 2].add(RequestResult(index, [index, 2], None, "length", logprobs=scores), "key")
    found = [Journal(path).find(index, "key") for index in range(6)]
    assert [own.tokens for own in found] == [[index, 2] for index in range(6)]
    assert found[5].logprobs == scores
    first, second = path.read_text().splitlines()[:2]
    for changed in DAMAGES:
        path.write_text(f"{first}\n{json.dumps({**json.loads(second), **changed})}\n")
        with pytest.raises(SpecConfigError, match="Line 2"):
            Journal(path)
    path.write_text("no journal\n")
    with pytest.raises(SpecConfigError, match="Line 1"):
        Journal(path)


@full
def test_journals_that_cannot_be_read_or_written(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    (tmp_path / "device").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "itself", "device", "pipe", "x" * 300, "no folder/journal", "a\0b"):
        with pytest.raises(SpecConfigError, match="Name another file"):
            Journal(tmp_path / name)
    with pytest.raises(SpecConfigError, match="Name another file"):
        Journal(tmp_path / "other", [tmp_path / "pipe"])
