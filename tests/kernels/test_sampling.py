"""`sample_from_probs`: the kernels give the reference's integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_specdec.kernels.sampling import _sample_triton, sample_torch
from tests.helpers.levels import in_full


ALMOST_ONE = float(np.nextafter(1.0, 0.0))


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def random_probs(generator, *shape):
    return torch.randn(shape, generator=generator).mul(1.5).softmax(-1)


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
def test_vocabularies_and_dtypes(vocab_size, dtype, device, generator):
    probs = random_probs(generator, 8, vocab_size).to(dtype)
    check(probs, torch.rand(8, dtype=torch.float64, generator=generator), device)


@pytest.mark.parametrize("number", [0.0, ALMOST_ONE, *in_full(1e-300, 0.5, 1.0)])
@pytest.mark.parametrize("vocab_size", [700, *in_full(3)])
def test_an_id_of_probability_zero_is_never_drawn(number, vocab_size, device, generator):
    probs = random_probs(generator, 8, vocab_size) * (torch.rand(8, vocab_size, generator=generator) < 0.3)
    probs[:, 0] = probs[:, -1] = 0.0
    probs[:, 1] = 1e-9
    # Beside the total the rounding of a block's sum decides which of the possible ids it is.
    ids = _sample_triton(probs.to(device), torch.full((8,), number, dtype=torch.float64, device=device)).cpu()
    assert (probs.gather(1, ids[:, None]) > 0).all()


def test_equal_probabilities(device):
    """Every threshold lies exactly on the border of two ids: the next one is drawn."""
    probs = torch.full((16, 512), 1 / 512)
    numbers = torch.arange(16, dtype=torch.float64) / 16
    assert check(probs, numbers, device).tolist() == list(range(0, 512, 32))


@pytest.mark.parametrize("vocab_size", [600, *in_full(5)])
def test_rows_without_a_distribution_are_marked(vocab_size, device):
    probs = torch.zeros(6, vocab_size)
    probs[0, 2] = 1.0
    for row, bad in enumerate((0.0, torch.nan, torch.inf), start=1):
        probs[row, 3] = bad
    probs[4, 1] = 0.5
    probs[5] = torch.nan
    assert check(probs, torch.tensor([0.1, 0.1, 0.1, 0.1, 0.9, 0.9]), device).tolist() == [2, -1, -1, -1, 1, -1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_full(torch.float32)])
def test_proposals(dtype, device, generator):
    """Rows from which nothing can be drawn propose a token, with certainty; twice, for what a launch leaves behind."""
    for _ in range(2):
        probs = random_probs(generator, 5, 9000).to(dtype)
        probs[1], probs[3, 8999], probs[4, 5] = 0.0, torch.nan, torch.inf
        numbers, given = torch.rand(5, dtype=torch.float64, generator=generator), probs.to(device)
        ids = _sample_triton(given, numbers.to(device), True)
        assert torch.equal(ids.cpu(), sample_torch(probs, numbers, True))
        assert torch.equal(given.cpu(), probs)
        assert ids[[1, 3, 4]].tolist() == [0, 0, 0]
        assert probs[[1, 3, 4], 0].tolist() == [1, 1, 1]


@pytest.mark.smoke
def test_shapes_and_strides(device, generator):
    probs, numbers = random_probs(generator, 4, 3, 300), torch.rand(3, 4, dtype=torch.float64, generator=generator)
    assert check(probs, numbers.T, device).shape == (4, 3)
    assert check(probs.transpose(0, 1), numbers, device).shape == (3, 4)
    assert check(probs[:, :1].expand(-1, 3, -1), numbers.T, device).shape == (4, 3)
    assert check(probs[0, 0], numbers[0, 0], device).shape == ()
    assert check(probs[:0], numbers.T[:0], device).shape == (0, 3)


LARGE, SMALL = (151_936, torch.float32), (32_001, torch.bfloat16)


@pytest.mark.parametrize(
    ("compile_for", "size"), [(90, SMALL), *in_full((80, LARGE), (100, LARGE), (120, SMALL))], indirect=["compile_for"]
)
def test_kernels_compile(size, compile_for):
    vocab_size, dtype = size
    with compile_for() as kernels:
        for proposes in (False, True):
            _sample_triton(torch.empty(9, vocab_size, dtype=dtype), torch.empty(9, dtype=torch.float64), proposes)
    assert len(kernels) == 2
