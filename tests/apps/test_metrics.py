"""The statistics of a call add up, and the trace of its cycles tells the whole text."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from time import perf_counter, sleep

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec import SpecDecodingStats, load_speculator, record
from hf_specdec.control.controller import Choice, SpeculationController
from hf_specdec.metrics import listeners
from hf_specdec.metrics.listeners import CallObserver, Listener
from tests.helpers.levels import full, in_full
from tests.helpers.models import prompts, scripted_for
from tests.helpers.threads import in_threads


PROMPT = 7
TREE = (-1, -1, 0, 1, 1)
GREEDY = {"do_sample": False, "max_new_tokens": 25}
SHORT = {"max_new_tokens": 4, "do_sample": False, "spec_method": "ngram"}


def traced(model, inputs, tree=None, k=4, accuracy=0.7, **settings):
    """Output and record of a call whose drafts are those of plain generation, so often as `accuracy` says."""
    text = model.generate(**inputs, do_sample=False, max_new_tokens=40)
    speculator = scripted_for(text, inputs, k=k, accuracy=accuracy, tree=tree)
    with record(trace=True) as made:
        output = model.generate(**inputs, **{**GREEDY, **settings}, assistant=speculator)
    return output, made.calls[0]


def stats_of(model, inputs, **settings) -> SpecDecodingStats:
    return model.generate(**inputs, **{**GREEDY, **settings}, return_dict_in_generate=True).speculative


def depth_of(parents):
    depths = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths)


def trim(tokens, eos):
    end = next((index for index, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[: end + 1]


EOS = {"eos_token_id": [6, 15]}


@pytest.mark.parametrize(
    ("batch_size", "tree", "settings"),
    [
        pytest.param(3, None, {}, id="chain"),
        pytest.param(1, TREE, EOS, id="tree-eos"),
        pytest.param(3, "random", {"do_sample": True}, id="ragged_tree-sampled"),
        *in_full(
            pytest.param(1, None, {"max_new_tokens": 1}, id="one_token"),
            pytest.param(3, TREE, {"repetition_penalty": 1.4}, id="tree-walk"),
        ),
    ],
)
def test_counts_and_text_are_those_of_the_trace(model, batch_size, tree, settings):
    output, call = traced(model, prompts(batch_size), tree, **settings)
    stats, rows = call.stats, [row for cycle in call.cycles for row in cycle.rows]
    drafted = [row for row in rows if row.draft_tokens]
    generated = [trim(row, settings.get("eos_token_id", [])) for row in output[:, PROMPT:].tolist()]

    texts = [[] for _ in range(batch_size)]
    for cycle in call.cycles:
        assert len({row.row for row in cycle.rows}) == len(cycle.rows)
        for row in cycle.rows:
            assert all(type(x) is int for x in (*row.draft_tokens, *row.parents, *row.committed_tokens))
            assert row.num_accepted <= len(row.committed_tokens) <= row.num_accepted + 1
            texts[row.row] += row.committed_tokens
            node = -1
            for token in row.committed_tokens[: row.num_accepted]:
                nodes = enumerate(zip(row.draft_tokens, row.parents))
                node = next(index for index, found in nodes if found == (token, node))
    assert texts == [row[1:] for row in generated]

    assert (stats.batch_size, stats.num_row_cycles, stats.num_drafts) == (batch_size, len(rows), len(drafted))
    assert stats.num_committed_tokens == sum(map(len, generated)) == batch_size + sum(map(len, texts))
    assert stats.num_target_forwards == len(call.cycles) + 1
    assert stats.num_draft_tokens == sum(len(row.draft_tokens) for row in drafted)
    assert stats.num_accepted_tokens == sum(row.num_accepted for row in rows)
    depths = Counter(depth_of(row.parents) for row in drafted)
    positions = range(1, max(depths, default=0) + 1)
    assert stats.num_drafts_per_depth == [depths[position] for position in positions]
    accepted_at = [sum(row.num_accepted >= position for row in rows) for position in positions]
    assert stats.num_accepted_tokens_per_pos == accepted_at
    without = [cycle for cycle in call.cycles if not any(row.draft_tokens for row in cycle.rows)]
    assert sum(stats.num_cycles_without_drafts.values()) == len(without)

    reached, committed = sum(min(row.num_accepted + 1, depth_of(row.parents)) for row in drafted), sum(map(len, texts))
    assert stats.num_reached_tokens == reached
    assert stats.acceptance_rate == stats.num_accepted_tokens / max(reached, 1)
    assert stats.draft_acceptance_rate == stats.num_accepted_tokens / max(stats.num_draft_tokens, 1)
    assert stats.mean_acceptance_length == (committed / len(rows) if rows else 1)


def test_drafts_that_are_all_right_and_an_end_inside_of_one(model):
    stats = traced(model, prompts(2), accuracy=1.0, max_new_tokens=21)[1].stats
    assert stats.acceptance_rate == stats.draft_acceptance_rate == 1
    assert json.loads(json.dumps(stats.to_dict())) == stats.to_dict()
    # Accepted tokens after the end are not counted.
    text = model.generate(**prompts(1), do_sample=False, max_new_tokens=40)
    output, call = traced(model, prompts(1), k=8, accuracy=1.0, eos_token_id=int(text[0, PROMPT + 4]))
    assert output.shape[1] == PROMPT + 5
    assert (call.stats.num_committed_tokens, call.stats.num_accepted_tokens) == (5, 4)
    assert call.stats.num_draft_tokens in (7, 8)


def test_times_of_calls_and_cycles(model, monkeypatch):
    def load_slowly(*args, **settings):
        sleep(0.02)
        return load_speculator(*args, **settings)

    monkeypatch.setattr("hf_specdec.call.entry.load_speculator", load_slowly)
    began = perf_counter()
    with record(timings=True, trace=True) as made:
        model.generate(**prompts(3), do_sample=False, max_new_tokens=30, spec_method="ngram")
    elapsed, (call,) = perf_counter() - began, made.calls
    stats, timings = call.stats, call.timings
    parts = (stats.draft_seconds, stats.verify_seconds, stats.prefill_seconds, stats.other_seconds)
    assert stats.total_seconds == pytest.approx(sum(parts))
    # The first token is waited for from the beginning of the call.
    assert stats.setup_seconds > 0.02
    assert stats.time_to_first_token == stats.setup_seconds + stats.prefill_seconds
    assert stats.time_to_first_token < stats.setup_seconds + stats.total_seconds <= elapsed
    assert len(timings) == len(call.cycles) == stats.num_target_forwards - 1
    for timing, cycle in zip(timings, call.cycles):
        assert timing.num_committed == sum(len(row.committed_tokens) for row in cycle.rows)
        assert min(timing.draft_seconds, timing.verify_seconds) > 0
        assert timing.seconds >= timing.draft_seconds + timing.verify_seconds
    assert sum(call.verify_seconds) == pytest.approx(stats.verify_seconds)
    # The rest is the reading of the prompt.
    assert 0 < sum(call.draft_seconds) < stats.draft_seconds
    assert sum(call.cycle_seconds) < stats.total_seconds - stats.prefill_seconds


def test_reasons_of_cycles_without_drafts(model, monkeypatch):
    def reasons(inputs, **settings):
        stats = stats_of(model, inputs, **{"spec_method": "ngram", "max_new_tokens": 12, **settings})
        assert sum(stats.num_cycles_without_drafts.values()) <= stats.num_target_forwards - 1
        return stats.num_cycles_without_drafts

    rule = {"num_speculative_tokens_per_batch_size": {2: 0}}
    assert reasons(prompts(2), speculative=rule) == {"batch_size": 10, "length_limit": 1}
    assert reasons(prompts(1), max_new_tokens=2) == {"length_limit": 1}
    unique = {"input_ids": torch.tensor([[1, 2, 3]])}
    assert reasons(unique, max_new_tokens=3) == {"nothing_found": 1, "length_limit": 1}
    text = model.generate(**prompts(1), do_sample=False, max_new_tokens=40)
    right = scripted_for(text, prompts(1), k=3, accuracy=1.0)
    assert reasons(prompts(1), spec_method=None, assistant=right, max_new_tokens=9) == {}
    monkeypatch.setattr(SpeculationController, "_choose", lambda *args: Choice(0))
    assert reasons(prompts(1), num_speculative_tokens="auto") == {"does_not_pay": 10, "length_limit": 1}


@pytest.mark.parametrize(
    ("method", "k"), [("ngram", 6), *in_full(("suffix", 6), ("ngram", "auto"), ("suffix+draft_model", 6))]
)
def test_lookups_of_methods_that_retrieve(model, method, k):
    inputs = prompts(2, length=30, padding=False)
    inputs["input_ids"][1] = inputs["input_ids"][1, :10].repeat(3)
    given = {"max_new_tokens": 12, "spec_method": method, **({"spec_model": model} if "+" in method else {})}
    with record(trace=True) as made:
        model.generate(**inputs, **{**GREEDY, **given}, num_speculative_tokens=k)
    stats, rows = made.calls[0].stats, [row for cycle in made.calls[0].cycles for row in cycle.rows]
    assert 0 <= stats.num_lookup_hits <= stats.num_lookups <= len(rows)
    assert stats.lookup_hit_rate == stats.num_lookup_hits / max(stats.num_lookups, 1)
    if "+" not in method:
        assert stats.num_lookup_hits == sum(bool(row.draft_tokens) for row in rows) > 0
    if k == 6:
        # Where only the target's own token has room nothing is looked for.
        generated, num_open = {0: 1, 1: 1}, 0
        for row in rows:
            num_open += generated[row.row] < 11
            generated[row.row] += len(row.committed_tokens)
        assert stats.num_lookups == num_open
        assert stats.num_spec_tokens >= 6
    # The texts of the first call are what the second one of suffix searches.
    assert (stats if method == "ngram" else stats_of(model, inputs, **given)).cache_tokens > 0


CYCLES = st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 4), st.sampled_from(["", "size", "other"]))


@full
@given(st.lists(CYCLES, max_size=20), st.sets(st.integers(0, 19)))
def test_what_is_read_bit_by_bit_adds_up(cycles, reads):
    stats, total, told = SpecDecodingStats(), SpecDecodingStats(), SpecDecodingStats()
    for index, (nodes, depth, accepted, reason) in enumerate(cycles):
        stats.count(nodes, min(depth, nodes), min(accepted, depth, nodes), accepted + 1)
        if reason:
            stats.count_without_drafts(reason)
        if index in reads:
            total.add(stats.since(told))
            told = stats.copy()
    new = stats.since(told)
    assert min(new.num_drafts_per_depth, default=0) >= 0
    assert all(new.num_cycles_without_drafts.values())
    total.add(new)
    assert asdict(total) == asdict(stats)
    zeros = [0] * len(stats.num_drafts_per_depth)
    padding = {"num_drafts_per_depth": zeros, "num_accepted_tokens_per_pos": zeros}
    assert asdict(stats.since(stats.copy())) == {**asdict(SpecDecodingStats()), **padding}


def test_records_have_the_calls_inside(model):
    inputs = prompts(1)
    with record() as outer:
        model.generate(**inputs, **SHORT)
        with record(trace=True) as inner:
            output = model.generate(**prompts(2), **SHORT, return_dict_in_generate=True)
            context = contextvars.copy_context()
        model.generate(**inputs, do_sample=False, max_new_tokens=4)
    # They end where they end, also in a context that was copied inside, and after an error.
    context.run(model.generate, **inputs, **SHORT)
    with pytest.raises(ZeroDivisionError), record() as failed:
        model.generate(**inputs, **SHORT, logits_processor=[lambda ids, scores: scores if ids.shape[1] < 9 else 1 / 0])
    model.generate(**inputs, **SHORT)
    assert [call.stats.batch_size for call in outer.calls] == [1, 2]
    assert [call.stats.batch_size for call in inner.calls] == [2]
    assert [call.stats.num_committed_tokens for call in failed.calls] > [0]
    assert outer.calls[1].stats is inner.calls[0].stats is output.speculative
    assert not outer.calls[1].cycles
    assert inner.calls[0].cycles


def test_a_record_can_have_the_calls_of_other_threads(model):
    inputs, seen = prompts(1), []
    with record(all_threads=True) as everywhere, record() as here:
        in_threads(lambda: model.generate(**inputs, **SHORT))
        seen.append(len(here.calls))
        in_threads(partial(contextvars.copy_context().run, model.generate, **inputs, **SHORT))
        seen.append(len(here.calls))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model.generate, **inputs, **SHORT).result()
        asyncio.run(asyncio.to_thread(model.generate, **inputs, **SHORT))
    assert [call.stats.num_committed_tokens for call in everywhere.calls] == [4] * 4
    assert seen == [0, 1]
    assert len(here.calls) == 2


class Failing(Listener, CallObserver):
    def __init__(self, at):
        self.at, self.told = at, []

    def tell(self, what):
        self.told.append(what)
        if what == self.at:
            raise RuntimeError(f"no {what}")
        return self

    def begin_call(self, stats, model_name):
        return self.tell("begin_call")

    def end_prefill(self, new):
        self.tell("end_prefill")

    def end_cycle(self, new, seconds):
        self.tell("end_cycle")

    def end_call(self, new):
        self.tell("end_call")


@pytest.mark.parametrize("at", ["end_cycle", *in_full("begin_call", "end_call")])
def test_a_listener_that_fails_fails_nobody_else(model, at, caplog, monkeypatch):
    monkeypatch.setattr(listeners, "_complaints", set())
    plain = model.generate(**prompts(1), max_new_tokens=9, do_sample=False)
    failing, other = Failing(at), Failing(None)
    for listener in (failing, other):
        listeners.add_listener(listener)
    try:
        with caplog.at_level("WARNING", "hf_specdec.metrics"), record(timings=True) as recorded:
            for _ in range(2):
                assert torch.equal(model.generate(**prompts(1), **{**SHORT, "max_new_tokens": 9}), plain)
    finally:
        for listener in (failing, other):
            listeners.remove_listener(listener)
    # Once a call, and asked anew in the next.
    assert (failing.told.count(at), failing.told[-1]) == (2, at)
    assert other.told.count("end_call") == 2
    assert [len(call.timings) for call in recorded.calls] == [other.told.count("end_cycle") // 2] * 2
    assert sum("Failing" in line.getMessage() for line in caplog.records) == 1
