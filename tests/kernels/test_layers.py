"""Kernels between the products of a layer: sums and norms, heads on their way to attention, activated gates."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from hf_specdec.kernels import _triton
from hf_specdec.kernels.gates import GELU_TANH, SILU, gated
from hf_specdec.kernels.heads import SlotWrite, place_heads
from hf_specdec.kernels.norms import Norm, Scale, add_norm
from hf_specdec.layers.llama import GatedMLP, Pending, RMSNorm, added_and_normed
from hf_specdec.layers.rope import signed_angles
from tests.helpers import layer_references as references


# The interpreter cuts digits off where a GPU rounds.
CLOSE = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2},
}
every_dtype = pytest.mark.parametrize("dtype", CLOSE, ids=str)


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm_of(size, dtype, seed, offset=0.0, rounds_last=False) -> Norm:
    return Norm(drawn(size, dtype=dtype, seed=seed) * 0.3 + 1 - offset, 1e-5, offset, rounds_last)


def to(value, device):
    """Tensors, norms and tuples of them on a device."""
    if isinstance(value, Norm):
        return value._replace(weight=to(value.weight, device))
    if isinstance(value, Scale):
        return value
    if isinstance(value, tuple):
        return tuple(to(part, device) for part in value)
    return value.to(device) if torch.is_tensor(value) else value


# Sums and norms

KINDS = {"llama": {}, "gemma": {"offset": 1.0, "rounds_last": True}, "olmo2": {"rounds_last": True}}
CENTERED = Norm(None, 1e-5, is_centered=True)


@every_dtype
@pytest.mark.parametrize("kind", [*KINDS, "olmo", "granite"])
@pytest.mark.parametrize("parts", ["norm", "sum and norm", "normed sum and norm", "normed sum"])
def test_sums_and_norms(dtype, kind, parts, device):
    size = 40

    def of_the_kind(seed):
        if kind == "granite" and seed == 2:
            return Scale(0.22)
        return CENTERED if kind == "olmo" else norm_of(size, dtype, seed, **KINDS.get(kind, {}))

    stream = drawn(2, 3, size, dtype=dtype) * 4
    # As part of a wider tensor.
    update = drawn(2, 3, 2 * size, dtype=dtype, seed=1)[..., size:] if "sum" in parts else None
    update_norm = of_the_kind(2) if "normed sum" in parts else None
    norm = of_the_kind(3) if parts.endswith("norm") else None
    expected = references.add_norm(stream, update, update_norm, norm)
    found = add_norm(*(to(value, device) for value in (stream, update, update_norm, norm)))
    for ours, theirs in zip(found, expected):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.cpu(), theirs, **CLOSE[dtype])
    assert not torch.allclose(expected[1], stream)


# Heads


def angles_of(rows, tokens, size, dtype, is_interleaved):
    turns = drawn(rows, tokens, size // 2, seed=5) * 3
    repeated = turns.repeat_interleave(2, -1) if is_interleaved else torch.cat((turns, turns), -1)
    return signed_angles(repeated.cos().to(dtype), repeated.sin().to(dtype), is_interleaved)


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


def heads_of(dtype, size=16, rows=2, tokens=5, is_packed=False):
    if is_packed:
        joined = drawn(rows, tokens, 8 * size, dtype=dtype).split((4 * size, 2 * size, 2 * size), -1)
        return tuple(part.view(rows, tokens, -1, size) for part in joined)
    return tuple(drawn(rows, tokens, heads, size, dtype=dtype, seed=seed) for seed, heads in enumerate((4, 2, 2)))


@pytest.mark.thinned(5)
@every_dtype
@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize(
    ("size", "turned", "is_interleaved", "is_packed"),
    [
        (16, 0, False, False),
        (16, 16, False, False),
        (16, 16, False, True),
        (24, 24, False, False),
        (16, 8, False, True),
        (16, 8, True, False),
    ],
)
def test_heads(dtype, kind, size, turned, is_interleaved, is_packed, device):
    heads = heads_of(dtype, size, is_packed=is_packed)
    norms = None if kind is None else tuple(norm_of(size, dtype, seed, **KINDS[kind]) for seed in (8, 9))
    angles = angles_of(2, 5, turned, dtype, is_interleaved)
    starts, shape = torch.tensor([3, 7]), (3, 2, 16, size)
    slots = [
        Slots([torch.zeros(shape, dtype=dtype).to(place) for _ in range(2)], starts.to(place), 12)
        for place in ("cpu", device)
    ]
    expected = references.place_heads(heads, angles, norms, slots[0], 0, is_interleaved)
    moved = (to(value, device) for value in (heads, angles, norms))
    found = place_heads(*moved, slots[1], 0, is_interleaved)
    for ours, theirs in zip((*found, *slots[1].buffers), (*expected, *slots[0].buffers)):
        torch.testing.assert_close(ours.cpu(), theirs, **CLOSE[dtype])
    for theirs in slots[0].buffers:
        assert theirs[:2, :, 3:12].any()
        assert not theirs[2].any()
    # Values pass as they are.
    assert torch.equal(slots[1].buffers[1].cpu(), slots[0].buffers[1])


def test_heads_that_share_angles(device):
    heads, angles = heads_of(torch.float32), angles_of(1, 5, 16, torch.float32, False)
    slots = [
        Slots([torch.zeros(2, 2, 9, 16).to(place) for _ in range(2)], torch.tensor([0, 4]).to(place), 9)
        for place in ("cpu", device)
    ]
    expected, *_ = references.place_heads(heads, angles, None, slots[0], 0, False)
    found, *_ = place_heads(to(heads, device), to(angles, device), None, slots[1], 0, False)
    torch.testing.assert_close(found.cpu(), expected)


# Gates


@every_dtype
@pytest.mark.parametrize(("kind", "name"), [(SILU, "silu"), (GELU_TANH, "gelu_pytorch_tanh")])
@pytest.mark.parametrize("is_packed", [False, True])
def test_gates(dtype, kind, name, is_packed, device):
    gate, up = (drawn(2, 3, 2 * 72, dtype=dtype) * 3).chunk(2, -1)
    gate, up = (gate, up) if is_packed else (gate.contiguous(), up.contiguous())
    found = gated(gate.to(device), up.to(device), kind)
    torch.testing.assert_close(found.cpu(), ACT2FN[name](gate) * up, **CLOSE[dtype])


# The choice


def test_layers_run_in_torch_where_gradients_are_needed_or_dtypes_mixed(monkeypatch):
    """Kernels have no gradients; the choice is made before anything is launched."""
    monkeypatch.setattr(_triton, "CHOICE", "triton")
    monkeypatch.setattr(_triton, "IS_INTERPRETED", True)
    monkeypatch.setattr(_triton, "HAS_TRITON", True)
    stream, norm = drawn(1, 2, 8).requires_grad_(), RMSNorm(8, 1e-5)
    assert not _triton.fuses(stream.detach())
    linears = [torch.nn.Linear(8, 8) for _ in range(3)]
    GatedMLP(*linears, torch.nn.SiLU())(norm(stream)).sum().backward()
    assert stream.grad.any()
    assert norm.weight.grad.any()
    with torch.no_grad():
        assert _triton.fuses(stream, norm.weight)
        assert not _triton.fuses(stream, norm.weight.half())
        assert not _triton.fuses(stream.double())
        _, mixed = added_and_normed(stream.half(), Pending(stream.half(), None, None), norm)
    assert mixed.dtype == torch.float32


# Ahead of time


@pytest.mark.parametrize("compile_for", [80, 90, 100, 120, "gfx942"], indirect=True)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_kernels_compile(compile_for, size):
    dtype = torch.bfloat16
    stream, inner = torch.empty(2, 16, 4096, dtype=dtype), torch.empty(2, 16, 2 * 14336, dtype=dtype)
    norm, sandwich = (Norm(torch.empty(4096, dtype=dtype), 1e-5, *form) for form in ((), (1.0, True)))
    head_norms = (Norm(torch.empty(size, dtype=dtype), 1e-6),) * 2
    heads = tuple(torch.empty(2, 16, count, size, dtype=dtype) for count in (32, 8, 8))
    buffers = [torch.empty(4, 8, 1024, size, dtype=dtype) for _ in range(2)]
    slots = Slots(buffers, torch.tensor([3, 5]), 1024)
    angles = (torch.empty(2, 16, 1, size, dtype=dtype),) * 2
    with compile_for() as kernels:
        add_norm(stream, None, None, norm)
        add_norm(stream, stream, None, norm)
        add_norm(stream, stream, sandwich, sandwich)
        add_norm(stream, stream, Scale(0.22), CENTERED)
        place_heads(heads, angles, head_norms, slots, 0, False)
        place_heads(heads, angles, None, slots, 0, True)
        for kind in (SILU, GELU_TANH):
            gated(*inner.chunk(2, -1), kind)
    assert len(kernels) == 8
    if "ptx" in kernels[0].asm:
        # Sixteen bytes at a time.
        assert all("ld.global.v4.b32" in kernel.asm["ptx"] for kernel in kernels[:4])
