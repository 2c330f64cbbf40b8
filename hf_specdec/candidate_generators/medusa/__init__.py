"""Drafts of Medusa heads (Cai et al. 2024, arXiv:2401.10774)."""

from ...method import Method


METHODS = (
    Method(
        name="medusa",
        noun="Medusa heads",
        folder=__name__,
        generator="generator:MedusaCandidateGenerator",
        formats="formats",
        weights="heads",
        drafts_static_trees=True,
        drafts_one_token_per_head=True,
        preference=6,
        preferred_because="no attention, and heads that do not know each other's tokens",
        recipe="recipe:MedusaRecipe",
        healthy_first_rate=0.1,
        demo="medusa",
    ),
)
