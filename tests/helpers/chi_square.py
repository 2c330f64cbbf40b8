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
    assert observed.shape == probs.shape
    if observed[probs == 0].any():
        return 0.0
    order = np.argsort(probs[probs > 0])
    observed, probs = observed[probs > 0][order], probs[probs > 0][order]
    expected = probs / probs.sum() * observed.sum()
    num_pooled = int((expected < min_expected).sum())
    if num_pooled:
        # With too few of them the next rarest cell joins.
        num_pooled += expected[:num_pooled].sum() < min_expected
        starts = [0, *range(num_pooled, len(expected))]
        observed, expected = np.add.reduceat(observed, starts), np.add.reduceat(expected, starts)
    assert len(observed) > 1, "all cells were pooled into one: the test could not fail"
    return float(stats.chisquare(observed, expected).pvalue)
