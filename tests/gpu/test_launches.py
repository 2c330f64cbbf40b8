"""Launches of a cycle, as benchmarks/launches.py counts them: within the aims, and no more than there have been."""

from __future__ import annotations

import pytest

from tests.helpers.levels import in_full, split, when_slow
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.tiny_drafters import tiny_drafter


pytest.importorskip("triton")

import launches
from launches import SAMPLING, Row, steady_cycles


# By model, method and batch: kernels of a layer, in the graphs of the drafter and outside of graphs; uploads, replays.
COUNTS = {
    ("qwen3", "ngram", 1): (8, 55, 5, 2, 2),
    ("mixtral", "ngram", 1): (12, 55, 5, 2, 2),
    ("qwen2_moe", "ngram", 1): (14, 55, 5, 2, 2),
}
# Every method whose drafts have graphs, and one that drafts on the host.
DRAFTERS = [
    "ngram",
    "recycling",
    "early_exit",
    "sparse_kv",
    "draft model",
    "draft model, masks",
    "draft model, states",
]
DRAFTERS += ["medusa", "mlp_speculator, fixed", "eagle3, dynamic tree", "mtp, layers", "dflash, tree"]
QUICK = ["recycling", "eagle3, dynamic tree", "dflash, tree"]


@pytest.mark.parametrize(("model", "drafter", "batch"), split(COUNTS, short=[("qwen3", "ngram", 1)]))
def test_a_cycle_launches_no_more_than_before(model, drafter, batch):
    row, cycles = launches.count(model, drafter, batch)
    assert len(cycles) >= 3
    found = (row.per_layer, row.draft, row.outside, row.uploads, row.replays)
    assert all(one <= other for one, other in zip(found, COUNTS[model, drafter, batch])), found
    # The one wait is for the verdict, after the next draft has been launched.
    assert (row.copies_to_host, row.waits) == (1, 0)
    assert not row.missed


@pytest.mark.parametrize(
    ("drafter", "batch"),
    [
        *split([(name, 1) for name in DRAFTERS], short=[(name, 1) for name in QUICK]),
        # Drafts are drawn and judged inside of graphs. No other method launches more outside of them.
        *in_full(("mlp_speculator, drawn", 1)),
        *when_slow(*((name, 8) for name in DRAFTERS)),
    ],
)
def test_every_draft_is_within_the_aims(drafter, batch):
    model, sampling = tiny_llama(), SAMPLING if "drawn" in drafter else {}
    # Almost all that it drafts is accepted.
    new_tokens = 24 if drafter == "sparse_kv" else 14
    cycles = steady_cycles(model, prompts(batch), tiny_drafter(model, drafter), new_tokens=new_tokens, **sampling)
    row = Row.of("tiny", drafter.split(",")[0], batch, cycles, sampled=bool(sampling))
    assert len(cycles) >= 3
    assert row.replays == (1 if drafter == "recycling" else 2)
    assert not row.missed, row
