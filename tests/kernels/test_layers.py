"""Kernels between the products of a layer: sums and norms, angles, heads on their way to attention, gates."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from hf_specdec.kernels import _triton
from hf_specdec.kernels.gates import GELU_TANH, SILU, gated_triton
from hf_specdec.kernels.heads import place_heads_triton, rotary_angles_triton, signed_angles
from hf_specdec.kernels.norms import Norm, Scale, add_norm_triton
from hf_specdec.layers.llama import GatedMLP, RMSNorm, bind_sum, place_heads
from hf_specdec.layers.plan import Normed, Way
from tests.helpers.layer_references import CLOSE, add_norm, drawn, rotary_angles, slots_of, to
from tests.helpers.levels import in_full, when_slow
from tests.kernels.conftest import every_gpu


F32, F16, BF16 = CLOSE
KINDS = {"llama": {}, "gemma": {"offset": 1.0, "rounds_last": True}, "olmo2": {"rounds_last": True}}
CENTERED = Norm(None, 1e-5, is_centered=True)


def norm_of(size, dtype, seed, offset=0.0, rounds_last=False) -> Norm:
    return Norm(drawn(size, dtype=dtype, seed=seed) * 0.3 + 1 - offset, 1e-5, offset, rounds_last)


@pytest.mark.parametrize(
    ("dtype", "kind", "parts"),
    [
        (F32, "gemma", "normed sum and norm"),
        (BF16, "olmo", "sum and norm"),
        *in_full(*((dtype, kind, "normed sum and norm") for dtype in CLOSE for kind in KINDS)),
        *in_full(*((F16, kind, "sum and norm") for kind in (*KINDS, "granite"))),
        *in_full((BF16, "llama", "norm"), (F32, "olmo", "norm"), (F32, "granite", "normed sum")),
    ],
    ids=str,
)
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
    given = stream, update, update_norm, of_the_kind(3) if parts.endswith("norm") else None
    expected = add_norm(*given)
    for ours, theirs in zip(add_norm_triton(*to(given, device)), expected):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.cpu(), theirs, **CLOSE[dtype])
    assert not torch.allclose(expected[1], stream)


def angles_of(rows, tokens, size, dtype, is_interleaved):
    turns = drawn(rows, tokens, size // 2, seed=5) * 3
    repeated = turns.repeat_interleave(2, -1) if is_interleaved else torch.cat((turns, turns), -1)
    return signed_angles(repeated.cos().to(dtype), repeated.sin().to(dtype), is_interleaved)


@pytest.mark.parametrize(
    ("size", "turned", "is_interleaved", "is_packed", "kind", "dtype"),
    [
        (24, 24, False, False, "gemma", F32),
        (16, 8, True, False, None, BF16),
        *in_full(*((16, 16, False, True, kind, dtype) for kind in KINDS for dtype in CLOSE)),
        *in_full((16, 0, False, False, None, F32), (16, 0, False, False, "olmo2", F16)),
        *in_full((16, 8, False, True, "llama", F32), (16, 8, True, False, "llama", F16)),
    ],
    ids=str,
)
def test_heads_are_normed_turned_and_written(size, turned, is_interleaved, is_packed, kind, dtype, device):
    if is_packed:
        joined = drawn(2, 5, 8 * size, dtype=dtype).split((4 * size, 2 * size, 2 * size), -1)
        heads = tuple(part.view(2, 5, -1, size) for part in joined)
    else:
        heads = tuple(drawn(2, 5, count, size, dtype=dtype, seed=seed) for seed, count in enumerate((4, 2, 2)))
    norms = None if kind is None else tuple(norm_of(size, dtype, seed, **KINDS[kind]) for seed in (8, 9))
    # Rows may share their angles.
    for rows in (2, 1):
        angles = angles_of(rows, 5, turned, dtype, is_interleaved)
        starts, shape = torch.tensor([3, 7]), (3, 2, 16, size)
        reference, slots = (
            slots_of([torch.zeros(shape, dtype=dtype).to(place) for _ in range(2)], starts.to(place), 12)
            for place in ("cpu", device)
        )
        expected = place_heads(heads, angles, norms, reference, 0, is_interleaved)
        found = place_heads_triton(*to((heads, angles, norms), device), slots, 0, is_interleaved)
        for ours, theirs in zip((*found, *slots.layers[0].buffers), (*expected, *reference.layers[0].buffers)):
            torch.testing.assert_close(ours.cpu(), theirs, **CLOSE[dtype])
        for buffer in reference.layers[0].buffers:
            assert buffer[:2, :, 3:12].any()
            assert not buffer[2].any()
        # Values pass as they are.
        assert torch.equal(slots.layers[0].values.cpu(), reference.layers[0].buffers[1])


def test_gates(device):
    for kind, name, is_packed, dtype in ((SILU, "silu", True, BF16), (GELU_TANH, "gelu_pytorch_tanh", False, F32)):
        gate, up = (drawn(2, 3, 2 * 72, dtype=dtype) * 3).chunk(2, -1)
        gate, up = (gate, up) if is_packed else (gate.contiguous(), up.contiguous())
        found = gated_triton(gate.to(device), up.to(device), kind)
        torch.testing.assert_close(found.cpu(), ACT2FN[name](gate) * up, **CLOSE[dtype])


def test_layers_run_in_torch_where_gradients_are_needed_or_dtypes_mixed(monkeypatch):
    """Kernels have no gradients; the choice is made before anything is launched."""
    monkeypatch.setattr(_triton, "CHOICE", "triton")
    monkeypatch.setattr(_triton, "IS_INTERPRETED", True)
    monkeypatch.setattr(_triton, "HAS_TRITON", True)
    stream, norm = drawn(1, 2, 8).requires_grad_(), RMSNorm(8, 1e-5)
    assert not _triton.fuses(stream.detach())
    GatedMLP(8, 8)(norm(stream)).sum().backward()
    assert stream.grad.any()
    assert norm.weight.grad.any()
    with torch.no_grad():
        assert _triton.fuses(stream)
        assert not _triton.fuses(stream.double())
        _, mixed = bind_sum(Way.KERNELS, torch.half, None, None, Normed(norm.norm))(stream.half(), stream.half())
    assert mixed.dtype == torch.float32


# Angles of rotary embeddings


# Rows of a wider tensor, up to the end of the longest texts, and rows that share their positions.
OWN = torch.tensor([[0, 1, 5, 9], [77, 4096, 131071, 9], [1000003, 2, 3, 9]])[:, :3]
SHARED = torch.tensor([[3, 70]]).expand(4, -1)


def frequencies_of(numbers: int) -> torch.Tensor:
    return 1 / 10000.0 ** (torch.arange(numbers) / numbers)


@pytest.mark.parametrize(
    ("positions", "numbers", "dtype", "factor", "is_interleaved", "stored"),
    [
        (OWN, 48, F32, 0.7, False, F32),
        (SHARED, 12, BF16, 1.0, True, BF16),
        *in_full((OWN, 64, BF16, 1.0, False, F32), (OWN, 64, BF16, 1.0, True, F32)),
        *in_full((OWN, 1, F16, 1.0, True, F32), (OWN, 8, F32, 1.0, False, BF16)),
    ],
)
def test_rotary_angles(device, positions, numbers, dtype, factor, is_interleaved, stored):
    frequencies = frequencies_of(numbers).to(stored)
    expected = rotary_angles(positions, frequencies, factor, dtype, is_interleaved)
    # Expanded there: a copy to another device would have rows of its own.
    there = positions[:1].to(device).expand(4, -1) if positions is SHARED else positions.to(device)
    found = rotary_angles_triton(there, frequencies.to(device), factor, dtype, is_interleaved)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.shape) == (dtype, (*positions.shape, 1, 2 * numbers))
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=1e-6 if dtype == F32 else 4e-3)


@every_gpu
@pytest.mark.parametrize("size", [128, *when_slow(64, 256)])
def test_kernels_compile(compile_for, size):
    dtype = BF16
    stream, inner = torch.empty(2, 16, 4096, dtype=dtype), torch.empty(2, 16, 2 * 14336, dtype=dtype)
    norm, sandwich = (Norm(torch.empty(4096, dtype=dtype), 1e-5, *form) for form in ((), (1.0, True)))
    head_norms = (Norm(torch.empty(size, dtype=dtype), 1e-6),) * 2
    heads = tuple(torch.empty(2, 16, count, size, dtype=dtype) for count in (32, 8, 8))
    buffers = [torch.empty(4, 8, 1024, size, dtype=dtype) for _ in range(2)]
    slots = slots_of(buffers, torch.tensor([3, 5]), 1024)
    angles = (torch.empty(2, 16, 1, size, dtype=dtype),) * 2
    with compile_for() as kernels:
        add_norm_triton(stream, None, None, norm)
        add_norm_triton(stream, stream, None, norm)
        add_norm_triton(stream, stream, sandwich, sandwich)
        add_norm_triton(stream, stream, Scale(0.22), CENTERED)
        place_heads_triton(heads, angles, head_norms, slots, 0, False)
        place_heads_triton(heads, angles, None, slots, 0, True)
        for kind in (SILU, GELU_TANH):
            gated_triton(*inner.chunk(2, -1), kind)
        rotary_angles_triton(torch.zeros(1, 16, dtype=torch.long), frequencies_of(64), 1.0, dtype, False)
    assert len(kernels) == 9
    if "ptx" in kernels[0].asm:
        # Sixteen bytes at a time.
        assert all("ld.global.v4.b32" in kernel.asm["ptx"] for kernel in kernels[:4])
        # Far from zero the units of a GPU that approximate are wrong; exact ones need many digits of 2 / pi.
        ptx = kernels[-1].asm["ptx"]
        assert "cos.approx" not in ptx
        assert "sin.approx" not in ptx
        assert "i2opi" in ptx
