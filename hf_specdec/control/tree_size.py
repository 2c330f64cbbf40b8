"""Size of draft trees: the nodes whose expected tokens pay for their verification.

    tokens(N) = 1 + c * (q_1 + ... + q_N)                    value(N) = tokens(N) / (T_draft + T_verify(N))

q_r is the probability that the node of rank r is accepted, as the drafter rates its own nodes, best first: the running
mean of the probabilities of their paths, or the usual ones of a static tree. c is accepted over expected tokens of the
nodes that were verified. The draft has been made when it is cut, so its time is the same for all sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate

from ..drafts import DraftTree
from ..transfers import PendingRead
from .latency import LatencyModel


# Sizes that are looked at: steps of at most a half, so that their times are soon known.
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)

# Another size must promise so much more.
_HYSTERESIS = 1.02

# Drafts between two plans, and the part that a new draft has in what is known of the ranks.
_PLAN_EVERY = 8
_PART = 0.1

# Expected tokens that are remembered for c, and how many the c of earlier calls counts for.
_WINDOW = 64.0
_FIRST_WEIGHT = 8.0


class TreeSize:
    """Cuts the draft trees of one call.

    Args:
        latency (`LatencyModel`): Knows the times.
        rating_factor (`float`): c, as earlier calls have found it.

    Attributes:
        size (`int`, *optional*): Nodes that are kept; all of them before anything is known.
    """

    def __init__(self, latency: LatencyModel, rating_factor: float = 1.0):
        self.latency = latency
        self.size: int | None = None
        self._expected, self._accepted = _FIRST_WEIGHT, _FIRST_WEIGHT * rating_factor
        self._probabilities: list[float] = []
        self._arriving: PendingRead | None = None
        self._depth = 0  # of the draft whose probabilities arrive
        self._num_drafts = 0

    @property
    def rating_factor(self) -> float:
        """c."""
        return self._accepted / self._expected

    def cut(
        self, draft: DraftTree, depth: int, agreed: Callable[[list[int]], list[int]] = lambda numbers: numbers
    ) -> DraftTree:
        """The draft with the nodes that pay.

        Args:
            draft (`DraftTree`): As it was drafted.
            depth (`int`): How deep it was meant to be.
            agreed (`Callable`): Gives what all processes with parts of the target decide, as `Session.agreed`.
        """
        if not draft.is_rated:
            return draft
        phase = self._num_drafts % _PLAN_EVERY
        self._num_drafts += 1
        if phase == 0:
            self._arriving, self._depth = PendingRead(draft.chances_by_rank()), depth
        elif phase == 1:
            # They have long arrived.
            self._learn_ranks(self._arriving.get().tolist())
            self._plan(draft.batch_size, self._depth)
            (size,) = agreed([self.size or 0])
            self.size = size or None
        return draft if self.size is None else draft.likeliest(self.size)

    def _learn_ranks(self, new: list[float]) -> None:
        if len(self._probabilities) != len(new):
            # Drafts of another depth have other nodes.
            self._probabilities = new
            return
        self._probabilities = [old + _PART * (value - old) for old, value in zip(self._probabilities, new)]

    def _plan(self, num_rows: int, depth: int) -> None:
        expected = list(accumulate(self._probabilities, initial=0.0))
        drafting = self.latency.draft_seconds(depth, num_rows)

        def value(size: int) -> float:
            seconds = drafting + self.latency.verify_seconds(size + 1, num_rows)
            return (1 + self.rating_factor * expected[size]) / seconds

        most = len(self._probabilities)
        present = most if self.size is None else min(self.size, most)
        best = max([*_SIZES[: bisect_left(_SIZES, most)], most], key=value)
        if value(best) > _HYSTERESIS * value(present):
            present = best
        self.size = None if present == most else present

    def observe(self, draft: DraftTree, num_accepted: list[int]) -> None:
        """Takes in what came of a draft.

        Args:
            draft (`DraftTree`): What was verified.
            num_accepted (`list[int]`): Draft tokens of each row that were accepted.
        """
        if not self._probabilities or not draft.is_rated:
            return
        totals = list(accumulate(self._probabilities, initial=0.0))
        # On average over the rows: a batch is one outcome.
        expected = sum(totals[min(count, len(self._probabilities))] for count in draft.counts()) / draft.batch_size
        mean_accepted = sum(num_accepted) / draft.batch_size
        keep = max(1 - expected / _WINDOW, 0.0)
        self._expected = keep * self._expected + expected
        self._accepted = keep * self._accepted + mean_accepted
