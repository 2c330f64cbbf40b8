"""The recipe of MLP speculators, each stage fed with the text's tokens (Wertheimer et al. 2024, arXiv:2404.19124)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ...errors import SpecConfigError
from ...target_facts import hidden_size, vocabulary_size
from ...training.heads import HeadsRecipe, max_positions_option
from ...training.initial_weights import main_directions
from ...training.options import option
from ...training.reading import Reading
from ...training.recipe import head_decay_option, kl_weight_option
from .network import MLPSpeculator, MLPSpeculatorConfig


@dataclass(frozen=True)
class MLPSpeculatorRecipe(HeadsRecipe):
    """
    An MLP speculator.

    Args:
        top_k_tokens_per_head (`tuple[int, ...]`, *optional*): Candidates of each stage that the checkpoint suggests to
            its users, by default 4, 3, 2, 2, ...
        n_candidates (`int`): Candidate sequences that it suggests.
    """

    n_predict: int = option(3, "Number of stages.", least=1)
    inner_dim: int = option(0, "Width; 0 for the target's hidden size.", least=0)
    tie_weights: bool = option(True, "The stages share their weights.", flags=("--tie-weights/--no-tie-weights",))
    scale_input: bool = option(
        True, "The target's state is normalised first.", flags=("--scale-input/--no-scale-input",)
    )
    top_k_tokens_per_head: tuple[int, ...] | None = None
    n_candidates: int = 4
    head_decay: float = head_decay_option(0.9)
    kl_weight: float = kl_weight_option(0.0)
    max_positions: int | None = max_positions_option()

    method = "mlp_speculator"

    def __post_init__(self):
        super().__post_init__()
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
        _begin_with_directions(network, target.get_output_embeddings().weight)
        return network

    def draft_logits(self, network: MLPSpeculator, reading: Reading, positions: torch.LongTensor) -> torch.Tensor:
        known = reading.tokens.flatten()[self.drafted_from(positions, reading)]
        return network(reading.flat_states()[positions].to(network.proj[0].weight.dtype), known.T)


@torch.no_grad()
def _begin_with_directions(network: MLPSpeculator, lm_head: torch.Tensor) -> None:
    """
    Initialises a speculator with the main directions of the rows `(V, H)` of the target's lm_head: stage 0 projects
    the state onto them, and all embeddings and heads are the tokens' coordinates there. A speculator of the target's
    width or more, or for a quantised lm_head, keeps its random weights.
    """
    width = network.config.width
    if not lm_head.is_floating_point() or width >= lm_head.shape[1]:
        return
    rows = lm_head.float()
    directions = main_directions(rows, width)
    coordinates = rows @ directions
    coordinates /= coordinates.std(0).clamp(min=1e-6) * width**0.5
    network.proj[0].weight.copy_(directions.T)
    for table in (*network.emb, *network.head):
        table.weight.copy_(coordinates)
