"""Drafts of the MLP speculator (Wertheimer et al. 2024, arXiv:2404.19124)."""

from dataclasses import dataclass

from ...method import Method
from ...settings.checks import Options, setting
from ...training.options import shared_option


@dataclass(frozen=True)
class MLPSpeculatorTraining(Options):
    """Options of training an MLP speculator."""

    n_predict: int = setting(3, "Number of stages.", least=1)
    inner_dim: int = setting(0, "Width; 0 for the target's hidden size.", least=0)
    tie_weights: bool = setting(True, "The stages share their weights.", flags=("--tie-weights/--no-tie-weights",))
    scale_input: bool = setting(
        True, "The target's state is normalised first.", flags=("--scale-input/--no-scale-input",)
    )
    top_k_tokens_per_head: tuple[int, ...] | None = None
    n_candidates: int = 4
    head_decay: float = shared_option("head_decay", 0.9)
    kl_weight: float = shared_option("kl_weight", 0.0)
    max_positions: int | None = shared_option("max_positions", None)


METHODS = (
    Method(
        name="mlp_speculator",
        noun="MLP speculator",
        drafts_from="the last hidden state and the tokens after it, step by step",
        generator="generator:MLPSpeculatorCandidateGenerator",
        formats="formats",
        weights="a speculator",
        drafts_static_trees=True,
        drafts_one_token_per_head=True,
        preference=50,
        tags=("mlp-speculator",),
        recipe="recipe:MLPSpeculatorRecipe",
        training=MLPSpeculatorTraining,
        healthy_first_rate=0.15,
        demo="mlp_speculator",
    ),
)
