"""Recipes of the methods that draft from the target's last hidden state: Medusa heads and the MLP speculator.

The state at position t has predicted token t + 1. Draft d, counted from 0, is token t + 2 + d; its loss is weighted
with `head_decay`^d, since it only matters once the drafts before it are right (Cai et al. 2024, arXiv:2401.10774,
section 2.2.1). Shapes as in `recipe.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specdec.candidate_generators.medusa.network import NUM_RANKS, MedusaHeads
from hf_specdec.candidate_generators.mlp_speculator.network import MLPSpeculator, MLPSpeculatorConfig
from hf_specdec.errors import SpecConfigError
from hf_specdec.target_facts import hidden_size, vocabulary_size

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
    """What both have in common: K drafts from one state."""

    head_decay: float
    kl_weight: float
    max_positions: int | None
    num_ranks = NUM_RANKS

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


@dataclass(frozen=True)
class MedusaRecipe(HeadsRecipe):
    """
    Medusa heads on a frozen target ("Medusa-1").

    Args:
        num_heads (`int`): K.
        num_layers (`int`): Residual blocks of a head.
        share_lm_head (`bool`): The heads use the target's lm_head; otherwise each trains one of its own, which begins
            as a copy of the target's.
        head_decay (`float`): Weight of a head's loss relative to the one before it.
        kl_weight (`float`): Share of KL(target || head) in the loss; the rest is the cross-entropy.
        max_positions (`int`, *optional*): Positions of a batch that are drawn for the loss. Neighbours in a text teach
            much the same, so many rows and few positions of each learn faster than few rows and all positions.
    """

    num_heads: int = 4
    num_layers: int = 1
    share_lm_head: bool = True
    head_decay: float = 0.8
    kl_weight: float = 0.0
    max_positions: int | None = None

    method = "medusa"

    def __post_init__(self):
        check_at_least("num_heads", self.num_heads)
        check_at_least("num_layers", self.num_layers)
        self._check_losses()

    @property
    def num_drafts(self) -> int:
        return self.num_heads

    def check(self, target: PreTrainedModel) -> None:
        super().check(target)
        if not self.share_lm_head and not target.get_output_embeddings().weight.is_floating_point():
            raise SpecConfigError(
                "Own lm_heads begin as copies of the target's, and this target's is quantised. Share it "
                "(`share_lm_head`), or load the target without quantisation."
            )

    def build(self, target: PreTrainedModel) -> MedusaHeads:
        own = not self.share_lm_head
        sizes = hidden_size(target), vocabulary_size(target), self.num_heads, self.num_layers
        network = MedusaHeads(*sizes, own_lm_heads=own)
        if own:
            network.start_from(target.get_output_embeddings().weight)
        return network

    def draft_logits(self, network: MedusaHeads, reading: Reading, positions: torch.LongTensor) -> torch.Tensor:
        return network(reading.flat_states()[positions], reading.head)

    def write(self, network: MedusaHeads, folder: Path, *, target_name, tokenizer, acceptance) -> None:
        accuracies = None if acceptance is None else acceptance.rank_accuracies
        network.save(folder, base_model=target_name, accuracies=accuracies)


@torch.no_grad()
def _start_from_target(network: MLPSpeculator, target: PreTrainedModel) -> None:
    """
    Lets training begin from what the target knows of its tokens: the D main directions of its lm_head's rows. Stage 0
    projects the state onto them, and all embeddings and heads are the tokens' coordinates there. A speculator of the
    target's width or more, or for a quantised lm_head, keeps its random weights.
    """
    head, width = target.get_output_embeddings().weight, network.config.width
    if not head.is_floating_point() or width >= head.shape[1]:
        return
    rows = head.float()
    directions = torch.linalg.eigh(rows.T @ rows).eigenvectors[:, -width:].flip(1)
    coordinates = rows @ directions
    coordinates /= coordinates.std(0).clamp(min=1e-6) * width**0.5
    network.proj[0].weight.copy_(directions.T)
    for table in (*network.emb, *network.head):
        table.weight.copy_(coordinates)


@dataclass(frozen=True)
class MLPSpeculatorRecipe(HeadsRecipe):
    """
    An MLP speculator, every stage fed with the tokens of the text (Wertheimer et al. 2024, arXiv:2404.19124).

    Args:
        n_predict (`int`): K, number of stages.
        inner_dim (`int`): Width; 0 for the target's.
        tie_weights (`bool`): The stages share their weights.
        scale_input (`bool`): The target's state is normalised first.
        top_k_tokens_per_head (`tuple[int, ...]`, *optional*): Candidates of each stage that the checkpoint suggests to
            its users, by default 4, 3, 2, 2, ...
        n_candidates (`int`): Candidate sequences that it suggests.
        head_decay (`float`): Weight of a stage's loss relative to the one before it.
        kl_weight (`float`): Share of KL(target || stage) in the loss; the rest is the cross-entropy.
        max_positions (`int`, *optional*): Positions of a batch that are drawn for the loss. Neighbours in a text teach
            much the same, so many rows and few positions of each learn faster than few rows and all positions.
    """

    n_predict: int = 3
    inner_dim: int = 0
    tie_weights: bool = True
    scale_input: bool = True
    top_k_tokens_per_head: tuple[int, ...] | None = None
    n_candidates: int = 4
    head_decay: float = 0.9
    kl_weight: float = 0.0
    max_positions: int | None = None

    method = "mlp_speculator"

    def __post_init__(self):
        check_at_least("n_predict", self.n_predict)
        check_at_least("inner_dim", self.inner_dim, 0)
        self._check_losses()
        widths = self.top_k_tokens_per_head
        if widths is not None and len(widths) != self.n_predict:
            raise SpecConfigError(
                f"`top_k_tokens_per_head` must have one number for each of the {self.n_predict} stages (`n_predict`), "
                f"got {widths}."
            )

    @property
    def num_drafts(self) -> int:
        return self.n_predict

    def build(self, target: PreTrainedModel) -> MLPSpeculator:
        widths = self.top_k_tokens_per_head or (4, 3, *[2] * self.n_predict)[: self.n_predict]
        config = MLPSpeculatorConfig(
            emb_dim=hidden_size(target),
            inner_dim=self.inner_dim,
            vocab_size=vocabulary_size(target),
            n_predict=self.n_predict,
            top_k_tokens_per_head=tuple(widths),
            n_candidates=self.n_candidates,
            tie_weights=self.tie_weights,
            scale_input=self.scale_input,
        )
        network = MLPSpeculator(config)
        _start_from_target(network, target)
        return network

    def draft_logits(self, network: MLPSpeculator, reading: Reading, positions: torch.LongTensor) -> torch.Tensor:
        known = reading.tokens.flatten()[self._drafted_from(positions, reading)]
        return network(reading.flat_states()[positions].to(network.proj[0].weight.dtype), known.T)
