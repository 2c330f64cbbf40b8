"""The equations of speculation, against sums by hand, simulation and each other."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec import SpecConfigError
from hf_specdec.control import theory


rates = st.floats(0, 1)
lengths = st.integers(0, 12)
times = st.floats(1e-4, 10)


@pytest.mark.parametrize(
    ("rate", "k", "tokens"), [(0.0, 4, 1), (1.0, 4, 5), (0.5, 0, 1), (0.5, 2, 1.75), (0.8, 1, 1.8)]
)
def test_tokens_of_a_chain(rate, k, tokens):
    assert theory.expected_tokens(rate, k) == pytest.approx(tokens)


@given(rates, lengths)
def test_equal_positions_are_a_chain_of_one_rate(rate, k):
    assert theory.expected_tokens_of_chain([rate] * k) == pytest.approx(theory.expected_tokens(rate, k))


@given(st.lists(rates, max_size=8))
def test_a_chain_is_a_tree(position_rates):
    parents = list(range(-1, len(position_rates) - 1))
    tree = theory.expected_tokens_of_tree(parents, position_rates)
    assert tree == pytest.approx(theory.expected_tokens_of_chain(position_rates))


def test_tokens_of_a_tree_count_every_path():
    parents, node_rates = [-1, -1, 0, 1, 1], [0.6, 0.3, 0.5, 0.4, 0.2]
    assert theory.expected_tokens_of_tree(parents, node_rates) == pytest.approx(1 + 0.9 + 0.3 + 0.12 + 0.06)


def test_a_simulation_commits_as_many_tokens():
    generator, rate, k = random.Random(0), 0.7, 4
    committed = 0
    for _ in range(40_000):
        accepted = 0
        while accepted < k and generator.random() < rate:
            accepted += 1
        committed += accepted + 1
    # Three standard deviations of the mean of 40,000 cycles are 0.024.
    assert theory.block_efficiency(committed, 40_000) == pytest.approx(theory.expected_tokens(rate, k), abs=0.025)


def test_a_free_draft_speeds_up_by_all_its_tokens():
    assert theory.memory_bound_speedup(3.2, 0.0, 5) == pytest.approx(3.2)


@given(rates, st.integers(1, 12), st.floats(0, 2), times)
def test_the_memory_bound_speedup_is_the_general_one_with_flat_verification(rate, k, cost_ratio, plain):
    tau = theory.expected_tokens(rate, k)
    general = theory.speedup(tau, cost_ratio * k * plain, plain, plain)
    assert theory.memory_bound_speedup(tau, cost_ratio, k) == pytest.approx(general)


@given(rates, st.integers(1, 12), times, times, times)
def test_speedup_is_the_ratio_of_costs_per_token(rate, k, draft, verify, plain):
    tau = theory.expected_tokens(rate, k)
    ours, theirs = theory.cost_per_token(tau, draft, verify), theory.cost_per_token(1, 0, plain)
    assert theory.speedup(tau, draft, verify, plain) == pytest.approx(theirs / ours)


@given(st.integers(1, 12), times, times, times)
def test_at_break_even_nothing_is_gained(k, draft, verify, plain):
    rate = theory.break_even_acceptance(k, draft, verify, plain)
    if rate is None:
        assert theory.speedup(k + 1, draft, verify, plain) < 1
    elif rate == 0:
        assert theory.speedup(1, draft, verify, plain) >= 1
    else:
        assert theory.speedup(theory.expected_tokens(rate, k), draft, verify, plain) == pytest.approx(1, abs=1e-6)


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
    with pytest.raises(SpecConfigError, match="from 0 to 1"):
        theory.expected_tokens_of_chain([0.5, value])


def test_every_node_needs_a_rate():
    with pytest.raises(SpecConfigError, match="2 parents and 1 rates"):
        theory.expected_tokens_of_tree([-1, 0], [0.5])
