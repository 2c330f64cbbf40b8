"""Drafts of what a call's grammar forces, and of the few alternatives that it leaves."""

from ...method import Method


METHODS = (
    Method(
        name="grammar",
        noun="grammar drafting",
        drafts_from="what the call's grammar forces, and the few alternatives that it leaves",
        generator="generator:GrammarCandidateGenerator",
        takes_model=False,
        needs_grammar=True,
        preference=110,
    ),
)
