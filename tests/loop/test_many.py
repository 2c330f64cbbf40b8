"""Many requests through one loop: who comes in, who ends, and that each gets what plain generation says to it."""

from __future__ import annotations

import gc
import itertools
from functools import partial

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor

from hf_specdec import (
    CandidateGenerator,
    DraftTree,
    SpecConfigError,
    SpecDecError,
    SpecDecodingStats,
    UnsupportedModelError,
    generate_many,
    load_speculator,
    record,
)
from hf_specdec.candidate_generators import register_candidate_generator, unregister_candidate_generator
from hf_specdec.many.engine import Engine
from hf_specdec.many.requests import RequestReader
from hf_specdec.many.row import Row
from tests.helpers.architectures import tiny_model
from tests.helpers.arrivals import (
    NGRAM,
    Raises,
    Trouble,
    prompt,
    run_many,
    said_alone,
    sampled_alone,
)
from tests.helpers.levels import full, in_full, split
from tests.helpers.models import letter_tokenizer, nothing_runs, tiny_gpt2, tiny_mistral
from tests.helpers.threads import in_threads


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
    assert all(result.tokens == said_alone(model, prompt(result.index), max_new_tokens=6) for result in seen)
    with pytest.raises(StopIteration):
        next(results)


def test_results_come_before_the_error_of_the_iterable(model):
    def broken():
        yield from map(prompt, range(3))
        raise KeyError("no more")

    results = generate_many(model, broken(), 2, do_sample=False, max_new_tokens=6, **NGRAM)
    seen = {next(results).index for _ in range(3)}
    with pytest.raises(KeyError, match="no more"):
        next(results)
    assert seen == {0, 1, 2}
    assert list(results) == []


@full
def test_results_are_asked_for_one_after_the_other(model):
    """Where another result is asked for while one is made, that is refused, and the run goes on."""

    def ask() -> None:
        with pytest.raises(SpecDecError, match="in one thread"):
            next(results)

    def requests():
        yield prompt(0)
        ask()
        in_threads(ask)
        yield prompt(1)

    results = generate_many(model, requests(), 2, do_sample=False, max_new_tokens=12, in_order=True, **NGRAM)
    assert [result.tokens for result in results] == [said_alone(model, prompt(index)) for index in range(2)]


def test_results_in_order_or_as_they_end(model):
    requests = [{"input_ids": prompt(index), "max_new_tokens": new} for index, new in enumerate([9, 2, 3, 1])]
    # Without a method texts are decoded plainly.
    for call in ({"do_sample": False}, {"do_sample": False, **NGRAM}):
        results = list(generate_many(model, requests, 2, in_order=True, **call))
        assert [result.index for result in results] == [0, 1, 2, 3]
        assert results[0].tokens == said_alone(model, prompt(0), max_new_tokens=9)
        assert [result.index for result in generate_many(model, requests, 2, **call)][-1] == 0


def test_max_tokens_in_flight(model, monkeypatch):
    most, step = [], Engine._cycle

    def watched(engine):
        most.append(sum(row.most_tokens for row in engine._loop.rows.groups))
        step(engine)

    monkeypatch.setattr(Engine, "_cycle", watched)
    requests = [prompt(index, 4 + 3 * (index % 3)) for index in range(8)] + [prompt(9, 40)]
    *results, too_long = run_many(model, requests, 8, max_tokens_in_flight=45)
    assert 22 < max(most) <= 45
    assert [result.tokens for result in results] == [said_alone(model, tokens) for tokens in requests[:8]]
    assert isinstance(too_long.error, SpecConfigError)


@pytest.mark.parametrize(
    ("name", "error", "times", "sample"),
    [
        ("verify", torch.OutOfMemoryError("no memory"), (3, 4), True),
        *in_full(("begin", UnsupportedModelError("not this one"), (2,), False)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_others_go_on_where_one_fails(model, monkeypatch, name, error, times, sample):
    """The one that came last ends with the error, and what the others say is what they would have said."""
    generate = sampled_alone if sample else lambda *given, seed: said_alone(*given)
    expected = [generate(model, prompt(index), seed=index) for index in range(4)]
    how = {"max_new_tokens": 12, "do_sample": sample, "top_logprobs": 0}
    reader = RequestReader(model, how, seed=3, num_places=3)
    engine = Engine(load_speculator(model, "ngram", num_speculative_tokens=4), reader)
    rows = [reader.row(index, prompt(index), {"seed": index}) for index in range(4)]
    trouble, ended = Trouble(monkeypatch, name, error, times), []
    for row in rows[:3]:
        engine.add(row)
        ended += engine.step()
    while not engine.is_idle:
        ended += engine.step()
    assert trouble.calls > max(times)
    engine.add(rows[3])
    while not engine.is_idle:
        ended += engine.step()
    failed = [row for row in rows if row.error is not None]
    assert len(failed) == len(times)
    assert rows[0] not in failed
    assert rows[3] not in failed
    assert {row.error for row in failed} == {error}
    assert sorted(ended, key=id) == sorted(rows, key=id)
    for row, text in zip(rows, expected):
        if row not in failed:
            assert row.tokens == text
            assert len(row.logprobs) == row.stats.num_committed_tokens == 12
    engine.close()


TARGETS = {
    "sliding window": tiny_mistral,
    "learned positions": tiny_gpt2,
    # Recurrent states of every kind: at each token, replayed, and beside attention.
    **{name: partial(tiny_model, name) for name in ("lfm2", "qwen3_next", "falcon_h1", "jamba", "gemma3_text")},
}


@pytest.mark.parametrize("name", split(TARGETS, ["sliding window", "qwen3_next"]))
def test_targets_of_other_kinds(name, monkeypatch):
    target, call = TARGETS[name](), {"pad_token_id": 0, "eos_token_id": None}
    # The last one comes when others are there, and is longer than a chunk.
    requests = [*(prompt(index, 1 + 4 * (index % 4)) for index in range(7)), prompt(7, 40)]
    monkeypatch.setattr(Engine.__init__, "__defaults__", (None, 16, False))
    results = run_many(target, requests, **call)
    assert [result.tokens for result in results] == [said_alone(target, tokens, **call) for tokens in requests]


def test_targets_that_count_slots_are_refused():
    target = tiny_model("mpt")
    with nothing_runs(target), pytest.raises(UnsupportedModelError, match="batch_size=1"):
        run_many(target, [prompt(0)])
    assert run_many(target, [prompt(0)], 1)[0].tokens == said_alone(target, prompt(0))


@full
def test_no_rows_tensors_and_hooks_are_left_behind(model):
    def living() -> int:
        gc.collect()
        # By its type: a proxy of something that is gone, such as numba leaves, cannot be asked for its class.
        return sum(issubclass(type(item), (torch.Tensor, Row)) for item in gc.get_objects())

    results = generate_many(model, (prompt(i % 7) for i in range(80)), 4, do_sample=False, max_new_tokens=3, **NGRAM)
    counts = [living() for index, _ in enumerate(results) if index in (29, 69)]
    assert counts[1] <= counts[0] + 20
    del results
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_rules_for_samples_leave_greedy_runs_alone(model, monkeypatch):
    monkeypatch.setattr(model, "training", True)
    speculative = {"method": "ngram", "rejection_sample_method": "typical"}
    results = generate_many(model, [prompt(0)], 2, do_sample=False, max_new_tokens=3, speculative=speculative)
    (result,) = results
    assert (result.error, result.stats.rejection_sample_method) == (None, "standard")
    assert results.stats.setup_seconds == 0


def test_listeners_are_told(model):
    with record(trace=True) as made:
        results = run_many(model, [prompt(index) for index in range(5)])
    # Where all rows have ended before others come, another call begins.
    stats = SpecDecodingStats.total(call.stats for call in made.calls)
    assert (stats.batch_size, stats.num_committed_tokens) == (5, 60)
    assert stats.num_accepted_tokens == sum(result.stats.num_accepted_tokens for result in results) > 0
    traces = [row for call in made.calls for cycle in call.cycles for row in cycle.rows]
    assert sum(len(row.committed_tokens) for row in traces) == 55
    assert all(len(row.committed_scores) == len(row.committed_tokens) for row in traces)


@full
def test_shards(model):
    requests, how = [prompt(index) for index in range(5)], {"do_sample": True, "seed": 3}
    whole = [result.tokens for result in run_many(model, requests, **how)]
    for rank in range(2):
        share = run_many(model, requests, shard=(rank, 2), **how)
        assert [result.index for result in share] == list(range(rank, 5, 2))
        assert [result.tokens for result in share] == whole[rank::2]


def test_end_tokens_and_stop_strings(model):
    requests, tokenizer = [prompt(index) for index in range(5)], letter_tokenizer()
    texts = [said_alone(model, own) for own in requests[:2]]
    for ends in (
        {"eos_token_id": [text[4] for text in texts], "pad_token_id": 0},
        {"stop_strings": [tokenizer.decode(text[5:7]) for text in texts], "tokenizer": tokenizer},
    ):
        results = run_many(model, requests, **ends)
        assert [result.tokens for result in results] == [said_alone(model, own, **ends) for own in requests]
        assert [result.finish_reason for result in results[:2]] == ["stop", "stop"]


class Counts(LogitsProcessor):
    """Favours the number of its call: it must be called once for each token, in order."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        assert len(input_ids) == 1
        self.calls += 1
        scores[:, self.calls] += 1e4 * (self.calls % 2)
        return scores


def test_logits_processors_of_single_requests(model):
    """Rows are judged in groups: those whose scores are left alone, those with a temperature, and each of the rest."""
    own = [
        {},
        {"repetition_penalty": 1.8},
        {"logits_processor": [Counts()]},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 3},
        {"repetition_penalty": 3.0},
    ]
    results = run_many(model, [{"input_ids": prompt(index), **more} for index, more in enumerate(own)])
    own[2] = {"logits_processor": [Counts()]}
    expected = [said_alone(model, prompt(index), **more) for index, more in enumerate(own)]
    assert [result.tokens for result in results] == expected
    # One of all requests is copied for each of them.
    processor, requests = Counts(), [prompt(index) for index in range(5)]
    expected = [said_alone(model, own, logits_processor=[Counts()]) for own in requests]
    assert [own.tokens for own in run_many(model, requests, logits_processor=[processor])] == expected
    assert processor.calls == 0


def test_processors_that_fail_are_the_error_of_their_request(model):
    def late(change) -> dict:
        processor = [lambda input_ids, scores: change(scores) if input_ids.shape[1] > 8 else scores]
        return {"input_ids": prompt(1), "logits_processor": processor}

    changes = (lambda scores: scores[0], lambda scores: None, lambda scores: 1 / 0)
    more_tokens = {**late(lambda scores: torch.cat([scores, scores + 9], dim=1)), "do_sample": True}
    stopping = {"input_ids": prompt(4), "stopping_criteria": [Raises(1)]}
    requests = [prompt(0), more_tokens, *map(late, changes), stopping, prompt(2)]
    first, *wrong, raised, stopped, last = run_many(model, requests)
    assert [first.tokens, last.tokens] == [said_alone(model, prompt(0)), said_alone(model, prompt(2))]
    assert raised.tokens == said_alone(model, prompt(1))[:4]
    assert [type(result.error) for result in (raised, stopped)] == [ZeroDivisionError] * 2
    assert [type(result.error) for result in wrong] == [SpecConfigError] * 3


def test_sampled_texts_are_those_of_generate(model):
    requests = [{"input_ids": prompt(index), "seed": index} for index in range(5)]
    call = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    texts = [result.tokens for result in run_many(model, requests, **call)]
    assert texts == [sampled_alone(model, prompt(index), seed=index, **call) for index in range(5)]
    mixed = [{**own, "do_sample": index % 2 == 0} for index, own in enumerate(requests)]
    assert [own.tokens for own in run_many(model, mixed, **call)][::2] == texts[::2]
    # One seed for all of them.
    same = [prompt(1)] * 4
    first, again = (run_many(model, same, places, do_sample=True, seed=5) for places in (3, 2))
    other = run_many(model, same, do_sample=True)
    assert [result.tokens for result in first] == [result.tokens for result in again]
    assert len({tuple(result.tokens) for result in [*first, *other]}) == 8


def test_generation_config(model):
    config = GenerationConfig(do_sample=False, max_length=20, pad_token_id=0, repetition_penalty=1.3)
    requests = [prompt(0), {"input_ids": prompt(1), "max_new_tokens": 4}]
    results = list(generate_many(model, requests, 2, in_order=True, generation_config=config, **NGRAM))
    texts = [model.generate(torch.tensor([prompt(index)]), generation_config=config)[0, 5:] for index in range(2)]
    assert [result.tokens for result in results] == [texts[0].tolist(), texts[1][:4].tolist()]


class Followers(CandidateGenerator):
    """Drafts what followed each token the last time, and knows nothing of rows that join."""

    samples_drafts = False

    def prefill(self, prompt):
        self.after = [dict(itertools.pairwise(tokens)) for tokens in prompt.token_lists]
        self.after += [{}] * (self.session.batch_size - len(self.after))

    def observe(self, commit):
        for row, tokens in zip(commit.rows, commit.token_lists):
            self.after[row].update(itertools.pairwise(tokens))

    def propose(self, step):
        rows = zip(step.rows, step.anchor_tokens.tolist(), step.max_draft_tokens)
        return DraftTree.from_lists([[self.after[row].get(anchor, 0)][:room] for row, anchor, room in rows])


class Joining(Followers):
    def join(self, other, numbers):
        for theirs, number in numbers.items():
            self.after[number] = other.after[theirs]


def test_registered_methods_need_join(model):
    for name, own in (("followers", Followers), ("joining", Joining)):
        register_candidate_generator(name, own)
    try:
        requests = [prompt(index) for index in range(5)]
        expected = [said_alone(model, own) for own in requests]
        with nothing_runs(model), pytest.raises(SpecConfigError, match=r"Followers .* does not implement\s+join"):
            run_many(model, requests, spec_method="followers")
        assert [own.tokens for own in run_many(model, requests, 1, spec_method="followers")] == expected
        assert [own.tokens for own in run_many(model, requests, spec_method="joining")] == expected
    finally:
        for name in ("followers", "joining"):
            unregister_candidate_generator(name)
