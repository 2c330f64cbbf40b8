"""Drafts of multi-token-prediction layers (DeepSeek-V3, arXiv:2412.19437, and its kin)."""

from ...method import Method


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
        vllm="mtp",
        transformers="use_mtp",
        healthy_first_rate=0.4,
        demo="mtp",
    ),
)
