"""Choice of the rows that ask the second drafter of a combination, by expected tokens and measured seconds.

It learns while the call runs how far scores of retrieved drafts can be trusted, and what asking the second
drafter costs.

Shapes: B active rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...control.latency import LatencyModel


# Each constant, and the property that it protects.
_LEAST_READ = 8  # few sizes to measure: drafts are timed by the tokens read for them, in powers of two from here on
_TRUST = 2.0  # no decision by a single draft: expected tokens that the prior on scores weighs
_TRUST_MEMORY = 0.96  # scores follow the text: share of what was seen that remains after each further draft
_TRUST_RANGE = (0.02, 2.0)  # one text does not silence or inflate a drafter: least and largest factor on its scores
_RATE_MEMORY = 0.97  # the worth of a second follows the text: share of tokens and seconds that remains after a cycle
_PRIOR_DRAFTS = 2  # a second drafter with a bad start is asked again: drafts that its prior mean weighs
_MEAN_WEIGHT = 1 / 32  # its mean follows the text: least weight of the newest draft
_FIRST_DRAFTS = 2  # its cost is known before it is weighed: drafts that are made without asking for the reading's cost
_TRIAL_SHARE = 0.01  # calls lose little by trials: share of all time that they may take
_LITTLE = 1.0  # trials cost few tokens: they are made where retrieved drafts promise less than this


@dataclass
class Experience:
    """Findings of calls with one pair of drafters.

    Attributes:
        latency (`LatencyModel`): Seconds of verifications, by their nodes.
        draft_latency (`LatencyModel`): Seconds of drafts of the second drafter, by the tokens of a row that it reads
            first.
        mean_accepted (`float`, *optional*): Draft tokens of the second drafter that are accepted.
        num_drafts (`int`): Drafts over which that is the mean.
        budget (`float`): Seconds that may be spent on trials.
    """

    latency: LatencyModel = field(default_factory=LatencyModel)
    draft_latency: LatencyModel = field(default_factory=LatencyModel)
    mean_accepted: float | None = None
    num_drafts: int = 0
    budget: float = 0.0


class DrafterChoice:
    """Chooses the rows for which the second drafter is asked.

    With r_b the tokens expected from the retrieved draft of row b (its score times the share of scores that has come
    true in this row), m the mean of the second drafter, and lambda the tokens per second of the last cycles, asking it
    for the rows with m > r_b gains in seconds

        sum_b (m - r_b) / lambda - T_draft - (T_verify(nodes with its drafts) - T_verify(nodes without))

    It is asked where that is positive, as soon as what was lost without it outweighs the reading of the text that it
    does not know yet. If not, it is still tried now and then where little was retrieved, because text and costs
    change: for a small part of all time.

    Args:
        experience (`Experience`): Of earlier calls.
        num_rows (`int`): Rows of the call.
        length (`int`): Most tokens of a draft of the second drafter, on one path.
        num_nodes (`int`): Most nodes of it.
    """

    def __init__(self, experience: Experience, num_rows: int, length: int, num_nodes: int):
        self.latency = experience.latency.for_another_call()
        self.draft_latency = experience.draft_latency.for_another_call()
        known = experience.mean_accepted
        self.mean_accepted = length / 2 if known is None else known
        # The text of this call may be another, so that earlier drafts soon count little.
        self.num_drafts = min(experience.num_drafts, _FIRST_DRAFTS)
        self._agreed, self._expected = [_TRUST] * num_rows, [_TRUST] * num_rows
        self._num_nodes = float(num_nodes)
        self._budget = experience.budget  # seconds that trials may cost
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
            num_unread (`int`): Tokens of a row that it would have to read first.
        """
        retrieved = [self._expected_tokens(row, sum(found), len(found)) for row, found in zip(rows, acceptance_probs)]
        drafted = [min(self.mean_accepted, length) for length in lengths]
        if self.latency.verify:
            self._budget += _TRIAL_SHARE * self.latency.verify_seconds(num_retrieved + 1, len(rows))
        wanted = [length > 0 and theirs > ours for ours, theirs, length in zip(retrieved, drafted, lengths)]
        reading = self._draft_seconds(num_unread, len(rows)) - self._draft_seconds(0, len(rows))
        if any(wanted):
            self._missed += max(self._gain(wanted, retrieved, drafted, num_retrieved), 0.0)
            if self.num_drafts < _FIRST_DRAFTS or self._missed > max(reading, 0.0):
                self._missed = 0.0
                return wanted
        tried = [length > 0 and ours < _LITTLE for ours, length in zip(retrieved, lengths)]
        if any(tried) and reading - self._gain(tried, retrieved, drafted, num_retrieved) <= self._budget:
            self._budget = 0.0
            return tried
        return [False] * len(rows)

    def _expected_tokens(self, row: int, score: float, depth: int) -> float:
        """Tokens expected from a retrieved draft of this score."""
        low, high = _TRUST_RANGE
        trust = min(max(self._agreed[row] / self._expected[row], low), high)
        return min(trust * score, depth)

    def _gain(self, asked: list[bool], retrieved: list[float], drafted: list[float], num_retrieved: int) -> float:
        """Expected seconds that are won by asking for these rows, the reading of unread text not counted."""
        num_rows, latency = len(asked), self.latency
        more_tokens = sum(theirs - ours for ours, theirs, is_asked in zip(retrieved, drafted, asked) if is_asked)
        without = latency.verify_seconds(num_retrieved + 1, num_rows)
        nodes = self._num_nodes if all(asked) else max(self._num_nodes, num_retrieved)
        more_seconds = self._draft_seconds(0, num_rows) + latency.verify_seconds(nodes + 1, num_rows) - without
        rate = self._tokens / self._seconds if self._seconds else (num_rows + sum(retrieved)) / without
        return more_tokens / rate - more_seconds

    def _draft_seconds(self, num_unread: int, num_rows: int) -> float:
        """Seconds of the second drafter where it has so many tokens to read first; 0 before it was measured."""
        return self.draft_latency.verify_seconds(_size(num_unread), num_rows) if self.draft_latency.verify else 0.0

    def observe_cycle(
        self,
        num_rows: int,
        num_nodes: int,
        draft_seconds: float | None,
        verify_seconds: float,
        num_unread: int,
        num_committed: int,
    ) -> None:
        """Takes in a cycle.

        Args:
            num_rows (`int`): Active rows.
            num_nodes (`int`): Nodes of a row that were verified, the anchor included.
            draft_seconds (`float`, *optional*): Of the second drafter; `None` where it was not asked.
            verify_seconds (`float`): Of everything else.
            num_unread (`int`): Tokens of a row that the second drafter has read before it drafted.
            num_committed (`int`): Tokens that were committed, in all rows.
        """
        self.latency.observe_verification(num_rows, num_nodes, verify_seconds)
        # Not the measured seconds: a stall of the machine says nothing about the text.
        seconds = self.latency.verify_seconds(num_nodes, num_rows)
        if draft_seconds is not None:
            self._num_nodes += 0.1 * (num_nodes - 1 - self._num_nodes)
            self.draft_latency.observe_verification(num_rows, _size(num_unread), draft_seconds)
            seconds += self._draft_seconds(num_unread, num_rows)
        self._tokens = _RATE_MEMORY * self._tokens + num_committed
        self._seconds = _RATE_MEMORY * self._seconds + seconds

    def observe_retrieved(self, row: int, acceptance_probs: Sequence[float], num_agreeing: int) -> None:
        """Takes in how many tokens of a retrieved draft agree with the text, as far as that can be seen."""
        self._agreed[row] = _TRUST_MEMORY * self._agreed[row] + num_agreeing
        self._expected[row] = _TRUST_MEMORY * self._expected[row] + sum(acceptance_probs)

    def observe_drafted(self, num_accepted: int, is_cut: bool) -> None:
        """Takes in a draft of the second drafter; one that was cut short and accepted as a whole says little."""
        self.num_drafts += 1
        if not is_cut:
            weight = max(1 / (_PRIOR_DRAFTS + self.num_drafts), _MEAN_WEIGHT)
            self.mean_accepted += weight * (num_accepted - self.mean_accepted)

    def leave_to(self, experience: Experience) -> None:
        """Leaves what was found to the next call."""
        experience.latency, experience.draft_latency = self.latency, self.draft_latency
        experience.mean_accepted, experience.num_drafts = self.mean_accepted, self.num_drafts
        experience.budget = self._budget


def _size(num_unread: int) -> int:
    """The size that stands for drafts before which so many tokens are read."""
    return max(1 << max(num_unread - 1, 0).bit_length(), _LEAST_READ)
