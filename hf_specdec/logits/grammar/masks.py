"""Masks of allowed tokens on scores, also of drafts while they grow. They go to a device as packed words.

Shapes: M scores, V vocabulary, W words of a mask (see `matchers.py`), R rows, F nodes of a level, U tokens of a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.generation.logits_process import LogitsProcessor

from .matchers import GrammarMatcher, NodeMasks


class GrammarMask(LogitsProcessor):
    """Masks scores `(M, V)` in place by masks int32 `(M, W)`; tokens beyond these are allowed or forbidden."""

    def __init__(self, masks: np.ndarray, allows_rest: bool):
        self.masks: np.ndarray[Any, Any] = masks
        self.allows_rest: bool = allows_rest

    def __call__(self, input_ids: torch.LongTensor | None, scores: torch.FloatTensor) -> torch.FloatTensor:
        width = min(self.masks.shape[1] * 32, scores.shape[1])
        scores[:, :width].masked_fill_(forbidden_tokens(self.masks, width, scores.device), -torch.inf)
        if not self.allows_rest:
            scores[:, width:] = -torch.inf
        return scores


def forbidden_tokens(masks: np.ndarray, width: int, device: torch.device) -> torch.BoolTensor:
    """Which of the first tokens masks int32 `(..., W)` forbid, `(..., width)`."""
    if device.type == "cpu":
        bits = np.unpackbits(masks.view(np.uint8), axis=-1, count=width, bitorder="little")
        return torch.from_numpy(bits) == 0
    words = torch.from_numpy(masks).to(device, non_blocking=True)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    return ((words[..., None] >> shifts) & 1).flatten(-2)[..., :width] == 0


def masked_nodes(masks: Sequence[NodeMasks | None], logits: torch.Tensor) -> torch.Tensor:
    """Logits `(R, T, V)` of all nodes of drafts with -inf for what the grammars of their rows forbid."""
    table = NodeMasks.padded(masks, logits.shape[1], -(-logits.shape[2] // 32))
    return logits.masked_fill(forbidden_tokens(table, logits.shape[2], logits.device), -torch.inf)


class GrowingMasks:
    """Masks after the nodes of R drafts whose children are chosen next; at first these nodes are the anchors."""

    def __init__(self, matchers: Sequence[GrammarMatcher | None], vocab_size: int):
        self._matchers = matchers
        # Processors of the call move the same matchers.
        self._begins = [matcher and list(matcher.tokens) for matcher in matchers]
        self._vocab_size = vocab_size
        self._paths: list[list[tuple[int, ...]]] = [[()] for _ in matchers]

    def apply(self, logits: torch.Tensor, ids: torch.LongTensor | None = None) -> torch.Tensor:
        """Logits `(R, F, U)` with -inf for forbidden tokens; `ids` `(U,)` are the target's, if others than these."""
        masks = np.full((*logits.shape[:2], -(-self._vocab_size // 32)), -1, dtype=np.int32)
        for row, matcher, begin, paths in zip(masks, self._matchers, self._begins, self._paths):
            if matcher is not None:
                matcher.move_to(begin)
                allowed = matcher.masks_after(paths)
                width = min(row.shape[1], allowed.shape[1])
                row[:, :width] = allowed[:, :width]
                row[:, width:] = 0
        if ids is not None:
            forbidden = forbidden_tokens(masks, self._vocab_size, logits.device).index_select(2, ids)
        else:
            width = min(logits.shape[-1], self._vocab_size)
            forbidden = forbidden_tokens(masks, width, logits.device)
            forbidden = F.pad(forbidden, (0, logits.shape[-1] - width), value=True)
        return logits.masked_fill(forbidden, -torch.inf)

    def follow(self, tokens: torch.LongTensor, parents: torch.LongTensor | slice) -> None:
        """Goes on to the next level: nodes `(R, F)` in the target's ids, and their parents in the level before."""
        if isinstance(parents, slice):
            parents = torch.arange(len(self._paths[0]), device="cpu")[parents]
        token_lists, parent_lists = tokens.tolist(), parents.expand(tokens.shape).tolist()
        self._paths = [
            [(*paths[parent], token) for token, parent in zip(row, above)]
            for paths, row, above in zip(self._paths, token_lists, parent_lists)
        ]
