"""Angles of rotary embeddings: the kernel against torch."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.kernels.angles import rotary_angles
from tests.helpers import layer_references as references
from tests.helpers.levels import in_full
from tests.kernels.conftest import every_nvidia


# Rows of a wider tensor, up to the end of the longest texts, and rows that share their positions.
OWN = torch.tensor([[0, 1, 5, 9], [77, 4096, 131071, 9], [1000003, 2, 3, 9]])[:, :3]
SHARED = torch.tensor([[3, 70]]).expand(4, -1)


def frequencies_of(numbers: int) -> torch.Tensor:
    return 1 / 10000.0 ** (torch.arange(numbers) / numbers)


@pytest.mark.parametrize(
    ("positions", "numbers", "dtype", "factor", "is_interleaved", "stored"),
    [
        (OWN, 48, torch.float32, 0.7, False, torch.float32),
        (SHARED, 12, torch.bfloat16, 1.0, True, torch.bfloat16),
        *in_full(*((OWN, 64, torch.bfloat16, 1.0, is_interleaved, torch.float32) for is_interleaved in (False, True))),
        *in_full(
            (OWN, 1, torch.float16, 1.0, True, torch.float32), (OWN, 8, torch.float32, 1.0, False, torch.bfloat16)
        ),
    ],
)
def test_kernel(device, positions, numbers, dtype, factor, is_interleaved, stored):
    frequencies = frequencies_of(numbers).to(stored)
    expected = references.rotary_angles(positions, frequencies, factor, dtype, is_interleaved)
    # Expanded there: a copy to another device would have rows of its own.
    there = positions[:1].to(device).expand(4, -1) if positions is SHARED else positions.to(device)
    found = rotary_angles(there, frequencies.to(device), factor, dtype, is_interleaved)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.shape) == (dtype, (*positions.shape, 1, 2 * numbers))
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=1e-6 if dtype == torch.float32 else 4e-3)


@every_nvidia
@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_full(torch.float32)], ids=str)
def test_kernel_compiles(compile_for, dtype):
    with compile_for() as kernels:
        rotary_angles(torch.zeros(1, 16, dtype=torch.long), frequencies_of(64), 1.0, dtype, False)
    assert len(kernels) == 1
    # Far from zero the units of a GPU that approximate are wrong; exact ones need many digits of 2 / pi.
    ptx = kernels[0].asm["ptx"]
    assert "cos.approx" not in ptx
    assert "sin.approx" not in ptx
    assert "i2opi" in ptx
