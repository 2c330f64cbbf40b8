"""The helper of chi-square tests: right p-values, and power."""

import numpy as np
import pytest
from scipy import stats

from tests.helpers.statistics import chi_square_pvalue


def test_pvalues_equal_those_of_scipy_and_are_small_under_another_distribution():
    pooled = stats.chisquare([7, 43, 50], [6, 44, 50]).pvalue
    assert chi_square_pvalue([3, 43, 4, 50], [0.03, 0.44, 0.03, 0.5]) == pytest.approx(pooled)
    # One rare cell alone takes the next rarest with it, and an impossible outcome has no probability.
    assert chi_square_pvalue([2, 43, 55], [0.02, 0.44, 0.54]) == pytest.approx(
        stats.chisquare([45, 55], [46, 54]).pvalue
    )
    assert chi_square_pvalue([99, 1, 0], [1.0, 0.0, 0.0]) == 0.0
    probs = np.random.default_rng(0).dirichlet(np.ones(20))
    wrong = 0.9 * probs + 0.1 * np.roll(probs, 1)
    assert chi_square_pvalue(np.random.default_rng(2).multinomial(20000, probs), probs) > 1e-3
    assert chi_square_pvalue(np.random.default_rng(2).multinomial(20000, probs), wrong) < 1e-6
