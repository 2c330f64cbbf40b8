"""The recipe of Medusa heads on a frozen target ("Medusa-1", Cai et al. 2024, arXiv:2401.10774)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...errors import SpecConfigError
from ...target_facts import hidden_size, numbers_of, vocabulary_size
from ...training.reading import Reading
from ...training.recipe import Acceptance, HeadsRecipe
from . import MedusaTraining
from .network import NUM_RANKS, MedusaHeads


class MedusaRecipe(MedusaTraining, HeadsRecipe):
    """Residual heads, which are saved with the accuracy of their best ranks."""

    method = "medusa"
    num_ranks = NUM_RANKS

    @property
    def num_drafts(self) -> int:
        return self.num_heads

    def check(self, target: PreTrainedModel) -> None:
        super().check(target)
        if not self.share_lm_head and numbers_of(target.get_output_embeddings().weight) is None:
            raise SpecConfigError(
                "Own lm_heads begin as copies of the target's, and this target's is quantised. Share it "
                "(`share_lm_head`), or load the target without quantisation."
            )

    def build(self, target: PreTrainedModel) -> MedusaHeads:
        sizes = hidden_size(target), vocabulary_size(target), self.num_heads, self.num_layers
        network = MedusaHeads(*sizes, own_lm_heads=not self.share_lm_head)
        if network.lm_heads is not None:
            network.lm_heads.data[:] = numbers_of(target.get_output_embeddings().weight)
        return network

    def draft_logits(self, network: MedusaHeads, reading: Reading, positions: torch.LongTensor) -> torch.Tensor:
        return network(reading.flat_states()[positions], reading.head)

    def write(self, network: MedusaHeads, folder: Path, **about: Any) -> None:
        acceptance: Acceptance | None = about.get("acceptance")
        accuracies = None if acceptance is None else acceptance.rank_accuracies
        network.save(folder, about.get("target_name"), accuracies)
