"""State of the text that a block drafter keeps: keys and values of its layers, and the last tokens for its heads.

Shapes: R active rows, C new tokens of the text, T positions of a block, S slots of the draft's cache, h and th hidden
sizes of draft and target.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...drafting.slots import DraftSlots
from ...kernels.tree_attention import SlotTree, pack_words
from ...target.attention import TreeMask
from ...target.masks import FULL, Span
from ...transfers import RowNumbers, kept_on_device, kept_tensor, last_of_each, select_rows, upload
from .config import BlockView
from .network import DFlashNetwork


class DraftText(DraftSlots):
    """The draft's keys and values of each row's text, and after them those of the current block.

    Args:
        network (`DFlashNetwork`): The draft.
        starts, leads, capacity, options: As for [`DraftSlots`].
    """

    network: DFlashNetwork
    # Of the last token that was read, `(R, h)`: LiLiCorr's.
    last_context: torch.Tensor | None = None
    # The last two tokens of the text, `(R, 2)`: XPress's, whose anchor is the second.
    tokens_before: torch.LongTensor | None = None

    def extend(self, states: dict[Any, torch.Tensor], counts: RowNumbers) -> None:
        """Takes in the target's states `(R, C, th)` of the next tokens, the first `counts[r]` of each row."""
        fused = self.network.fuse(states)
        here = self.plan_read(fused.shape[1])
        for layer, (keys, values) in enumerate(self.network.context(fused, here.positions, here.bound)):
            self.cache.update(keys, values, layer)
        self.cache.commit(counts)
        if self.network.config.lilicorr is not None:
            self.last_context = last_of_each(fused, counts)

    def begin(self, prompts: torch.LongTensor) -> None:
        """Begins with prompts `(R, L)`, of which nothing has been read."""
        config = self.network.config
        if config.lilicorr is not None:
            self.last_context = torch.zeros(
                (len(prompts), config.hidden_size), dtype=self.network.dtype, device=self.device
            )
        if config.xpress is not None:
            missing = max(2 - prompts.shape[1], 0)
            self.tokens_before = F.pad(prompts, (missing, 0))[:, -2:].to(self.device)

    def add_tokens(self, tokens: torch.LongTensor, counts: RowNumbers) -> None:
        """Takes in the next tokens `(R, C)`, of which the first `counts[r]` count, where tokens are known at all."""
        if self.tokens_before is None:
            return
        known = torch.cat((self.tokens_before, tokens.to(self.device)), dim=1)
        first = upload(counts, self.device)[:, None]
        self.tokens_before = known.gather(1, first + torch.arange(2, device=self.device))

    def keep_rows(self, keep: list[int]) -> None:
        super().keep_rows(keep)
        for name in ("last_context", "tokens_before"):
            if (rows := getattr(self, name)) is not None:
                setattr(self, name, select_rows(rows, keep))

    def join(self, other: DraftText) -> None:
        super().join(other)
        for name in ("last_context", "tokens_before"):
            if (rows := getattr(self, name)) is not None:
                setattr(self, name, torch.cat((rows, getattr(other, name))))

    def begin_block(self, size: int) -> None:
        """Prepares for blocks of this size; they may be read more than once."""
        self._block = self.plan_read(size)
        self._masks = {view: self._mask(view) for view in self.network.views}

    def read_block(self, tokens: torch.LongTensor) -> torch.Tensor:
        """The network's output `(R, T, h)` for blocks `(R, T)`; nothing of them is kept."""
        return self.network(tokens, self._block.positions, self._masks, self.cache, self._block.bound)

    def _mask(self, view: BlockView) -> torch.Tensor | TreeMask | None:
        """Mask of a layer, additive `(R, 1, T, S)` where there is no kernel; distances of slots are of positions."""
        if not self.has_kernel and view.sees_all and self._block.is_uniform:
            return None
        size = self._block.slots.shape[1]
        depths = kept_tensor(tuple(range(size)), self.device)
        bits = _block_bits(view, size, self.device)
        tree = SlotTree(self.cache.plan.starts(self.device), self.first_slots[:, 0], bits, depths)
        mask = TreeMask(tree, FULL if view.window is None else Span("sliding", view.window))
        return mask if self.has_kernel else mask.additive(self._block.columns, self.network.dtype)


@kept_on_device
def _block_bits(view: BlockView, size: int, device: torch.device) -> torch.LongTensor:
    """Words of bits `(1, T, W)`: which positions of a block each of them sees."""
    places = torch.arange(size, device=device)
    return pack_words(~view.hidden(places[:, None] - places))[None]
