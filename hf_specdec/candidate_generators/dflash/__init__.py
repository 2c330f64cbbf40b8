"""Drafts of DFlash and its kin: a whole block in one pass."""

from ...method import Method


METHODS = (
    Method(
        name="dflash",
        noun="DFlash draft",
        folder=__name__,
        generator="generator:DFlashCandidateGenerator",
        formats="formats",
        weights="a draft",
        preference=2,
        preferred_because="a whole block in one pass, of several layers",
        recipe="recipe:DFlashRecipe",
        vllm="dflash",
        sglang="DFLASH",
        healthy_first_rate=0.4,
        demo="dflash",
    ),
)
