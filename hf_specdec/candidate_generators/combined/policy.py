"""Choice of the rows that ask the second drafter of a combination, by expected tokens and measured seconds.

Costs, acceptance and the price of trials are learnt as by [`~control.controller`]: this one chooses whom to ask, that
one how much to draft.

Shapes: B active rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

from ...control import ControlProfile
from ...control.constants import (
    CALLS_WEIGHT,
    FIRST_DRAFTS,
    FIRST_RATE,
    LARGEST_RATING,
    LITTLE,
    RATE_MEMORY,
    ROW_RATING_WEIGHT,
    WINDOW,
)
from ...control.profile import TrialBudget
from ...control.rates import PositionRates, RatingFactor, RowOutcome


if TYPE_CHECKING:
    from ...control.times import LatencyModel


@dataclass
class _Trial:
    """A draft of the second drafter that does not seem to pay.

    Attributes:
        retrieved (`dict[int, float]`): By row of the call the tokens expected from its retrieved draft.
        num_retrieved (`int`): Nodes of a row of the retrieved drafts.
        reading (`float`): Seconds in which the drafter has to read first.
    """

    retrieved: dict[int, float]
    num_retrieved: int
    reading: float


class DrafterChoice:
    """Chooses the rows for which the second drafter is asked.

    With r_b the tokens expected from the retrieved draft of row b (its score times the share of scores that has come
    true in this row), m_b those expected from the second drafter, and lambda the tokens per second of the last cycles,
    asking it for the rows with m_b > r_b gains in seconds

        sum_b (m_b - r_b) / lambda - T_draft - (T_verify(nodes with its drafts) - T_verify(nodes without))

    It is asked where that is positive, once the time lost without it outweighs reading the text that it has missed.
    Otherwise it is still tried now and then where little was retrieved, since text and costs change. These trials
    take a small part of all time.

    Args:
        profile (`ControlProfile`): Of the second drafter, from earlier calls; learns from this one when it is closed.
        num_rows (`int`): Rows of the call.
        length (`int`): Most tokens of a draft of the second drafter, on one path.
    """

    def __init__(self, profile: ControlProfile, num_rows: int, length: int):
        self.profile = profile
        self.latency: LatencyModel = profile.latency.for_another_call()
        # One rate for all rows: what differs between them is what is retrieved.
        self.accepted: PositionRates = PositionRates(length, WINDOW, FIRST_RATE, profile.accepted, CALLS_WEIGHT)
        self._num_first = 0 if self.latency.draft else FIRST_DRAFTS
        self._budget = TrialBudget(profile.budget)
        self._trial: _Trial | None = None
        self._ratings = [RatingFactor(weight=ROW_RATING_WEIGHT) for _ in range(num_rows)]
        self._missed = 0.0  # seconds that were lost without the drafter
        self._tokens = self._seconds = 0.0  # of the last cycles

    def asks(
        self,
        rows: list[int],
        acceptance_probs: list[list[float]],
        num_retrieved: int,
        lengths: list[int],
        num_unread: int,
    ) -> list[bool]:
        """Tells for each row whether the second drafter is asked.

        Args:
            rows (`list[int]` of length B): Number of each active row in the call.
            acceptance_probs (`list[list[float]]`): Of the retrieved drafts.
            num_retrieved (`int`): Nodes of a row of them, padding included.
            lengths (`list[int]`): Most tokens that the second drafter may draft for each row.
            num_unread (`int`): Tokens of all rows that it would have to read first.
        """
        retrieved = [
            min(min(self._ratings[row].value, LARGEST_RATING) * sum(probs), len(probs))
            for row, probs in zip(rows, acceptance_probs)
        ]
        tokens = list(accumulate(accumulate(self.accepted.expected(), mul), initial=0.0))
        more = [tokens[length] - ours for ours, length in zip(retrieved, lengths)]
        reading = self.latency.reading_seconds(num_unread)
        if self.latency.verify:
            plain, usual = (self.latency.verify_seconds(nodes + 1, len(rows)) for nodes in (0, num_retrieved))
            self._budget.earn(usual, plain, reading)

        def gain(asked: list[bool]) -> float:
            more_tokens, depth = (sum(filter(None, map(mul, asked, more))), max(map(mul, asked, lengths)))
            return self._gain(more_tokens, depth, len(rows), num_retrieved, 0 if all(asked) else num_retrieved)

        self._trial = None
        wanted = [length > 0 and theirs > 0 for theirs, length in zip(more, lengths)]
        if any(wanted):
            self._missed += max(gain(wanted), 0.0)
            if self._num_first > 0 or self._missed > reading:
                self._missed = 0.0
                return wanted
        tried = [length > 0 and ours < LITTLE for ours, length in zip(retrieved, lengths)]
        if any(tried) and self._budget.is_due and self._budget.pays(reading - gain(tried)):
            self._budget.begin()
            self._trial = _Trial(dict(zip(rows, retrieved)), num_retrieved, reading)
            return tried
        return [False] * len(rows)

    def _gain(self, more_tokens: float, depth: int, num_rows: int, num_retrieved: int, least_nodes: int) -> float:
        """Seconds that a draft wins which brings so many more tokens, the reading of unread text not counted."""
        latency = self.latency
        without = latency.verify_seconds(num_retrieved + 1, num_rows)
        nodes = max(latency.nodes_of_depth(depth), least_nodes)
        more_seconds = latency.draft_seconds(depth, num_rows) + latency.verify_seconds(nodes + 1, num_rows) - without
        seconds_per_token = self._seconds / self._tokens if self._tokens else without / num_rows
        return more_tokens * seconds_per_token - more_seconds

    def observe_cycle(self, num_rows: int, num_nodes: int, verify_seconds: float, num_committed: int) -> None:
        """Takes in a cycle.

        Args:
            num_rows (`int`): Active rows.
            num_nodes (`int`): Draft nodes of a row that were verified, padding included.
            verify_seconds (`float`): Of all but the second drafter.
            num_committed (`int`): Tokens that were committed, in all rows.
        """
        self.latency.observe_verification(num_rows, num_nodes + 1, verify_seconds)
        self._tokens = RATE_MEMORY * self._tokens + num_committed
        # Not the measured seconds: a stall of the machine says nothing about the text.
        self._seconds = RATE_MEMORY * self._seconds + self.latency.verify_seconds(num_nodes + 1, num_rows)

    def observe_draft(
        self,
        outcomes: list[RowOutcome],
        num_rows: int,
        num_nodes: int,
        seconds: float,
        reading: tuple[int, float] | None,
    ) -> None:
        """Takes in a draft of the second drafter, in the cycle that was taken in last.

        Args:
            outcomes (`list[RowOutcome]`): Of the rows for which it was asked.
            num_rows (`int`): Active rows.
            num_nodes (`int`): Nodes of a row of its drafts, padding included.
            seconds (`float`): Of the draft.
            reading (`tuple[int, float]`, *optional*): As of [`LatencyModel.observe_draft`].
        """
        depth = max(outcome.limit for outcome in outcomes)
        self.latency.observe_draft(num_rows, depth, seconds, reading)
        self.latency.observe_nodes(depth, num_nodes)
        self._seconds += self.latency.draft_seconds(depth, num_rows)
        if reading is not None:
            self._seconds += self.latency.reading_seconds(reading[0])
        self._num_first -= 1
        for outcome in outcomes:
            self.accepted.observe(outcome.num_accepted, outcome.num_known)
        if self._trial is not None:
            trial, self._trial = self._trial, None
            more = sum(outcome.num_accepted - trial.retrieved[outcome.row] for outcome in outcomes)
            least_nodes = trial.num_retrieved if len(outcomes) < num_rows else 0
            gained = self._gain(more, depth, num_rows, trial.num_retrieved, least_nodes)
            self._budget.spend(trial.reading - gained)

    def observe_retrieved(self, row: int, acceptance_probs: Sequence[float], num_agreeing: int) -> None:
        """Takes in how many tokens of a retrieved draft agree with the text, as far as that can be seen."""
        self._ratings[row].observe(sum(acceptance_probs), num_agreeing)

    def join(self, rows: list[int]) -> None:
        """Forgets the ratings of the texts that these rows had before."""
        for row in rows:
            self._ratings[row] = RatingFactor(weight=ROW_RATING_WEIGHT)

    def close(self) -> None:
        """Ends the call: the profile learns what was found."""
        self.profile.learn(self.latency, self._budget, self.accepted)
