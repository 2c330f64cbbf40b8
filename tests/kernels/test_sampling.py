"""Warpers and `sample_from_probs`: the tokens that transformers keeps, and the reference's integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from hf_specdec.kernels import launching
from hf_specdec.kernels.sampling import _sample_triton, sample_torch
from hf_specdec.kernels.tiles import Gpu
from hf_specdec.kernels.warpers import Warping, warped_triton
from tests.helpers.layer_references import warped
from tests.helpers.levels import full, in_full, when_slow
from tests.helpers.rule_cases import random_probs
from tests.kernels.conftest import every_gpu


ALMOST_ONE = float(np.nextafter(1.0, 0.0))


def check(probs, uniform, device):
    """The kernels' ids, after they were compared with the reference's."""
    ids = _sample_triton(probs.to(device), uniform.to(device)).cpu()
    assert ids.dtype == torch.long
    assert torch.equal(ids, sample_torch(probs, uniform))
    return ids


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (4097, torch.bfloat16),
        *in_full(*((size, torch.float32) for size in (1, 2, 37, 255, 256, 257, 1000, 50_257))),
        *in_full((3000, torch.float16), (3000, torch.float64)),
    ],
)
def test_vocabularies_shapes_and_dtypes(vocab_size, dtype, device, generator):
    probs = random_probs(generator, 4, 3, vocab_size).to(dtype)
    numbers = torch.rand(3, 4, dtype=torch.float64, generator=generator)
    assert check(probs, numbers.T, device).shape == (4, 3)
    assert check(probs.transpose(0, 1), numbers, device).shape == (3, 4)
    assert check(probs[:, :1].expand(-1, 3, -1), numbers.T, device).shape == (4, 3)
    assert check(probs[0, 0], numbers[0, 0], device).shape == ()
    assert check(probs[:0], numbers.T[:0], device).shape == (0, 3)


@pytest.mark.parametrize("vocab_size", [700, *in_full(3)])
def test_an_id_of_probability_zero_is_never_drawn(vocab_size, device, generator):
    for number in (0.0, ALMOST_ONE, 1e-300, 0.5, 1.0):
        probs = random_probs(generator, 8, vocab_size) * (torch.rand(8, vocab_size, generator=generator) < 0.3)
        probs[:, 0] = probs[:, -1] = 0.0
        probs[:, 1] = 1e-9
        # Beside the total the rounding of a block's sum decides which of the possible ids it is.
        ids = _sample_triton(probs.to(device), torch.full((8,), number, dtype=torch.float64, device=device)).cpu()
        assert (probs.gather(1, ids[:, None]) > 0).all()


@pytest.mark.smoke
def test_equal_probabilities_and_rows_without_a_distribution(device):
    # Every threshold lies exactly on the border of two ids: the next one is drawn.
    numbers = torch.arange(16, dtype=torch.float64) / 16
    assert check(torch.full((16, 512), 1 / 512), numbers, device).tolist() == list(range(0, 512, 32))
    for vocab_size in (600, 5):
        probs = torch.zeros(6, vocab_size)
        probs[0, 2] = 1.0
        for row, bad in enumerate((0.0, torch.nan, torch.inf), start=1):
            probs[row, 3] = bad
        probs[4, 1] = 0.5
        probs[5] = torch.nan
        assert check(probs, torch.tensor([0.1, 0.1, 0.1, 0.1, 0.9, 0.9]), device).tolist() == [2, -1, -1, -1, 1, -1]


def test_proposals(device, generator):
    """Rows from which nothing can be drawn propose a token, with certainty; twice, for what a launch leaves behind."""
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float32):
        probs = random_probs(generator, 5, 9000).to(dtype)
        probs[1], probs[3, 8999], probs[4, 5] = 0.0, torch.nan, torch.inf
        numbers, given = torch.rand(5, dtype=torch.float64, generator=generator), probs.to(device)
        ids = _sample_triton(given, numbers.to(device), True)
        assert torch.equal(ids.cpu(), sample_torch(probs, numbers, True))
        assert torch.equal(given.cpu(), probs)
        assert ids[[1, 3, 4]].tolist() == [0, 0, 0]
        assert probs[[1, 3, 4], 0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("compile_for", "vocab_size", "dtype"),
    [
        *in_full((90, 32_001, torch.bfloat16), (80, 151_936, torch.float32)),
        *when_slow((100, 151_936, torch.float32), (120, 32_001, torch.bfloat16)),
    ],
    indirect=["compile_for"],
)
def test_kernels_compile(vocab_size, dtype, compile_for):
    with compile_for() as kernels:
        for proposes in (False, True):
            _sample_triton(torch.empty(9, vocab_size, dtype=dtype), torch.empty(9, dtype=torch.float64), proposes)
    assert len(kernels) == 2


# Warpers: the kernels keep the tokens that transformers keeps

# Of a probability, how near to a border rounding may decide.
ROUNDING = 1e-5


def check_warped(logits: torch.Tensor, warping: Warping, device: torch.device) -> torch.Tensor:
    """The scores of the kernels, after they were compared with those of transformers."""
    found, expected = warped_triton(logits.to(device), warping).cpu(), warped(logits, warping)
    assert found.dtype == torch.float32
    is_kept = expected > -torch.inf
    torch.testing.assert_close(found[is_kept], expected[is_kept], rtol=1e-6, atol=0)
    assert (found[~is_kept] == -torch.inf).all()
    return found


def far_from_borders(logits: torch.Tensor, warping: Warping) -> bool:
    """Tells whether rounding cannot decide which tokens are kept."""
    probs = warped(logits, warping._replace(top_p=None, min_p=None)).double().softmax(-1).sort(dim=-1).values
    distances = []
    if warping.top_p is not None:
        # The most probable one is always kept.
        distances.append(probs.cumsum(-1)[:, :-1] - (1 - warping.top_p))
    if warping.min_p is not None:
        differences = probs / probs.amax(-1, keepdim=True) - warping.min_p
        distances.append(differences[differences != 0])
    return all((distance.abs() > ROUNDING).all() for distance in distances)


@full
@given(
    warping=st.builds(
        Warping,
        temperature=st.sampled_from([1.0, 0.6, 1.7]),
        top_k=st.sampled_from([None, 1, 2, 20, 5000]),
        top_p=st.sampled_from([None, 0.0, 0.123, 0.5, 0.9, 0.987, 0.9999]),
        min_p=st.sampled_from([None, 0.0, 0.07, 1.0]),
    ),
    rows=st.integers(1, 3),
    vocab_size=st.sampled_from([2, 7, 256, 608]),
    numbers=st.sampled_from([2, 9, 10**6]),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_warpers(device, warping, rows, vocab_size, numbers, scale, dtype, seed):
    """Also of few different numbers, where most tokens are as probable as others, and of impossible tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-numbers, numbers + 1, (rows, vocab_size), generator=generator) / numbers * scale
    logits[-1, 2:9] = -torch.inf
    logits = logits.to(dtype)
    assume(far_from_borders(logits, warping))
    check_warped(logits, warping, device)


@pytest.mark.parametrize(
    ("warping", "dtype"),
    [
        (Warping(0.7, 50, 0.95, 0.05), torch.bfloat16),
        *in_full((Warping(0.7, 50, 0.95, 0.05), torch.float32), (Warping(0.7, top_p=0.95), torch.float16)),
        *in_full((Warping(0.7, min_p=0.05), torch.bfloat16), (Warping(0.7, top_k=50), torch.bfloat16)),
    ],
)
def test_warpers_of_many_parts(device, monkeypatch, warping, dtype):
    """As a large GPU has them. Twice: the first launch leaves nothing behind. Rows may be parts of wider ones."""
    monkeypatch.setattr(launching, "gpu_of", lambda device: Gpu(16, 99 << 10))
    logits = torch.randn((2, 3000), generator=torch.Generator().manual_seed(0)).mul(4).to(dtype)
    for width in (3000, 2777):
        check_warped(logits[:, :width], warping, device)
    # Of equal ones at the border the last are kept; transformers' sort is not stable, and keeps as many.
    logits = torch.zeros((1, 3000), dtype=dtype)
    logits[0, ::2] = -1.0
    scores, expected = check_warped(logits, Warping(top_p=0.31), device), hf.TopPLogitsWarper(0.31)
    assert torch.equal(scores.sort().values, expected(None, logits.float()).sort().values)


@full
def test_warpers_of_logits_that_are_no_numbers_or_impossible(device):
    """Nothing may be drawn from such rows, whose softmax is not a number."""
    warping = Warping(0.8, 20, 0.9, 0.01)
    logits = torch.randn((5, 300), generator=torch.Generator().manual_seed(0))
    logits[1:4, 7] = torch.tensor([torch.nan, -torch.nan, torch.inf])
    logits[4] = -torch.inf
    found = warped_triton(logits.to(device), warping).cpu()
    assert torch.equal(found[:1], check_warped(logits[:1], warping, device))
    assert found[1:4].softmax(-1).isnan().any(-1).all()
    assert (found[4] == -torch.inf).all()


@every_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, *when_slow(torch.float32, torch.float16)], ids=str)
def test_warpers_compile(compile_for, dtype):
    with compile_for() as kernels:
        for vocab_size in (32000, 151936):
            warped_triton(torch.empty((16, vocab_size), dtype=dtype), Warping(0.7, 50, 0.95, 0.05))
        warped_triton(torch.empty((1, 32000), dtype=dtype), Warping(0.7, min_p=0.05))
    num_digits = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}[dtype]
    assert len(kernels) == 2 * (2 * num_digits + 1) + 2
