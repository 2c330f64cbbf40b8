"""Drafts of tokens that the target itself has considered earlier (Token Recycling, arXiv:2408.08696)."""

from ...method import Method


METHODS = (
    Method(
        name="recycling",
        noun="token recycling",
        drafts_from="what the target considered after the same token",
        generator="generator:RecyclingCandidateGenerator",
        takes_model=False,
        drafts_static_trees=True,
        complements_copies=True,
        aliases=("token_recycling",),
        preference=100,
    ),
)
