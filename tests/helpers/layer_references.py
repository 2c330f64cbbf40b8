"""Tensors, tolerances, references for kernels that the package itself has none of, and a cache of one layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers.generation import logits_process as hf

from hf_specdec.kernels.cache import WritePlan
from hf_specdec.kernels.gates import SILU
from hf_specdec.kernels.heads import signed_angles
from hf_specdec.kernels.projections import Unnormed
from hf_specdec.kernels.tree_attention import visible_slots
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


def add_norm(stream, update, update_norm, norm):
    if update is not None:
        stream = stream + (update if update_norm is None else update_norm(update))
    return stream, stream if norm is None else norm(stream)


def gated(gate, up, kind):
    return (F.silu(gate) if kind == SILU else F.gelu(gate, approximate="tanh")) * up


def mixture(hidden, logits, gate_up, down, routing, kind=SILU, shared=None):
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(routing.top_k, dim=-1)
    if routing.normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights.to(logits.dtype) if routing.rounds else weights
    gate, up = torch.einsum("mh,mknh->mkn", hidden, gate_up[experts]).chunk(2, dim=-1)
    products = torch.einsum("mkn,mkhn->mkh", gated(gate, up, kind), down[experts])
    output = (products * weights[..., None]).sum(1).to(hidden.dtype)
    return output if shared is None else output + F.linear(hidden, shared.gate).sigmoid() * shared.output


def products(x, linears):
    hidden = x.norm(x.stream) if isinstance(x, Unnormed) else x
    return [F.linear(hidden, weight, bias) for weight, bias in linears]


def gated_product(x, gate, up, kind):
    return gated(*products(x, (gate, up)), kind)


def added_product(x, linear, stream):
    total = stream + F.linear(x, *linear)
    return total, total.flatten(0, -2).float().square().sum(-1)[None]


def rotary_angles(positions, frequencies, factor, dtype, is_interleaved):
    turns = positions[..., None].float() * frequencies.float()
    cosine, sine = (torch.cat((part, part), dim=-1) * factor for part in (turns.cos(), turns.sin()))
    return signed_angles(cosine.to(dtype), sine.to(dtype), is_interleaved)


def tree_attention(query, key, value, tree, scale=None, window=0, chunk=0, softcap=0.0, sinks=None, num_splits=None):
    rows, heads, nodes, size = query.shape
    kv_heads, slots = key.shape[1:3]
    query = query.float().reshape(rows, kv_heads, -1, size)
    scale = size**-0.5 if scale is None else scale
    scores = (query @ key.float().transpose(-1, -2) * scale).view(rows, heads, nodes, slots)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~visible_slots(tree, slots, window, chunk)[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(rows, heads, nodes, 1)], dim=-1)
    weights = scores.softmax(-1)[..., :slots].view(rows, kv_heads, -1, slots)
    output = (weights @ value.float()).view(rows, heads, nodes, -1)
    return output.transpose(1, 2).contiguous().to(value.dtype)


def warped(logits, warping):
    """By transformers' warpers, with a stable sort."""
    temperature, top_k, top_p, min_p = warping
    scores = logits.reshape(-1, logits.shape[-1]).float() / temperature
    if top_k is not None:
        scores = hf.TopKLogitsWarper(top_k)(None, scores)
    if top_p is not None:
        ordered = scores.sort(dim=-1, stable=True)
        goes = ordered.values.softmax(-1).cumsum(-1) <= 1 - top_p
        goes[:, -1] = False
        scores = scores.masked_fill(goes.scatter(-1, ordered.indices, goes), -torch.inf)
    if min_p is not None:
        scores = hf.MinPLogitsWarper(min_p)(None, scores)
    return scores.view(logits.shape)


def slots_of(buffers, starts, columns):
    """A cache of one layer whose rows go on where they start."""
    cache = SlotCache(buffers[0].shape[2])
    layer = cache.layer_at(0)
    layer.lazy_initialization(*buffers)
    layer.keys, layer.values = buffers
    cache.plan = WritePlan(columns, None, starts, 5, cache.layers)
    return cache
