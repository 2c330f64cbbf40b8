"""Launches of a cycle, counted without a GPU: within the aims, and no more than there have been."""

from __future__ import annotations

import pytest
import torch

from hf_specdec import load_speculator
from hf_specdec.candidate_generators.combined.policy import DrafterChoice
from tests.helpers.architectures import tiny_model
from tests.helpers.levels import in_full, split, when_slow
from tests.helpers.methods import settings_of
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.own_methods import registered
from tests.helpers.tiny_drafters import tiny_drafter


pytest.importorskip("triton")

from tests.helpers.launches import Row, steady_cycles


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95}
# With n-grams: kernels of a layer, in the graphs of the drafter and outside of graphs; uploads, replays.
COUNTS = {"qwen3": (8, 55, 5, 2, 2), "mixtral": (12, 55, 5, 2, 2), "qwen2_moe": (14, 55, 5, 2, 2)}
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


@pytest.mark.parametrize("name", split(COUNTS, short=["qwen3"]))
def test_a_cycle_launches_no_more_than_before(name):
    model = tiny_model(name).to(torch.bfloat16)
    # Repeated, so that n-grams are found.
    tokens = torch.randint(1, 90, (1, 12), generator=torch.Generator().manual_seed(0)).repeat(1, 3)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    speculator = load_speculator(model, settings_of("ngram", num_speculative_tokens="fixed"))
    # Drafts are launched ahead only where the longest one has room.
    cycles = steady_cycles(model, inputs, speculator, new_tokens=72)
    row = Row.of(cycles)
    assert len(cycles) >= 3
    found = (row.per_layer, row.draft, row.outside, row.uploads, row.replays)
    assert all(one <= other for one, other in zip(found, COUNTS[name])), found
    # The one wait is for the verdict, after the next draft has been launched.
    assert (row.copies_to_host, row.waits) == (1, 0)
    assert not row.missed(), row


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
    row = Row.of(cycles)
    assert len(cycles) >= 3
    assert row.replays == (1 if drafter == "recycling" else 2)
    assert not row.missed(drafter), row


@pytest.mark.parametrize(
    ("drafter", "batch"), [("ngram+medusa", 1), *in_full(("ngram+eagle3", 1), ("suffix+medusa", 3))]
)
def test_a_combination_drafts_as_its_part_with_a_network(drafter, batch, monkeypatch):
    """What is retrieved is found by the host alone, when the other draft has been launched."""
    monkeypatch.setattr(DrafterChoice, "asks", lambda self, rows, *given: [True] * len(rows))
    model = tiny_llama()
    cycles = steady_cycles(model, prompts(batch), tiny_drafter(model, drafter), new_tokens=14)
    row = Row.of(cycles)
    assert len(cycles) >= 3
    assert (row.replays, row.copies_to_host, row.waits) == (2, 1, 0)
    assert not row.missed(drafter), row


@pytest.mark.parametrize("batch", [1, *in_full(3)])
def test_a_network_method_of_ones_own_is_one_graph_a_draft(batch):
    """It is launched before the verdict is read, and nobody waits for it."""
    model = tiny_llama()
    with registered("next_states") as own:
        cycles = steady_cycles(model, prompts(batch), load_speculator(model, own.name), new_tokens=14)
    row = Row.of(cycles)
    assert len(cycles) >= 3
    assert (row.replays, row.copies_to_host, row.waits) == (2, 1, 0)
    assert not row.missed(), row
