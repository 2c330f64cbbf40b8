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

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt


# Outcomes that a rate remembers, for each row that it is fed by.
WINDOW = 32

# What is expected before anything is known: optimistic, because drafting is how one learns.
FIRST_RATE = 0.65

# Outcomes that the expectation counts for: before anything is known, of the position before, and for one row that of
# all rows.
_FIRST_WEIGHT = 4.0
_PRIOR_WEIGHT = 2.0
_ROW_PRIOR_WEIGHT = 6.0

# Outcomes that the rates of earlier calls count for, for each row, beside being the first position's prior; those of
# one call that count among them; and those of all calls that are remembered.
_CALLS_WEIGHT = 3.0
_WEIGHT_OF_CALL = 16.0
_MEMORY = 64.0

# Standard deviations added to a rate to be optimistic.
_OPTIMISM = 1.5

# A change: a run of equal outcomes that is so improbable. The mean of about the last six takes over then.
_IMPROBABLE = 1e-3
_RECENT = 1 / 6
_WEIGHT_OF_RECENT = 3.0


class Rate:
    """A running mean of outcomes.

    Args:
        mean, weight (`float`): Where it begins.

    Attributes:
        mean (`float`): From 0 to 1.
        weight (`float`): Outcomes it stands for, at most the window.
        count, num_successes (`int`): All outcomes that were added, and those that were successes.
    """

    __slots__ = ("_last", "_recent", "_run", "count", "mean", "num_successes", "weight")

    def __init__(self, mean: float = 0.0, weight: float = 0.0):
        self.mean = self._recent = mean
        self.weight = weight
        self.count = self.num_successes = 0
        self._last, self._run = False, 0

    def observe(self, outcome: bool, window: int) -> bool:
        """Adds an outcome. Returns whether it shows that the rate has changed."""
        self.count += 1
        self.num_successes += outcome
        self._run = self._run + 1 if outcome == self._last else 1
        self._last = outcome
        if not self.weight:
            self._recent = float(outcome)
        is_known = self.weight > _WEIGHT_OF_RECENT
        is_change = is_known and (self.mean if outcome else 1 - self.mean) ** self._run < _IMPROBABLE
        self._recent += _RECENT * (outcome - self._recent)
        self.weight = min(self.weight + 1, window)
        self.mean += (outcome - self.mean) / self.weight
        if is_change:
            self.mean, self.weight, self._run = self._recent, _WEIGHT_OF_RECENT, 0
        return is_change

    def expected(self, prior: float, prior_weight: float) -> float:
        """The mean, as far as it is known, and else the prior, which fades."""
        prior_weight *= prior_weight / (prior_weight + self.weight)
        return (self.weight * self.mean + prior_weight * prior) / (self.weight + prior_weight)


class PositionRates:
    """Rates of positions 1 to K.

    Args:
        most (`int`): K.
        means, weights (`Sequence[float]`): What is known of the first positions, and for how many outcomes.
    """

    def __init__(self, most: int, means: Sequence[float] = (), weights: Sequence[float] = ()):
        self.rates = list(map(Rate, means[:most], weights))
        self.rates += [Rate() for _ in range(most - len(self.rates))]

    def observe(self, reached: int, limit: int, window: int, known: int | None = None) -> None:
        """Adds one draft.

        Args:
            reached (`int`): The last position that counts as a success.
            limit (`int`): How deep the row was allowed to draft.
            window (`int`): Outcomes to remember.
            known (`int`, *optional*): The last position whose outcome is known; `None`: the first failure.
        """
        last = min(reached + 1, limit) if known is None else min(known, limit)
        for position in range(last):
            changed = self.rates[position].observe(position < reached, window)
            if changed:
                self._forget_deeper(position)

    def _forget_deeper(self, position: int) -> None:
        """Forgets deeper positions, which are known from another text."""
        for rate in self.rates[position + 1 :]:
            rate.weight = min(rate.weight, 1.0)

    def expected(self, prior: float) -> list[float]:
        """The rate of each position; one that is little known is expected to be like the one before it.

        Args:
            prior (`float`): What is expected of the first one.
        """
        found = [self.rates[0].expected(prior, _FIRST_WEIGHT)]
        for rate in self.rates[1:]:
            found.append(rate.expected(found[-1], _PRIOR_WEIGHT))
        return found

    def optimistic(self, expected: Sequence[float]) -> list[float]:
        """Optimistic rates: the expected ones plus their uncertainty."""
        return [
            min(mean + _OPTIMISM * sqrt(mean * (1 - mean) / (rate.weight + _PRIOR_WEIGHT)), 1.0)
            for mean, rate in zip(expected, self.rates)
        ]


@dataclass(frozen=True)
class PastRates:
    """Rates of positions over calls; never changed, since calls that run at the same time share them.

    Attributes:
        means (`list[float]`): Of the positions that anything is known of.
        weights (`list[float]`): Outcomes that each of them stands for.
    """

    means: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def with_call(self, rates: Sequence[Rate]) -> PastRates:
        """These rates and what one more call has seen of each position."""
        means, weights = list(self.means), list(self.weights)
        for position, rate in enumerate(rates):
            if not rate.count:
                break
            if position == len(means):
                means.append(0.0)
                weights.append(0.0)
            mean, weight = rate.num_successes / rate.count, min(rate.count, _WEIGHT_OF_CALL)
            total = weights[position] + weight
            means[position] += (mean - means[position]) * weight / total
            weights[position] = min(total, _MEMORY)
        return PastRates(means, weights)

    def expected(self, prior: float) -> list[float]:
        """The rate of each of the positions; `prior` is what is expected of the first one where nothing is known."""
        return PositionRates(len(self.means), self.means, self.weights).expected(prior) if self.means else []


class AcceptanceModel:
    """Expected acceptance of the drafts of a call.

    Args:
        most (`int`): K, the deepest position.
        num_rows (`int`): Rows of the call.
        accepted_before, drafted_before (`PastRates`, *optional*): The rates of earlier calls.
    """

    def __init__(
        self,
        most: int,
        num_rows: int,
        accepted_before: PastRates | None = None,
        drafted_before: PastRates | None = None,
    ):
        self.window = WINDOW * num_rows
        most_weight = _CALLS_WEIGHT * num_rows
        # What is expected of the first position before it is known.
        self._first_rate, self.accepted = _begin(most, accepted_before, FIRST_RATE, most_weight)
        self._first_depth, self.drafted = _begin(most, drafted_before, 1.0, most_weight)
        self.rows: dict[int, tuple[PositionRates, PositionRates]] = {}
        if num_rows > 1:
            self.rows = {row: (PositionRates(most), PositionRates(most)) for row in range(num_rows)}

    def observe(self, row: int, limit: int, depth: int, num_accepted: int, is_cut: bool = False) -> None:
        """Adds one row's draft.

        Args:
            row (`int`): Row of the call.
            limit (`int`): How deep it was allowed to draft, at least 1.
            depth (`int`): How deep it is.
            num_accepted (`int`): How many draft tokens were committed.
            is_cut (`bool`): The row ended there, so that nothing is known of the next token.
        """
        known = num_accepted if is_cut else None
        self.accepted.observe(num_accepted, limit, self.window, known)
        self.drafted.observe(depth, limit, self.window)
        if self.rows:
            accepted, drafted = self.rows[row]
            accepted.observe(num_accepted, limit, WINDOW, known)
            drafted.observe(depth, limit, WINDOW)

    def expected(self) -> tuple[list[float], list[float]]:
        """Rates of all rows together: of acceptance, and of being drafted at all, by position."""
        return self.accepted.expected(self._first_rate), self.drafted.expected(self._first_depth)

    def optimistic(self) -> list[float]:
        """Optimistic rates of all rows together."""
        return self.accepted.optimistic(self.expected()[0])

    def expected_of_row(
        self, row: int, accepted: Sequence[float], drafted: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """Expected rates of one row, which is taken to be like all others where little is known of it."""
        own_accepted, own_drafted = self.rows[row]
        weight = _ROW_PRIOR_WEIGHT
        return (
            [rate.expected(prior, weight) for rate, prior in zip(own_accepted.rates, accepted)],
            [rate.expected(prior, weight) for rate, prior in zip(own_drafted.rates, drafted)],
        )


def _begin(most: int, past: PastRates | None, prior: float, most_weight: float) -> tuple[float, PositionRates]:
    """Prior of the first position of a call, and the rates that the call begins with."""
    if past is None or not past.means:
        return prior, PositionRates(most)
    means = past.expected(prior)
    return means[0], PositionRates(most, means, [min(weight, most_weight) for weight in past.weights])
