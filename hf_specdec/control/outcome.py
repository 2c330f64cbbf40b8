"""Outcome of a cycle for one row, and the summary of a call's lengths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RowOutcome:
    """Outcome of a cycle for one row.

    Attributes:
        row (`int`): Row of the call.
        limit (`int`): How deep it was allowed to draft.
        depth (`int`): How deep its draft was.
        num_accepted (`int`): Draft tokens that were committed.
        num_committed (`int`): All tokens that were committed.
    """

    row: int
    limit: int
    depth: int
    num_accepted: int
    num_committed: int


def lengths_note(kind: str, num_cycles: int, num_plain_cycles: int, sum_limits: int) -> str:
    """Summarises the lengths of a call in one line for its statistics."""
    return (
        f"{kind}: at most {sum_limits / num_cycles:.1f} draft tokens a cycle on average, "
        f"{num_plain_cycles} of {num_cycles} cycles without drafts"
    )
