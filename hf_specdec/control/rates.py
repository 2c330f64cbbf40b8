"""Acceptance rates: running means by position, of all rows together and of each row.

A position is a depth: of a chain the token, of a tree whatever node the accepted path has there. Two things are
counted at each position i, both under the condition that the row was allowed to draft so deep:

    accepted: how often the accepted path reaches i, where it had reached i - 1
    drafted:  how often the draft reaches i, where it had reached i - 1

Drafters that stop on their own (no match, no confidence) have the second below 1; for the first, a token that was not
drafted is a token that was not accepted. From them follow the expected tokens of a limit, 1 + sum of products, and
how deep drafts get.

A call begins with the mean rates of earlier calls, as if it had seen a few such outcomes itself: few, since the next
text may be another one. What is older than the window is forgotten. A run of outcomes that does not fit is taken for
a change of the text, and all before it is forgotten at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

from .constants import (
    CALLS_WEIGHT,
    FIRST_RATE,
    FIRST_WEIGHT,
    IMPROBABLE,
    MEMORY,
    OPTIMISM,
    PRIOR_WEIGHT,
    RATING_WEIGHT,
    RATING_WINDOW,
    RECENT_PART,
    ROW_PRIOR_WEIGHT,
    WEIGHT_OF_CALL,
    WEIGHT_OF_RECENT,
    WINDOW,
)


@dataclass
class RowOutcome:
    """Outcome of a cycle for one row."""

    row: int  # of the call
    limit: int  # how deep it was allowed to draft
    depth: int  # how deep its draft was
    num_accepted: int  # draft tokens that were committed
    num_committed: int  # all tokens that were committed: no more where the row has ended before a failure was seen


class Rate:
    """A running mean of outcomes, from 0 to 1; it begins as one that stands for `weight` outcomes."""

    __slots__ = ("_last", "_recent", "_run", "count", "mean", "num_successes", "weight")

    def __init__(self, mean: float = 0.0, weight: float = 0.0):
        self.mean: float = mean
        self.weight: float = weight
        self.count: int = 0  # of all outcomes that were added
        self.num_successes: int = 0
        self._recent = mean
        self._last = False
        self._run = 0

    def observe(self, outcome: bool, window: int) -> bool:
        """Adds an outcome. Returns whether it shows that the rate has changed."""
        self.count += 1
        self.num_successes += outcome
        self._run = self._run + 1 if outcome == self._last else 1
        self._last = outcome
        if not self.weight:
            self._recent = float(outcome)
        chance_of_one = self.mean if outcome else 1 - self.mean
        is_change = self.weight > WEIGHT_OF_RECENT and chance_of_one**self._run < IMPROBABLE
        self._recent += RECENT_PART * (outcome - self._recent)
        self.weight = min(self.weight + 1, window)
        self.mean += (outcome - self.mean) / self.weight
        if is_change:
            self.mean = self._recent
            self.weight = WEIGHT_OF_RECENT
            self._run = 0
        return is_change

    def expected(self, prior: float, prior_weight: float) -> float:
        """The mean, as far as it is known, and else the prior, which fades."""
        prior_weight *= prior_weight / (prior_weight + self.weight)
        return (self.weight * self.mean + prior_weight * prior) / (self.weight + prior_weight)


def with_call(past: Sequence[Rate], rates: Sequence[Rate]) -> list[Rate]:
    """Rates of positions over calls, with what one more call has seen; calls that run at once share the past ones."""
    combined = list(past)
    for position, rate in enumerate(rates):
        if not rate.count:
            break
        before = past[position] if position < len(past) else Rate()
        weight = min(rate.count, WEIGHT_OF_CALL)
        total = before.weight + weight
        mean = before.mean + (rate.num_successes / rate.count - before.mean) * weight / total
        combined[position : position + 1] = [Rate(mean, min(total, MEMORY))]
    return combined


class PositionRates:
    """Rates of positions 1 to K in one call.

    `window` outcomes are remembered, `prior` is expected of the first position before anything is known, and the rates
    of earlier calls count for at most `most_weight` outcomes.
    """

    def __init__(
        self, most: int, window: int, prior: float = 0.0, past: Sequence[Rate] = (), most_weight: float = 0.0
    ):
        self.window = window
        self.prior: float = prior
        self.rates: list[Rate] = list(past)
        if past:
            means = self.expected()
            self.prior = means[0]
            self.rates = [Rate(mean, min(rate.weight, most_weight)) for mean, rate in zip(means[:most], past)]
        self.rates += [Rate() for _ in range(most - len(self.rates))]

    def observe(self, reached: int, limit: int, has_failed: bool = True) -> None:
        """Adds a draft of which positions up to `reached` were successes, and the next one a failure, if it counts."""
        for position in range(min(reached + has_failed, limit)):
            if self.rates[position].observe(position < reached, self.window):
                # Deeper positions are known from another text.
                for rate in self.rates[position + 1 :]:
                    rate.weight = min(rate.weight, 1.0)

    def expected(self) -> list[float]:
        """The rate of each position; one that is little known is expected to be like the one before it."""
        means, mean, weight = [], self.prior, FIRST_WEIGHT
        for rate in self.rates:
            mean = rate.expected(mean, weight)
            means.append(mean)
            weight = PRIOR_WEIGHT
        return means


class AcceptanceModel:
    """Expected acceptance of the drafts of a call, up to position `most`."""

    def __init__(
        self,
        most: int,
        num_rows: int,
        accepted_before: Sequence[Rate] = (),
        drafted_before: Sequence[Rate] = (),
    ):
        window, most_weight = WINDOW * num_rows, CALLS_WEIGHT * num_rows
        self.most = most
        self.accepted: PositionRates = PositionRates(most, window, FIRST_RATE, accepted_before, most_weight)
        self.drafted: PositionRates = PositionRates(most, window, 1.0, drafted_before, most_weight)
        self.rows: dict[int, tuple[PositionRates, PositionRates]] = {}
        if num_rows > 1:
            self.restart(range(num_rows))

    def restart(self, rows: Iterable[int]) -> None:
        """Begins anew with rows whose texts begin."""
        for row in rows:
            self.rows[row] = PositionRates(self.most, WINDOW), PositionRates(self.most, WINDOW)

    def observe(self, outcome: RowOutcome) -> None:
        """Adds one row's draft; its limit is at least 1."""
        for accepted, drafted in ((self.accepted, self.drafted), *filter(None, [self.rows.get(outcome.row)])):
            accepted.observe(outcome.num_accepted, outcome.limit, outcome.num_committed > outcome.num_accepted)
            drafted.observe(outcome.depth, outcome.limit)

    def of_rows(self, rows: Sequence[int]) -> list[list[tuple[float, float]]]:
        """Rates of each of the rows by position: of tokens that are accepted, and of drafts that go on. One row is
        taken to be like all of them where little is known of it.
        """
        by_position = []
        for position, common in enumerate(zip(self.accepted.expected(), self.drafted.expected())):
            rates = [common] * len(rows)
            for index, row in enumerate(rows):
                if row in self.rows:
                    of_row = (known.rates[position] for known in self.rows[row])
                    rates[index] = tuple(rate.expected(mean, ROW_PRIOR_WEIGHT) for rate, mean in zip(of_row, common))
            by_position.append(rates)
        return by_position

    def optimistic(self) -> list[float]:
        """Rates of acceptance of all rows together, plus their uncertainty."""
        return [
            min(mean + OPTIMISM * sqrt(mean * (1 - mean) / (rate.weight + PRIOR_WEIGHT)), 1.0)
            for mean, rate in zip(self.accepted.expected(), self.accepted.rates)
        ]


@dataclass
class RatingFactor:
    """Accepted over expected tokens: what comes of the ratings that a drafter gives its own drafts."""

    value: float = 1.0
    weight: float = RATING_WEIGHT  # expected tokens that it counts for

    def observe(self, num_expected: float, num_accepted: float) -> None:
        """Adds a draft of which so many tokens were expected."""
        kept = max(1 - num_expected / RATING_WINDOW, 0.0) * self.weight
        self.weight = kept + num_expected
        self.value = (kept * self.value + num_accepted) / self.weight
