"""Masks of allowed tokens, applied to scores.

Shapes: M scores, V vocabulary, W words of a mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.generation.logits_process import LogitsProcessor


class GrammarMask(LogitsProcessor):
    """Masks scores in place, each with its own mask.

    Args:
        masks (`np.ndarray` of shape `(M, W)`, int32): Allowed tokens.
        allows_rest (`bool`): Tokens beyond the masks are left as they are; else they are forbidden.
    """

    def __init__(self, masks: np.ndarray, allows_rest: bool):
        self.masks: np.ndarray[Any, Any] = masks
        self.allows_rest: bool = allows_rest

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores `(M, V)` with -inf at forbidden tokens."""
        width = min(self.masks.shape[1] * 32, scores.shape[1])
        if scores.device.type == "cpu":
            bits = np.unpackbits(self.masks.view(np.uint8), axis=1, count=width, bitorder="little")
            is_forbidden = torch.from_numpy(bits) == 0
        else:
            words = torch.from_numpy(self.masks).to(scores.device, non_blocking=True)
            shifts = torch.arange(32, dtype=torch.int32, device=scores.device)
            is_forbidden = ((words[..., None] >> shifts) & 1).flatten(1)[:, :width] == 0
        scores[:, :width].masked_fill_(is_forbidden, -torch.inf)
        if not self.allows_rest:
            scores[:, width:] = -torch.inf
        return scores
