"""Tensors of each generated token, of rows that advance at their own pace.

Shapes: B rows of the call, R rows that a value is added to, M tokens of each.
"""

from __future__ import annotations

import torch


class StepRecorder:
    """Collects per-token tensors of rows that advance at their own pace, and returns them step by step.

    Plain generation returns one tensor of shape `(B, ...)` for each generated token. Rows hold zeros where nothing was
    added.

    Args:
        batch_size (`int`): B.
    """

    def __init__(self, batch_size: int):
        self.rows: list[list[torch.Tensor]] = [[] for _ in range(batch_size)]

    def add(self, rows: list[int], values: torch.Tensor, counts: list[int]) -> None:
        """Adds the first `counts[i]` entries of `values[i]` (shape `(R, M, ...)`) to row `rows[i]`."""
        for row, value, count in zip(rows, values, counts):
            self.rows[row].extend(value[:count])

    def cut(self, lengths: list[int]) -> None:
        """Drops what goes beyond each row's length."""
        self.rows = [steps[:length] for steps, length in zip(self.rows, lengths)]

    def step(self, index: int) -> torch.Tensor:
        """Values of one generated token, `(B, ...)`."""
        nothing = torch.zeros_like(next(steps[index] for steps in self.rows if len(steps) > index))
        return torch.stack([steps[index] if len(steps) > index else nothing for steps in self.rows])

    def steps(self) -> tuple[torch.Tensor, ...]:
        """One tensor `(B, ...)` per generated token."""
        return tuple(map(self.step, range(max(map(len, self.rows)))))
