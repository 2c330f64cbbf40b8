"""Kernels by themselves, beside torch's: attention, linear layers that read the same tokens, and drawn tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from common import Row
from gpu_clocks import Stopwatch
from gpu_models import SIZES
from torch import nn
from transformers.generation import logits_process as hf

from hf_specdec.drafts import chain_topology
from hf_specdec.kernels import _triton
from hf_specdec.kernels.sampling import sample_from_probs
from hf_specdec.kernels.tree_attention import SlotTree, pack_words, tree_attention_triton
from hf_specdec.layers.llama import GatedMLP
from hf_specdec.layers.plan import bind_linears, way_of
from hf_specdec.logits.warpers import Warpers
from hf_specdec.target import graphs


# Memory that layers are to read in turn: more than a GPU keeps in its caches.
MANY_BYTES = 2**29


def attention(device: torch.device, dtype: torch.dtype) -> list[Row]:
    """Microseconds by context and nodes, and the bytes of keys and values, beside torch's attention without masks."""
    is_cuda = device.type == "cuda"
    heads, kv_heads, size = (32, 8, 128) if is_cuda else (4, 2, 16)
    draw, rows = partial(torch.randn, dtype=dtype, device=device), []
    for context in (1024, 8192, 32768) if is_cuda else (64,):
        bytes_read = 2 * kv_heads * context * size * dtype.itemsize
        count = max(1, min(MANY_BYTES // bytes_read, 64)) if is_cuda else 2
        # A layer after the other, as in a model.
        layers = [tuple(draw((1, kv_heads, context + 64, size)) for _ in range(2)) for _ in range(count)]
        for nodes in (1, 16, 60):
            query, topology = draw((1, heads, nodes, size)), chain_topology(nodes - 1, device)
            lengths, starts = (torch.full((1,), value, dtype=torch.long, device=device) for value in (context, 0))
            tree = SlotTree(lengths, starts, pack_words(topology.ancestors)[None], topology.depths)
            times = {
                "kernel_us": _microseconds(_attend, layers, device, query, tree),
                "torch_us": _microseconds(_attend_without_mask, layers, device, query, context),
            }
            speed = {"kernel_gb_per_second": bytes_read / times["kernel_us"] / 1e3}
            rows.append({"context": context, "nodes": nodes, **times, **speed})
        del layers
    return rows


def _attend(keys: tuple[torch.Tensor, torch.Tensor], query: torch.Tensor, tree: SlotTree) -> torch.Tensor:
    return tree_attention_triton(query, *keys, tree)[0, 0, 0, 0]


def _attend_without_mask(keys: tuple[torch.Tensor, torch.Tensor], query: torch.Tensor, context: int) -> torch.Tensor:
    key, value = (states[:, :, :context] for states in keys)
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)[0, 0, 0, 0]


# What a layer computes from its linear layers, and the same by torch alone.
PRODUCTS: dict[str, tuple[Callable, Callable]] = {
    "queries, keys, values": (
        lambda linears, states: bind_linears(way_of(states), states.dtype, linears)[0](states),
        lambda linears, states: [linear(states) for linear in linears],
    ),
    "gated MLP": (
        GatedMLP.forward,
        lambda mlp, states: mlp.down_proj(F.silu(mlp.gate_proj(states)) * mlp.up_proj(states)),
    ),
}


def products(device: torch.device, dtype: torch.dtype) -> list[Row]:
    """Microseconds of queries, keys and values, and of gated MLPs, as layers compute them, beside torch's products."""
    is_cuda, rows = device.type == "cuda", []
    linear = partial(nn.Linear, bias=False, device=device, dtype=dtype)
    for name in ("llama-8b", "llama-1b", "qwen3-1.7b") if is_cuda else ("tiny",):
        sizes = SIZES[name].target
        hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
        widths = [sizes[f"num_{kind}_heads"] * sizes["head_dim"] for kind in ("attention", "key_value", "key_value")]
        count = max(1, MANY_BYTES // (dtype.itemsize * hidden * (sum(widths) + 3 * inner))) if is_cuda else 2
        layers: dict[str, list[Any]] = {
            "queries, keys, values": [[linear(hidden, width) for width in widths] for _ in range(count)],
            "gated MLP": [GatedMLP(hidden, inner).to(device, dtype) for _ in range(count)],
        }
        for tokens in (1, 16, 64):
            states = torch.randn((1, tokens, hidden), dtype=dtype, device=device)
            for what, sides in PRODUCTS.items():
                ours, torchs = (_microseconds(side, layers[what], device, states) for side in sides)
                rows.append({"size": name, "tokens": tokens, "products": what, "layer_us": ours, "torch_us": torchs})
        del layers
    return rows


_TEMPERATURE, _TOP_K, _TOP_P = hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(50), hf.TopPLogitsWarper(0.95)
WARPERS = {
    "temperature": Warpers([_TEMPERATURE]),
    "top-p": Warpers([_TEMPERATURE, _TOP_P]),
    "top-k": Warpers([_TEMPERATURE, _TOP_K]),
    "top-k, top-p": Warpers([_TEMPERATURE, _TOP_K, _TOP_P]),
}


def drawn_tokens(device: torch.device, dtype: torch.dtype) -> list[Row]:
    """Microseconds from logits to tokens that are drawn, by kernels, and by transformers' warpers and torch."""
    is_cuda, rows = device.type == "cuda", []
    for count in (1, 16, 128) if is_cuda else (2,):
        logits = torch.randn((count, 128256 if is_cuda else 1000), device=device).mul_(3).to(dtype)
        uniforms = torch.rand(count, dtype=torch.float64, device=device)
        for name, warpers in WARPERS.items():
            times = {}
            for side, choice in (("kernel_us", "auto"), ("torch_us", "torch")):
                with patch.object(_triton, "CHOICE", choice):
                    times[side] = _microseconds(_draw, [warpers], device, logits, uniforms)
            rows.append({"rows": count, "warpers": name, **times})
    return rows


def _draw(warpers: Warpers, logits: torch.FloatTensor, uniforms: torch.Tensor) -> torch.LongTensor:
    return sample_from_probs(warpers(None, logits).softmax(-1), uniforms, proposes=True)


def _microseconds(compute: Callable, layers: list[Any], device: torch.device, *arguments: Any) -> float:
    """Microseconds a layer, run as a graph where there are any, so that launching does not count; the best of five."""
    backend = graphs.capture_backend(device)

    def in_turn() -> list[Any]:
        return [compute(layer, *arguments) for layer in layers]

    with torch.no_grad():
        repeat = in_turn if backend is None else backend.capture(in_turn)[0]
        return 1000 * min(Stopwatch(device).times(repeat, 5)) / len(layers)
