"""Drafts of Medusa heads (Cai et al. 2024, arXiv:2401.10774)."""

from dataclasses import dataclass

from ...method import Method
from ...settings.checks import Options, setting
from ...training.options import shared_option


@dataclass(frozen=True)
class MedusaTraining(Options):
    """Options of training Medusa heads."""

    num_heads: int = setting(4, "Number of heads.", least=1)
    num_layers: int = setting(1, "Residual blocks of a head.", least=1)
    share_lm_head: bool = setting(
        True,
        "The heads use the target's lm_head, or each trains its own, which begins as a copy of it.",
        flags=("--share-lm-head/--own-lm-heads",),
    )
    head_decay: float = shared_option("head_decay", 0.8)
    kl_weight: float = shared_option("kl_weight", 0.0)
    max_positions: int | None = shared_option("max_positions", None)


METHODS = (
    Method(
        name="medusa",
        noun="Medusa heads",
        drafts_from="heads on the target's last hidden state, combined into a tree",
        generator="generator:MedusaCandidateGenerator",
        formats="formats",
        weights="heads",
        drafts_static_trees=True,
        drafts_one_token_per_head=True,
        preference=60,
        recipe="recipe:MedusaRecipe",
        training=MedusaTraining,
        healthy_first_rate=0.1,
        demo="medusa",
    ),
)
