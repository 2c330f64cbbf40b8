"""Draws from a distribution by a given number: its inverse, long tails, rows that depend on nothing else."""

import numpy as np
import pytest
import torch

from hf_specdec.kernels.sampling import _first_above, sample_from_probs
from tests.helpers.rule_cases import ALMOST_ONE, SAMPLES, random_probs, uniform
from tests.helpers.statistics import chi_square_pvalue


@pytest.mark.parametrize("vocab_size", [1, 2, 37, 256, 257, 1000])
def test_sample_is_the_inverse_cdf(vocab_size, generator):
    probs = random_probs(generator, 500, vocab_size)
    probs[:, ::3] *= (uniform(generator, 500, 1) < 0.5) | (vocab_size == 1)
    numbers = uniform(generator, 500)
    ids = sample_from_probs(probs, numbers)
    cumulative = probs.double().cumsum(-1).numpy()
    thresholds = numbers.numpy() * cumulative[:, -1]
    for row, threshold, token in zip(cumulative, thresholds, ids.tolist()):
        expected = int(np.searchsorted(row, threshold, side="right"))
        # Sums of blocks are float32: beside a boundary the neighbour is right too.
        assert token == expected or abs(row[min(token, expected)] - threshold) < 1e-6


def test_sample_has_the_distribution(generator):
    probs = random_probs(generator, 37)
    ids = sample_from_probs(probs.expand(SAMPLES, 37), uniform(generator, SAMPLES))
    assert chi_square_pvalue(ids.bincount(minlength=37), probs) > 1e-3
    other = probs.roll(1) * 0.1 + probs * 0.9
    assert chi_square_pvalue(ids.bincount(minlength=37), other) < 1e-6


def test_sample_reaches_every_id_of_a_long_tail():
    # The tail's ids have 4e-9 each: below the resolution of a cumulative sum in float32 near 1.
    vocab_size, tail = 262_144, 4e-9
    probs = torch.full((vocab_size,), tail)
    probs[0] = 1.0 - tail * (vocab_size - 1)
    total = probs.double().sum().item()
    steps = torch.arange(1000, 2000, dtype=torch.float64) + 0.5
    ids = sample_from_probs(probs.expand(1000, vocab_size), (probs[0].item() + steps * tail) / total)
    assert ids.unique().numel() == 1000
    assert (ids - (steps + 0.5).long()).abs().max() <= 10  # the first block's float32 rounding, 3e-8, in ids of 4e-9


@pytest.mark.parametrize("number", [0.0, 1e-300, 0.5, ALMOST_ONE, 1.0])
@pytest.mark.parametrize("vocab_size", [3, 256, 700, 32_000])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_sample_never_returns_an_id_of_probability_zero(number, vocab_size, scale):
    generator = torch.Generator().manual_seed(vocab_size)
    probs = random_probs(generator, 64, vocab_size) * (uniform(generator, 64, vocab_size) < 0.3)
    probs[:, 0] = probs[:, -1] = 0.0
    probs[:, 1] = 1e-9
    probs = probs.float() * scale
    ids = sample_from_probs(probs, torch.full((64,), number, dtype=torch.float64))
    assert (probs.gather(1, ids[:, None]) > 0).all()
    ids = sample_from_probs(probs, torch.full((64,), number, dtype=torch.float32))
    assert (probs.gather(1, ids[:, None]) > 0).all()


def test_sample_passes_ids_of_probability_zero_where_the_cumulative_sum_wavers():
    # A parallel scan may round an entry up although its weight is 0.
    weights = torch.tensor([[0.5, 0.0, 0.5, 0.0]], dtype=torch.float64)
    cumulative = torch.tensor([[0.5, 0.5 + 1e-16 * 4, 1.0, 1.0]], dtype=torch.float64)
    threshold = torch.tensor([[0.5]], dtype=torch.float64)
    assert cumulative[0, 1] > 0.5
    assert _first_above(weights, cumulative, threshold).item() == 2
    assert _first_above(weights, cumulative, threshold + 0.5).item() in (0, 2)


@pytest.mark.parametrize("number", [ALMOST_ONE, 1.0])
def test_sample_stays_in_a_vocabulary_that_ends_inside_a_block(number, generator):
    probs = random_probs(generator, 200, 400)
    probs[:, :256] *= 0.01
    ids = sample_from_probs(probs, torch.full((200,), number, dtype=torch.float64))
    assert (ids < 400).all()


@pytest.mark.parametrize("vocab_size", [1, 5, 100])
def test_sample_of_one_possible_id(vocab_size):
    probs = torch.eye(vocab_size)
    for number in (0.0, 0.3, ALMOST_ONE):
        ids = sample_from_probs(probs, torch.full((vocab_size,), number))
        assert ids.tolist() == list(range(vocab_size))


@pytest.mark.parametrize("vocab_size", [37, 1000, 50_257, 151_936])
def test_sample_of_a_row_does_not_depend_on_the_batch(vocab_size, generator):
    probs = random_probs(generator, 2, 9, vocab_size)
    numbers = uniform(generator, 2, 9)
    ids = sample_from_probs(probs, numbers)
    assert ids.shape == (2, 9)
    for row in range(2):
        assert torch.equal(sample_from_probs(probs[row], numbers[row]), ids[row])
        for node in range(9):
            assert sample_from_probs(probs[row, node], numbers[row, node]) == ids[row, node]
    assert torch.equal(sample_from_probs(probs * 0.125, numbers), ids)
    transposed = probs.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(sample_from_probs(transposed, numbers), ids)


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("vocab_size", [5, 600])
def test_sample_marks_rows_without_a_distribution(bad, vocab_size):
    probs = torch.zeros(3, vocab_size)
    probs[0, 2] = 1.0
    probs[1, 3] = bad
    probs[2, 1] = 0.5
    assert sample_from_probs(probs, torch.tensor([0.1, 0.1, 0.9])).tolist() == [2, -1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sample_takes_other_dtypes(dtype, generator):
    probs = random_probs(generator, 50, 3000).to(dtype)
    numbers = uniform(generator, 50)
    ids = sample_from_probs(probs, numbers)
    assert torch.equal(ids, sample_from_probs(probs.float(), numbers))
