"""Drafts from a suffix tree of the prompt and of earlier responses (SuffixDecoding, arXiv:2411.04975)."""

from ...method import Method


METHODS = (
    Method(
        name="suffix",
        noun="suffix decoding",
        drafts_from="suffix trees of the prompt and of past responses",
        generator="generator:SuffixCandidateGenerator",
        takes_model=False,
        aliases=("suffix_decoding",),
        package="arctic-inference",
        preference=80,
        vllm="suffix",
    ),
)
