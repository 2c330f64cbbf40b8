"""The recipe of Medusa heads on a frozen target (Cai et al. 2024, arXiv:2401.10774, "Medusa-1")."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...errors import SpecConfigError
from ...target_facts import hidden_size, vocabulary_size
from ...training.heads import HeadsRecipe
from ...training.recipe import Reading, check_at_least
from .network import NUM_RANKS, MedusaHeads


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
    num_ranks = NUM_RANKS

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
