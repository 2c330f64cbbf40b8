"""What requests, arguments and journals of a run of many requests may be, and which error is whose."""

from __future__ import annotations

import json
import os

import pytest
import torch
from transformers import GenerationConfig

from hf_specdec import SpecConfigError, SpeculativeBatchingManager, generate_batch, generate_many
from hf_specdec.decoding.joint import TokenLogprobs
from hf_specdec.many.journal import Journal
from hf_specdec.many.results import RequestResult
from tests.helpers.arrivals import NGRAM, Raises, prompt, run_many, said_alone
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
    forms += [messages, {"messages": messages}]
    results = run_many(model, forms, tokenizer=chat_tokenizer)
    assert {tuple(result.tokens) for result in results} == {tuple(said_alone(model, ids))}
    text = chat_tokenizer.decode(results[0].tokens, skip_special_tokens=True)
    assert {result.text for result in results} == {text}
    # What chat templates are told.
    told = [{"thinking": True}, {"add_generation_prompt": False}, {"continue_final_message": True}]
    requests = [{"messages": messages, "chat_template_kwargs": one} for one in told]
    expected = [said_alone(model, chat_tokenizer(text)["input_ids"]) for text in ("abtg", "ab", "ab")]
    assert [result.tokens for result in run_many(model, requests, tokenizer=chat_tokenizer)] == expected


IMAGE = [{"role": "user", "content": [{"type": "image", "url": "x"}]}]
NO_PROMPTS = [
    *((wrong, "") for wrong in ([], [1.5, 2], {"input_ids": {5: 1}}, {5, 6}, [{"x": 1}, 2], {"seed": 3}, None, 3)),
    ([VOCAB_SIZE], "from 0 to 63"),
    (torch.tensor(3), "A request is a text"),
    (b"abc", "A request is a text"),
    (bytearray(b"abc"), "A request is a text"),
    (IMAGE, "a part that is none"),
    ({"messages": [], "tools": [{}]}, ""),
    ({"messages": [{"role": "user"}], "chat_template_kwargs": 3}, "takes a dict, got 3"),
    ({"messages": [{"role": "user"}], "chat_template_kwargs": {"tokenize": True}}, "cannot have 'tokenize'"),
    ({"input_ids": [1], "num_beams": 2}, "num_beams"),
    *(
        ({"input_ids": [1], **own}, "for all requests")
        for own in ({"spec_method": "suffix"}, {"spec_model": "user/head"}, {"speculative": "suffix"})
    ),
]


def test_prompts_that_cannot_be_read_are_the_error_of_their_request(model, chat_tokenizer):
    with nothing_runs(model):
        results = run_many(model, [request for request, _ in NO_PROMPTS], tokenizer=chat_tokenizer)
    for result, (request, message) in zip(results, NO_PROMPTS):
        assert isinstance(result.error, SpecConfigError), request
        assert message in str(result.error)
        assert (result.finish_reason, result.tokens) == ("error", [])
    without_tokenizer, unknown, right = run_many(model, ["abc", {"input_ids": [1], "id": 3}, prompt(1)])
    assert isinstance(without_tokenizer.error, SpecConfigError)
    assert isinstance(unknown.error, ValueError)
    assert right.tokens == said_alone(model, prompt(1))


def test_texts_that_cannot_be_encoded(model):
    class Strict:
        def __call__(self, text, **kwargs):
            return {"input_ids": list(text.encode("utf-8"))}

        def decode(self, tokens, **kwargs):
            return ""

    wrong, right = run_many(model, ["\ud800", "\x05"], tokenizer=Strict())
    assert isinstance(wrong.error, SpecConfigError)
    assert right.tokens == said_alone(model, [5])


IMPOSSIBLE = {
    "max_new_tokens": [2**63, 10**21, float("inf"), float("nan"), 2.5, "8", True, 0],
    "seed": [1.5, "x", True, 2**64],
    "stop_strings": [3, [], ["a", 3], ""],
    "logits_processor": [3, [3]],
    "stopping_criteria": ["x", [None]],
    "prefix_allowed_tokens_fn": [3],
    "begin_suppress_tokens": [3],
    "max_time": ["x", (4, 5), float("nan")],
    "guidance_scale": ["x"],
    "is_assistant": [True, 2.0],
    "forced_bos_token_id": ["x", {1}, -1, 10**6],
    "position_ids": [[[0, 1, 2, 3, 4]], torch.arange(5)[None]],
    "chat_template_kwargs": [{"thinking": True}, 3],
    "eos_token_id": ["x", {}],
    "top_logprobs": [-1],
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


def test_lengths_that_are_no_integers_end_as_in_plain_generation(model):
    for length in (8.0, 2.5, 10**21, float("inf")):
        call = {"max_new_tokens": length, "eos_token_id": said_alone(model, prompt(1))[9]}
        assert said_alone(model, prompt(1), **call, **NGRAM) == said_alone(model, prompt(1), **call)


BAD_ARGUMENTS = {
    "batch_size": [0, 10**9, True],
    "max_new_tokens": [float("inf")],
    "generation_config": [GenerationConfig(max_new_tokens=2**63), {"max_new_tokens": 3}],
    "shard": [3, (0.5, 2)],
    "requests": ["abc", 3, {}, torch.tensor(3), None],
    "model": [None, torch.nn.Linear(1, 1)],
    "max_tokens_in_flight": [0],
    "num_return_sequences": [2],
    "streamer": [object()],
    "spec_method": ["nonsense"],
    "num_beams": [3],
    "prefill_chunk_size": [0],
    "is_assistant": [True],
    "position_ids": [torch.zeros(1, 1, dtype=torch.long)],
    "max_time": ["x"],
    **dict.fromkeys(("stop_strings", "tokenizer", "journal", "seed"), [1.5]),
}
BAD_ARGUMENTS_OF_BATCHES = {
    "batch_size": [-1, "x"],
    "num_return_sequences": ["x"],
    "generation_config": [{"max_new_tokens": 3}, "x"],
    "model": [None],
    "inputs": ["abc", ["abc"], b"abc", [b"abc"], [3], range(3), [[1], 3]],
    "shard": [(0, 2)],
    **dict.fromkeys(("record_timestamps", "in_order", "progress"), [True]),
}


def test_bad_arguments_are_refused_before_anything_runs(model):
    def refused(function, *cases, **arguments):
        messages = []
        for name, value in cases:
            with nothing_runs(model), pytest.raises(SpecConfigError) as caught:
                function(**{"model": model, **arguments, name: value})
            messages.append(str(caught.value))
        return messages

    cases = [(name, value) for name, values in BAD_ARGUMENTS.items() for value in values]
    refused(generate_many, *cases, requests=[[1]])
    of_files = ("requests", "journal", "shard")
    refused(SpeculativeBatchingManager, *((name, value) for name, value in cases if name not in of_files))
    cases = [(name, value) for name, values in BAD_ARGUMENTS_OF_BATCHES.items() for value in values]
    refused(generate_batch, *cases, inputs=[[1]], **NGRAM)
    wrapped = [("model", model) for model in (torch.compile(model), torch.nn.DataParallel(model))]
    for message in refused(generate_many, *wrapped, requests=[[1]]):
        assert "It is a wrapper: pass the model inside" in message
    with nothing_runs(model), pytest.raises(ValueError, match="nonsense"):
        generate_many(model, [[1]], nonsense=3)


def test_progress(model, capsys):
    run_many(model, [prompt(index) for index in range(3)], progress=True, max_new_tokens=2)
    assert "3/3" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- journal


def test_run_that_was_stopped_goes_on(model, tmp_path):
    path, requests = tmp_path / "results.jsonl", [prompt(index) for index in range(6)]
    requests[4] = {"input_ids": prompt(4), "stopping_criteria": [Raises(1)]}
    first = generate_many(model, requests, 2, journal=path, do_sample=False, max_new_tokens=6, **NGRAM)
    seen = {next(first).index for _ in range(3)}
    first.close()
    with path.open("a") as file:
        file.write('{"index": 5, "key')
    forwards = []
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    again = run_many(model, requests, journal=path, max_new_tokens=6)
    hook.remove()
    assert forwards
    assert {result.index for result in again} == set(range(6))
    texts = [own.tokens for own in again[:4]]
    assert texts == [said_alone(model, prompt(index), max_new_tokens=6) for index in range(4)]
    assert all(again[index].stats.num_committed_tokens == 6 for index in seen)
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(entry["index"] for entry in entries if entry["error"] is None) == [0, 1, 2, 3, 5]
    assert {entry["error"] for entry in entries if entry["index"] == 4} == {"ZeroDivisionError"}
    with nothing_runs(model):
        known = run_many(model, requests[:4], journal=path, max_new_tokens=6)
    assert [own.tokens for own in known] == texts
    # What has failed is tried again.
    assert isinstance(run_many(model, requests, journal=path, max_new_tokens=6)[4].error, ZeroDivisionError)
    assert len(path.read_text().splitlines()) == len(entries) + 1
    for other in ({"max_new_tokens": 7}, {"max_new_tokens": 6, "temperature": 0.5}):
        with pytest.raises(SpecConfigError, match="other settings"):
            run_many(model, requests, journal=path, **other)
    path.write_text("no journal\n")
    with pytest.raises(SpecConfigError, match="Line 1"):
        run_many(model, requests, journal=path)


def test_journal_of_settings_with_keys_that_are_no_texts(model, tmp_path):
    bias = {(3,): 4.0, (5, 6): -1.0}
    request = {"input_ids": prompt(1), "sequence_bias": bias}
    (result,) = run_many(model, [request], journal=tmp_path / "journal")
    assert result.tokens == said_alone(model, prompt(1), sequence_bias=bias)
    with nothing_runs(model):
        assert run_many(model, [request], journal=tmp_path / "journal")[0].tokens == result.tokens
    with pytest.raises(SpecConfigError, match="other settings"):
        run_many(model, [{**request, "sequence_bias": {(3,): 4.5}}], journal=tmp_path / "journal")


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
    ({"logprobs": [[-1.0, [[3]]], [-2.0, []]]}, "Line 2 .*unpack"),
    ({"logprobs": [-1.0, -2.0]}, "Line 2 .*unpack"),
    ({"logprobs": [[-1.0, [["a", -1.0]]], [-2.0, []]]}, "Line 2 .*'a' is no whole number"),
    ({"logprobs": [["low", []], [-2.0, []]]}, "Line 2 .*low"),
    ({"logprobs": [[-1.0, []]]}, "Line 2 .*1 log-probabilities of 2 tokens"),
    ({"stats": {"num_drafts": 1}}, "Line 2 .*num_draft_tokens"),
    ({"stats": 3}, "Line 2 "),
    ({"tokens": [1, 2.5]}, "Line 2 .*2.5 is no whole number"),
    ({"tokens": {}}, "Line 2 .*`tokens` is {}"),
    ({"text": []}, "Line 2 .*`text`"),
    ({"error": 3}, "Line 2 .*`error`"),
    ({"logprobs": [[10**400, []], [-2.0, []]]}, "Line 2 .*too large"),
    ({"index": "1"}, "Line 2 .*'1' is no whole number"),
]


def test_damaged_journals(tmp_path):
    path = tmp_path / "results.jsonl"
    journal = Journal(path)
    for index in range(2):
        scores = [TokenLogprobs(-1.0, [(3, -0.5)]), TokenLogprobs(-2.0, [])]
        journal.add(RequestResult(index, [1, 2], None, "length", logprobs=scores), "key")
    assert Journal(path).find(1, "key").logprobs == scores
    first, second = path.read_text().splitlines()
    for changed, message in DAMAGES:
        path.write_text(f"{first}\n{json.dumps({**json.loads(second), **changed})}\n")
        with pytest.raises(SpecConfigError, match=message):
            Journal(path)


def test_journals_that_cannot_be_read_or_written(tmp_path):
    unreadable = {
        "folder": lambda path: path.mkdir(),
        "link to itself": lambda path: path.symlink_to(path),
        "device": lambda path: path.symlink_to("/dev/zero"),
        "pipe": os.mkfifo,
    }
    for name, make in unreadable.items():
        make(tmp_path / name)
        for arguments in ((tmp_path / name,), (tmp_path / "other", [tmp_path / name])):
            with pytest.raises(SpecConfigError, match="Name another file"):
                Journal(*arguments)
    for name in ("x" * 300, "no folder/journal", "a\0b"):
        with pytest.raises(SpecConfigError, match="Name another file"):
            Journal(tmp_path / name)


def test_two_runs_with_one_journal_leave_it_readable(tmp_path):
    journals = [Journal(tmp_path / "results.jsonl") for _ in range(2)]
    for index in range(6):
        journals[index % 2].add(RequestResult(index, [index] * (index + 1), None, "length"), "key")
    found = Journal(tmp_path / "results.jsonl")
    assert [found.find(index, "key").tokens for index in range(6)] == [[index] * (index + 1) for index in range(6)]
