"""Kernels by themselves, beside torch's: attention, linear layers that read the same tokens, and drawn tokens."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from gpu_clocks import Stopwatch
from gpu_models import SIZES
from torch import nn
from transformers.generation import logits_process as hf

from hf_specdec.drafts import chain_topology
from hf_specdec.kernels import _triton
from hf_specdec.kernels.sampling import propose_from_probs
from hf_specdec.kernels.tree_attention import SlotTree, pack_ancestors, tree_attention
from hf_specdec.layers.llama import GatedMLP, project_together
from hf_specdec.logits.warpers import Warpers
from hf_specdec.target import graphs


# Memory that attention is to read in turn: more than a GPU keeps in its caches.
ATTENTION_BYTES = 2**29


def attention_bandwidth(device: torch.device, options: argparse.Namespace) -> list[dict]:
    """Bytes of keys and values a second, by context and nodes, beside the attention of torch without masks."""
    is_cuda, dtype = device.type == "cuda", getattr(torch, options.dtype)
    heads, kv_heads, size = (32, 8, 128) if is_cuda else (4, 2, 16)
    rows = []
    for context in (1024, 8192, 32768) if is_cuda else (64,):
        slots = context + 64
        draw = {"dtype": dtype, "device": device}
        bytes_read = 2 * kv_heads * context * size * dtype.itemsize
        count = max(1, min(ATTENTION_BYTES // bytes_read, 64)) if is_cuda else 2
        # A layer after the other, as in a model.
        layers = [tuple(torch.randn((1, kv_heads, slots, size), **draw) for _ in range(2)) for _ in range(count)]
        for nodes in (1, 16, 60):
            query = torch.randn((1, heads, nodes, size), **draw)
            topology = chain_topology(nodes - 1, device)
            lengths, starts = (torch.full((1,), value, dtype=torch.long, device=device) for value in (context, 0))
            tree = SlotTree(lengths, starts, pack_ancestors(topology.ancestors), topology.depths)

            def ours(query=query, tree=tree, layers=layers) -> torch.Tensor:
                return torch.stack([tree_attention(query, key, value, tree)[0, 0, 0, 0] for key, value in layers])

            def torchs(query=query, layers=layers, context=context) -> torch.Tensor:
                outputs = (
                    F.scaled_dot_product_attention(query, key[:, :, :context], value[:, :, :context], enable_gqa=True)
                    for key, value in layers
                )
                return torch.stack([output[0, 0, 0, 0] for output in outputs])

            row: dict[str, Any] = {"context": context, "nodes": nodes}
            for name, function in (("tree_attention", ours), ("sdpa", torchs)):
                seconds = _seconds(function, device) / count
                row[name] = {"microseconds": 1e6 * seconds, "gigabytes_per_second": bytes_read / seconds / 1e9}
            rows.append(row)
        del layers
    return rows


# What a layer computes from its linear layers, and the same by torch alone.
PRODUCTS: dict[str, tuple[Callable, Callable]] = {
    "queries, keys, values": (project_together, lambda linears, states: [linear(states) for linear in linears]),
    "gated MLP": (
        GatedMLP.forward,
        lambda mlp, states: mlp.down_proj(F.silu(mlp.gate_proj(states)) * mlp.up_proj(states)),
    ),
}


def products_together(device: torch.device, options: argparse.Namespace) -> list[dict]:
    """Queries, keys and values, and gated MLPs, as layers compute them, beside torch's products."""
    is_cuda, dtype = device.type == "cuda", getattr(torch, options.dtype)
    rows = []
    for name in ("llama-8b", "llama-1b", "qwen3-1.7b") if is_cuda else ("tiny",):
        sizes = SIZES[name].target
        hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
        heads = [sizes[f"num_{kind}_heads"] * sizes["head_dim"] for kind in ("attention", "key_value", "key_value")]
        # More than a GPU keeps in its caches.
        count = max(1, ATTENTION_BYTES // (dtype.itemsize * hidden * (sum(heads) + 3 * inner))) if is_cuda else 2

        def linears(*shapes, device=device, dtype=dtype) -> list[nn.Linear]:
            return [nn.Linear(*shape, bias=False, device=device, dtype=dtype) for shape in shapes]

        layers: dict[str, list[Any]] = {
            "queries, keys, values": [linears(*((hidden, width) for width in heads)) for _ in range(count)],
            "gated MLP": [
                GatedMLP(*linears((hidden, inner), (hidden, inner), (inner, hidden)), nn.SiLU()) for _ in range(count)
            ],
        }
        for tokens in (1, 16, 64):
            states = torch.randn((1, tokens, hidden), dtype=dtype, device=device)
            for what, sides in PRODUCTS.items():
                times = [_seconds(partial(_in_turn, side, layers[what], states), device) / count for side in sides]
                microseconds = dict(zip(("layer", "torch"), (1e6 * seconds for seconds in times)))
                rows.append({"size": name, "tokens": tokens, "products": what, "microseconds": microseconds})
        del layers
    return rows


_TEMPERATURE, _TOP_K, _TOP_P = hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(50), hf.TopPLogitsWarper(0.95)
WARPERS = {
    "temperature": Warpers([_TEMPERATURE]),
    "top-p": Warpers([_TEMPERATURE, _TOP_P]),
    "top-k": Warpers([_TEMPERATURE, _TOP_K]),
    "top-k, top-p": Warpers([_TEMPERATURE, _TOP_K, _TOP_P]),
}


def drawn_tokens(device: torch.device, options: argparse.Namespace) -> list[dict]:
    """From logits to tokens that are drawn from them: through kernels, and through transformers' warpers and torch."""
    is_cuda, rows = device.type == "cuda", []
    for count in (1, 16, 128) if is_cuda else (2,):
        logits = torch.randn((count, 128256 if is_cuda else 1000), device=device).mul_(3)
        logits = logits.to(getattr(torch, options.dtype))
        uniforms = torch.rand(count, dtype=torch.float64, device=device)
        for name, warp in WARPERS.items():

            def draw(logits=logits, uniforms=uniforms, warp=warp) -> torch.LongTensor:
                return propose_from_probs(warp(None, logits).softmax(-1), uniforms)

            times = {}
            for side, choice in (("kernels", "auto"), ("torch", "torch")):
                with patch.object(_triton, "CHOICE", choice):
                    times[side] = 1e6 * _seconds(draw, device)
            rows.append({"rows": count, "warpers": name, "microseconds": times})
    return rows


def _in_turn(compute: Callable, layers: list[Any], states: torch.Tensor) -> list[Any]:
    return [compute(layer, states) for layer in layers]


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a run, as a graph where there are any, so that launching does not count; the best of several."""
    backend, watch = graphs.capture_backend(device), Stopwatch(device)
    with torch.no_grad():
        repeat = function if backend is None else backend.capture(function)[0]
        times = []
        for _ in range(5):
            first = watch.mark()
            repeat()
            last = watch.mark()
            watch.synchronize()
            times.append(watch.milliseconds(first, last) / 1000)
    return min(times)
