"""Random numbers depend on seed, row, position and purpose alone, and draws by them are the inverse of the CDF."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.kernels.sampling import _first_above, sample_from_probs
from hf_specdec.logits.randomness import ACCEPT, DRAFT, NODES_PER_ANCHOR, TARGET, RowUniforms, seed_from_torch
from tests.helpers.levels import in_full
from tests.helpers.rule_cases import ALMOST_ONE, random_probs, uniform


PURPOSES = (TARGET, ACCEPT, DRAFT)


def numbers_of_row(seed, purpose, row, count, space=0):
    """The first numbers of a row, drawn in one go."""
    key, counter = np.array([seed, purpose], np.uint64), np.array([0, space, row, 0], np.uint64)
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=key, counter=counter)).random(count))


POSITIONS, COUNTS = st.lists(st.integers(0, 3000), min_size=4, max_size=4), st.integers(0, 40) | st.just(1900)


@given(reads=st.lists(st.tuples(st.sampled_from(PURPOSES), POSITIONS, COUNTS), max_size=8))
def test_numbers_are_those_of_philox_whatever_is_read_before_and_beside(reads):
    uniforms, rows = RowUniforms(7), [2, 0, 5, 1]
    expected = {(purpose, row): numbers_of_row(7, purpose, row, 5000) for purpose in PURPOSES for row in rows}
    answers = []
    for purpose, firsts, count in reads:
        values = uniforms.keys(rows, firsts).at(purpose, count)
        assert values.shape == (4, count)
        answers.append((values, purpose, firsts, count))
    # Later reads leave earlier answers alone.
    for values, purpose, firsts, count in answers:
        for row, first, row_values in zip(rows, firsts, values):
            assert torch.equal(row_values, expected[purpose, row][first : first + count])


def test_numbers_of_nodes_follow_their_anchor_and_a_position_drafted_again_gets_another():
    for seed, purpose in ((7, ACCEPT), (2**64 - 1, TARGET)):
        expected = numbers_of_row(seed, purpose, 3, 40 * NODES_PER_ANCHOR, space=1).view(40, NODES_PER_ANCHOR)
        uniforms = RowUniforms(seed)
        for anchor in (0, 39, 5, 6, 7, 20):
            keys = uniforms.keys([3], [anchor])
            assert torch.equal(keys.for_nodes(9, purpose)[0], expected[anchor, :9])
            assert torch.equal(keys.for_nodes(6, purpose, first_node=250)[0], expected[anchor, 250:])
    with pytest.raises(ValueError, match="at most 256 nodes, got 257"):
        uniforms.keys([0], [0]).for_nodes(257)
    first, again = (
        uniforms.keys([0, 1], [place] * 2).for_nodes(1, DRAFT, node)[:, 0] for place, node in ((10, 3), (12, 1))
    )
    assert first.shape == (2,)
    assert torch.cat([first, again]).unique().numel() == 4


def test_no_number_becomes_1_in_float32_and_seeds_come_from_torchs_cpu_generator(monkeypatch):
    torch.manual_seed(3)
    seeds = [seed_from_torch(), seed_from_torch()]
    torch.manual_seed(3)
    with torch.device("meta"):
        assert [seed_from_torch(), seed_from_torch()] == seeds
    assert seeds[0] != seeds[1]
    assert all(2**32 < max(seeds) >= seed >= 0 for seed in seeds)
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="from 0 to 2"):
            RowUniforms(seed)
    assert torch.tensor(ALMOST_ONE).item() == 1.0
    extreme = SimpleNamespace(random=lambda count: np.full(count, ALMOST_ONE))
    monkeypatch.setattr(np.random, "Generator", lambda bits: extreme)
    values = RowUniforms(0).keys([0], [0]).at(TARGET, 3)
    assert values.dtype == torch.float64
    assert 0.9999 < values.float().min() <= values.float().max() < 1.0


# Draws by given numbers


@pytest.mark.parametrize("vocab_size", [257, *in_full(1, 37, 256, 1000)])
def test_draws_are_the_inverse_of_the_cdf(vocab_size, generator):
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
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        rounded = probs.to(dtype)
        assert torch.equal(sample_from_probs(rounded, numbers), sample_from_probs(rounded.float(), numbers))


def test_draws_reach_every_id_of_a_long_tail():
    # The tail's ids have 4e-9 each: below the resolution of a cumulative sum in float32 near 1.
    vocab_size, tail = 262_144, 4e-9
    probs = torch.full((vocab_size,), tail)
    probs[0] = 1.0 - tail * (vocab_size - 1)
    total = probs.double().sum().item()
    steps = torch.arange(1000, 2000, dtype=torch.float64) + 0.5
    ids = sample_from_probs(probs.expand(1000, vocab_size), (probs[0].item() + steps * tail) / total)
    assert ids.unique().numel() == 1000
    assert (ids - (steps + 0.5).long()).abs().max() <= 10  # the first block's float32 rounding, 3e-8, in ids of 4e-9


@pytest.mark.parametrize("vocab_size", [700, *in_full(3)])
def test_draws_never_return_an_id_of_probability_0(vocab_size, generator):
    probs = random_probs(generator, 64, vocab_size) * (uniform(generator, 64, vocab_size) < 0.3)
    probs[:, 0] = probs[:, -1] = 0.0
    probs[:, 1] = 1e-9
    one = torch.eye(vocab_size)
    for number in (0.0, 1e-300, 0.5, ALMOST_ONE, 1.0):
        assert sample_from_probs(one, torch.full((vocab_size,), number)).tolist() == list(range(vocab_size))
        for dtype in (torch.float64, torch.float32):
            numbers = torch.full((64,), number, dtype=dtype)
            for scale in (1e-30, 1.0, 1e30):
                scaled = probs.float() * scale
                assert (scaled.gather(1, sample_from_probs(scaled, numbers)[:, None]) > 0).all()
            # A vocabulary may end inside a block.
            assert (sample_from_probs(random_probs(generator, 64, 400), numbers) < 400).all()
    for bad in (0.0, float("nan"), float("inf")):
        probs = torch.zeros(3, vocab_size)
        probs[0, 2], probs[1, 2], probs[2, 1] = 1.0, bad, 0.5
        assert sample_from_probs(probs, torch.tensor([0.1, 0.1, 0.9])).tolist() == [2, -1, 1]
    # A parallel scan may round an entry up although its weight is 0.
    weights, threshold = (torch.tensor([values], dtype=torch.float64) for values in ([0.5, 0.0, 0.5, 0.0], [0.5]))
    cumulative = torch.tensor([[0.5, 0.5 + 1e-16 * 4, 1.0, 1.0]], dtype=torch.float64)
    assert cumulative[0, 1] > 0.5
    assert _first_above(weights, cumulative, threshold).item() == 2
    assert _first_above(weights, cumulative, threshold + 0.5).item() in (0, 2)


def test_the_draw_of_a_row_does_not_depend_on_the_batch(generator):
    probs, numbers = random_probs(generator, 2, 9, 257), uniform(generator, 2, 9)
    ids = sample_from_probs(probs, numbers)
    assert ids.shape == (2, 9)
    for row in range(2):
        assert torch.equal(sample_from_probs(probs[row], numbers[row]), ids[row])
        for node in range(9):
            assert sample_from_probs(probs[row, node], numbers[row, node]) == ids[row, node]
    assert torch.equal(sample_from_probs(probs * 0.125, numbers), ids)
    transposed = probs.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(sample_from_probs(transposed, numbers), ids)
