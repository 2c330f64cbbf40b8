"""Choice of the rows that ask the second drafter of a combination, by expected tokens and measured seconds.

Costs, acceptance and the price of trials are learnt as by [`~control.controller`]: this one chooses whom to ask, that
one how much to draft. The one cannot do for the other, since here it is known before the choice what was retrieved in
this cycle. Where a third of the cycles retrieve 6 tokens and a draft of half a verification brings 2.5 to the others,
asking by that is worth 17 % more than always doing what is better on average.

Shapes: B active rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from ...control import ControlProfile
from ...control.constants import (
    CALLS_WEIGHT,
    FIRST_DRAFTS,
    FIRST_RATE,
    HYSTERESIS,
    LARGEST_RATING,
    LITTLE,
    PLAN_EVERY,
    RATE_MEMORY,
    ROW_RATING_WEIGHT,
    WINDOW,
)
from ...control.controller import TrialBudget, first_length
from ...control.rates import PositionRates, Rate, RatingFactor, RowOutcome
from ...control.times import LatencyModel


# How often a cycle must ask like the one before it for a draft to be launched before that is known: one for nothing
# costs a GPU the whole draft, one that is asked for saves its wait for the host alone. Estimated, not measured.
_LIKELY = 0.75


@dataclass
class _Trial:
    """A draft of the second drafter that does not seem to pay."""

    retrieved: dict[int, float]  # by row of the call the tokens expected from its retrieved draft
    num_retrieved: int  # nodes of a row of the retrieved drafts
    reading: float  # seconds in which the drafter has to read first


class DrafterChoice:
    """Chooses the rows for which the second drafter is asked.

    With r_b the tokens expected from the retrieved draft of row b (its score times the share of scores that has come
    true in this row), m_b those expected from the second drafter, and lambda the tokens per second of the last cycles,
    asking it for the rows with m_b > r_b gains in seconds

        sum_b (m_b - r_b) / lambda - T_draft - (T_verify(nodes with its drafts) - T_verify(nodes without))

    It is asked where that is positive, once the time lost without it outweighs reading the text that it has missed.
    Otherwise it is still tried now and then where little was retrieved, since text and costs change. These trials
    take a small part of all time. Where lengths adapt and the profile has a `draft_cost`, `depth` tokens of at most
    `length` are drafted, else as many as there is room for.
    """

    def __init__(self, profile: ControlProfile, num_rows: int, length: int, adapts: bool = True):
        self.profile = profile
        self._chooses_depth = adapts and profile.draft_cost is not None
        # Of one token it learns what drafts cost.
        self.depth: int = max(first_length(length, profile.draft_cost), 1) if self._chooses_depth else length
        self._num_cycles = 0
        self.latency: LatencyModel = profile.latency.for_another_call()
        # One rate for all rows: what differs between them is what is retrieved.
        self.accepted: PositionRates = PositionRates(length, WINDOW, FIRST_RATE, profile.accepted, CALLS_WEIGHT)
        self._num_first = 0 if self.latency.draft else FIRST_DRAFTS
        self._budget = TrialBudget(profile.budget)
        self._trial: _Trial | None = None
        self._ratings = [RatingFactor(weight=ROW_RATING_WEIGHT) for _ in range(num_rows)]
        self._missed = 0.0  # seconds that were lost without the drafter
        self._was_asked = False
        self._again = Rate(1.0, 1.0)  # how often one cycle after the other asks
        self._tokens = self._seconds = 0.0  # of the last cycles

    def asks(
        self,
        rows: list[int],  # numbers in the call
        acceptance_probs: list[list[float]],  # of the retrieved drafts
        num_retrieved: int,  # nodes of a row of them, padding included
        lengths: list[int],  # most tokens that the second drafter may draft for each row
        num_unread: int,  # tokens of all rows that it would have to read first
    ) -> list[bool]:
        """Tells for each row whether the second drafter is asked."""
        retrieved = [
            min(min(self._ratings[row].value, LARGEST_RATING) * sum(probs), len(probs))
            for row, probs in zip(rows, acceptance_probs)
        ]
        tokens = list(accumulate(accumulate(self.accepted.expected(), mul), initial=0.0))
        more = [tokens[length] - ours for ours, length in zip(retrieved, lengths)]
        reading = self.latency.reading_seconds(num_unread)
        is_due = False
        if self.latency.verify:
            plain, usual = (self.latency.verify_seconds(nodes + 1, len(rows)) for nodes in (0, num_retrieved))
            is_due = self._budget.earn(usual, plain, reading)

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
        if any(tried) and is_due and reading - gain(tried) <= self._budget.seconds:
            self._budget.num_cycles = 0
            self._trial = _Trial(dict(zip(rows, retrieved)), num_retrieved, reading)
            return tried
        return [False] * len(rows)

    def choose_depth(self, num_rows: int) -> int:
        """The depth that brings most tokens per second to rows for which nothing is retrieved."""
        is_due = self._chooses_depth and self._num_cycles % PLAN_EVERY == 0
        self._num_cycles += 1
        if is_due and self.latency.draft:
            tokens = accumulate(accumulate(self.accepted.expected(), mul), initial=1.0)
            values = [number / self.latency.cycle_seconds(depth, num_rows) for depth, number in enumerate(tokens)]
            best = max(range(1, len(values)), key=values.__getitem__)
            if values[best] > HYSTERESIS * values[self.depth]:
                self.depth = best
        return self.depth

    def note_asked(self, is_asked: bool) -> None:
        """Takes in whether the second drafter drafts for any row of this cycle."""
        if self._was_asked:
            self._again.observe(is_asked, WINDOW)
        self._was_asked = is_asked

    @property
    def may_ask_again(self) -> bool:
        """Tells whether the next cycle asks as probably as pays for a draft that is launched before this is known."""
        return self._was_asked and self._again.mean > _LIKELY

    def _gain(self, more_tokens: float, depth: int, num_rows: int, num_retrieved: int, least_nodes: int) -> float:
        """Seconds that a draft wins which brings so many more tokens, the reading of unread text not counted."""
        latency = self.latency
        without = latency.verify_seconds(num_retrieved + 1, num_rows)
        more_seconds = latency.cycle_seconds(depth, num_rows, least_nodes=least_nodes) - without
        seconds_per_token = self._seconds / self._tokens if self._tokens else without / num_rows
        return more_tokens * seconds_per_token - more_seconds

    def observe_cycle(self, num_rows: int, num_nodes: int, verify_seconds: float, num_committed: int) -> None:
        """Takes in a cycle; the seconds are those of all but the second drafter."""
        self.latency.observe_verification(num_rows, num_nodes + 1, verify_seconds)
        self._tokens = RATE_MEMORY * self._tokens + num_committed
        # Not the measured seconds: a stall of the machine says nothing about the text.
        self._seconds = RATE_MEMORY * self._seconds + self.latency.verify_seconds(num_nodes + 1, num_rows)

    def observe_draft(
        self,
        outcomes: list[RowOutcome],
        num_rows: int,
        num_nodes: int,  # of a row of its drafts, padding included
        seconds: float,
        reading: tuple[int, float] | None,
    ) -> None:
        """Takes in a draft of the second drafter, with the rows for which it was asked, in the cycle taken in last."""
        depth = max(outcome.limit for outcome in outcomes)
        self.latency.observe_draft(num_rows, depth, num_nodes, seconds, reading)
        self._seconds += self.latency.draft_seconds(depth, num_rows)
        if reading is not None:
            self._seconds += self.latency.reading_seconds(reading[0])
        self._num_first -= 1
        for outcome in outcomes:
            self.accepted.observe(outcome.num_accepted, outcome.limit, outcome.num_committed > outcome.num_accepted)
        if self._trial is not None:
            trial, self._trial = self._trial, None
            more = sum(outcome.num_accepted - trial.retrieved[outcome.row] for outcome in outcomes)
            least_nodes = trial.num_retrieved if len(outcomes) < num_rows else 0
            gained = self._gain(more, depth, num_rows, trial.num_retrieved, least_nodes)
            self._budget.seconds -= trial.reading - gained

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
