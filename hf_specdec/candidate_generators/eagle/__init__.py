"""Drafts of EAGLE and EAGLE-3 heads (Li et al. 2024, 2025: arXiv:2401.15077, 2406.16858, 2503.01840)."""

from dataclasses import dataclass
from functools import partial

from ...method import Method
from ...settings.checks import Options, setting
from ...training.options import shared_option


@dataclass(frozen=True)
class Eagle1Training(Options):
    """Options of training an EAGLE-1 head."""

    ttt_steps: int = shared_option("ttt_steps", 1)
    num_layers: int = setting(1, "Decoder layers.", least=1)
    intermediate_size: int = shared_option("intermediate_size", 0)
    token_weight: float = setting(0.1, "Weight of the tokens' loss beside that of the states, a smooth L1.", least=0)
    noise: float = setting(0.2, "Width of the range of noise on the target's states.", least=0)
    head_decay: float = shared_option("head_decay", 0.8)
    kl_weight: float = shared_option("kl_weight", 1.0)


@dataclass(frozen=True)
class Eagle3Training(Options):
    """Options of training an EAGLE-3 head."""

    ttt_steps: int = shared_option("ttt_steps", 6)
    num_layers: int = setting(1, "Decoder layers.", least=1)
    hidden_size: int = setting(0, "Hidden size of the head; 0 for the target's.", least=0)
    intermediate_size: int = shared_option("intermediate_size", 0)
    draft_vocab_size: int = setting(
        0, "Tokens that the draft knows, the most frequent of the training rows; 0 for all.", least=0
    )
    own_head: bool = setting(
        True, "The head trains an lm_head, or uses the target's.", flags=("--own-lm-head/--target-lm-head",)
    )
    aux_layer_ids: tuple[int, ...] | None = setting(
        None,
        "Target layers whose inputs the head reads, separated by commas; N for the output of the last of N layers. "
        "Default: 2, N // 2 and N - 3.",
    )
    head_decay: float = shared_option("head_decay", 0.8)
    kl_weight: float = shared_option("kl_weight", 1.0)


@dataclass(frozen=True)
class PEagleTraining(Eagle3Training):
    """Options of training a P-EAGLE head."""

    ttt_steps: int = setting(8, "Tokens that the head drafts at once.", least=1)
    num_layers: int = setting(4, "Decoder layers.", least=1)
    mask_token_id: int | None = shared_option("mask_token_id", None)
    own_embedding: bool = setting(
        True, "The head trains an embedding, or uses the target's.", flags=("--own-embedding/--target-embedding",)
    )


_method = partial(
    Method,
    drafts_from="hidden states of one or more layers, extrapolated by a layer of its own; dynamic trees",
    generator="generator:EagleCandidateGenerator",
    formats="formats",
    weights="a head",
    drafts_static_trees=True,
    sglang_counts_steps=True,
    healthy_first_rate=0.4,
)

METHODS = (
    _method(
        name="eagle",
        noun="EAGLE head",
        preference=40,
        recipe="recipe:Eagle1Recipe",
        training=Eagle1Training,
        vllm="eagle",
        sglang="EAGLE",
        demo="eagle",
    ),
    _method(
        name="eagle3",
        noun="EAGLE-3 head",
        preference=10,
        tags=("eagle-3",),
        recipe="recipe:Eagle3Recipe",
        training=Eagle3Training,
        further_recipes={"peagle": ("P-EAGLE head", "recipe:PEagleRecipe", PEagleTraining)},
        vllm="eagle3",
        sglang="EAGLE3",
        demo="eagle3",
        demo_settings={"": {}, "tree": {"num_draft_nodes": 19}},
    ),
)
