"""What the kernels of layers compute, in torch, by the functions that the layers themselves call on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hf_specdec.kernels.gates import SILU
from hf_specdec.kernels.heads import SlotWrite
from hf_specdec.kernels.norms import Scale
from hf_specdec.layers.llama import normed, turned
from hf_specdec.layers.rope import signed_angles


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


class Slots:
    """A cache of one layer."""

    writes_slots = True

    def __init__(self, buffers, starts, columns):
        self.buffers, self.starts, self.columns = buffers, starts, columns

    def begin_write(self, keys, values, layer_idx):
        return SlotWrite(*self.buffers, self.starts, slice(0, self.columns))

    def update(self, keys, values, layer_idx):
        for buffer, new in zip(self.buffers, (keys, values)):
            for row, start in enumerate(self.starts.tolist()):
                buffer[row, :, start : start + new.shape[2]] = new[row]
        return tuple(buffer[: len(keys), :, : self.columns] for buffer in self.buffers)


def add_norm(stream, update, update_norm, norm):
    if isinstance(update_norm, Scale):
        update = update * update_norm.factor
    elif update_norm is not None:
        update = normed(update, update_norm)
    if update is not None:
        stream = stream + update
    return stream, stream if norm is None else normed(stream, norm)


def rotary_angles(positions, frequencies, factor, dtype, is_interleaved):
    turns = positions[..., None].float() * frequencies.float()
    cosine, sine = (torch.cat((part, part), dim=-1) * factor for part in (turns.cos(), turns.sin()))
    return signed_angles(cosine.to(dtype), sine.to(dtype), is_interleaved)


def place_heads(heads, angles, norms, cache, layer_idx, is_interleaved):
    query, key, value = heads
    if norms is not None:
        query, key = (normed(part, norm) for part, norm in zip((query, key), norms))
    query, keys = turned(query, key, angles, is_interleaved)
    return query, *cache.update(keys, value.transpose(1, 2), layer_idx)


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
