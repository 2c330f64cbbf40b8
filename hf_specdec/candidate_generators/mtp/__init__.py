"""Drafts of multi-token-prediction layers (DeepSeek-V3, arXiv:2412.19437, and its kin)."""

from dataclasses import dataclass

from ...method import Method
from ...settings.checks import Options
from ...training.options import shared_option


@dataclass(frozen=True)
class MtpTraining(Options):
    """Options of training an MTP layer."""

    ttt_steps: int = shared_option("ttt_steps", 4)
    intermediate_size: int = shared_option("intermediate_size", 0)
    head_decay: float = shared_option("head_decay", 0.8)
    kl_weight: float = shared_option("kl_weight", 1.0)


METHODS = (
    Method(
        name="mtp",
        noun="multi-token-prediction layers",
        drafts_from="the target's own multi-token-prediction layers",
        generator="generator:MtpCandidateGenerator",
        formats="formats",
        weights="MTP layers",
        in_target_checkpoint=True,
        drafts_static_trees=True,
        aliases=("deepseek_mtp", "mimo_mtp", "glm4_moe_mtp", "ernie_mtp", "qwen3_next_mtp", "longcat_flash_mtp"),
        preference=30,
        recipe="recipe:MtpRecipe",
        training=MtpTraining,
        vllm="mtp",
        transformers="use_mtp",
        healthy_first_rate=0.4,
        demo="mtp",
    ),
)
