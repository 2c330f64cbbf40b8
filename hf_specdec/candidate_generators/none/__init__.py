"""No drafts: the loop alone, what every method must beat to be worth drafting with."""

from ...method import NO_DRAFTS, Method


METHODS = (
    Method(
        name=NO_DRAFTS,
        noun="no drafts",
        drafts_from="nothing: plain decoding in the same loop",
        generator="generator:NoDrafts",
        takes_model=False,
        only_if_named=True,
        preference=200,
    ),
)
