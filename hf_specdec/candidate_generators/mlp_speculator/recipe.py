"""The recipe of MLP speculators (Wertheimer et al. 2024, arXiv:2404.19124)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ...errors import SpecConfigError
from ...target_facts import hidden_size, vocabulary_size
from ...training.heads import HeadsRecipe
from ...training.recipe import Reading, check_at_least
from .network import MLPSpeculator, MLPSpeculatorConfig


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
