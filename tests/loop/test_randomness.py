"""Random numbers that depend on seed, row, position and purpose, and on nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hf_specdec.logits.randomness import ACCEPT, DRAFT, NODES_PER_ANCHOR, TARGET, RowUniforms, seed_from_torch


PURPOSES = (TARGET, ACCEPT, DRAFT)


def numbers_of_row(seed, purpose, row, count, space=0):
    """The first numbers of a row, drawn in one go."""
    key, counter = np.array([seed, purpose], np.uint64), np.array([0, space, row, 0], np.uint64)
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=key, counter=counter)).random(count))


first_positions = st.lists(st.integers(0, 3000), min_size=4, max_size=4)


@given(reads=st.lists(st.tuples(st.sampled_from(PURPOSES), first_positions, st.integers(0, 40)), max_size=8))
def test_numbers_are_those_of_philox_whatever_is_read_before(reads):
    uniforms, rows = RowUniforms(7), [2, 0, 5, 1]
    expected = {(purpose, row): numbers_of_row(7, purpose, row, 3100) for purpose in PURPOSES for row in rows}
    for purpose, firsts, count in reads:
        values = uniforms.at(purpose, rows, firsts, count)
        assert values.shape == (4, count)
        for row, first, row_values in zip(rows, firsts, values):
            assert torch.equal(row_values, expected[purpose, row][first : first + count])


def test_nodes_are_numbered_after_their_anchor():
    expected = numbers_of_row(7, ACCEPT, 3, 40 * NODES_PER_ANCHOR, space=1).view(40, NODES_PER_ANCHOR)
    uniforms = RowUniforms(7)
    for anchor in (0, 39, 5, 6, 7, 20):
        assert torch.equal(uniforms.for_nodes([3], [anchor], 9)[0], expected[anchor, :9])
        assert torch.equal(uniforms.for_nodes([3], [anchor], 6, first_node=250)[0], expected[anchor, 250:])


def test_a_row_does_not_depend_on_its_neighbours():
    alone, together = RowUniforms(1), RowUniforms(1)
    batch = together.at(TARGET, [4, 0, 9], [600, 3, 77], 5)
    assert torch.equal(alone.at(TARGET, [9], [77], 5), batch[2:])
    assert torch.equal(alone.at(TARGET, [4], [600], 5), batch[:1])


def test_one_position_has_one_number_in_every_cycle():
    uniforms = RowUniforms(1)
    assert torch.equal(uniforms.at(TARGET, [0], [10], 6)[:, 4:], uniforms.at(TARGET, [0], [14], 2))


def test_a_position_that_is_drafted_again_gets_another_number():
    uniforms = RowUniforms(1)
    first, again = uniforms.draft_at([0, 1], [10, 10], 3), uniforms.draft_at([0, 1], [12, 12], 1)
    assert first.shape == (2,)
    assert not (first == again).any()


def test_seeds_rows_purposes_and_addressings_are_unrelated():
    streams = [RowUniforms(seed).at(p, [row], [0], 400)[0] for seed in (0, 1) for p in PURPOSES for row in (0, 1)]
    streams += [RowUniforms(0).for_nodes([row], [0], 256, p)[0] for p in PURPOSES for row in (0, 1)]
    values = torch.cat(streams)
    assert values.unique().numel() == values.numel()


def test_numbers_are_uniform_and_rows_uncorrelated():
    uniforms = RowUniforms(12)
    rows = torch.cat([uniforms.at(TARGET, [0, 1], [i, i], 500) for i in range(0, 50000, 500)], dim=1).numpy()
    assert stats.kstest(rows.ravel(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(rows)[0, 1]) < 4 / rows.shape[1] ** 0.5
    assert abs(np.corrcoef(rows[0, :-1], rows[0, 1:])[0, 1]) < 4 / rows.shape[1] ** 0.5


def test_no_number_becomes_one_in_float32(monkeypatch):
    almost_one = float(np.nextafter(1.0, 0.0))
    assert torch.tensor(almost_one).item() == 1.0

    class Extreme:
        def __init__(self, bit_generator):
            pass

        def random(self, count):
            return np.full(count, almost_one)

    monkeypatch.setattr(np.random, "Generator", Extreme)
    values = RowUniforms(0).at(TARGET, [0], [0], 3)
    assert values.dtype == torch.float64
    assert values.float().max() < 1.0
    assert values.min() > 0.9999


def test_later_reads_leave_earlier_answers_alone():
    uniforms = RowUniforms(1)
    values = uniforms.at(TARGET, [0], [0], 4)
    kept = values.clone()
    uniforms.at(TARGET, [0, 1], [5000, 0], 4)
    assert torch.equal(values, kept)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_refuses_seeds_out_of_range(seed):
    with pytest.raises(ValueError, match="from 0 to 2"):
        RowUniforms(seed)


def test_large_seeds_are_told_apart():
    values = [RowUniforms(seed).at(TARGET, [0], [0], 1).item() for seed in (2**63, 2**63 + 1, 2**64 - 1)]
    assert len(set(values)) == 3


def test_refuses_more_numbers_than_there_are():
    with pytest.raises(ValueError, match="at most 256 nodes, got 257"):
        RowUniforms(0).for_nodes([0], [0], 257)


def test_long_reads_give_the_numbers_of_their_positions():
    narrow, wide = RowUniforms(3), RowUniforms(3)
    expected = torch.cat([narrow.at(TARGET, [0, 2], [start, start + 7], 100) for start in range(5, 1905, 100)], dim=1)
    wide.at(TARGET, [0, 2], [0, 0], 10)
    assert torch.equal(wide.at(TARGET, [0, 2], [5, 12], 1900), expected)
    # What is read after a long read does not change either.
    assert torch.equal(wide.at(TARGET, [2], [12], 100), narrow.at(TARGET, [2], [12], 100))


def test_seed_comes_from_the_default_cpu_generator():
    torch.manual_seed(3)
    seeds = [seed_from_torch(), seed_from_torch()]
    torch.manual_seed(3)
    with torch.device("meta"):
        assert [seed_from_torch(), seed_from_torch()] == seeds
    assert seeds[0] != seeds[1]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**32
