"""What is left of a machine's memory."""

from __future__ import annotations

import psutil
import torch


def free_bytes(device: torch.device | str) -> int:
    """Bytes that can still be used on a device: what torch holds and does not use counts as free."""
    device = torch.device(device)
    if device.type != "cuda":
        return psutil.virtual_memory().available
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
