"""Drafts of a smaller language model (Leviathan et al. 2022, arXiv:2211.17192)."""

from ...method import Method


METHODS = (
    Method(
        name="draft_model",
        noun="draft model",
        folder=__name__,
        generator="generator:DraftModelCandidateGenerator",
        formats="formats",
        weights="a draft model",
        is_language_model=True,
        aliases=("assistant_model",),
        preference=7,
        preferred_because="a whole model, the most work for a token",
        tags=("draft-model",),
        recipe="recipe:DraftModelRecipe",
        vllm="draft_model",
        sglang="STANDALONE",
        sglang_counts_steps=True,
        transformers="assistant_model",
        healthy_first_rate=0.3,
        demo="draft",
        demo_settings={"": {"same_tokenizer": True}},
    ),
)
