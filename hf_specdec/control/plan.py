"""Value of each speculation length: expected tokens per second of a cycle.

    value(k) = tokens(k) / E[T_draft(W) + T_verify(nodes(W))]

For one row tokens(k) = 1 + S_1 + ... + S_k, where S_i is the probability that its token i is accepted. W <= k is how
deep the deepest draft of the batch gets. The probabilities come from [`~control.rates`], the times from
[`~control.times`]. k = 0 is plain decoding: nothing is drafted, and one token a row is committed in T_verify(1).

A row that gets r tokens a cycle leaves the batch after n = left / r cycles. Of a cycle's time a part f is the same for
any number of rows, and is paid until the slowest row has ended; the rest falls with the rows. So the call takes as
long as f E[max(n)] + (1 - f) mean(n) cycles of all rows, and each of them has the value

    tokens(k) = sum(left) / (f E[max(n)] + (1 - f) mean(n))

Even of equal rows one is the slowest: acceptance is random. Where a row's tokens of a cycle have the variance v, n has
the standard deviation sqrt(n v) / r. The largest of m such numbers is expected to be z(m) standard deviations above
their mean, m counting the rows that come within one of them of the slowest. No row needs more cycles than it has
tokens left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import sqrt
from operator import add, mul, truediv
from statistics import NormalDist

from .constants import NEGLIGIBLE
from .rates import AcceptanceModel
from .times import LatencyModel


@dataclass
class Plan:
    """Expected tokens and seconds of a cycle by limit, for some rows.

    Limits whose last position is hardly ever reached are left out of `tokens`, `seconds` and `row_tokens`.
    """

    rows: list[int]  # of the call
    tokens: list[float]  # value of a cycle, in tokens
    seconds: list[float]
    row_tokens: list[list[float]]  # of each row, for each limit
    costs: list[float]  # seconds of a cycle whose deepest draft has each of the depths up to the largest limit
    accepted: list[list[float]]  # by position and row: the probability that so many tokens are accepted
    depths: list[list[float]]  # by position and row: the probability that the draft gets so deep

    def value(self, limit: int) -> float:
        """Tokens per second."""
        return self.tokens[limit] / self.seconds[limit]

    @property
    def best(self) -> int:
        """The limit with the largest value."""
        return max(range(len(self.tokens)), key=self.value)

    def within(self, limit: int) -> int:
        """The limit, or the largest one that has a value."""
        return min(limit, len(self.tokens) - 1)

    def seconds_of(self, limit: int) -> float:
        """Seconds of a cycle with this limit; where drafts hardly ever get so deep, of one that does."""
        return self.seconds[limit] if limit < len(self.seconds) else self.costs[limit]

    def token_value(self, limit: int, other: int) -> float:
        """Value of an additional token of one of two limits over the other, on average."""
        first, second = self.within(limit), self.within(other)
        more = sum(self.row_tokens[first]) - sum(self.row_tokens[second])
        return (self.tokens[first] - self.tokens[second]) / more if more else 1.0

    def row_limits(self, length: int) -> dict[int, int]:
        """The limit of each row, at most `length`.

        A verification is as wide as its widest row, so a token is free for a row where others go as deep anyway. One
        that makes the cycle longer must bring more tokens than the batch makes in that time.
        """
        rate, token_value = self.value(length), self.token_value(length, 0)
        best, gains, limits = [0.0] * len(self.rows), [0.0] * len(self.rows), [0] * len(self.rows)
        for position in range(length):
            depths, more_seconds = self.depths[position], self.costs[position + 1] - self.costs[position]
            for index, alone in enumerate(_none_of_the_others(depths)):
                longer = alone * depths[index] * more_seconds
                gains[index] += token_value * self.accepted[position][index] - rate * longer
                if gains[index] >= best[index]:
                    best[index], limits[index] = gains[index], position + 1
        return dict(zip(self.rows, limits))


def make_plan(
    latency: LatencyModel,
    acceptance: AcceptanceModel,
    rows: list[int],
    costs: list[float],
    num_unread: int = 0,
    left: Sequence[float] | None = None,
) -> Plan:
    """Values all lengths for the active rows.

    `costs` are those of the plan, `num_unread` the tokens of all rows together that the drafter would read before it
    drafts, and `left` the tokens that each row may still get, if that is known.
    """
    num_rows = len(rows)
    room = left or [1.0] * num_rows
    # What the drafter must read first is spread over the tokens that are left.
    reading = latency.reading_seconds(num_unread) / sum(left) if left else 0.0
    row_tokens, squares = [[1.0] * num_rows], [0.0] * num_rows
    fixed = latency.fixed_part(num_rows)
    tokens = [batch_tokens(row_tokens[0], room, fixed)]
    seconds = [latency.verify_seconds(1, num_rows)]
    accepted, depths = [], []
    spent, deeper = 0.0, 1.0
    for position, (gains, reach) in zip(range(len(costs) - 1), acceptance.path_probabilities(rows)):
        if sum(gains) < NEGLIGIBLE * num_rows:
            break
        row_tokens.append(list(map(add, row_tokens[-1], gains)))
        squares = [square + (2 * position + 1) * gain for square, gain in zip(squares, gains)]
        tokens.append(batch_tokens(row_tokens[-1], room, fixed, squares if left else None))
        accepted.append(gains)
        depths.append(reach)
        reached = _at_least_one(reach)
        spent += (deeper - reached) * costs[position]
        deeper = reached
        seconds.append(spent + deeper * costs[position + 1] + reading * tokens[-1])
    return Plan(list(rows), tokens, seconds, row_tokens, costs, accepted, depths)


def batch_tokens(
    row_tokens: Sequence[float], left: Sequence[float], fixed: float, squares: Sequence[float] | None = None
) -> float:
    """Value of a cycle of a batch, in tokens, given f: their sum if all rows are equal and nothing is random.

    The squares are the mean squares of each row's accepted tokens of a cycle, which are r - 1 on average.
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


def _none_of_the_others(probabilities: Sequence[float]) -> list[float]:
    """Probability, for each of several independent events, that none of the others happens."""
    nones = [1 - probability for probability in probabilities]
    before = accumulate(nones[:-1], mul, initial=1.0)
    after = list(accumulate(nones[:0:-1], mul, initial=1.0))
    return list(map(mul, before, reversed(after)))


def _at_least_one(probabilities: Iterable[float]) -> float:
    """Probability that at least one of several independent events happens."""
    none = 1.0
    for probability in probabilities:
        none *= 1 - probability
    return 1 - none
