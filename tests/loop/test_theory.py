"""The equations of speculation, against sums by hand, simulation and each other."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec import SpecConfigError
from hf_specdec.control import theory


times = st.floats(1e-4, 10)


@pytest.mark.parametrize(
    ("rate", "k", "tokens"), [(0.0, 4, 1), (1.0, 4, 5), (0.5, 0, 1), (0.5, 2, 1.75), (0.8, 1, 1.8)]
)
def test_tokens_of_a_chain(rate, k, tokens):
    assert theory.expected_tokens(rate, k) == pytest.approx(tokens)


def test_a_simulation_commits_as_many_tokens():
    generator, rate, k = random.Random(0), 0.7, 4
    committed = 0
    for _ in range(40_000):
        accepted = 0
        while accepted < k and generator.random() < rate:
            accepted += 1
        committed += accepted + 1
    # Three standard deviations of the mean of 40,000 cycles are 0.024.
    assert committed / 40_000 == pytest.approx(theory.expected_tokens(rate, k), abs=0.025)


@given(st.integers(1, 12), times, times, times)
def test_at_break_even_nothing_is_gained(k, draft, verify, plain):
    rate = theory.break_even_acceptance(k, draft, verify, plain)
    cycle = (draft + verify) / plain
    if rate is None:
        assert k + 1 < cycle
    elif rate == 0:
        assert cycle <= 1
    else:
        assert theory.expected_tokens(rate, k) == pytest.approx(cycle, rel=1e-6)


@pytest.mark.parametrize(
    ("rate", "cost", "k"),
    [(0.9, 0.05, 13), (0.8, 0.05, 8), (0.8, 0.2, 4), (0.6, 0.1, 3), (0.5, 0.1, 2), (0.3, 1.0, 0)],
)
def test_the_best_length_with_flat_verification(rate, cost, k):
    assert theory.optimal_length(rate, lambda k: cost * k, lambda k: 1.0, 30) == k


@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_a_rate_is_from_0_to_1(value):
    with pytest.raises(SpecConfigError, match="from 0 to 1"):
        theory.expected_tokens(value, 3)
