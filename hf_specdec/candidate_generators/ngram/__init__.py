"""Drafts that continue an n-gram as it went on earlier in the text."""

from ...method import Method


METHODS = (
    Method(
        name="ngram",
        noun="n-gram speculation",
        drafts_from="the longest earlier match of the end of the text",
        generator="generator:NgramCandidateGenerator",
        takes_model=False,
        aliases=("prompt_lookup", "prompt_lookup_decoding"),
        preference=90,
        vllm="ngram",
        sglang="NGRAM",
        transformers="prompt_lookup_num_tokens",
    ),
)
