"""Small operations on tensors that have one number a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def upload(values: Sequence, device: torch.device) -> torch.LongTensor:
    """Numbers, nested or not, on `device`; unlike `torch.tensor` on a GPU it does not wait for what runs there."""
    return torch.tensor(values).to(device, non_blocking=True)


def last_of_each(values: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Entry `counts[r] - 1` of each row of `(R, T, ...)`: `(R, ...)`."""
    if min(counts) == max(counts):
        return values[:, counts[0] - 1]
    last = upload(counts, values.device) - 1
    return values[torch.arange(len(counts), device=values.device), last]
