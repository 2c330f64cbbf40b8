"""Many requests through one loop: who comes in, who ends, and what each of them gets."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import os
import threading
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from hf_specdec import (
    CandidateGenerator,
    DraftTree,
    SpecConfigError,
    SpecDecError,
    SpecDecodingStats,
    SpeculativeBatchingManager,
    UnsupportedModelError,
    generate_batch,
    generate_many,
    record,
)
from hf_specdec.candidate_generators import register_candidate_generator
from hf_specdec.decoding.joint import JointLoop, Row, TokenLogprobs
from hf_specdec.decoding.sequences import Sequences
from hf_specdec.many.engine import Engine
from hf_specdec.many.journal import Journal
from hf_specdec.many.requests import RequestReader
from hf_specdec.many.results import RequestResult
from hf_specdec.method import methods
from tests.helpers.architectures import tiny_model
from tests.helpers.models import VOCAB_SIZE, letter_tokenizer, nothing_runs, tiny_gpt2, tiny_llama, tiny_mistral


NGRAM = {"spec_method": "ngram", "num_speculative_tokens": 4}

# New tokens of a request that is running still when the test comes to it, however slow the test is.
ENDLESS = 1_000_000


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def prompt(index: int, length: int = 5) -> list[int]:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()


def alone(model, tokens: list[int], **settings) -> list[int]:
    """What plain generation says."""
    output = model.generate(torch.tensor([tokens]), **{"do_sample": False, "max_new_tokens": 12, **settings})
    return output[0, len(tokens) :].tolist()


def run(model, requests, batch_size: int = 3, **settings) -> list:
    settings = {"do_sample": False, "max_new_tokens": 12, **NGRAM, **settings}
    return list(generate_many(model, requests, batch_size, in_order=True, **settings))


# -------------------------------------------------------------------------------------------------- who comes and goes


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    places=st.sampled_from([1, 2, 3, 8]),
    requests=st.lists(
        st.tuples(
            st.integers(1, 9),  # tokens of the prompt
            st.integers(1, 9),  # new tokens
            st.sampled_from(["greedy", "greedy", "sampled", "raises", "cancelled"]),
            st.integers(0, 3),  # steps before it arrives
        ),
        min_size=1,
        max_size=9,
    ),
)
def test_lengths_arrivals_cancellations_and_errors(model, places, requests):
    reader = RequestReader(model, {"max_new_tokens": 12}, seed=3, num_places=places)
    engine = Engine(model, speculator(model, "none" if places == 2 else "ngram"), reader, places, chunk_size=4)
    rows: dict[int, Row] = {}
    ended: dict[int, Row] = {}

    def step():
        for row in engine.step():
            ended[next(index for index, own in rows.items() if own is row)] = row

    for index, (length, new, kind, pause) in enumerate(requests):
        for _ in range(pause):
            step()
        own = {"max_new_tokens": new, "do_sample": kind == "sampled", "seed": index}
        if kind == "raises":
            own["stopping_criteria"] = [Raises(len_at=length + 2)]
        rows[index] = reader.row(index, prompt(index, length), own)
        engine.add(rows[index])
        if kind == "cancelled":
            step()
            if index not in ended:
                engine.cancel(rows[index])
    while not engine.is_idle:
        step()
    step()
    assert ended.keys() == rows.keys()
    for index, (length, new, kind, _) in enumerate(requests):
        said = ended[index].tokens
        if kind == "sampled":
            expected = sampled_alone(model, prompt(index, length), new, index)
        else:
            expected = alone(model, prompt(index, length), max_new_tokens=new)
        if kind == "raises" and new >= 2:
            assert isinstance(ended[index].error, ZeroDivisionError)
        elif kind == "cancelled":
            assert said == expected[: len(said)]
        else:
            assert said == expected
    engine.close()


def speculator(model, method="ngram"):
    from hf_specdec import load_speculator

    return load_speculator(model, method, num_speculative_tokens=4)


def sampled_alone(model, tokens: list[int], new: int, seed: int) -> list[int]:
    torch.manual_seed(seed)
    output = model.generate(torch.tensor([tokens]), do_sample=True, max_new_tokens=new, **NGRAM)
    return output[0, len(tokens) :].tolist()


class Raises(StoppingCriteria):
    def __init__(self, len_at: int):
        self.len_at = len_at

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= self.len_at:
            raise ZeroDivisionError
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_requests_are_taken_when_there_is_room(model):
    taken = []

    def endless():
        for index in itertools.count():
            taken.append(index)
            yield prompt(index)

    results = generate_many(model, endless(), 3, do_sample=False, max_new_tokens=6, **NGRAM)
    assert not taken
    seen = [next(results) for _ in range(7)]
    assert len(taken) <= 7 + 3
    results.close()
    assert not results._ready
    assert all(result.tokens == alone(model, prompt(result.index), max_new_tokens=6) for result in seen)
    with pytest.raises(StopIteration):
        next(results)


@pytest.mark.parametrize("in_order", [False, True])
def test_results_that_need_no_place_come_at_once(model, tmp_path, in_order):
    """Those of a journal, and of requests that cannot be read."""
    requests, taken = [prompt(index) for index in range(20)], []
    run(model, requests, journal=tmp_path / "journal", max_new_tokens=2)

    def known_and_wrong():
        for index in itertools.count():
            taken.append(index)
            yield requests[index] if index < 20 else {"nonsense": 3}

    call = {"do_sample": False, "max_new_tokens": 2, "journal": tmp_path / "journal", "in_order": in_order, **NGRAM}
    results = generate_many(model, known_and_wrong(), 3, **call)
    assert next(results).tokens == alone(model, prompt(0), max_new_tokens=2)
    assert len(taken) <= 3
    wrong = [next(results) for _ in range(40)][-1]
    assert isinstance(wrong.error, SpecConfigError)
    assert len(taken) <= 41 + 3
    results.close()
    with pytest.raises(StopIteration):
        next(results)


@pytest.mark.parametrize("in_thread", [False, True])
def test_results_are_made_one_after_the_other(model, in_thread):
    """Where another result is asked for while one is made, that is refused, and the run goes on."""
    refused = []

    def ask() -> None:
        with pytest.raises(SpecDecError, match="in one thread"):
            next(results)
        refused.append(True)

    def requests():
        for index in range(3):
            if in_thread:
                asking = threading.Thread(target=ask)
                asking.start()
                asking.join()
            else:
                ask()
            yield prompt(index)

    results = generate_many(model, requests(), 2, do_sample=False, max_new_tokens=12, in_order=True, **NGRAM)
    assert [result.tokens for result in results] == [alone(model, prompt(index)) for index in range(3)]
    assert refused == [True] * 3


def test_in_order_or_as_they_end(model):
    requests = [{"input_ids": prompt(index), "max_new_tokens": new} for index, new in enumerate([9, 2, 3, 1])]
    call = {"do_sample": False, **NGRAM}
    assert [result.index for result in generate_many(model, requests, 2, in_order=True, **call)] == [0, 1, 2, 3]
    assert [result.index for result in generate_many(model, requests, 2, **call)][-1] == 0


def test_tokens_in_flight(model, monkeypatch):
    most = []
    step = Engine._cycle

    def watched(engine):
        most.append(sum(row.most_tokens for row in engine._loop.active))
        step(engine)

    monkeypatch.setattr(Engine, "_cycle", watched)
    requests = [prompt(index, 4 + 3 * (index % 3)) for index in range(8)] + [prompt(9, 40)]
    results = run(model, requests, 8, max_tokens_in_flight=45)
    assert 22 < max(most) <= 45
    assert [result.tokens for result in results[:8]] == [alone(model, tokens) for tokens in requests[:8]]
    assert isinstance(results[8].error, SpecConfigError)
    assert "max_tokens_in_flight=45" in str(results[8].error)


def test_long_prompts_do_not_stop_the_others(model, monkeypatch):
    """While a prompt is read in chunks the others go on, and the states that drafts are made from are whole."""
    monkeypatch.setattr(Engine.__init__, "__defaults__", (None, 8, False))
    turns = []
    cycle = Engine._cycle_of_others
    monkeypatch.setattr(Engine, "_cycle_of_others", lambda engine: (turns.append(1), cycle(engine)))
    requests = [prompt(0), {"input_ids": prompt(1), "max_new_tokens": 3}, prompt(2, 40)]
    assert [result.tokens for result in run(model, requests, 2)] == [
        alone(model, prompt(0)),
        alone(model, prompt(1), max_new_tokens=3),
        alone(model, prompt(2, 40)),
    ]
    assert len(turns) == 4


def test_a_long_prompt_leaves_listeners_and_graphs_where_they_are(model, monkeypatch):
    """Also where all others end while it is read."""
    monkeypatch.setattr(Engine.__init__, "__defaults__", (None, 4, False))
    graphs = []
    use = JointLoop._use_graphs
    monkeypatch.setattr(JointLoop, "_use_graphs", lambda loop: (graphs.append(loop), use(loop)))
    requests = [{"input_ids": prompt(0), "max_new_tokens": 2}, {"input_ids": prompt(1), "max_new_tokens": 3}]
    requests += [prompt(2, 60), prompt(3)]
    with record() as made:
        results = run(model, requests, 2)
    lengths = [2, 3, 12, 12]
    assert [result.tokens for result in results] == [
        alone(model, prompt(index, 60 if index == 2 else 5), max_new_tokens=new) for index, new in enumerate(lengths)
    ]
    assert SpecDecodingStats.total(call.stats for call in made.calls).num_committed_tokens == sum(lengths)
    assert len(graphs) == len(made.calls) == 1


class Trouble:
    """Fails a method of loops when it is called for the nth time."""

    def __init__(self, monkeypatch, name: str, error: Exception, times: tuple[int, ...]):
        self.calls, original = 0, getattr(JointLoop, name)

        def failing(loop, *args, **kwargs):
            self.calls += 1
            output = original(loop, *args, **kwargs)
            # Late: what it does is done in part.
            if self.calls in times:
                raise error
            return output

        monkeypatch.setattr(JointLoop, name, failing)


TROUBLES = {
    "memory in a cycle": ("_verify", torch.OutOfMemoryError("no memory"), (3,)),
    "memory in several cycles": ("_verify", torch.OutOfMemoryError("no memory"), (3, 4)),
    "a cycle that was committed": ("_commit", RuntimeError("broken"), (4,)),
    "joining": ("join", RuntimeError("broken"), (1,)),
    "a newcomer's prompt": ("begin", UnsupportedModelError("not this one"), (2,)),
}


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", TROUBLES)
def test_others_go_on_where_one_fails(model, monkeypatch, name, sample):
    """The one that came last ends with the error, and what the others say is what they would have said."""
    settings = {"max_new_tokens": 12, "do_sample": sample, "top_logprobs": 0}
    reader = RequestReader(model, settings, num_places=3)
    expected = [sampled_alone(model, prompt(index), 12, index) for index in range(4)]
    if not sample:
        expected = [alone(model, prompt(index)) for index in range(4)]
    engine = Engine(model, speculator(model), reader, 3)
    rows = [reader.row(index, prompt(index), {"seed": index}) for index in range(4)]
    trouble = Trouble(monkeypatch, *TROUBLES[name])
    ended = []
    for row in rows[:3]:
        engine.add(row)
        ended += engine.step()
    while not engine.is_idle:
        ended += engine.step()
    assert trouble.calls > max(TROUBLES[name][2])
    engine.add(rows[3])
    while not engine.is_idle:
        ended += engine.step()
    failed = [row for row in rows if row.error is not None]
    assert len(failed) == len(TROUBLES[name][2])
    assert {row.error for row in failed} == {TROUBLES[name][1]}
    assert rows[0] not in failed
    assert rows[3] not in failed
    assert sorted(ended, key=id) == sorted(rows, key=id)
    for row, text in zip(rows, expected):
        if row not in failed:
            assert row.tokens == text
            assert len(row.logprobs) == row.stats.num_committed_tokens == 12
    engine.close()


def test_a_free_place_is_given_away_at_once(model):
    reader = RequestReader(model, {"max_new_tokens": 40}, num_places=8)
    engine = Engine(model, speculator(model, "none"), reader, 8)
    rows = [reader.row(index, prompt(index), {}) for index in range(8)]
    for row in rows[:7]:
        engine.add(row)
    engine.step()
    engine.add(rows[7])
    engine.step()
    assert len(rows[7].tokens) == 2
    engine.close()


TARGETS = {
    "sliding window": tiny_mistral,
    "learned positions": tiny_gpt2,
    # Recurrent states of every kind: at each token, replayed, and beside attention.
    **{name: partial(tiny_model, name) for name in ("lfm2", "qwen3_next", "falcon_h1", "jamba", "gemma3_text")},
}


@pytest.mark.parametrize("name", TARGETS)
def test_other_targets(name, monkeypatch):
    target = TARGETS[name]()
    requests = [prompt(index, 1 + 4 * (index % 4)) for index in range(7)]
    call = {"pad_token_id": 0, "eos_token_id": None}
    requests.append(prompt(7, 40))
    # The last one comes when others are there, and is longer than a chunk.
    monkeypatch.setattr(Engine.__init__, "__defaults__", (None, 16, False))
    results = run(target, requests, **call)
    assert [result.tokens for result in results] == [alone(target, tokens, **call) for tokens in requests]


def test_plain_decoding_without_a_drafter(model):
    requests = [prompt(index, 1 + index) for index in range(5)]
    for off in ({}, {"spec_method": "off"}):
        results = list(generate_many(model, requests, 2, in_order=True, do_sample=False, max_new_tokens=5, **off))
        assert [result.tokens for result in results] == [alone(model, own, max_new_tokens=5) for own in requests]


def test_nothing_is_left_behind(model):
    """Neither hooks nor rows: the number of living tensors and rows does not grow with the requests."""

    def living() -> int:
        gc.collect()
        # By its type: a proxy of something that is gone, such as numba leaves, cannot be asked for its class.
        return sum(issubclass(type(item), (torch.Tensor, Row)) for item in gc.get_objects())

    results = generate_many(model, (prompt(i % 7) for i in range(200)), 4, do_sample=False, max_new_tokens=3, **NGRAM)
    counts = [living() for index, _ in enumerate(results) if index % 60 == 59]
    assert counts[2] <= counts[1] + 20
    del results
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# ----------------------------------------------------------------------------------------------- what a request may be


def test_texts_ids_chats_and_dicts(model):
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    ids = tokenizer("abc")["input_ids"]
    forms = ["abc", ids, torch.tensor([ids]), torch.tensor(ids), {"text": "abc"}, {"input_ids": ids}]
    forms += [[{"role": "user", "content": "abc"}], {"messages": [{"role": "user", "content": "abc"}]}]
    results = run(model, forms, tokenizer=tokenizer)
    assert {tuple(result.tokens) for result in results} == {tuple(alone(model, ids))}
    assert {result.text for result in results} == {tokenizer.decode(results[0].tokens, skip_special_tokens=True)}


def test_a_request_that_cannot_be_read_is_its_own_error(model):
    wrong = [
        "abc",
        [],
        [VOCAB_SIZE],
        [1.5, 2],
        {"input_ids": {5: 1}},
        {5, 6},
        [{"x": 1}, 2],
        {"max_new_tokens": 3},
        {"input_ids": [1], "spec_method": "ngram"},
    ]
    wrong += [
        {"messages": [], "tools": [{}]},
        {"input_ids": [1], "nonsense": 3},
        {"input_ids": [1], "num_beams": 2},
        None,
        3,
    ]
    results = run(model, [*wrong, prompt(1)])
    assert [type(result.error) for result in results[:-1]] == [SpecConfigError] * 10 + [ValueError] + [
        SpecConfigError
    ] * 3
    assert all(result.finish_reason == "error" and result.tokens == [] for result in results[:-1])
    assert results[-1].tokens == alone(model, prompt(1))


@pytest.mark.parametrize(
    ("name", "values"),
    {
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
        **dict.fromkeys(["model", "inputs", "self", "custom_generate", "", 3], [[1]]),
    }.items(),
)
def test_a_setting_that_cannot_be_is_the_error_of_its_request(model, name, values):
    settings = [{"input_ids": prompt(1), "do_sample": True, name: value} for value in values]
    *wrong, right = run(model, [*settings, prompt(2)], tokenizer=letter_tokenizer())
    assert {type(result.error) for result in wrong} == {SpecConfigError}
    assert all(str(name) in str(result.error) for result in wrong)
    assert right.tokens == alone(model, prompt(2))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.tensor(3), "A request is a text"),
        (b"abc", "A request is a text"),
        (bytearray(b"abc"), "A request is a text"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "a part that is none"),
        ({"messages": [{"role": "user"}], "chat_template_kwargs": 3}, "takes a dict, got 3"),
        ({"messages": [{"role": "user"}], "chat_template_kwargs": {"tokenize": True}}, "cannot have 'tokenize'"),
    ],
)
def test_prompts_that_are_none(model, wrong, message):
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}a{% endfor %}"
    with nothing_runs(model):
        (result,) = run(model, [wrong], tokenizer=tokenizer)
    assert isinstance(result.error, SpecConfigError)
    assert message in str(result.error)


def test_what_chat_templates_are_told(model):
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content }}{% endfor %}"
        "{% if thinking %}t{% endif %}{% if add_generation_prompt %}g{% endif %}"
    )
    messages = [{"role": "user", "content": "ab"}]
    told = [{}, {"thinking": True}, {"add_generation_prompt": False}, {"continue_final_message": True}]
    requests = [{"messages": messages, "chat_template_kwargs": one} for one in told]
    texts = [tokenizer(text)["input_ids"] for text in ("abg", "abtg", "ab", "ab")]
    assert [result.tokens for result in run(model, requests, tokenizer=tokenizer)] == [
        alone(model, text) for text in texts
    ]


def test_an_unknown_name_is_the_error_of_its_request(model):
    wrong, right = run(model, [{"input_ids": prompt(1), "id": 3}, prompt(2)])
    assert "id" in str(wrong.error)
    assert right.tokens == alone(model, prompt(2))


def test_settings_with_keys_that_are_no_texts(model, tmp_path):
    bias = {(3,): 4.0, (5, 6): -1.0}
    request = {"input_ids": prompt(1), "sequence_bias": bias}
    (result,) = run(model, [request], journal=tmp_path / "journal")
    assert result.tokens == alone(model, prompt(1), sequence_bias=bias)
    with nothing_runs(model):
        assert run(model, [request], journal=tmp_path / "journal")[0].tokens == result.tokens
    with pytest.raises(SpecConfigError, match="other settings"):
        run(model, [{**request, "sequence_bias": {(3,): 4.5}}], journal=tmp_path / "journal")


@pytest.mark.parametrize("length", [8.0, 2.5, 10**21, float("inf")])
def test_lengths_that_are_no_integers_end_as_in_plain_generation(model, length):
    call = {"do_sample": False, "max_new_tokens": length, "eos_token_id": alone(model, prompt(1))[9]}
    assert alone(model, prompt(1), **call, **NGRAM) == alone(model, prompt(1), **call)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"batch_size": 10**9},
        {"max_new_tokens": float("inf")},
        {"generation_config": GenerationConfig(max_new_tokens=2**63)},
        {"seed": 1.5},
        {"shard": 3},
        {"shard": (0.5, 2)},
        {"batch_size": True},
        {"max_tokens_in_flight": 0},
        {"num_return_sequences": 2},
        {"streamer": object()},
        {"spec_method": "nonsense"},
        {"num_beams": 3},
        {"stop_strings": "a"},
        {"generation_config": {"max_new_tokens": 3}},
        *({"requests": requests} for requests in ("abc", 3, {}, torch.tensor(3), None)),
        {"model": None},
        {"model": torch.nn.Linear(1, 1)},
        {"tokenizer": "x"},
        {"journal": 3},
        {"max_time": "x"},
        {"prefill_chunk_size": 0},
        {"is_assistant": True},
        {"position_ids": torch.zeros(1, 1, dtype=torch.long)},
    ],
)
def test_bad_arguments(model, wrong):
    arguments = {"model": model, "requests": [[1]], **wrong}
    with nothing_runs(model), pytest.raises(SpecConfigError):
        generate_many(**arguments)
    if not {"requests", "journal", "shard"} & wrong.keys():
        with nothing_runs(model), pytest.raises(SpecConfigError):
            SpeculativeBatchingManager(**{name: value for name, value in arguments.items() if name != "requests"})


def test_models_in_wrappers(model):
    for wrapped in (torch.compile(model), torch.nn.DataParallel(model)):
        with nothing_runs(model), pytest.raises(SpecConfigError, match="It is a wrapper: pass the model inside"):
            generate_many(wrapped, [[1]])


def test_numbers_of_other_libraries(model):
    numbers = {"prefill_chunk_size": np.int64(2), "max_new_tokens": np.int64(12), "seed": np.int64(3)}
    request = {"input_ids": prompt(1), "seed": np.int64(2), "num_speculative_tokens": np.int64(1)}
    for result in run(model, [prompt(1), request], **numbers):
        assert result.tokens == alone(model, prompt(1))


def test_unknown_arguments(model):
    with nothing_runs(model), pytest.raises(ValueError, match="nonsense"):
        generate_many(model, [[1]], nonsense=3)


# --------------------------------------------------------------------------------------------- what generate() honours


def test_end_tokens(model):
    requests = [prompt(index) for index in range(6)]
    ends = [alone(model, own)[4] for own in requests[:3]]
    results = run(model, requests, eos_token_id=ends, pad_token_id=0)
    assert [result.tokens for result in results] == [
        alone(model, own, eos_token_id=ends, pad_token_id=0) for own in requests
    ]
    assert {result.finish_reason for result in results[:3]} == {"stop"}


def test_stop_strings(model):
    tokenizer, requests = letter_tokenizer(), [prompt(index) for index in range(5)]
    words = [tokenizer.decode(alone(model, own)[5:7]) for own in requests[:2]]
    call = {"stop_strings": words, "tokenizer": tokenizer}
    results = run(model, requests, **call)
    assert [result.tokens for result in results] == [alone(model, own, **call) for own in requests]
    assert [result.finish_reason for result in results[:2]] == ["stop", "stop"]


def test_penalties_of_single_requests(model):
    """Rows are judged in groups: those whose scores are left alone, those with a temperature, and each of the rest."""
    own = [
        {},
        {"repetition_penalty": 1.8},
        {},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 3},
        {"repetition_penalty": 3.0},
    ]
    results = run(model, [{"input_ids": prompt(index), **more} for index, more in enumerate(own)])
    assert [result.tokens for result in results] == [
        alone(model, prompt(index), **more) for index, more in enumerate(own)
    ]


class Counts(LogitsProcessor):
    """Favours the number of its call: it must be called once for each token, in order."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        assert len(input_ids) == 1
        self.calls += 1
        scores[:, self.calls] += 1e4 * (self.calls % 2)
        return scores


def test_processors_that_remember(model):
    processor, requests = Counts(), [prompt(index) for index in range(5)]
    results = run(model, requests, logits_processor=[processor])
    assert [result.tokens for result in results] == [
        alone(model, own, logits_processor=[Counts()]) for own in requests
    ]
    assert processor.calls == 0


class Fails(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 8:
            raise RuntimeError("no more")
        return scores


WRONG_SCORES = {
    "of tokens that are none": lambda scores: torch.cat([scores, scores + 9], dim=1),
    "of no row": lambda scores: scores[0],
    "lost": lambda scores: None,
    "elsewhere": lambda scores: scores.numpy(),
}


@pytest.mark.parametrize("wrong", WRONG_SCORES)
def test_scores_that_are_none_are_their_requests_error(model, wrong):
    def processor(input_ids, scores):
        return WRONG_SCORES[wrong](scores) if input_ids.shape[1] > 8 else scores

    request = {"input_ids": prompt(1), "do_sample": "tokens" in wrong, "logits_processor": [processor]}
    first, result, last = run(model, [prompt(0), request, prompt(2)])
    assert isinstance(result.error, SpecConfigError)
    assert "Logits processors return scores as they are given them" in str(result.error)
    assert [first.tokens, last.tokens] == [alone(model, prompt(0)), alone(model, prompt(2))]


def test_a_request_that_raises_is_its_own_error(model):
    requests = [prompt(0), {"input_ids": prompt(1), "logits_processor": [Fails()]}, prompt(2), prompt(3)]
    requests.append({"input_ids": prompt(4), "stopping_criteria": [Raises(6)]})
    results = run(model, requests)
    assert str(results[1].error) == "no more"
    assert results[1].tokens == alone(model, prompt(1))[:4]
    assert isinstance(results[4].error, ZeroDivisionError)
    assert [results[index].tokens for index in (0, 2, 3)] == [alone(model, prompt(index)) for index in (0, 2, 3)]


def test_sampled_texts_are_those_of_generate(model):
    requests = [{"input_ids": prompt(index), "seed": index} for index in range(5)]
    call = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    results = run(model, requests, **call)
    for index, result in enumerate(results):
        torch.manual_seed(index)
        alone = model.generate(torch.tensor([prompt(index)]), max_new_tokens=12, **call, **NGRAM)
        assert result.tokens == alone[0, 5:].tolist()
    mixed = [{**own, "do_sample": index % 2 == 0} for index, own in enumerate(requests)]
    assert [own.tokens for own in run(model, mixed, **call)][::2] == [own.tokens for own in results][::2]


def test_one_seed_for_all(model):
    requests, call = [prompt(1)] * 4, {"do_sample": True, "seed": 5}
    first, again, other = (
        run(model, requests, **call),
        run(model, requests, 2, **call),
        run(model, requests, do_sample=True),
    )
    assert [result.tokens for result in first] == [result.tokens for result in again]
    assert len({tuple(result.tokens) for result in [*first, *other]}) == 8


# --------------------------------------------------------------------------------------------------------- own methods


class Followers(CandidateGenerator):
    """Drafts what followed each token the last time, and knows nothing of rows that join."""

    samples_drafts = False

    def prefill(self, prompt):
        self.after = [dict(itertools.pairwise(tokens)) for tokens in prompt.token_lists]

    def observe(self, commit):
        for row, tokens in zip(commit.rows, commit.token_lists):
            self.after[row].update(itertools.pairwise(tokens))

    def propose(self, step):
        anchors = step.anchor_tokens.tolist()
        drafts = [
            [token for token in [self.after[row].get(anchor)] if token] for row, anchor in zip(step.rows, anchors)
        ]
        return DraftTree.from_lists([draft if room else [] for draft, room in zip(drafts, step.max_draft_tokens)])


class Joining(Followers):
    def prefill(self, prompt):
        super().prefill(prompt)
        self.after += [{}] * (self.session.batch_size - len(self.after))

    def join(self, other, numbers):
        for theirs, number in numbers.items():
            self.after[number] = other.after[theirs]


for name, own in (("followers of rows", Followers), ("joining", Joining)):
    if name not in methods():
        register_candidate_generator(name, own)


def test_methods_of_ones_own(model):
    requests = [prompt(index) for index in range(5)]
    expected = [alone(model, own) for own in requests]
    with nothing_runs(model), pytest.raises(SpecConfigError, match=r"Followers .* does not implement\s+join"):
        run(model, requests, spec_method="followers of rows")
    assert [own.tokens for own in run(model, requests, 1, spec_method="followers of rows")] == expected
    assert [own.tokens for own in run(model, requests, spec_method="joining")] == expected
    with pytest.raises(SpecConfigError, match="serves one call"):
        generate_many(model, requests, assistant=Followers())


def test_targets_that_count_slots_are_refused():
    target = tiny_model("mpt")
    with nothing_runs(target), pytest.raises(UnsupportedModelError, match="batch_size=1"):
        run(target, [prompt(0)])
    assert run(target, [prompt(0)], 1)[0].tokens == alone(target, prompt(0))


# ------------------------------------------------------------------------------------------------------------- journal


def test_a_run_that_was_stopped_goes_on(model, tmp_path):
    path, requests = tmp_path / "results.jsonl", [prompt(index) for index in range(6)]
    requests[4] = {"input_ids": prompt(4), "stopping_criteria": [Raises(6)]}
    first = generate_many(model, requests, 2, journal=path, do_sample=False, max_new_tokens=6, **NGRAM)
    seen = {next(first).index for _ in range(3)}
    first.close()
    with path.open("a") as file:
        file.write('{"index": 5, "key')
    forwards = []
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    again = run(model, requests, journal=path, max_new_tokens=6)
    hook.remove()
    assert forwards
    assert {result.index for result in again} == set(range(6))
    assert [own.tokens for own in again[:4]] == [alone(model, prompt(index), max_new_tokens=6) for index in range(4)]
    assert all(again[index].stats.num_committed_tokens == 6 for index in seen)
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    # What has failed is tried again.
    assert sorted(entry["index"] for entry in entries if entry["error"] is None) == [0, 1, 2, 3, 5]
    assert {entry["error"] for entry in entries if entry["index"] == 4} == {"ZeroDivisionError"}
    with nothing_runs(model):
        assert [own.tokens for own in run(model, requests[:4], journal=path, max_new_tokens=6)] == [
            own.tokens for own in again[:4]
        ]
    for other in ({"max_new_tokens": 7}, {"max_new_tokens": 6, "temperature": 0.5}):
        with pytest.raises(SpecConfigError, match="other settings"):
            run(model, requests, journal=path, **other)
    path.write_text("no journal\n")
    with pytest.raises(SpecConfigError, match="Line 1"):
        run(model, requests, journal=path)


def test_log_probabilities(model, tmp_path):
    requests = [{"input_ids": prompt(index), "top_logprobs": index} for index in (0, 2)] + [prompt(1)]
    zero, two, without = run(model, requests, journal=tmp_path / "journal", repetition_penalty=1.2)
    assert without.logprobs is None
    assert [top for _, top in zero.logprobs] == [[]] * 12
    with torch.no_grad():
        logs = model(torch.tensor([prompt(2) + two.tokens])).logits[0, 4:-1].log_softmax(-1)
    for scores, token, (own, top) in zip(logs, two.tokens, two.logprobs):
        assert own == pytest.approx(scores[token].item(), abs=1e-4)
        assert [pair[0] for pair in top] == scores.topk(2).indices.tolist()
        assert [pair[1] for pair in top] == pytest.approx(scores.topk(2).values.tolist(), abs=1e-4)
    again = run(model, requests, journal=tmp_path / "journal", repetition_penalty=1.2)
    assert [result.logprobs for result in again] == [zero.logprobs, two.logprobs, None]
    settings = {"do_sample": False, "max_new_tokens": 12, "repetition_penalty": 1.2, **NGRAM}
    (output,) = generate_batch(model, [prompt(2)], top_logprobs=1, **settings).values()
    assert output.logprobs == pytest.approx([own for own, _ in two.logprobs], abs=1e-5)
    assert [top[0][0] for top in output.top_logprobs] == [top[0][0] for _, top in two.logprobs]
    (refused,) = run(model, [{"input_ids": prompt(0), "top_logprobs": -1}])
    assert "top_logprobs" in str(refused.error)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
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
    ],
)
def test_damaged_journals(changed, message, tmp_path):
    path = tmp_path / "results.jsonl"
    journal = Journal(path)
    for index in range(2):
        scores = [TokenLogprobs(-1.0, [(3, -0.5)]), TokenLogprobs(-2.0, [])]
        journal.add(RequestResult(index, [1, 2], None, "length", logprobs=scores), "key")
    assert Journal(path).find(1, "key").logprobs == scores
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{json.dumps({**json.loads(second), **changed})}\n")
    with pytest.raises(SpecConfigError, match=message):
        Journal(path)


UNREADABLE = {
    "folder": lambda path: path.mkdir(),
    "link to itself": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_journals_that_are_no_files(name, tmp_path):
    path = tmp_path / "journal"
    UNREADABLE[name](path)
    for arguments in ((path,), (tmp_path / "other", [path])):
        with pytest.raises(SpecConfigError, match="Name another file"):
            Journal(*arguments)


@pytest.mark.parametrize("name", ["x" * 300, "no folder/journal", "a\0b"])
def test_journals_that_cannot_be_written(name, tmp_path):
    with pytest.raises(SpecConfigError, match="Name another file"):
        Journal(tmp_path / name)


def test_texts_that_cannot_be_encoded(model):
    class Strict:
        def __call__(self, text, **kwargs):
            return {"input_ids": list(text.encode("utf-8"))}

        def decode(self, tokens, **kwargs):
            return ""

    wrong, right = run(model, ["\ud800", "\x05"], tokenizer=Strict())
    assert isinstance(wrong.error, SpecConfigError)
    assert right.tokens == alone(model, [5])


def test_two_runs_with_one_journal_leave_it_readable(tmp_path):
    journals = [Journal(tmp_path / "results.jsonl") for _ in range(2)]
    for index in range(6):
        journals[index % 2].add(RequestResult(index, [index] * (index + 1), None, "length"), "key")
    found = Journal(tmp_path / "results.jsonl")
    assert [found.find(index, "key").tokens for index in range(6)] == [[index] * (index + 1) for index in range(6)]


def test_listeners_are_told(model):
    requests = [prompt(index) for index in range(5)]
    with record(trace=True) as made:
        results = run(model, requests)
    # Where all rows have ended before others come, another call begins.
    stats = SpecDecodingStats.total(call.stats for call in made.calls)
    assert stats.batch_size == 5
    assert stats.num_committed_tokens == sum(len(result.tokens) for result in results) == 60
    assert stats.num_accepted_tokens == sum(result.stats.num_accepted_tokens for result in results) > 0
    traces = [row for call in made.calls for cycle in call.cycles for row in cycle.rows]
    assert sum(len(row.committed_tokens) for row in traces) == 55
    assert all(len(row.committed_scores) == len(row.committed_tokens) for row in traces)
    with pytest.raises(SpecConfigError, match="took turns"):
        made.calls[0].to_html()
    assert made.calls[0]._repr_html_() is None


def test_shards(model):
    requests = [prompt(index) for index in range(5)]
    settings = {"do_sample": True, "seed": 3}
    whole = [result.tokens for result in run(model, requests, **settings)]
    for rank in range(2):
        share = run(model, requests, shard=(rank, 2), **settings)
        assert [result.index for result in share] == list(range(rank, 5, 2))
        assert [result.tokens for result in share] == whole[rank::2]
    for wrong in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(SpecConfigError, match="rank, num_processes"):
            run(model, requests, shard=wrong)


def test_progress(model, capsys):
    run(model, [prompt(index) for index in range(3)], progress=True, max_new_tokens=2)
    assert "3/3" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- generate_batch()


def test_outputs_are_those_of_transformers(model):
    prompts = [prompt(index, 2 + index) for index in range(5)]
    outputs = generate_batch(
        model, prompts, GenerationConfig(do_sample=False, max_new_tokens=7), batch_size=2, **NGRAM
    )
    assert list(outputs) == [f"req_{index}" for index in range(5)]
    for name, own in zip(outputs, prompts):
        output = outputs[name]
        assert isinstance(output, GenerationOutput)
        assert output.is_finished()
        assert (output.request_id, output.prompt_ids, output.error) == (name, own, None)
        assert output.generated_tokens == alone(model, own, max_new_tokens=7)
        assert output.speculative.num_committed_tokens == 7
    assert generate_batch(model, []) == {}


def test_several_sequences_of_a_prompt(model):
    config = GenerationConfig(do_sample=True, max_new_tokens=9, num_return_sequences=2, pad_token_id=0)
    outputs = model.generate_batch([prompt(0), prompt(1)], config, **NGRAM)
    assert list(outputs) == ["req_0__child#0", "req_0", "req_1__child#0", "req_1"]
    assert len({tuple(output.generated_tokens) for output in outputs.values()}) == 4
    assert config.num_return_sequences == 2


def test_failed_outputs(model):
    outputs = generate_batch(model, [prompt(0), [VOCAB_SIZE]], max_new_tokens=3, do_sample=False, **NGRAM)
    assert outputs["req_0"].status == RequestStatus.FINISHED
    assert outputs["req_1"].status == RequestStatus.FAILED
    assert "from 0 to 63" in outputs["req_1"].error


@pytest.mark.parametrize(
    "wrong",
    [
        {"record_timestamps": True},
        {"inputs": "abc"},
        {"inputs": ["abc"]},
        {"batch_size": -1},
        {"batch_size": "x"},
        {"num_return_sequences": "x"},
        {"generation_config": {"max_new_tokens": 3}},
        {"generation_config": "x"},
        {"model": None},
        *({"inputs": inputs} for inputs in (b"abc", [b"abc"], [3], range(3), [[1], 3])),
        {"in_order": True},
        {"progress": True},
        {"shard": (0, 2)},
    ],
)
def test_bad_arguments_of_batches(model, wrong):
    with nothing_runs(model), pytest.raises(SpecConfigError):
        generate_batch(**{"model": model, "inputs": [[1]], **NGRAM, **wrong})


# ------------------------------------------------------------------------------------------------------------- manager


@pytest.fixture
def manager(model):
    with SpeculativeBatchingManager(model, batch_size=2, do_sample=False, max_new_tokens=8, **NGRAM) as manager:
        yield manager
        manager.destroy()


def test_requests_come_and_go(model, manager):
    names = manager.add_requests([prompt(index) for index in range(4)])
    assert names == ["req_0", "req_1", "req_2", "req_3"]
    own = manager.add_request(prompt(4), "mine", max_new_tokens=3)
    assert manager.get_result(own, timeout=60).generated_tokens == alone(model, prompt(4), max_new_tokens=3)
    outputs = {output.request_id: output for output in (manager.get_result(timeout=60) for _ in names)}
    assert [outputs[name].generated_tokens for name in names] == [
        alone(model, prompt(index), max_new_tokens=8) for index in range(4)
    ]
    assert manager.get_result(timeout=0.01) is None
    assert manager.is_running()


def test_streams_and_cancelled_requests(model, manager):
    long = manager.add_request(prompt(0), max_new_tokens=ENDLESS)
    shown = list(manager.request_id_iter(manager.add_request(prompt(1), streaming=True)))
    expected = alone(model, prompt(1), max_new_tokens=8)
    assert len(shown) > 1
    assert all(output.generated_tokens == expected[: len(output.generated_tokens)] for output in shown)
    assert [output.is_finished() for output in shown] == [False] * (len(shown) - 1) + [True]
    assert shown[-1].generated_tokens == expected
    manager.cancel_request(long)
    manager.cancel_request("unknown")
    assert manager.get_result(long, timeout=60) is None


def test_outputs_on_the_way_are_of_their_time(model, manager):
    first, *_, last = manager.request_id_iter(manager.add_request(prompt(1), streaming=True))
    assert first.speculative.num_committed_tokens == len(first.generated_tokens) < 8
    assert last.speculative.num_committed_tokens == 8


def test_a_stream_costs_by_its_new_tokens(model, monkeypatch):
    """However long the prompt is."""
    read = []
    tokens = Sequences.tokens
    with SpeculativeBatchingManager(model, do_sample=False, max_new_tokens=20, eos_token_id=-1) as manager:
        with manager.pause():
            manager.add_request(prompt(1, 300), "mine", streaming=True)
            monkeypatch.setattr(
                Sequences, "tokens", lambda *args: (found := tokens(*args), read.append(len(found)))[0]
            )
        *parts, last = manager.request_id_iter("mine")
    assert len(parts) == 18
    assert last.generated_tokens == alone(model, prompt(1, 300), max_new_tokens=20, eos_token_id=-1)
    # The prompt once; each token on the way, and all of them again at the end.
    assert sum(read) < 300 + 4 * 20
    assert all(part.prompt_ids is last.prompt_ids for part in parts)


def test_requests_are_prepared_while_others_are_decoded(model, manager, monkeypatch):
    may_go_on = threading.Event()
    prepare = RequestReader.row

    def held_up(reader, number, tokens, settings):
        assert number == 0 or may_go_on.wait(60)
        return prepare(reader, number, tokens, settings)

    monkeypatch.setattr(RequestReader, "row", held_up)
    manager.add_request(prompt(0), "first")
    others = manager.add_requests([prompt(index) for index in range(1, 4)])
    manager.cancel_request(others[2])
    assert manager.get_result("first", timeout=60).generated_tokens == alone(model, prompt(0), max_new_tokens=8)
    may_go_on.set()
    for index, name in enumerate(others[:2], 1):
        output = manager.get_result(name, timeout=60)
        assert output.generated_tokens == alone(model, prompt(index), max_new_tokens=8)
    assert manager.get_result(others[2], timeout=60) is None


def test_a_manager_that_nobody_holds_ends():
    target = tiny_llama(seed=4)
    manager = SpeculativeBatchingManager(target, do_sample=False, max_new_tokens=8, **NGRAM)
    manager.start()
    manager.get_result(manager.add_request(prompt(0)), timeout=60)
    thread, left = manager._thread, weakref.ref(target)
    del target, manager
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    gc.collect()
    assert left() is None


def test_one_that_is_stopping_can_be_started_anew(model):
    manager = SpeculativeBatchingManager(model, do_sample=False, max_new_tokens=8)
    manager.start()
    with manager.pause():
        first = manager.add_request(prompt(0))
        manager.stop(block=False)
    manager.start()
    second = manager.add_request(prompt(1))
    for index, name in enumerate((first, second)):
        output = manager.get_result(name, timeout=60)
        assert output.generated_tokens == alone(model, prompt(index), max_new_tokens=8)
    manager.stop()


def test_the_others_and_the_manager_outlive_a_lack_of_memory(model, manager, monkeypatch):
    with manager.pause():
        trouble = Trouble(monkeypatch, "_verify", torch.OutOfMemoryError("no memory"), (4,))
        manager.add_requests([prompt(0), prompt(1)], max_new_tokens=40)
    outputs = [manager.get_result(timeout=60) for _ in range(2)]
    failed = next(output for output in outputs if output.error is not None)
    (other,) = (output for output in outputs if output is not failed)
    assert failed.error == "no memory"
    assert other.generated_tokens == alone(model, other.prompt_ids, max_new_tokens=40)
    assert trouble.calls > 4
    assert manager.error is None
    later = manager.get_result(manager.add_request(prompt(2)), timeout=60)
    assert later.generated_tokens == alone(model, prompt(2), max_new_tokens=8)


def test_weights_may_change_in_a_pause(model):
    target = tiny_llama(seed=3)
    with SpeculativeBatchingManager(target, do_sample=False, max_new_tokens=8, **NGRAM) as manager:
        manager.add_request(prompt(0))
        first = manager.get_result(timeout=60)
        with manager.pause():
            target.load_state_dict(model.state_dict())
        manager.add_request(prompt(0))
        assert manager.get_result(timeout=60).generated_tokens == alone(model, prompt(0), max_new_tokens=8)
    assert first.generated_tokens != alone(model, prompt(0), max_new_tokens=8)
    assert not manager.is_running()


def test_errors_of_requests_and_of_the_manager(model, manager):
    with pytest.raises(SpecConfigError, match="from 0 to 63"):
        manager.add_request([VOCAB_SIZE])
    # Else the first may have failed before the second comes.
    with manager.pause():
        manager.add_request(prompt(0), "one", stopping_criteria=[Raises(6)])
        with pytest.raises(SpecConfigError, match="Choose another"):
            manager.add_request(prompt(0), "one")
    assert manager.get_result("one", timeout=60).status == RequestStatus.FAILED
    manager.add_request(prompt(0), "two", nonsense=3)
    assert "nonsense" in manager.get_result("two", timeout=60).error
    # The step in which the second request has failed may not have ended yet.
    with manager.pause():
        manager._engine.step = None
    manager.add_request(prompt(0), "three")
    assert manager.get_result("three", timeout=60).status == RequestStatus.FAILED
    assert isinstance(manager.error, TypeError)
    with pytest.raises(SpecConfigError, match="stopping"):
        manager.add_request(prompt(0))
    del manager._engine.step
    manager.start()
    assert manager.error is None
    manager.add_request(prompt(0), "four")
    assert manager.get_result("four", timeout=60).generated_tokens == alone(model, prompt(0), max_new_tokens=8)


def test_a_cancellation_that_comes_too_late_concerns_no_later_request(model, manager):
    step = manager._engine.step

    def cancelled_as_it_ends():
        if ended := step():
            manager.cancel_request("mine")
        return ended

    manager._engine.step = cancelled_as_it_ends
    for request in (prompt(0), prompt(1)):
        manager.add_request(request, "mine")
        output = manager.get_result("mine", timeout=60)
        assert output.generated_tokens == alone(model, request, max_new_tokens=8)


def test_results_for_an_event_loop(model, manager):
    async def listen() -> dict[str, list]:
        heard = {name: [] for name in ("streaming", "whole", "cancelled", "given up")}
        ended = asyncio.Queue()

        def hear(name, output):
            heard[name].append(output)
            if output is None or output.is_finished():
                ended.put_nowait(name)

        for number, name in enumerate(heard):
            manager.register_result_handler(name, partial(hear, name))
            length = 8 if number < 2 else ENDLESS
            manager.add_request(prompt(number), name, length, streaming=name == "streaming", eos_token_id=-1)
        await ended.get(), await ended.get()
        manager.cancel_request("cancelled")
        assert await ended.get() == "cancelled"
        manager.stop(hard_stop=True)
        assert await ended.get() == "given up"
        return heard

    heard = asyncio.run(asyncio.wait_for(listen(), 60))
    assert heard["cancelled"] == heard["given up"] == [None]
    (whole,) = heard["whole"]
    assert whole.generated_tokens == alone(model, prompt(1), max_new_tokens=8)
    assert whole.finish_reason == "length"
    *parts, last = heard["streaming"]
    assert parts
    assert {part.finish_reason for part in parts} == {None}
    assert last.generated_tokens == alone(model, prompt(0), max_new_tokens=8)
    # Nothing is kept for those who ask otherwise.
    assert manager.get_result(timeout=0.01) is None


@pytest.mark.parametrize("wrong", [{"input_ids": []}, {"spec_method": "ngram"}, {"seed": "x"}])
def test_nobody_waits_for_a_request_that_was_not_added(model, manager, wrong):
    async def add() -> None:
        heard = asyncio.Queue()
        manager.register_result_handler("running", heard.put_nowait)
        manager.add_request(prompt(0), "running")
        manager.register_result_handler("refused", heard.put_nowait)
        for name in ("refused", "running"):
            with pytest.raises(SpecConfigError):
                manager.add_request(**{"input_ids": prompt(1), "request_id": name, **wrong})
        assert (await heard.get()).generated_tokens == alone(model, prompt(0), max_new_tokens=8)

    asyncio.run(asyncio.wait_for(add(), 60))
    assert not manager._handlers
    with pytest.raises(SpecConfigError, match="request_id"):
        manager.add_request(prompt(0), [1])


@pytest.mark.parametrize(
    "wrong",
    [
        *(partial(SpeculativeBatchingManager.get_result, timeout=seconds) for seconds in ("x", math.nan, math.inf)),
        partial(SpeculativeBatchingManager.stop, timeout="x"),
        partial(SpeculativeBatchingManager.get_result, request_id=[]),
        partial(SpeculativeBatchingManager.cancel_request, request_id=[]),
        *(partial(SpeculativeBatchingManager.add_requests, inputs=inputs) for inputs in (None, "abc", 3)),
        partial(SpeculativeBatchingManager.register_result_handler, request_id="x", callback=print),
    ],
)
def test_bad_arguments_of_managers(model, manager, wrong):
    with pytest.raises(SpecConfigError):
        wrong(manager)
    name = manager.add_request(prompt(0))
    assert manager.get_result(name, timeout=60).generated_tokens == alone(model, prompt(0), max_new_tokens=8)


def test_a_manager_has_one_thread(manager):
    starting = [threading.Thread(target=manager.start) for _ in range(20)]
    manager.stop()
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join()
    with manager.pause(), manager.pause():
        decoding = [thread for thread in threading.enumerate() if thread.name == "hf_specdec"]
        assert [thread for thread in decoding if thread._args[0]() is manager] == [manager._thread]


def test_a_request_names_no_drafter(model, manager):
    for own in ({"spec_method": "suffix"}, {"spec_model": "user/head"}, {"speculative": "suffix"}):
        with pytest.raises(SpecConfigError, match="for all requests"):
            manager.add_request(prompt(0), **own)
        (result,) = run(model, [{"input_ids": prompt(0), **own}])
        assert "for all requests" in str(result.error)
    with pytest.raises(SpecConfigError, match="num_speculative_tokens"):
        manager.add_request(prompt(0), num_speculative_tokens=-1)


def test_what_was_added_is_finished(model):
    manager = SpeculativeBatchingManager(model, batch_size=1, do_sample=False, max_new_tokens=4)
    with manager:
        manager.add_requests([prompt(index) for index in range(3)])
    assert [output.generated_tokens for output in manager] == [
        alone(model, prompt(index), max_new_tokens=4) for index in range(3)
    ]


# -------------------------------------------------------------------------------------------------- generation configs


def test_a_generation_config(model, caplog):
    config = GenerationConfig(do_sample=False, max_length=20, pad_token_id=0, repetition_penalty=1.3)
    before = config.to_dict()
    requests = [prompt(0), {"input_ids": prompt(1), "max_new_tokens": 4}, prompt(2)]
    results = list(generate_many(model, requests, 2, in_order=True, generation_config=config, **NGRAM))
    texts = [model.generate(torch.tensor([prompt(index)]), generation_config=config) for index in range(3)]
    expected = [text[0, 5:].tolist() for text in texts]
    assert [result.tokens for result in results] == [expected[0], expected[1][:4], expected[2]]
    assert config.to_dict() == before
    assert not [one for one in caplog.messages if "deprecated" in one or "Both" in one]
