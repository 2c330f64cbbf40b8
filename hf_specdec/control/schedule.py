"""Lengths by the number of active rows, as serving engines have them: a rule of the user's, nothing is measured.

The loop drops rows that have finished, so the number of rows falls in a call, and the length may rise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .rates import RowOutcome


class ScheduledLength:
    """Chooses the limits of one call's cycles by the number of rows alone, with the interface of a controller."""

    kind = "length by batch size"
    why_none = "batch_size"
    sizes = None  # trees stay whole
    is_resting = False

    def __init__(self, most_tokens: Callable[[int], int]):
        self.most_tokens = most_tokens

    def limits(self, rows: list[int], num_unread: int = 0, left: Sequence[float] | None = None) -> list[int]:
        """Depth that each of the active rows may draft in this cycle."""
        return [self.most_tokens(len(rows))] * len(rows)

    def take_back(self) -> None: ...

    def join(self, rows: list[int]) -> None: ...

    def observe(self, outcomes: list[RowOutcome], *costs: Any) -> None: ...

    def close(self) -> None: ...
