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
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

import torch

from ..drafts import DraftTree
from ..transfers import PendingRead
from .constants import HYSTERESIS, NEGLIGIBLE, RANK_PART, SIZE_EVERY, TREE_SIZES
from .rates import RatingFactor
from .times import LatencyModel


# What all processes with parts of the target decide, as `Session.agreed`.
Agreed = Callable[[list[int]], list[int]]


class DraftSizes:
    """Cuts the drafts of one call that rate their nodes: combined methods may draft trees and chains."""

    def __init__(self, latency: LatencyModel, factor: float = 1.0):
        # c, which begins as earlier calls have found it, is one for both.
        self.rating: RatingFactor = RatingFactor(factor)
        self.trees: TreeSize = TreeSize(latency, self.rating)
        self.chains: ChainLength = ChainLength(latency, self.rating)
        self._present: TreeSize | ChainLength | None = None  # for the draft of this cycle

    def cut(self, draft: DraftTree, depth: int, agreed: Agreed = lambda numbers: numbers) -> DraftTree:
        """The draft with the nodes that pay, one that was meant to be so deep."""
        self._present = None
        if draft.is_chain and draft.path_log_probs is not None:
            self._present = self.chains
        elif not draft.is_chain and draft.is_rated:
            self._present = self.trees
        return draft if self._present is None else self._present.cut(draft, depth, agreed)

    def observe(self, draft: DraftTree, num_accepted: Iterable[int]) -> None:
        """Takes in how many draft tokens of each row were accepted of what was verified."""
        expected = 0.0 if self._present is None else self._present.expected(draft)
        if expected > 0:
            # On average over the rows: a batch is one outcome.
            self.rating.observe(expected, sum(num_accepted) / draft.batch_size)


@dataclass(eq=False)
class _RatedDrafts:
    """Drafts of one kind: what their drafter foresees of them, of which one draft in a few is read."""

    keeps_places: ClassVar[bool]  # a probability has the same meaning in a draft of another size

    latency: LatencyModel
    rating: RatingFactor
    probabilities: list[float] = field(default_factory=list)  # running means
    _num_drafts: int = 0
    _arriving: PendingRead | None = None
    _depth: int = 0  # of the draft whose probabilities arrive

    def _learns(self, foreseen: Callable[[], torch.Tensor], depth: int) -> bool:
        """Reads the probabilities of a draft while the device goes on, and tells whether means have changed."""
        phase = self._num_drafts % SIZE_EVERY
        self._num_drafts += 1
        if phase == 0:
            self._arriving, self._depth = PendingRead(foreseen()), depth
        if phase != 1:
            return False
        arrived = self._arriving.get().tolist()
        if len(arrived) != len(self.probabilities) and not self.keeps_places:
            self.probabilities = []
        for rank, (mean, value) in enumerate(zip(self.probabilities, arrived)):
            self.probabilities[rank] += RANK_PART * (value - mean)
        self.probabilities += arrived[len(self.probabilities) :]
        return True

    def _values(self, num_rows: int) -> list[float]:
        """Expected tokens per second of a row by size, from 0 on."""
        drafting = self.latency.draft_seconds(self._depth, num_rows)
        return [
            (1 + self.rating.value * total) / (drafting + self.latency.verify_seconds(size + 1, num_rows))
            for size, total in enumerate(accumulate(self.probabilities, initial=0.0))
        ]


class TreeSize(_RatedDrafts):
    """How many nodes of trees are kept; the probabilities are those by rank."""

    keeps_places = False
    size: int | None = None  # all of them before anything is known

    def cut(self, draft: DraftTree, depth: int, agreed: Agreed) -> DraftTree:
        if self._learns(draft.probs_by_rank, depth):
            self._plan(draft.batch_size)
            (size,) = agreed([self.size or 0])
            self.size = size or None
        return draft if self.size is None else draft.likeliest(self.size)

    def _plan(self, num_rows: int) -> None:
        values, most = self._values(num_rows), len(self.probabilities)
        present = most if self.size is None else min(self.size, most)
        best = max([*TREE_SIZES[: bisect_left(TREE_SIZES, most)], most], key=values.__getitem__)
        if values[best] > HYSTERESIS * values[present]:
            present = best
        self.size = None if present == most else present

    def expected(self, draft: DraftTree) -> float:
        """Tokens of a row that the drafter expects to be accepted, on average."""
        totals = list(accumulate(self.probabilities, initial=0.0))
        counts = draft.counts()
        return sum(totals[min(count, len(self.probabilities))] for count in counts) / len(counts)


class ChainLength(_RatedDrafts):
    """How long chains are; the probabilities are s_k."""

    keeps_places = True
    price: float = 0.0  # tokens of a row that a position must bring; 0: all are verified

    def cut(self, draft: DraftTree, depth: int, agreed: Agreed) -> DraftTree:
        survival = draft.path_log_probs.exp().mean(0)
        if self._learns(lambda: survival, depth) and self.probabilities:
            self._plan(draft.batch_size)
        self._foreseen = self.probabilities
        # Where positions are free, a GPU is not made to wait.
        if not any(agreed([int(self.price > NEGLIGIBLE)])):
            return draft
        self._foreseen = survival.tolist()
        pays = [self.rating.value * value >= self.price for value in self._foreseen]
        (width,) = agreed([[*pays, False].index(False)])
        return draft.shortened([width] * draft.batch_size)

    def _plan(self, num_rows: int) -> None:
        most = len(self.probabilities)
        longer = self.latency.verify_seconds(most + 1, num_rows) - self.latency.verify_seconds(1, num_rows)
        self.price = max(self._values(num_rows)) * max(longer, 0.0) / most

    def expected(self, draft: DraftTree) -> float:
        """Tokens of a row that the drafter expects to be accepted, on average."""
        return sum(self._foreseen[: draft.size])
