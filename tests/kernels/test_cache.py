"""Writing and moving slots: the kernels leave the same buffers behind as the references, bit for bit."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.kernels.cache import WritePlan, _move_torch, _move_triton, _write_torch, _write_triton
from tests.helpers.levels import in_full
from tests.kernels.conftest import every_nvidia


def numbered(*shape, dtype=torch.float32, first=0.0):
    """Another number in every place, as far as the dtype can tell them apart."""
    return (torch.arange(torch.Size(shape).numel()).view(shape) + first).to(dtype)


def assert_same_bits(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("size", "value_size", "nodes", "dtype"),
    [
        pytest.param(24, 5, 19, torch.bfloat16, marks=pytest.mark.smoke),
        *in_full((16, 16, 1, torch.float32), (128, 64, 19, torch.float16), (128, 64, 1, torch.float64)),
    ],
    ids=str,
)
def test_write_kernel(size, value_size, nodes, dtype, device):
    rows, heads, capacity = 3, 2, 40
    # The layout that models hand over, and one that is not even dense in its last dimension.
    states = [
        numbered(rows, nodes, heads, size, dtype=dtype).transpose(1, 2),
        numbered(rows, heads, value_size, nodes, dtype=dtype, first=7).transpose(2, 3),
    ]
    # Rows with starts of their own or a common one; one buffer, or two.
    for plan in (WritePlan(capacity, None, [0, 21, 5], nodes), WritePlan(capacity, 5, [5, 5, 5], nodes)):
        for new in (states, states[:1]):
            buffers = [torch.zeros(rows + 1, heads, capacity, part.shape[-1], dtype=dtype) for part in new]
            written = [buffer.to(device) for buffer in buffers]
            _write_triton(written, [part.to(device) for part in new], plan)
            _write_torch(buffers, new, plan)
            assert_same_bits(written, buffers)


@pytest.mark.parametrize(
    ("path", "dtype"),
    [
        ([[0, 4, 4], [0, 1, 6]], torch.float32),
        ([[0, *range(3, 15)], [0, *range(1, 13)]], torch.bfloat16),
        *in_full(([[0, 1, 2], [0, 1, 2]], torch.float16), ([[0, 2, 3], [0, 3, 4]], torch.float64)),
    ],
    ids=str,
)
def test_move_kernel(path, dtype, device):
    """Layers of different shapes; each group of equal ones is one launch."""
    shapes = [(3, 2, 30, 16), (3, 2, 30, 16), (3, 1, 30, 72), (3, 2, 30, 16), (3, 2, 25, 16)]
    buffers = [numbered(*shape, dtype=dtype, first=100 * index) for index, shape in enumerate(shapes)]
    # What is no number is copied all the same.
    buffers[0][0, 0, 5] = torch.nan
    starts, path = torch.tensor([2, 9]), torch.tensor(path)
    moved = [buffer.to(device) for buffer in buffers]
    _move_triton(moved, starts.to(device), path.to(device))
    _move_torch(buffers, starts, path)
    assert_same_bits(moved, buffers)


@every_nvidia
def test_kernels_compile(compile_for):
    buffers = [torch.empty(4, 8, 1024, 128, dtype=torch.bfloat16) for _ in range(2)]
    states = [torch.empty(4, 16, 8, 128, dtype=torch.bfloat16).transpose(1, 2) for _ in buffers]
    with compile_for() as kernels:
        _write_triton(buffers, states, WritePlan(1024, None, [5, 6, 7, 8], 16))
        _move_triton(buffers * 32, torch.zeros(4, dtype=torch.long), torch.zeros(4, 16, dtype=torch.long))
    # One launch for a layer's keys and values, and one for the path in all layers.
    assert len(kernels) == 2
    for kernel in kernels:
        # Sixteen bytes at a time.
        assert "ld.global.v4.b32" in kernel.asm["ptx"]
        assert "st.global.v4.b32" in kernel.asm["ptx"]
    move = kernels[1].asm["ptx"]
    # All threads have read before one writes.
    assert move.rindex("ld.global") < move.index("bar.sync") < move.index("st.global")
