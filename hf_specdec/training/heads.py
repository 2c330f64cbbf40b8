"""The recipe that methods share whose K drafts come from the target's last hidden state alone.

The state at position t has predicted token t + 1. Draft d, counted from 0, is token t + 2 + d; its loss is weighted
with `head_decay`^d, since it only matters once the drafts before it are right (Cai et al. 2024, arXiv:2401.10774,
section 2.2.1). Shapes as in `recipe.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import SpecConfigError
from .recipe import (
    IGNORED,
    Reading,
    Recipe,
    check_at_least,
    check_plain_head,
    check_share,
    draft_loss,
    sum_over_chunks,
)


class HeadsRecipe(Recipe):
    """
    Class attributes:
        num_ranks (`int`): Candidate ranks whose accuracy is measured.
    """

    head_decay: float
    kl_weight: float
    max_positions: int | None
    num_ranks: ClassVar[int] = 1

    def _check_losses(self) -> None:
        check_share("head_decay", self.head_decay)
        check_share("kl_weight", self.kl_weight)
        if self.max_positions is not None:
            check_at_least("max_positions", self.max_positions)

    @property
    def target_hidden_states(self) -> tuple:
        return ("last",)

    def check(self, target: PreTrainedModel) -> None:
        if target.get_output_embeddings() is None:
            raise SpecConfigError(f"{type(target).__name__} has no lm_head. Pass a causal language model as target.")
        if self.kl_weight:
            check_plain_head(target, "`kl_weight`")

    @abstractmethod
    def draft_logits(self, network: nn.Module, reading: Reading, positions: torch.LongTensor) -> torch.Tensor:
        """Logits of all drafts of the cycles that begin at `positions` of the flattened batch: `(K, N, V)`."""

    def loss(self, network: nn.Module, reading: Reading) -> torch.Tensor:
        labels = self._labels(reading)
        positions = (labels != IGNORED).any(0).nonzero()[:, 0]
        if self.max_positions is not None and len(positions) > self.max_positions:
            chosen = torch.randperm(len(positions), device=positions.device)[: self.max_positions]
            positions = positions[chosen.sort().values]
        labels = labels[:, positions]
        weights = self.head_decay ** torch.arange(self.num_drafts, device=labels.device)
        weights = weights / weights.sum() / (labels != IGNORED).sum(1).clamp(min=1)

        def chunk_loss(rows: slice) -> torch.Tensor:
            logits = self.draft_logits(network, reading, positions[rows])
            target_logits = (
                reading.target_logits(self._drafted_from(positions[rows], reading)) if self.kl_weight else None
            )
            losses = draft_loss(logits, labels[:, rows], target_logits, self.kl_weight)
            return (weights * losses.sum(1)).sum()

        if not len(positions):
            # Every process must take part in the step, also with rows in which nothing counts.
            return sum(parameter.sum() for parameter in network.parameters() if parameter.requires_grad) * 0.0
        return sum_over_chunks(chunk_loss, len(positions), self.num_drafts * reading.vocab_size)

    def hits(self, network: nn.Module, reading: Reading) -> tuple[torch.BoolTensor, torch.BoolTensor]:
        labels = self._labels(reading)
        ranks = min(self.num_ranks, reading.vocab_size)
        parts = []
        for positions in torch.arange(labels.shape[1], device=labels.device).split(512):
            best = self.draft_logits(network, reading, positions).topk(ranks, dim=-1).indices
            parts.append((best == labels[:, positions, None]).transpose(1, 2))
        hits, known = torch.cat(parts, dim=2), labels != IGNORED
        return hits.unflatten(2, reading.tokens.shape), known.unflatten(1, reading.tokens.shape)

    def _labels(self, reading: Reading) -> torch.LongTensor:
        """The drafts' tokens, `(K, B * T)`."""
        return torch.stack([reading.next_tokens(2 + draft).flatten() for draft in range(self.num_drafts)])

    def _drafted_from(self, positions: torch.LongTensor, reading: Reading) -> torch.LongTensor:
        """Where the target decides each draft's token, `(K, N)`; some lie behind the end, where nothing counts."""
        offsets = torch.arange(1, self.num_drafts + 1, device=positions.device)[:, None]
        return (positions + offsets).clamp(max=reading.tokens.numel() - 1)
