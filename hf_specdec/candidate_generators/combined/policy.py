"""Choice of the rows that ask the second drafter of a combination, by expected tokens and measured seconds.

Costs, acceptance and the price of trials are learnt as by [`~control.controller`]: this one chooses whom to ask, that
one how much to draft. The one cannot do for the other, since here it is known before the choice what was retrieved in
this cycle. Where a third of the cycles retrieve 6 tokens and a draft of half a verification brings 2.5 to the others,
asking by that is worth 17 % more than always doing what is better on average.

Shapes: B active rows.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from ...control import ControlProfile, constants
from ...control.controller import TrialBudget, first_length
from ...control.rates import PositionRates, Rate, RatingFactor, RowOutcome
from ...control.times import LatencyModel


# How often a cycle must ask like the one before it for a draft to be launched before that is known: one for nothing
# costs a GPU the whole draft, one that is asked for saves its wait for the host alone. Estimated, not measured.
_LIKELY = 0.75


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
        self.accepted: PositionRates = PositionRates(
            length, constants.WINDOW, constants.FIRST_RATE, profile.accepted, constants.CALLS_WEIGHT
        )
        self._num_first = 0 if self.latency.draft else constants.FIRST_DRAFTS
        self._budget = TrialBudget(profile.budget)
        # By row of the call: what agrees with the text of what was expected of its retrieved drafts.
        self.ratings: list[RatingFactor] = [RatingFactor(weight=constants.ROW_RATING_WEIGHT) for _ in range(num_rows)]
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
            min(min(self.ratings[row].value, constants.LARGEST_RATING) * sum(probs), len(probs))
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
            """Seconds that these drafts win, the reading of unread text not counted."""
            depth, num_rows, latency = max(map(mul, asked, lengths)), len(rows), self.latency
            without = latency.verify_seconds(num_retrieved + 1, num_rows)
            least_nodes = 0 if all(asked) else num_retrieved
            drafting = latency.cycle_seconds(depth, num_rows, least_nodes=least_nodes) - without
            seconds_per_token = self._seconds / self._tokens if self._tokens else without / num_rows
            return sum(tokens for tokens, is_asked in zip(more, asked) if is_asked) * seconds_per_token - drafting

        wanted = [length > 0 and theirs > 0 for theirs, length in zip(more, lengths)]
        if any(wanted):
            self._missed += max(gain(wanted), 0.0)
            if self._num_first > 0 or self._missed > reading:
                self._missed = 0.0
                return wanted
        tried = [length > 0 and ours < constants.LITTLE for ours, length in zip(retrieved, lengths)]
        if any(tried) and is_due and (price := reading - gain(tried)) <= self._budget.seconds:
            self._budget.num_cycles = 0
            self._budget.seconds -= price
            return tried
        return [False] * len(rows)

    def choose_depth(self, num_rows: int) -> int:
        """The depth that brings most tokens per second to rows for which nothing is retrieved."""
        is_due = self._chooses_depth and self._num_cycles % constants.PLAN_EVERY == 0
        self._num_cycles += 1
        if is_due and self.latency.draft:
            tokens = accumulate(accumulate(self.accepted.expected(), mul), initial=1.0)
            values = [number / self.latency.cycle_seconds(depth, num_rows) for depth, number in enumerate(tokens)]
            best = max(range(1, len(values)), key=values.__getitem__)
            if values[best] > constants.HYSTERESIS * values[self.depth]:
                self.depth = best
        return self.depth

    def note_asked(self, is_asked: bool) -> None:
        """Takes in whether the second drafter drafts for any row of this cycle."""
        if self._was_asked:
            self._again.observe(is_asked, constants.WINDOW)
        self._was_asked = is_asked

    @property
    def may_ask_again(self) -> bool:
        """Tells whether the next cycle asks as probably as pays for a draft that is launched before this is known."""
        return self._was_asked and self._again.mean > _LIKELY

    def observe_cycle(self, num_rows: int, num_nodes: int, verify_seconds: float, num_committed: int) -> None:
        """Takes in a cycle; the seconds are those of all but the second drafter."""
        self.latency.observe_verification(num_rows, num_nodes + 1, verify_seconds)
        self._tokens = constants.RATE_MEMORY * self._tokens + num_committed
        # Not the measured seconds: a stall of the machine says nothing about the text.
        self._seconds = constants.RATE_MEMORY * self._seconds + self.latency.verify_seconds(num_nodes + 1, num_rows)

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

    def join(self, rows: list[int]) -> None:
        """Forgets the ratings of the texts that these rows had before."""
        for row in rows:
            self.ratings[row] = RatingFactor(weight=constants.ROW_RATING_WEIGHT)

    def close(self) -> None:
        """Ends the call: the profile learns what was found."""
        self.profile.learn(self.latency, self._budget, self.accepted)
