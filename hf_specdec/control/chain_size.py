"""Size of chains whose drafter foresees, token by token, what will be accepted: the positions that pay.

A verification is as wide as its widest row, so the rows share the positions. With s_k the mean probability, over the
rows, that all draft tokens up to position k are accepted, as the drafter estimates it for this very draft,

    position k is verified where c s_k >= price               price = value * (seconds of a position)

c is accepted over expected tokens, as for trees. The price is what tokens cost elsewhere: the largest expected tokens
per second of earlier drafts, times the mean seconds by which a further position makes a verification longer. s_k falls
from position to position, so a draft is cut at the first one that does not pay.

Sampling stays exact: s_k depends on the tokens before position k alone, and the price on earlier cycles.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from ..drafts import DraftTree
from ..transfers import PendingRead
from .acceptance import RatingFactor
from .constants import NEGLIGIBLE, RANK_PART, SIZE_EVERY
from .latency import LatencyModel


class ChainSize:
    """Cuts the chains of one call.

    Args:
        latency (`LatencyModel`): Knows the times.
        rating (`RatingFactor`): c.

    Attributes:
        price (`float`): Expected tokens of a row that a position must bring; 0: all positions are verified.
    """

    def __init__(self, latency: LatencyModel, rating: RatingFactor):
        self.latency = latency
        self.rating = rating
        self.price: float = 0.0
        self._survival: list[float] = []  # running means of s_k
        self._arriving: PendingRead | None = None
        self._expected: float | None = None  # tokens of a row of the present draft, where they were read
        self._num_drafts = 0

    def cut(self, draft: DraftTree, depth: int, agreed: Callable[[list[int]], list[int]]) -> DraftTree:
        """The draft with the positions that pay; arguments as for [`TreeSize.cut`]."""
        survival = draft.path_log_probs.exp().mean(0)
        phase = self._num_drafts % SIZE_EVERY
        self._num_drafts += 1
        if phase == 0:
            self._arriving = PendingRead(survival)
        elif phase == 1:
            # They have long arrived.
            self._learn(self._arriving.get().tolist())
            self._plan(draft.batch_size, depth)
        self._expected = None
        # Where positions are free, a GPU is not made to wait.
        if not any(agreed([int(self.price > NEGLIGIBLE)])):
            return draft
        found = survival.tolist()
        (width,) = agreed([self._width(found)])
        self._expected = sum(found[:width])
        return draft.shortened([width] * draft.batch_size)

    def _width(self, survival: list[float]) -> int:
        pays = (self.rating.value * value >= self.price for value in survival)
        return next((position for position, is_worth in enumerate(pays) if not is_worth), len(survival))

    def _learn(self, new: list[float]) -> None:
        known = len(self._survival)
        self._survival += new[known:]
        for position, value in enumerate(new[:known]):
            self._survival[position] += RANK_PART * (value - self._survival[position])

    def _plan(self, num_rows: int, depth: int) -> None:
        most = len(self._survival)
        if not most:
            # The drafter itself has ended all drafts before their first token.
            return
        seconds = [self.latency.verify_seconds(size + 1, num_rows) for size in range(most + 1)]
        drafting = self.latency.draft_seconds(depth, num_rows)
        tokens = accumulate(self._survival, initial=0.0)
        value = max((1 + self.rating.value * total) / (drafting + of_size) for total, of_size in zip(tokens, seconds))
        self.price = value * max(seconds[-1] - seconds[0], 0.0) / most

    def observe(self, draft: DraftTree, num_accepted: list[int]) -> None:
        """Takes in what came of a draft; arguments as for [`TreeSize.observe`]."""
        expected = self._expected
        if expected is None:
            expected = sum(self._survival[: draft.size])
        if expected > 0:
            self.rating.observe(expected, sum(num_accepted) / draft.batch_size)
