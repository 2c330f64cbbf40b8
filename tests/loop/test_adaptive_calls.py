"""Lengths that adapt in generate(), by what pays and by the number of rows."""

from __future__ import annotations

import json
from math import isnan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hf_specdec import SpecConfigError, SpeculativeConfig, load_speculator, record
from hf_specdec.candidate_generators.adaptive import AdaptiveCandidateGenerator
from hf_specdec.candidate_generators.base import CandidateGenerator
from hf_specdec.cli import app
from hf_specdec.control import LatencyModel, SpeculationController
from hf_specdec.control.clock import CycleClock
from hf_specdec.drafts import DraftTree
from hf_specdec.protocol import Commit, DraftStep, Prompt, Session
from hf_specdec.target.graphs import CallGraphs
from tests.helpers.levels import in_full
from tests.helpers.methods import demo_inputs, demo_target, settings_of
from tests.helpers.models import prompts, tiny_llama


BY_BATCH_SIZE = "num_speculative_tokens_per_batch_size"


def auto(method, **settings):
    return settings_of(method, num_speculative_tokens="auto", **settings)


def follow(monkeypatch, lengths):
    """Lets the controller choose these lengths, again and again."""
    chosen = []

    def limits(controller, rows, num_unread, num_left):
        length = lengths[len(chosen) % len(lengths)]
        chosen.append(length)
        return [min(length, controller.most)] * len(rows)

    monkeypatch.setattr("hf_specdec.control.controller.SpeculationController.limits", limits)
    return chosen


@pytest.mark.parametrize(("method", "batch_size"), [("draft_model", 3), *in_full(("eagle3", 3))])
def test_greedy_text_is_that_of_plain_generation(method, batch_size):
    settings = {**demo_inputs(batch_size), "max_new_tokens": 30, "do_sample": False}
    plain = demo_target().generate(**settings)
    with record() as r:
        for _ in range(2):
            assert torch.equal(demo_target().generate(**settings, speculative=auto(method)), plain)
    assert all(call.stats.notes[0].startswith("adaptive length: ") for call in r.calls)


def test_sampled_text_does_not_depend_on_what_is_chosen(monkeypatch):
    settings, texts = {**demo_inputs(3), "max_new_tokens": 16, "do_sample": True}, []
    for lengths in ([0], [4], [2, 0, 0, 5]):
        with monkeypatch.context() as patch:
            follow(patch, lengths)
            torch.manual_seed(7)
            texts.append(demo_target().generate(**settings, speculative=auto("draft_model")).tolist())
    assert texts[0] == texts[1] == texts[2]


def test_a_given_tree_is_cut_at_the_chosen_depth(monkeypatch):
    settings = {**demo_inputs(1), "max_new_tokens": 24, "do_sample": False}
    monkeypatch.setattr("hf_specdec.control.sizes.DraftSizes.cut", lambda sizes, draft, *given: draft)
    follow(monkeypatch, [1, 0, 2])
    tree = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]
    with record(trace=True) as r:
        text = demo_target().generate(**settings, speculative=auto("eagle3", speculative_token_tree=tree))
    assert torch.equal(text, demo_target().generate(**settings))
    assert [len(cycle.rows[0].draft_tokens) for cycle in r.calls[0].cycles[:4]] == [2, 0, 4, 2]


class Scripted(CandidateGenerator):
    """Drafts the token 1 always, for two rows, and keeps what it is told."""

    def __init__(self):
        self.session = Session(2, 100, torch.device("cpu"))
        self.config, self.num_speculative_tokens = None, 4
        self.commits, self.steps = [], []

    def propose(self, step):
        self.steps.append(step)
        return DraftTree.from_lists([[1] * most for most in step.max_draft_tokens])

    def observe(self, commit):
        self.commits.append(commit)


def commit_of(rows, start, width, num_accepted=0):
    tokens = torch.arange(start, start + len(rows) * width).view(len(rows), width)
    states = {"last": tokens[..., None].float()}
    return Commit(rows, tokens, tokens.tolist(), [num_accepted] * len(rows), states)


def test_what_is_committed_during_a_pause_comes_as_one_commit(monkeypatch):
    follow(monkeypatch, [2, 0, 0, 0, 3])
    inner = Scripted()
    generator = AdaptiveCandidateGenerator(inner, SpeculationController(4, 2))
    generator.prefill(Prompt(torch.zeros(2, 3, dtype=torch.long), [0, 0]))
    generator.observe(commit_of([0, 1], 0, 1))
    step = DraftStep([0, 1], torch.tensor([0, 1]), [4, 4], [4, 4])
    for start, width, accepted in ((10, 3, 2), (20, 1, 0), (30, 1, 0)):
        generator.propose(step)
        generator.observe(commit_of([0, 1], start, width, accepted))
    assert len(inner.commits) == 2
    # The second row has finished.
    generator.keep_rows([0])
    step = DraftStep([0], torch.tensor([30]), [9], [4])
    generator.propose(step)
    generator.observe(commit_of([0], 40, 1))
    assert len(inner.commits) == 2
    generator.propose(step)
    told = inner.commits[2]
    assert (told.rows, told.token_lists, told.tokens.tolist()) == ([0], [[20, 30, 40]], [[20, 30, 40]])
    assert told.hidden_states["last"].tolist() == [[[20.0], [30.0], [40.0]]]
    assert [step.max_draft_tokens for step in inner.steps] == [[2, 2], [3]]


def test_the_room_of_a_row_bounds_its_limit(monkeypatch):
    follow(monkeypatch, [4])
    inner = Scripted()
    generator = AdaptiveCandidateGenerator(inner, SpeculationController(4, 2))
    generator.propose(DraftStep([0, 1], torch.tensor([0, 1]), [4, 4], [1, 0]))
    assert inner.steps[0].max_draft_tokens == [1, 0]
    generator.observe(commit_of([0, 1], 0, 1))
    assert generator.propose(DraftStep([0, 1], torch.tensor([0, 1]), [5, 5], [0, 0])).size == 0
    assert len(inner.steps) == 1


def test_the_setting_is_a_number_or_auto():
    config = SpeculativeConfig(method="ngram", num_speculative_tokens="auto")
    assert config.fixed_length is None
    assert SpeculativeConfig.from_dict(config.to_dict()) == config
    assert config.replace(num_speculative_tokens=3).fixed_length == 3
    with pytest.raises(SpecConfigError, match="control_profile"):
        SpeculativeConfig(method="ngram", control_profile="profile.json")
    for wrong in ("atuo", 0):
        with pytest.raises(SpecConfigError, match="num_speculative_tokens"):
            SpeculativeConfig(method="ngram", num_speculative_tokens=wrong)
    generate = ["generate", "demo", "def f(a):", "-d", "ngram", "--max-new-tokens", "8", "--json", "-k"]
    for length in ("auto", "3"):
        notes = json.loads(CliRunner().invoke(app, [*generate, length]).stdout)["stats"]["notes"]
        assert any(note.startswith("adaptive length: ") for note in notes) == (length == "auto")


def test_lengths_adapt_by_default_where_that_changes_no_text(model, monkeypatch):
    monkeypatch.delenv("HF_SPECDEC_ADAPTIVE")
    draft = {"draft_model": tiny_llama(1)}
    drawn = {"method": "draft_model", "draft_sample_method": "probabilistic"}
    assert not load_speculator(model, drawn, **draft).is_adaptive
    assert load_speculator(model, "draft_model", **draft).is_adaptive
    speculator = load_speculator(model, "ngram")
    assert load_speculator(model, "ngram", num_speculative_tokens="auto").profile is speculator.profile
    # Decided when it was made.
    monkeypatch.setenv("HF_SPECDEC_ADAPTIVE", "0")
    assert speculator.is_adaptive
    assert not load_speculator(model, "ngram").is_adaptive


# Lengths by the number of active rows


def by_rows(lengths, **settings):
    return SpeculativeConfig(method="ngram", **{BY_BATCH_SIZE: lengths}, **settings)


def test_all_spellings_of_lengths_by_batch_size_mean_the_same():
    other = by_rows([[1, 8, 5], [9, 32, 2], [33, 128, 0]])
    for lengths in (
        [(33, 128, 0), (1, 8, 5), (9, 32, 2)],
        {"1": 5, "9": 2, "33": 0},
        # What lies between two ranges belongs to the lower one.
        [[1, 4, 5], [9, 10, 2], [33, 33, 0]],
    ):
        ours = by_rows(lengths)
        assert (ours, ours.compute_hash()) == (other, other.compute_hash())
        assert [ours.most_tokens(rows) for rows in (1, 8, 9, 32, 33, 1000)] == [5, 5, 2, 2, 0, 0]
    # Without a number there is no limit.
    assert [by_rows({9: 0}).most_tokens(rows) for rows in (1, 8, 9, 1000)] == [1024, 1024, 0, 0]
    assert by_rows({9: 0}) == by_rows([[1, 8, None], [9, 9, 0]])
    # A fixed length is the most.
    assert by_rows({1: 4}, num_speculative_tokens=4).most_tokens(1) == 4
    assert by_rows({1: 4}, num_speculative_tokens="auto").most_tokens(7) == 4
    with pytest.raises(SpecConfigError, match="k=4, more than `num_speculative_tokens`=2"):
        by_rows({1: 4}, num_speculative_tokens=2)
    for lengths in ([], 5, [[1, 2, 3, 4]], [[1, True, 2]], [[4, 2, 1]], [[1, 4, 2], [3, 5, 1]]):
        with pytest.raises(SpecConfigError, match="must be a list of|says twice what holds for 3"):
            by_rows(lengths)


@given(st.dictionaries(st.integers(2, 60), st.integers(0, 9), max_size=5), st.integers(1, 9), st.integers(1, 80))
def test_json_keeps_lengths_by_batch_size_and_serving_engines_read_the_same(lengths, first, rows):
    ours = by_rows({1: first, **lengths})
    assert SpeculativeConfig.from_dict(json.loads(json.dumps(ours.to_dict()))) == ours
    exported = ours.to_vllm()
    assert max(k for _, _, k in exported[BY_BATCH_SIZE]) <= exported["num_speculative_tokens"]
    inside = [k for low, high, k in exported[BY_BATCH_SIZE] if low <= rows <= high]
    assert (inside or [exported[BY_BATCH_SIZE][-1][2]]) == [ours.most_tokens(rows)]


@pytest.mark.parametrize("length", ["auto", *in_full(None)])
def test_cycles_follow_the_lengths_by_batch_size_as_rows_leave(length):
    model, inputs, most = tiny_llama(), prompts(3), {1: 6, 2: 2, 3: 0}
    settings = {**inputs, "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    first, free = inputs["input_ids"].shape[1], model.generate(**settings)
    # Ends that let rows leave at different times.
    ends = [int(free[0, first + 4]), int(free[1, first + 12])]
    speculative = {"method": "ngram", "prompt_lookup_min": 1, BY_BATCH_SIZE: most, "num_speculative_tokens": length}
    with record(trace=True) as r:
        ours = model.generate(**settings, eos_token_id=ends, speculative=speculative)
    assert torch.equal(ours, model.generate(**settings, eos_token_id=ends))
    drafted = [(len(cycle.rows), len(row.draft_tokens)) for cycle in r.calls[0].cycles for row in cycle.rows]
    assert {rows for rows, _ in drafted} >= {1, 3}
    assert all(count <= most[rows] for rows, count in drafted)
    assert length == "auto" or max(count for _, count in drafted) > 2
    # No drafts at all, where a batch is too large for them.
    off = {"method": "ngram", "num_speculative_tokens": length, BY_BATCH_SIZE: {3: 0}}
    with record() as r:
        assert torch.equal(model.generate(**settings, speculative=off), free)
    assert r.calls[0].stats.num_draft_tokens == 0


# The clock of cycles


def test_a_cycle_with_a_capture_has_no_times(monkeypatch):
    monkeypatch.setattr(CallGraphs, "all_captures", CallGraphs.all_captures)
    clock, latency = CycleClock(torch.device("cpu")), LatencyModel()
    clock.begin()
    clock.mark()
    clock.mark()
    CallGraphs.all_captures += 1
    times = clock.end()
    for spoilt in (times.draft, 0.0, -1.0, float("inf")):
        latency.observe_draft(1, 3, 3, spoilt, (8, times.reading))
        latency.observe_verification(1, 4, spoilt)
    assert not any((latency.draft, latency.verify, latency.reading.sizes))
    # A capture for the next draft, which ran ahead, spoils both cycles.
    for is_ahead, is_spoilt in ((True, True), (False, True), (False, False)):
        clock.begin()
        clock.mark()
        if is_ahead:
            with clock.ahead():
                CallGraphs.all_captures += 1
        times = clock.end()
        assert isnan(times.rest) == is_spoilt
        assert is_ahead or isnan(times.draft) == is_spoilt


@pytest.fixture(scope="module")
def model():
    return tiny_llama()
