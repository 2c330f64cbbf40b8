"""Drafts of the target itself, without weights: of its first layers (LayerSkip), or over a part of its slots."""

from ...method import Method


_DRAFTS_FROM = "the target itself: its first layers, or all of them over a part of the text"

METHODS = (
    Method(
        name="early_exit",
        noun="early exit",
        drafts_from=_DRAFTS_FROM,
        generator="generator:EarlyExitCandidateGenerator",
        takes_model=False,
        only_if_named=True,
        aliases=("layerskip",),
        preference=110,
        transformers="assistant_early_exit",
    ),
    Method(
        name="sparse_kv",
        noun="sparse-KV self-speculation",
        drafts_from=_DRAFTS_FROM,
        generator="generator:SparseKVCandidateGenerator",
        takes_model=False,
        only_if_named=True,
        aliases=("magicdec",),
        preference=120,
    ),
)
