"""Lengths by the number of active rows, as serving engines have them: a rule of the user's, nothing is measured.

The loop drops rows that have finished, so the number of rows falls in a call, and the length may rise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .outcome import RowOutcome, lengths_note


class ScheduledLength:
    """Chooses the limits of one call's cycles by the number of rows alone.

    Args:
        most_tokens (`Callable[[int], int]`): Active rows -> k, 0 for no drafts.

    Attributes:
        num_cycles, num_plain_cycles, sum_limits (`int`): As of [`~controller.SpeculationController`].
        why_none (`str`): Why the last cycle had no drafts, if it had none.
    """

    why_none = "batch_size"
    tree_size = None  # trees stay whole

    def __init__(self, most_tokens: Callable[[int], int]):
        self.most_tokens = most_tokens
        self.num_cycles = self.num_plain_cycles = self.sum_limits = 0

    def limits(self, rows: list[int], num_unread: int = 0, left: Sequence[float] | None = None) -> list[int]:
        """Depth that each of the active rows may draft in this cycle."""
        limit = self.most_tokens(len(rows))
        self.num_cycles += 1
        self.num_plain_cycles += limit == 0
        self.sum_limits += limit
        return [limit] * len(rows)

    def observe(self, outcomes: list[RowOutcome], *costs) -> None:
        """Learns nothing."""

    def close(self) -> str:
        """Ends the call. Returns a line for its statistics."""
        return lengths_note("length by batch size", self.num_cycles, self.num_plain_cycles, self.sum_limits)
