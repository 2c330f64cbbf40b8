"""Greedy decoding: with the drafts of every row of the table the target writes what it writes alone."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_specdec import record
from hf_specdec.target.facts import ModelProfile
from tests.helpers.caches import CACHE
from tests.helpers.calls import (
    NEW,
    PROMPT,
    assert_drafts,
    assert_same,
    continuation,
    drafted,
    half_target,
    inputs,
    plain,
    traces_of,
    windowed_target,
    with_mask,
)
from tests.helpers.levels import full, in_full
from tests.helpers.methods import demo_target, fresh_speculator, settings_of


SHAPES = ("num_speculative_tokens", "speculative_token_tree")


@pytest.mark.every_row
@pytest.mark.parametrize("batch_size", [4, *in_full(1)], ids=["padded", "single"])
def test_greedy_matches_generate(row, batch_size):
    call = assert_same(row, batch_size)
    assert call.stats.num_accepted_tokens >= batch_size
    branches = any(len(set(trace.parents)) < len(trace.parents) for trace in traces_of(call))
    if batch_size > 1:
        assert branches or "tree" not in row
    assert not branches or "chain" not in row


@pytest.mark.as_users_run
def test_default_lengths_and_kernels(row):
    """Nothing says how much to draft, and every row drafts as much as is fastest."""
    settings = settings_of(row)
    speculator = fresh_speculator(settings)
    with record() as made:
        for batch_size in (1, 3):
            limits = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None}
            ours = demo_target().generate(**inputs(batch_size), **limits, assistant=speculator)
            assert torch.equal(ours, plain(batch_size))
    is_adaptive = not any(name in settings for name in SHAPES)
    assert speculator.config.is_adaptive == is_adaptive
    for call in made.calls:
        assert any(note.startswith("adaptive length: ") for note in call.stats.notes) == is_adaptive
    # The first call tries both; later ones have learnt.
    assert_drafts(row, made.calls[0])


@full
@pytest.mark.as_users_run
def test_short_prompts(row):
    for batch_size, length in ((1, 1), (3, 2)):
        batch = with_mask(inputs(3)["input_ids"][:batch_size, -length:])
        ours, _ = drafted(row, batch, max_new_tokens=8)
        assert torch.equal(ours, continuation(**batch))


def test_sliding_window(row):
    assert_same(row, 3, windowed_target())
    assert not torch.equal(plain(3), plain(3, windowed_target()))


@full
def test_chains_for_targets_that_take_no_trees(row, monkeypatch):
    monkeypatch.setattr(ModelProfile, "supports_trees", False)
    call = assert_same(row, 2)
    assert all(len(set(trace.parents)) == len(trace.parents) for trace in traces_of(call))


def test_half_precision(row):
    """Every token is one of those between which plain generation would choose by rounding."""
    target = half_target()
    ours, call = drafted(row, 3, target)
    assert call.stats.num_accepted_tokens > 0
    mask = torch.nn.functional.pad(inputs(3)["attention_mask"], (0, NEW), value=1)
    with torch.no_grad():
        logits = target(ours, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits.float()
    logits = logits[:, PROMPT - 1 : -1]
    chosen = logits.gather(2, ours[:, PROMPT:, None])[..., 0]
    # Two roundings of numbers between 16 and 32.
    assert (logits.max(-1).values - chosen).max() <= 0.25


def test_chunked_prefill(row):
    """The drafts, too, are those of a prompt read at once."""
    whole, chunked = (drafted(row, 3, prefill_chunk_size=size, max_new_tokens=8) for size in (None, 13))
    assert torch.equal(chunked[0], whole[0])
    assert torch.equal(chunked[0], plain(3)[:, : PROMPT + 8])
    assert chunked[1].cycles == whole[1].cycles


@full
def test_prompts_of_embeddings(row):
    batch = inputs(2)
    embeds = demo_target().get_input_embeddings()(batch["input_ids"]).detach()
    call = {"inputs_embeds": embeds, "attention_mask": batch["attention_mask"]}
    new = plain(2)[:, PROMPT:]
    alone, _ = drafted(row, call)
    assert torch.equal(alone, new)
    with_ids, made = drafted(row, {**call, "input_ids": batch["input_ids"]})
    assert torch.equal(with_ids[:, -NEW:], new)
    assert made.stats.num_accepted_tokens > 0


@full
@pytest.mark.as_users_run
def test_prefilled_cache(row):
    """The target has read a part of the prompt in another call, and the drafter has not."""
    batch, cache = inputs(2), DynamicCache()
    first = {name: value[:, :20] for name, value in batch.items()}
    with torch.no_grad():
        demo_target()(**first, position_ids=(first["attention_mask"].cumsum(1) - 1).clamp(min=0), **{CACHE: cache})
    ours, call = drafted(row, 2, **{CACHE: cache})
    assert torch.equal(ours, plain(2))
    assert_drafts(row, call)


@pytest.mark.as_users_run
def test_returned_cache(row):
    output, _ = drafted(row, 2, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain(2))
    ids = torch.cat([output.sequences, inputs(2)["input_ids"][:, -6:]], dim=1)
    mask = torch.nn.functional.pad(inputs(2)["attention_mask"], (0, NEW + 6), value=1)
    turn = {"input_ids": ids, "attention_mask": mask}
    ours, _ = drafted(row, turn, **{CACHE: output[CACHE]}, max_new_tokens=8)
    whole = continuation(**turn)
    assert torch.equal(ours, whole)
    assert output[CACHE].get_seq_length() == whole.shape[1] - 1
