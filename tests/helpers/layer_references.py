"""Tensors and tolerances for the kernels of layers, and a cache of one layer."""

from __future__ import annotations

import torch

from hf_specdec.kernels.cache import WritePlan
from hf_specdec.target.cache import SlotCache


# The interpreter cuts digits off where a GPU rounds.
CLOSE = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2},
}


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def to(value, device):
    """Tensors, and tuples and lists of them, also named ones, on a device; anything else stays as it is."""
    if isinstance(value, (tuple, list)):
        parts = [to(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value.to(device) if torch.is_tensor(value) else value


def slots_of(buffers, starts, columns):
    """A cache of one layer whose rows go on where they start."""
    cache = SlotCache(buffers[0].shape[2])
    layer = cache.layer_at(0)
    layer.lazy_initialization(*buffers)
    layer.keys, layer.values = buffers
    cache.plan = WritePlan(columns, None, starts, 5, cache.layers)
    return cache
