"""Small gathers that torch references share.

Shapes: B rows, X entries of a row.
"""

from __future__ import annotations

import torch

from ..transfers import kept_on_device


@kept_on_device
def arange(size: int, device: torch.device) -> torch.LongTensor:
    """0 to `size` - 1, made once; not to be written to."""
    return torch.arange(size, device=device)


def pick(values: torch.Tensor, index: torch.LongTensor) -> torch.Tensor:
    """Entry `index[b]` of each row of `(B, X)`."""
    return values.gather(1, index[:, None]).squeeze(1)


def rows_at(values: torch.Tensor, index: torch.LongTensor) -> torch.Tensor:
    """A copy `(B, X)` of entry `index[b]` of each row of `(B, nodes, X)`."""
    batch_size, num_nodes = values.shape[:2]
    # Whole rows of a matrix are copied faster than by indexing with two tensors.
    return values.flatten(0, 1).index_select(0, arange(batch_size, values.device) * num_nodes + index)


def distributions_at(probs: torch.FloatTensor, index: torch.LongTensor) -> torch.FloatTensor:
    """`rows_at` in float32 or better."""
    return rows_at(probs, index).to(torch.promote_types(probs.dtype, torch.float32))


def nowhere(mask: torch.BoolTensor) -> bool:
    """Tells whether no entry holds, where asking does not wait for a device."""
    return mask.device.type == "cpu" and not mask.any()


def widest_float(device: torch.device) -> torch.dtype:
    """The most precise dtype of a device."""
    return torch.float32 if device.type == "mps" else torch.float64
