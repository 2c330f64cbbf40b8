"""Small operations on tensors that have one number a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..transfers import upload


def last_of_each(values: torch.Tensor, counts: Sequence[int] | torch.LongTensor) -> torch.Tensor:
    """Entry `counts[r] - 1` of each row of `(R, T, ...)`: `(R, ...)`."""
    if not torch.is_tensor(counts):
        if min(counts) == max(counts):
            return values[:, counts[0] - 1]
        counts = upload(counts, values.device)
    return values[torch.arange(len(counts), device=values.device), counts - 1]
