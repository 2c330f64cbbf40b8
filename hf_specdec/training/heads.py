"""The recipe that methods share whose K drafts come from the target's last hidden state alone.

The state at position t has predicted token t + 1. Draft d, counted from 0, is token t + 2 + d; its loss is weighted
with `head_decay`^d, since it only matters once the drafts before it are right (Cai et al. 2024, arXiv:2401.10774,
section 2.2.1). Shapes as in `recipe.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import nn

from .reading import IGNORED, Reading
from .recipe import Recipe


class HeadsRecipe(Recipe):
    """The loss and measure of a network that drafts K tokens from one state."""

    num_ranks: ClassVar[int] = 1  # of candidates, whose accuracy is measured
    target_hidden_states: ClassVar[tuple[int | str, ...]] = ("last",)

    head_decay: float
    max_positions: int | None

    @abstractmethod
    def draft_logits(self, network: nn.Module, reading: Reading, positions: torch.LongTensor) -> torch.Tensor:
        """The logits `(K, N, V)` of the cycles that begin at the positions `(N,)` of the flattened batch."""

    def losses(self, network: nn.Module, reading: Reading) -> Iterator[torch.Tensor | float]:
        labels = [reading.next_tokens(2 + draft).flatten() for draft in range(self.num_drafts)]
        labels = torch.stack(labels, dim=1)
        positions = (labels != IGNORED).any(1).nonzero()[:, 0]
        if self.max_positions is not None and len(positions) > self.max_positions:
            chosen = torch.randperm(len(positions), device=positions.device)[: self.max_positions]
            positions = positions[chosen.sort().values]
        labels = labels[positions]
        counts = labels != IGNORED
        decay = self.head_decay ** torch.arange(self.num_drafts, device=labels.device)
        yield self.token_loss(
            reading,
            lambda places: self.draft_logits(network, reading, places).movedim(0, 1),
            positions,
            labels,
            self.drafted_from(positions, reading).T,
            self.num_drafts * reading.vocab_size,
            weights=counts * decay / counts.sum(0).clamp(min=1),
        )

    def drafts(self, network: nn.Module, reading: Reading, anchors: torch.LongTensor) -> torch.LongTensor:
        rows = torch.arange(len(anchors), device=anchors.device)[:, None]
        positions = (anchors + rows * reading.tokens.shape[1]).flatten()
        ranks = min(self.num_ranks, reading.vocab_size)
        parts = [
            self.draft_logits(network, reading, part).topk(ranks, dim=-1).indices for part in positions.split(512)
        ]
        return torch.cat(parts, dim=1).movedim(2, 1).unflatten(2, anchors.shape)

    def drafted_from(self, positions: torch.LongTensor, reading: Reading) -> torch.LongTensor:
        """Positions `(K, N)` at which the target decides each draft's token; those past the end do not count."""
        offsets = torch.arange(1, self.num_drafts + 1, device=positions.device)[:, None]
        return (positions + offsets).clamp(max=reading.tokens.numel() - 1)
