"""Drafts of multi-token-prediction layers (DeepSeek-V3, arXiv:2412.19437, and its kin)."""

from dataclasses import dataclass

from ...method import Method
from ...training.options import (
    Options,
    head_decay_option,
    intermediate_size_option,
    kl_weight_option,
    ttt_steps_option,
)


@dataclass(frozen=True)
class MtpTraining(Options):
    """Options of training an MTP layer."""

    ttt_steps: int = ttt_steps_option(4)
    intermediate_size: int = intermediate_size_option()
    head_decay: float = head_decay_option(0.8)
    kl_weight: float = kl_weight_option(1.0)


METHODS = (
    Method(
        name="mtp",
        noun="multi-token-prediction layers",
        folder=__name__,
        generator="generator:MtpCandidateGenerator",
        formats="formats",
        weights="MTP layers",
        in_target_checkpoint=True,
        drafts_static_trees=True,
        aliases=(
            "deepseek_mtp",
            "mimo_mtp",
            "glm4_moe_mtp",
            "ernie_mtp",
            "qwen3_next_mtp",
            "longcat_flash_mtp",
        ),
        preference=3,
        preferred_because="trained with the target, mostly for one token that is then drafted on from",
        recipe="recipe:MtpRecipe",
        training=MtpTraining,
        vllm="mtp",
        transformers="use_mtp",
        healthy_first_rate=0.4,
        demo="mtp",
    ),
)
