"""Drafts whose positions were predicted at once, as entries that a draft grows from under a grammar.

What a network predicts for a position does not depend on the tokens before it, but what the grammar allows there does.
So the logits of a position are those of all nodes of a level, each under a mask of its own.

Where the tokens of a block are chosen together, a walk along the positions says what the grammar allows at each.

Shapes: R active rows, F nodes of a level, K positions, U vocabulary of the draft, whose tokens may have other ids than
the target's: `token_ids` `(U,)`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..drafts.static import Level
from ..kernels.best import best_tokens
from ..logits.grammar.masks import GrowingMasks
from .growth import DepthLimits, DraftNodes, DynamicTree, grow


# What forbidden tokens lose: all others come before them, and no sum of logits becomes infinite.
_FORBIDDEN = 1e4


class Positions:
    """Takes the place of [`DraftEntries`] and of their network in [`grow`], with logits `(R, K, U)`."""

    def __init__(self, logits: torch.Tensor, token_ids: torch.LongTensor | None = None):
        self.position_logits: torch.Tensor = logits
        self.token_ids: torch.LongTensor | None = token_ids
        self.position: int = 0

    @property
    def network(self) -> Positions:
        return self

    def read_nodes(
        self, tokens: torch.LongTensor, hidden: torch.Tensor, parents: torch.LongTensor | slice
    ) -> tuple[torch.Tensor, torch.LongTensor]:
        """Goes on to the next position, after tokens `(R, F)`, which are what `logits` reads."""
        self.position += 1
        return hidden, tokens

    def logits(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Logits `(R, F, U)` of the position after tokens `(R, F)`."""
        return self.position_logits[:, self.position, None].expand(-1, tokens.shape[1], -1)

    def grow(
        self,
        shape: DynamicTree | tuple[Level, ...],
        anchors: torch.LongTensor,
        limits: DepthLimits,
        masks: GrowingMasks,
    ) -> DraftNodes:
        """Grows a draft after anchors `(R,)`; the other arguments are those of [`~drafting.growth.grow`]."""
        # There is no state that nodes would hand on.
        hidden = self.position_logits.new_empty((len(anchors), 0), dtype=torch.float32)
        return grow(shape, self, hidden, self.logits(anchors[:, None])[:, 0], limits, masks)


class MaskedWalk:
    """Walks along the positions of a block, over the best tokens that the grammars of the rows allow.

    `begin` makes the masks after the anchors, for another walk.
    """

    def __init__(self, begin: Callable[[], GrowingMasks], token_ids: torch.LongTensor | None = None):
        self._begin = begin
        self._token_ids = token_ids

    def ranked(
        self, logits: torch.Tensor, known: torch.BoolTensor | None = None, tokens: torch.LongTensor | None = None
    ) -> torch.Tensor:
        """Logits `(R, K, U)` in which all allowed tokens of a position come before the forbidden ones.

        The walk goes over the target's `tokens` `(R, K)` where they are `known` `(R, K)`.
        """
        masks, levels = self._begin(), []
        for position in range(logits.shape[1]):
            level = logits[:, position, None]
            masked = masks.apply(level, self._token_ids)
            levels.append(torch.where(masked == -torch.inf, level - _FORBIDDEN, level))
            best = best_tokens(levels[-1])
            best = best if self._token_ids is None else self._token_ids[best]
            if known is not None and tokens is not None:
                column = slice(position, position + 1)
                best = torch.where(known[:, column], tokens[:, column], best)
            masks.follow(best, slice(None))
        return torch.cat(levels, dim=1)
