"""Lengths by the number of active rows: how they are written, and that the cycles of a call follow them."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec import SpecConfigError, SpeculativeConfig, record
from hf_specdec.control import SpeculationController
from hf_specdec.control.acceptance import RowOutcome
from tests.helpers.models import prompts, tiny_llama


NAME = "num_speculative_tokens_per_batch_size"


def config(lengths, **settings):
    return SpeculativeConfig(method="ngram", **{NAME: lengths}, **settings)


@pytest.mark.parametrize(
    "lengths",
    [
        [[1, 8, 5], [9, 32, 2], [33, 128, 0]],
        [(33, 128, 0), (1, 8, 5), (9, 32, 2)],
        {1: 5, 9: 2, 33: 0},
        {"1": 5, "9": 2, "33": 0},
        [[1, 5], [4, 5], [9, 2], [33, 0]],
        # What lies between two ranges belongs to the lower one.
        [[1, 4, 5], [9, 10, 2], [33, 33, 0]],
    ],
)
def test_all_spellings_mean_the_same(lengths):
    ours, other = config(lengths), config([[1, 8, 5], [9, 32, 2], [33, 128, 0]])
    assert ours == other
    assert hash(ours) == hash(other)
    assert ours.compute_hash() == other.compute_hash()
    assert [ours.most_tokens(rows) for rows in (1, 8, 9, 32, 33, 1000)] == [5, 5, 2, 2, 0, 0]


@given(st.dictionaries(st.integers(2, 60), st.integers(0, 9), max_size=5), st.integers(1, 9), st.integers(1, 80))
def test_json_keeps_it_and_serving_engines_read_the_same(lengths, first, rows):
    ours = config({1: first, **lengths})
    assert SpeculativeConfig.from_dict(json.loads(json.dumps(ours.to_dict()))) == ours
    exported = ours.to_vllm()
    assert max(k for _, _, k in exported[NAME]) <= exported["num_speculative_tokens"]
    inside = [k for low, high, k in exported[NAME] if low <= rows <= high]
    assert (inside or [exported[NAME][-1][2]]) == [ours.most_tokens(rows)]


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([], "must be a list of"),
        (5, "must be a list of"),
        ([[1, 2, 3, 4]], "must be a list of"),
        ([[1, True, 2]], "must be a list of"),
        ([[4, 2, 1]], "must be a list of"),
        ({1: -1}, "must be a list of"),
        ([[2, 3, 1]], "must begin at 1 row"),
        ([[1, 4, 2], [3, 5, 1]], "says twice what holds for 3 rows"),
    ],
)
def test_what_is_no_such_rule_is_refused(lengths, words):
    with pytest.raises(SpecConfigError, match=words):
        config(lengths)


def test_a_fixed_length_is_the_most():
    assert config({1: 4}, num_speculative_tokens=4).most_tokens(1) == 4
    with pytest.raises(SpecConfigError, match="k=4, more than `num_speculative_tokens`=2"):
        config({1: 4}, num_speculative_tokens=2)
    assert config({1: 4}, num_speculative_tokens="auto").most_tokens(7) == 4


@pytest.mark.parametrize("length", [None, 6, "auto"])
def test_cycles_follow_the_rule_as_rows_leave(length):
    model = tiny_llama()
    inputs = prompts(3)
    settings = {**inputs, "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    first = inputs["input_ids"].shape[1]
    free = model.generate(**settings)
    # Ends that let rows leave at different times.
    ends = [int(free[0, first + 4]), int(free[1, first + 12])]
    plain = model.generate(**settings, eos_token_id=ends)
    speculative = {
        "method": "ngram",
        "prompt_lookup_min": 1,
        NAME: {1: 6, 2: 2, 3: 0},
        "num_speculative_tokens": length,
    }
    with record(trace=True) as r:
        ours = model.generate(**settings, eos_token_id=ends, speculative=speculative)
    assert torch.equal(ours, plain)
    cycles = r.calls[0].cycles
    assert {len(cycle.rows) for cycle in cycles} >= {1, 3}
    most = {1: 6, 2: 2, 3: 0}
    for cycle in cycles:
        assert all(len(row.draft_tokens) <= most[len(cycle.rows)] for row in cycle.rows)
    kind = "adaptive length" if length == "auto" else "length by batch size"
    assert any(note.startswith(f"{kind}: at most") for note in r.calls[0].stats.notes)
    if length != "auto":
        assert max(len(row.draft_tokens) for cycle in cycles for row in cycle.rows) > 2


def test_a_controller_plans_within_the_rule():
    controller = SpeculationController(8, 4, most_tokens={4: 0, 3: 0, 2: 3, 1: 8}.get)
    for rows, most in (([0, 1, 2, 3], 0), ([0, 1], 3), ([0], 8)):
        for _ in range(40):
            limits = controller.limits(rows)
            assert max(limits) <= most
            assert controller.why_none == ("does_not_pay" if most else "batch_size")
            outcomes = [RowOutcome(row, limit, limit, limit, limit + 1) for row, limit in zip(rows, limits)]
            controller.observe(outcomes, max(limits), 1e-4 if max(limits) else None, 1e-3)
    assert controller.length == 8
