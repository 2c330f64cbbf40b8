"""Drafts of EAGLE and EAGLE-3 heads (Li et al. 2024, 2025: arXiv:2401.15077, 2406.16858, 2503.01840)."""

from ...method import Method


METHODS = (
    Method(
        name="eagle",
        noun="EAGLE head",
        folder=__name__,
        generator="generator:EagleCandidateGenerator",
        formats="formats",
        weights="a head",
        drafts_static_trees=True,
        preference=4,
        preferred_because="one layer that reads the target's last state alone",
        recipe="recipe:Eagle1Recipe",
        vllm="eagle",
        sglang="EAGLE",
        sglang_counts_steps=True,
        healthy_first_rate=0.4,
        demo="eagle",
    ),
    Method(
        name="eagle3",
        noun="EAGLE-3 head",
        folder=__name__,
        generator="generator:EagleCandidateGenerator",
        formats="formats",
        weights="a head",
        drafts_static_trees=True,
        preference=1,
        preferred_because="one layer that reads three depths of the target: long accepted drafts for little work",
        tags=("eagle-3",),
        recipe="recipe:Eagle3Recipe",
        vllm="eagle3",
        sglang="EAGLE3",
        sglang_counts_steps=True,
        healthy_first_rate=0.4,
        demo="eagle3",
        demo_settings={"": {}, "tree": {"num_draft_nodes": 19}},
    ),
)
