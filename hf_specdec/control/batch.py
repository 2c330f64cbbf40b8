"""Value of a cycle for a batch whose rows end at different times."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import sqrt
from operator import truediv
from statistics import NormalDist


def batch_tokens(
    row_tokens: Sequence[float], left: Sequence[float], fixed: float, squares: Sequence[float] | None = None
) -> float:
    """Value of a cycle of a batch, in tokens: their sum if all rows are equal and nothing is random.

    A row that gets r tokens a cycle leaves the batch after n = left / r cycles. Of a cycle's time a part f is the same
    for any number of rows, and is paid until the slowest row has ended; the rest falls with the rows. So the call
    takes as long as f E[max(n)] + (1 - f) mean(n) cycles of all rows, and each of them is worth

        sum(left) / (f E[max(n)] + (1 - f) mean(n))

    Even of equal rows one is the slowest: acceptance is random. Where a row's tokens of a cycle have the
    variance v, n has the standard deviation sqrt(n v) / r. The largest of m such numbers is expected to be z(m)
    standard deviations above their mean, m counting the rows that come within one of them of the slowest. No row
    needs more cycles than it has tokens left.

    Args:
        row_tokens (`Sequence[float]`): r of each row.
        left (`Sequence[float]`): Tokens that each of them may still get; only their proportions matter if there are
            no squares.
        fixed (`float`): f.
        squares (`Sequence[float]`, *optional*): Mean square of each row's accepted tokens of a cycle, which are
            r - 1 on average; without them v is 0.
    """
    if len(row_tokens) == 1:
        return row_tokens[0]
    cycles = list(map(truediv, left, row_tokens))
    slowest = max(cycles)
    if squares is not None:
        row = cycles.index(slowest)
        variance = max(squares[row] - (row_tokens[row] - 1) ** 2, 0.0)
        deviation = sqrt(slowest * variance) / row_tokens[row]
        num_slow = sum(number >= slowest - deviation for number in cycles)
        slowest = min(slowest + _largest_of(num_slow) * deviation, max(left))
    return sum(left) / (fixed * slowest + (1 - fixed) * sum(cycles) / len(cycles))


@cache
def _largest_of(count: int) -> float:
    """Expected largest of so many standard normal numbers (Blom, 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
