"""Launches of a cycle, as benchmarks/launches.py counts them: within the aims, and no more than there have been."""

from __future__ import annotations

import pytest

from tests.helpers.levels import full, split, when_slow
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.tiny_drafters import (
    SPARSE,
    dflash,
    draft_model,
    eagle3,
    medusa,
    method,
    mlp_speculator,
    mtp,
)


pytest.importorskip("triton")

import launches
from launches import SAMPLING, Row, steady_cycles


# By model, method and batch: kernels of a layer, in the graphs of the drafter and outside of graphs; uploads, replays.
COUNTS = {
    ("qwen3", "ngram", 1): (8, 55, 5, 2, 2),
    ("mixtral", "ngram", 1): (12, 55, 5, 2, 2),
    ("qwen2_moe", "ngram", 1): (14, 55, 5, 2, 2),
}

# Every method whose drafts have graphs, and one that drafts on the host, with small networks of random weights.
DRAFTERS = {
    "ngram": method("ngram", num_speculative_tokens=3),
    "recycling": method("recycling", num_speculative_tokens=3),
    "early_exit": method("early_exit", num_speculative_tokens=3),
    "sparse_kv": method("sparse_kv", **SPARSE, num_speculative_tokens=3),
    "draft_model": draft_model(num_speculative_tokens=3),
    "draft_model, masks": draft_model(mask_token=3, num_speculative_tokens=3),
    "draft_model, states": draft_model(mask_token=3, reads_states=True, num_speculative_tokens=3),
    "medusa": medusa(num_speculative_tokens="fixed"),
    "mlp_speculator": mlp_speculator(num_speculative_tokens="fixed"),
    "eagle3": eagle3(draft_tree_depth=3, draft_tree_top_k=2, num_draft_nodes=6, num_speculative_tokens="fixed"),
    "mtp": mtp(num_speculative_tokens="fixed"),
    "dflash": dflash(num_draft_nodes=6, num_speculative_tokens="fixed"),
}


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """The check of a class of models waits in a cycle, once in a process."""
    monkeypatch.setenv("HF_SPECDEC_CHECK", "0")


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
        *split([(name, 1) for name in DRAFTERS], short=[("recycling", 1), ("eagle3", 1), ("dflash", 1)]),
        *when_slow(*((name, 8) for name in DRAFTERS)),
    ],
)
def test_every_draft_is_within_the_aims(drafter, batch):
    inputs = prompts(batch)
    model = tiny_llama()
    # Almost all that it drafts is accepted.
    new_tokens = 24 if drafter == "sparse_kv" else 14
    cycles = steady_cycles(model, inputs, DRAFTERS[drafter](None, inputs)(model), new_tokens=new_tokens)
    row = Row.of("tiny", drafter, batch, cycles)
    assert len(cycles) >= 3
    assert row.replays == (1 if drafter == "recycling" else 2)
    assert not row.missed, row


@full
def test_a_sampled_cycle_is_within_the_aims():
    """Drafts are drawn and judged inside of graphs. No other method launches more outside of them."""
    inputs = prompts(1)
    model = tiny_llama()
    drafter = mlp_speculator(num_speculative_tokens=3, draft_sample_method="probabilistic")(None, inputs)(model)
    cycles = steady_cycles(model, inputs, drafter, new_tokens=14, **SAMPLING)
    row = Row.of("tiny", "mlp_speculator", 1, cycles, sampled=True)
    assert len(cycles) >= 3
    assert row.replays == 2
    assert not row.missed, row
