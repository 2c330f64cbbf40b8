"""Agreement between the processes that hold parts of one target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..logits.randomness import seed_from_torch


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def target_processes(model: torch.nn.Module) -> ProcessGroup | None:
    """The processes that hold parts of a model; `None` where each has all of it."""
    if (getattr(model, "tp_size", None) or 1) == 1:
        return None
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        return torch.distributed.group.WORLD
    return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")


def shared_seed(model: torch.nn.Module) -> int:
    """A seed from torch's generator: that of the first process, as all that hold parts draw the same tokens."""
    shared, group = [seed_from_torch()], target_processes(model)
    if group is not None:
        torch.distributed.broadcast_object_list(shared, group=group, group_src=0)
    return shared[0]
