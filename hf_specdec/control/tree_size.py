"""Size of draft trees: the nodes whose expected tokens pay for their verification.

    tokens(N) = 1 + c * (q_1 + ... + q_N)                    value(N) = tokens(N) / (T_draft + T_verify(N))

q_r is the probability that the node of rank r is accepted, as the drafter rates its own nodes, best first: the running
mean of the probabilities of their paths, or the usual ones of a static tree. c is accepted over expected tokens of the
nodes that were verified. The draft has been made when it is cut, so its time is the same for all sizes. Chains that
are rated are cut by [`~control.chain_size`].
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate

from ..drafts import DraftTree
from ..transfers import PendingRead
from .acceptance import RatingFactor
from .chain_size import ChainSize
from .constants import HYSTERESIS, RANK_PART, SIZE_EVERY, TREE_SIZES
from .latency import LatencyModel


class TreeSize:
    """Cuts the drafts of one call that rate their nodes.

    Args:
        latency (`LatencyModel`): Knows the times.
        factor (`float`): c, as earlier calls have found it.

    Attributes:
        size (`int`, *optional*): Nodes of trees that are kept; all of them before anything is known.
        rating (`RatingFactor`): c.
        chains (`ChainSize`): Cuts chains.
    """

    def __init__(self, latency: LatencyModel, factor: float = 1.0):
        self.latency = latency
        self.size: int | None = None
        self.rating: RatingFactor = RatingFactor(factor)
        self.chains: ChainSize = ChainSize(latency, self.rating)
        self._probabilities: list[float] = []
        self._arriving: PendingRead | None = None
        self._depth = 0  # of the draft whose probabilities arrive
        self._num_drafts = 0

    def cut(
        self, draft: DraftTree, depth: int, agreed: Callable[[list[int]], list[int]] = lambda numbers: numbers
    ) -> DraftTree:
        """The draft with the nodes that pay.

        Args:
            draft (`DraftTree`): As it was drafted.
            depth (`int`): How deep it was meant to be.
            agreed (`Callable`): Gives what all processes with parts of the target decide, as `Session.agreed`.
        """
        if draft.is_rated_chain:
            return self.chains.cut(draft, depth, agreed)
        if not draft.is_rated:
            return draft
        phase = self._num_drafts % SIZE_EVERY
        self._num_drafts += 1
        if phase == 0:
            self._arriving, self._depth = PendingRead(draft.probs_by_rank()), depth
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
        self._probabilities = [old + RANK_PART * (value - old) for old, value in zip(self._probabilities, new)]

    def _plan(self, num_rows: int, depth: int) -> None:
        expected = list(accumulate(self._probabilities, initial=0.0))
        drafting = self.latency.draft_seconds(depth, num_rows)

        def value(size: int) -> float:
            seconds = drafting + self.latency.verify_seconds(size + 1, num_rows)
            return (1 + self.rating.value * expected[size]) / seconds

        most = len(self._probabilities)
        present = most if self.size is None else min(self.size, most)
        best = max([*TREE_SIZES[: bisect_left(TREE_SIZES, most)], most], key=value)
        if value(best) > HYSTERESIS * value(present):
            present = best
        self.size = None if present == most else present

    def observe(self, draft: DraftTree, num_accepted: list[int]) -> None:
        """Takes in what came of a draft.

        Args:
            draft (`DraftTree`): What was verified.
            num_accepted (`list[int]`): Draft tokens of each row that were accepted.
        """
        if draft.is_rated_chain:
            self.chains.observe(draft, num_accepted)
        if not self._probabilities or not draft.is_rated:
            return
        totals = list(accumulate(self._probabilities, initial=0.0))
        # On average over the rows: a batch is one outcome.
        expected = sum(totals[min(count, len(self._probabilities))] for count in draft.counts()) / draft.batch_size
        self.rating.observe(expected, sum(num_accepted) / draft.batch_size)
