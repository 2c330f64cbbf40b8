"""The chi-square helper: right p-values, power against a wrong distribution, and no test that cannot fail."""

import numpy as np
import pytest
from scipy import stats

from tests.helpers.statistics import chi_square_pvalue


def test_equals_scipy_where_nothing_is_pooled():
    counts, probs = np.array([[30, 50], [12, 8]]), np.array([[0.3, 0.5], [0.1, 0.1]])
    expected = stats.chisquare(counts.ravel(), probs.ravel() * 100).pvalue
    assert chi_square_pvalue(counts, probs) == pytest.approx(expected)


def test_pools_cells_that_expect_few_counts():
    pooled = stats.chisquare([7, 43, 50], [6, 44, 50]).pvalue
    assert chi_square_pvalue([3, 43, 4, 50], [0.03, 0.44, 0.03, 0.5]) == pytest.approx(pooled)
    # One rare cell alone takes the next rarest with it.
    pooled = stats.chisquare([45, 55], [46, 54]).pvalue
    assert chi_square_pvalue([2, 43, 55], [0.02, 0.44, 0.54]) == pytest.approx(pooled)


def test_an_impossible_outcome_has_no_probability():
    assert chi_square_pvalue([99, 1, 0], [1.0, 0.0, 0.0]) == 0.0


def test_pvalues_are_uniform_under_the_distribution_and_small_under_another():
    probs = np.random.default_rng(0).dirichlet(np.ones(20))
    draws = np.random.default_rng(1).multinomial(2000, probs, size=1000)
    pvalues = [chi_square_pvalue(counts, probs) for counts in draws]
    assert stats.kstest(pvalues, "uniform").pvalue > 1e-3
    wrong = 0.9 * probs + 0.1 * np.roll(probs, 1)
    assert chi_square_pvalue(np.random.default_rng(2).multinomial(20000, probs), wrong) < 1e-6


@pytest.mark.parametrize(
    ("counts", "probs", "message"),
    [([1, 2], [1.0], "cannot be compared"), ([0, 0], [0.5, 0.5], "no observations"), ([2, 1], [0.5, 0.5], "pooled")],
)
def test_refuses_what_could_not_fail(counts, probs, message):
    with pytest.raises(ValueError, match=message):
        chi_square_pvalue(counts, probs)
