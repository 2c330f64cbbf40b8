"""Chi-square tests of sampled tokens against the exact distribution."""

from __future__ import annotations

import numpy as np
from scipy import stats


def chi_square_pvalue(observed_counts, expected_probs, min_expected: float = 5.0) -> float:
    """Probability of a deviation at least as large as the observed one, if the counts follow the distribution.

    Cells that expect fewer than `min_expected` counts are pooled into one (Cochran's rule). A count in a cell of
    probability 0 is impossible: the p-value is 0. Tests with fixed seeds compare it with about 1e-3.
    """
    observed = np.asarray(observed_counts, dtype=np.float64).ravel()
    probs = np.asarray(expected_probs, dtype=np.float64).ravel()
    if observed.shape != probs.shape:
        raise ValueError(f"{observed.size} counts cannot be compared with {probs.size} probabilities.")
    if observed.sum() == 0:
        raise ValueError("There are no observations.")
    if observed[probs == 0].any():
        return 0.0
    expected = probs / probs.sum() * observed.sum()
    observed, expected = _pool_small_cells(observed[probs > 0], expected[probs > 0], min_expected)
    if len(observed) == 1:
        raise ValueError("All cells were pooled into one: the test could not fail. Use more observations.")
    return float(stats.chisquare(observed, expected).pvalue)


def _pool_small_cells(observed, expected, min_expected):
    order = np.argsort(expected)
    observed, expected = observed[order], expected[order]
    num_pooled = int((expected < min_expected).sum())
    if num_pooled == 0:
        return observed, expected
    if expected[:num_pooled].sum() < min_expected:
        num_pooled += 1
    starts = [0, *range(num_pooled, len(expected))]
    return np.add.reduceat(observed, starts), np.add.reduceat(expected, starts)
