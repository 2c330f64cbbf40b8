"""Drafts of the MLP speculator (Wertheimer et al. 2024, arXiv:2404.19124)."""

from ...method import Method


METHODS = (
    Method(
        name="mlp_speculator",
        noun="MLP speculator",
        folder=__name__,
        generator="generator:MLPSpeculatorCandidateGenerator",
        formats="formats",
        weights="a speculator",
        drafts_static_trees=True,
        drafts_one_token_per_head=True,
        preference=5,
        preferred_because="no attention: each token is a guess from the state and the token before",
        tags=("mlp-speculator",),
        recipe="recipe:MLPSpeculatorRecipe",
        healthy_first_rate=0.15,
        demo="mlp_speculator",
    ),
)
