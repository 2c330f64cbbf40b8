"""Size of rated drafts, which have been made when they are cut: the nodes that pay for their verification.

Trees whose drafter rates its own nodes keep the N likeliest ones:

    tokens(N) = 1 + c * (q_1 + ... + q_N)                    value(N) = tokens(N) / (T_draft + T_verify(N))

q_r is the probability that the node of rank r is accepted, best first: the running mean of the probabilities of their
paths, or the usual ones of a static tree. c is accepted over expected tokens of the nodes that were verified.

Chains whose drafter foresees, token by token, what will be accepted, are cut draft by draft. A verification is as wide
as its widest row, so the rows share the positions. With s_k the mean probability, over the rows, that all draft tokens
up to position k are accepted, as the drafter estimates it for this very draft,

    position k is verified where c s_k >= price               price = value * (seconds of a position)

The price is what tokens cost elsewhere: the largest expected tokens per second of earlier drafts, times the mean
seconds by which a further position makes a verification longer. s_k falls from position to position, so a draft is cut
at the first one that does not pay. Sampling stays exact: s_k depends on the tokens before position k alone, and the
price on earlier cycles.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate

from ..drafts import DraftTree
from ..transfers import PendingRead
from .constants import HYSTERESIS, NEGLIGIBLE, RANK_PART, SIZE_EVERY, TREE_SIZES
from .rates import RatingFactor
from .times import LatencyModel


class DraftSizes:
    """Cuts the drafts of one call that rate their nodes: combined methods may draft trees and chains."""

    def __init__(self, latency: LatencyModel, factor: float = 1.0):
        self.trees: DraftSize = DraftSize(latency, factor)
        self.chains: DraftSize = DraftSize(latency, factor)
        # c, which begins as earlier calls have found it, is one for both.
        self.rating: RatingFactor = self.trees.rating
        self.chains.rating = self.rating

    def cut(
        self, draft: DraftTree, depth: int, agreed: Callable[[list[int]], list[int]] = lambda numbers: numbers
    ) -> DraftTree:
        """As [`DraftSize.cut`]."""
        return (self.chains if draft.is_rated_chain else self.trees).cut(draft, depth, agreed)

    def observe(self, draft: DraftTree, num_accepted: Iterable[int]) -> None:
        """As [`DraftSize.observe`]."""
        (self.chains if draft.is_rated_chain else self.trees).observe(draft, num_accepted)


class DraftSize:
    """Cuts rated drafts of one kind; the first one tells whether these are trees or chains."""

    def __init__(self, latency: LatencyModel, factor: float = 1.0):
        self.latency = latency
        self.rating: RatingFactor = RatingFactor(factor)  # c, which begins as earlier calls have found it
        self.size: int | None = None  # nodes of trees that are kept; all of them before anything is known
        self.price: float = 0.0  # tokens of a row that a position of chains must bring; 0: all are verified
        self._is_of_chains: bool | None = None
        self._probabilities: list[float] = []  # running means: q_r of trees, s_k of chains
        self._expected: float | None = None  # tokens of a row of the present chains, where they were read
        self._arriving: PendingRead | None = None
        self._depth = 0  # of the draft whose probabilities arrive
        self._num_drafts = 0

    def cut(
        self, draft: DraftTree, depth: int, agreed: Callable[[list[int]], list[int]] = lambda numbers: numbers
    ) -> DraftTree:
        """The draft with the nodes that pay, one that was meant to be so deep.

        `agreed` gives what all processes with parts of the target decide, as `Session.agreed`.
        """
        is_chain = draft.is_rated_chain
        if self._is_of_chains is None and (is_chain or draft.is_rated):
            self._is_of_chains = is_chain
        if not self._can_cut(draft):
            return draft
        phase = self._num_drafts % SIZE_EVERY
        self._num_drafts += 1
        survival = draft.path_log_probs.exp().mean(0) if is_chain else None
        if phase == 0:
            self._arriving = PendingRead(survival if is_chain else draft.probs_by_rank())
            self._depth = depth
        elif phase == 1:
            # They have long arrived.
            self._learn(self._arriving.get().tolist())
            self._plan(draft.batch_size, self._depth)
            if not is_chain:
                (size,) = agreed([self.size or 0])
                self.size = size or None
        if not is_chain:
            return draft if self.size is None else draft.likeliest(self.size)
        self._expected = None
        # Where positions are free, a GPU is not made to wait.
        if not any(agreed([int(self.price > NEGLIGIBLE)])):
            return draft
        probabilities = survival.tolist()
        pays = [self.rating.value * value >= self.price for value in probabilities]
        (width,) = agreed([[*pays, False].index(False)])
        self._expected = sum(probabilities[:width])
        return draft.shortened([width] * draft.batch_size)

    def _can_cut(self, draft: DraftTree) -> bool:
        """`True` for rated drafts of the method's kind: where methods are combined, others may rate drafts, too."""
        is_chain = draft.is_rated_chain
        return (is_chain or draft.is_rated) and is_chain == self._is_of_chains

    def _learn(self, new: list[float]) -> None:
        if len(new) != len(self._probabilities) and not self._is_of_chains:
            # Trees of another depth have other nodes.
            self._probabilities = new
            return
        known = len(self._probabilities)
        self._probabilities += new[known:]
        for rank, value in enumerate(new[:known]):
            self._probabilities[rank] += RANK_PART * (value - self._probabilities[rank])

    def _plan(self, num_rows: int, depth: int) -> None:
        most = len(self._probabilities)
        if not most:
            # The drafter itself has ended all chains before their first token.
            return
        expected = list(accumulate(self._probabilities, initial=0.0))
        drafting = self.latency.draft_seconds(depth, num_rows)

        def value(size: int) -> float:
            seconds = drafting + self.latency.verify_seconds(size + 1, num_rows)
            return (1 + self.rating.value * expected[size]) / seconds

        if self._is_of_chains:
            longer = self.latency.verify_seconds(most + 1, num_rows) - self.latency.verify_seconds(1, num_rows)
            self.price = max(map(value, range(most + 1))) * max(longer, 0.0) / most
            return
        present = most if self.size is None else min(self.size, most)
        best = max([*TREE_SIZES[: bisect_left(TREE_SIZES, most)], most], key=value)
        if value(best) > HYSTERESIS * value(present):
            present = best
        self.size = None if present == most else present

    def observe(self, draft: DraftTree, num_accepted: Iterable[int]) -> None:
        """Takes in how many draft tokens of each row were accepted of what was verified."""
        expected = self._expected
        if not self._can_cut(draft) or (expected is None and not self._probabilities):
            return
        if expected is None:
            totals = list(accumulate(self._probabilities, initial=0.0))
            counts = [draft.size] if self._is_of_chains else draft.counts()
            # On average over the rows: a batch is one outcome.
            expected = sum(totals[min(count, len(self._probabilities))] for count in counts) / len(counts)
        if expected > 0:
            self.rating.observe(expected, sum(num_accepted) / draft.batch_size)
