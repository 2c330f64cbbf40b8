"""Numbers with the count of their values and their spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np


PERCENTILES = (50, 95, 99)
_INTERVAL = (2.5, 97.5)
_NUM_DRAWS = 1000


@dataclass(frozen=True)
class Figure:
    """A number from several values.

    Attributes:
        value (`float`): The number.
        low, high (`float`): Its spread: smallest and largest value, the quartiles, or a 95 % bootstrap interval.
        n (`int`): How many values.
        over (`str`): What the values are: "rounds", "calls", "cycles", "drafts" or "draft tokens".
        spread (`str`): "range", "quartiles" or "bootstrap".
    """

    value: float
    low: float
    high: float
    n: int
    over: str
    spread: str

    def spread_to_dict(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high, "n": self.n, "over": self.over, "spread": self.spread}


def median_and_range(values: Sequence[float]) -> Figure:
    """The median of one value a round, with the smallest and the largest."""
    return Figure(float(np.median(values)), float(min(values)), float(max(values)), len(values), "rounds", "range")


def median_and_quartiles(values: Sequence[float], over: str) -> Figure:
    """The median of many values between the first and the third quartile, interpolated linearly."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    return Figure(float(middle), float(low), float(high), len(values), over, "quartiles")


def pooled(numerators: Sequence[float], denominators: Sequence[float], over: str = "calls") -> Figure | None:
    """Sum over sum, such as accepted over drafted tokens of all calls, with its 95 % bootstrap interval.

    For the interval as many calls as there are are drawn from them with replacement, again and again (Efron 1979).
    Tokens of one call resemble each other, so calls are drawn, not tokens.

    Args:
        numerators, denominators (`Sequence[float]`): Of each call. Calls with a denominator of 0 have no ratio.
        over (`str`): What is counted in `n`: "calls", or what the denominators count.

    Returns:
        `Figure`, or `None` where no call has a ratio.
    """
    pairs = np.array([pair for pair in zip(numerators, denominators) if pair[1]], dtype=float)
    if not len(pairs):
        return None
    parts, wholes = (_draws(len(pairs)) @ pairs).T
    low, high = np.percentile(parts / wholes, _INTERVAL)
    part, whole = pairs.sum(axis=0)
    n = len(pairs) if over == "calls" else round(whole)
    return Figure(float(part / whole), float(low), float(high), n, over, "bootstrap")


@cache
def _draws(count: int) -> np.ndarray:
    """Number of times that each of so many calls is drawn: `(draws, count)`, the same in every run."""
    return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=_NUM_DRAWS).astype(float)


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """p50, p95 and p99, interpolated linearly."""
    return {f"p{share}": float(value) for share, value in zip(PERCENTILES, np.percentile(values, PERCENTILES))}
