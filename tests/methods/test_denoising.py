"""Denoising steps: recorded steps, and the same beside whatever rows they run."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from hf_specdec.candidate_generators.dflash.heads import BlockHead
from hf_specdec.candidate_generators.dflash.heads.walks import Block, Denoising, keep_counts
from hf_specdec.drafting import prefixes
from hf_specdec.drafting.prefixes import confidences
from tests.helpers.levels import full, in_full
from tests.helpers.paths import FIXTURES
from tests.helpers.published import published


MASK = 3
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, *in_full(torch.float32, torch.float16)])


def update(state: Denoising, logits: torch.Tensor, keep: int) -> None:
    """One step by a block of plain DFlash with these logits."""
    network = SimpleNamespace(block_head=BlockHead(None, None), target_ids=lambda ids: ids)
    state.update(Block(network, None, None, logits, None, {}), keep)


def step(logits: torch.Tensor, keep: int) -> Denoising:
    """One step on blocks of which nothing is known."""
    state = Denoising(*logits.shape[:2], MASK, logits.device)
    update(state, logits, keep)
    return state


def assert_same(state: Denoising, expected: Denoising, rows=slice(None)) -> None:
    for name in ("tokens", "settled", "confidences"):
        assert torch.equal(getattr(state, name)[rows], getattr(expected, name))


def random_logits(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(4).to(dtype)


def test_schedule_and_known_tokens():
    assert keep_counts(8, 4) == (2, 4, 6, 8)
    assert keep_counts(16, 3) == (6, 11, 16)
    assert keep_counts(2, 10) == (1, 1, 1, 1, 1, 2)
    logits = torch.zeros(1, 3, 6)
    logits[0, 0, 4] = 1.0
    state = step(logits, keep=1)
    kept = state.confidences[0, 0].clone()
    logits = torch.zeros(1, 3, 6)
    logits[0, :, 2] = torch.tensor([9.0, 5.0, 5.0])
    update(state, logits, keep=2)
    # The known token keeps its confidence, and may be masked again.
    assert state.confidences[0, 0] == kept
    assert state.tokens.tolist() == [[4, 2, 2]]
    assert state.inputs.tolist() == [[MASK, 2, 2]]
    # The mask's own id can be predicted; what is known is not predicted again.
    logits = torch.zeros(1, 4, 6)
    logits[0, 0, MASK], logits[0, 1, 5] = 9.0, 8.0
    state = step(logits, keep=2)
    assert state.settled.tolist() == [[True, True, False, False]]
    update(state, torch.eye(6)[None, :4] * 20, keep=4)
    assert state.tokens.tolist() == [[MASK, 5, 2, 3]]


@every_dtype
def test_logits_that_are_no_distribution_are_masked_first(dtype):
    for bad in (math.nan, math.inf):
        logits = random_logits((2, 4, 9), dtype)
        logits[1, 2, 5] = logits[1, 2, 7] = bad
        state = step(logits, keep=3)
        assert state.settled.tolist()[1] == [True, True, False, True]
        assert state.tokens[1, 2] == 5
        assert state.confidences.isfinite().all()
        assert_same(state, step(logits[:1], keep=3), slice(1))


def test_recorded_steps():
    recorded = load_file(FIXTURES / "dflash" / "denoise_step" / "expected.safetensors")
    names = [name for name in recorded if ".keep_" in name]
    for name in names:
        case, fraction = name.split(".keep_")
        part, whole = map(int, fraction.split("_of_"))
        logits = recorded[f"{case}.logits"]
        rows, num_positions = logits.shape[:2]
        state = Denoising(rows, num_positions, recorded["mask_token_id"].item(), "cpu")
        keep = keep_counts(num_positions * part, whole)[0]
        update(state, logits, keep)
        assert torch.equal(state.tokens, recorded[f"{case}.tokens"])
        assert torch.equal(state.inputs, recorded[name])
        assert (~state.settled).sum(1).tolist() == [num_positions - keep] * rows
        torch.testing.assert_close(confidences(logits), recorded[f"{case}.confidence"], atol=1e-6, rtol=0)
    assert len(names) > 3


def test_recorded_steps_of_a_trained_draft():
    expected = published("dflash/trained_b8").expected
    for cycle in (0, 1):
        state = Denoising(1, 7, expected["mask_token_id"].item(), "cpu")
        for index, keep in enumerate(keep_counts(7, 3)):
            prefix = f"refine_trace.n3.cycle{cycle}.step{index}."
            assert torch.equal(state.inputs, expected[f"{prefix}block_input_ids"][:, 1:])
            update(state, expected[f"{prefix}logits"], keep)
            assert torch.equal(state.tokens, expected[f"{prefix}tokens"])
            assert torch.equal(state.settled, expected[f"{prefix}kept"].bool())
            if keep < 7:
                wanted = expected[f"{prefix}confidence"]
                torch.testing.assert_close(state.confidences, wanted, atol=1e-6, rtol=0)


@every_dtype
def test_rows_depend_on_nothing_around_them(dtype, monkeypatch):
    """Alone, in another order, in other memory and in chunks of any size they come out bit for bit the same."""
    logits = random_logits((4, 5, 1_003), dtype)
    state = step(logits, keep=2)
    for row in range(4):
        assert_same(state, step(logits[row : row + 1].clone(), keep=2), slice(row, row + 1))
    assert torch.equal(step(logits.flip(0), keep=2).confidences.flip(0), state.confidences)
    assert_same(step(logits[:, 1:], keep=2), step(logits[:, 1:].clone(), keep=2))
    for size in (1, 2_500, 7_000):
        monkeypatch.setitem(prefixes._CHUNK_SIZES, "cpu", size)
        assert_same(step(logits, keep=2), state)


@full
def test_ties_and_large_logits():
    state = step(torch.zeros(2, 8, 100), keep=3)
    assert state.tokens.eq(0).all()
    assert state.settled.tolist() == [[True] * 3 + [False] * 5] * 2
    # Two tokens of half of the probability at every position, other ones at each.
    tied = torch.full((1, 8, 50), -200.0)
    for position in range(8):
        tied[0, position, [position, 49 - position]] = 0.0
    assert step(tied, keep=4).settled.tolist() == [[True] * 4 + [False] * 4]
    small = random_logits((2, 8, 100)).mul_(64).round_().div_(64)
    assert torch.equal(confidences(small + 1000), confidences(small))
    overflow = step(torch.full((2, 8, 100), 60_000.0, dtype=torch.float16), keep=4)
    assert overflow.confidences.isfinite().all()
