"""Causal self-attention over whole rows in blocks of queries that never look past the diagonal.

For training small models on a CPU, where attention and the logits decide the speed.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import AttentionInterface


def blockwise_causal(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    block: int = 128,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    Causal self-attention over whole, unpadded rows, in blocks of queries.

    Args:
        query (`torch.FloatTensor` of shape `(B, H, T, D)`): Queries.
        key, value (`torch.FloatTensor` of shape `(B, H_kv, T, D)`): Keys and values, `H` a multiple of `H_kv`.
        attention_mask: Must be `None`; rows have no padding.

    Returns:
        `torch.FloatTensor` of shape `(B, T, H, D)`, and `None` for the attention weights.
    """
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    if attention_mask is not None or key.shape[2] != length or dropout:
        raise ValueError("`blockwise_causal` attends over whole rows: no mask, no cache and no dropout.")
    query, key = query.to(value.dtype), key.to(value.dtype)
    query = query.view(batch, kv_heads, heads // kv_heads, length, dim)
    scale: float = dim**-0.5 if scaling is None else scaling
    future = torch.full((block, block), -math.inf, dtype=value.dtype, device=value.device).triu(1)
    outputs = []
    for start in range(0, length, block):
        end = min(start + block, length)
        size = end - start
        scores = (query[..., start:end, :] * scale).flatten(2, 3) @ key[:, :, :end].transpose(-1, -2)
        scores = scores.view(batch, kv_heads, -1, size, end)
        scores[..., start:] += future[:size, :size]
        weights = scores.softmax(-1, dtype=value.dtype).flatten(2, 3)
        outputs.append((weights @ value[:, :, :end]).view(batch, heads, size, dim))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register("blockwise_causal", blockwise_causal)
