"""Numbers that sum up several values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


PERCENTILES = (50, 95, 99)


class Figure(NamedTuple):
    """The median of several values, with the smallest and the largest."""

    value: float
    low: float
    high: float
    n: int

    def spread_to_dict(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high, "n": self.n}


def median_and_range(values: Sequence[float]) -> Figure:
    """The median of values, with the smallest and the largest."""
    return Figure(float(np.median(values)), float(min(values)), float(max(values)), len(values))


def pooled(numerators: Sequence[float], denominators: Sequence[float]) -> float | None:
    """Sum over sum, such as accepted over drafted tokens of all calls; `None` where there is nothing to divide by."""
    whole = sum(denominators)
    return sum(numerators) / whole if whole else None


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """p50, p95 and p99, interpolated linearly."""
    return {f"p{share}": float(value) for share, value in zip(PERCENTILES, np.percentile(values, PERCENTILES))}
