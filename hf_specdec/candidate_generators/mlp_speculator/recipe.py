"""The recipe of MLP speculators, each stage fed with the text's tokens (Wertheimer et al. 2024, arXiv:2404.19124)."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ...checkpoints.schema import COUNT
from ...errors import SpecConfigError, shown
from ...target_facts import hidden_size, numbers_of, vocabulary_size
from ...training.initial_weights import main_directions
from ...training.reading import Reading
from ...training.recipe import HeadsRecipe
from . import MLPSpeculatorTraining
from .formats import MOST_DRAFTED
from .network import MLPSpeculator, MLPSpeculatorConfig


class MLPSpeculatorRecipe(MLPSpeculatorTraining, HeadsRecipe):
    """An MLP speculator; candidates of its stages are what the checkpoint suggests to its users."""

    method = "mlp_speculator"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n_predict", "n_candidates"):
            if not MOST_DRAFTED.is_valid(getattr(self, name)):
                raise SpecConfigError(f"`{name}` must be {MOST_DRAFTED.what}, got {shown(getattr(self, name))}.")
        widths = self.top_k_tokens_per_head
        if widths is not None and (len(widths) != self.n_predict or not all(map(COUNT.is_valid, widths))):
            raise SpecConfigError(
                f"`top_k_tokens_per_head` must have one positive integer for each of the {self.n_predict} stages "
                f"(`n_predict`), got {shown(widths)}."
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
        tokens = reading.tokens.flatten()[self.drafted_from(positions, reading)]
        return network(reading.flat_states()[positions].to(network.proj[0].weight.dtype), tokens.T)


@torch.no_grad()
def _begin_with_directions(network: MLPSpeculator, lm_head: torch.Tensor) -> None:
    """Lets stage 0 project onto the main directions of an lm_head `(V, H)`, where tokens have their coordinates."""
    # A speculator of the target's width or more, or for an lm_head that only its module can read, stays random.
    width = network.config.width
    rows = numbers_of(lm_head)
    if rows is None or width >= rows.shape[1]:
        return
    rows = rows.float()
    directions = main_directions(rows, width)
    coordinates = rows @ directions
    coordinates /= coordinates.std(0).clamp(min=1e-6) * width**0.5
    network.proj[0].weight.copy_(directions.T)
    for table in (*network.emb, *network.head):
        table.weight.copy_(coordinates)
