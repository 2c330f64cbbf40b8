"""Angles of rotary embeddings: the kernel against torch."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.kernels.angles import rotary_angles
from tests.helpers import layer_references as references


def frequencies_of(numbers: int) -> torch.Tensor:
    return 1 / 10000.0 ** (torch.arange(numbers) / numbers)


@pytest.mark.parametrize("is_interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize(
    ("numbers", "dtype", "factor"),
    [(64, torch.bfloat16, 1.0), (12, torch.float32, 1.0), (1, torch.float16, 1.0), (48, torch.float32, 0.7)],
)
def test_kernel(device, numbers, dtype, factor, is_interleaved):
    # As rows of a wider tensor, up to the end of the longest texts.
    positions = torch.tensor([[0, 1, 5, 9], [77, 4096, 131071, 9], [1000003, 2, 3, 9]])[:, :3]
    given = frequencies_of(numbers), factor, dtype, is_interleaved
    expected = references.rotary_angles(positions, *given)
    found = rotary_angles(positions.to(device), given[0].to(device), *given[1:])
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.shape) == (dtype, (3, 3, 1, 2 * numbers))
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=1e-6 if dtype == torch.float32 else 4e-3)


def test_positions_that_all_rows_share(device):
    positions = torch.tensor([[3, 70]]).expand(4, -1)
    given = frequencies_of(8), 1.0, torch.float32, False
    expected = references.rotary_angles(positions, *given)
    found = rotary_angles(positions.to(device).expand(4, -1), given[0].to(device), *given[1:])
    assert all(torch.allclose(ours.cpu(), theirs, rtol=0, atol=1e-6) for ours, theirs in zip(found, expected))


def test_frequencies_in_16_bits(device):
    positions, frequencies = torch.tensor([[3, 70]]), frequencies_of(8).bfloat16()
    expected = references.rotary_angles(positions, frequencies, 1.0, torch.float32, False)
    found = rotary_angles(positions.to(device), frequencies.to(device), 1.0, torch.float32, False)
    assert all(torch.allclose(ours.cpu(), theirs, rtol=0, atol=1e-6) for ours, theirs in zip(found, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_kernel_compiles(compile_for, dtype):
    with compile_for() as kernels:
        rotary_angles(torch.zeros(1, 16, dtype=torch.long), frequencies_of(64), 1.0, dtype, False)
    assert len(kernels) == 1
    # Far from zero the units of a GPU that approximate are wrong; exact ones need many digits of 2 / pi.
    ptx = kernels[0].asm["ptx"]
    assert "cos.approx" not in ptx
    assert "sin.approx" not in ptx
    assert "i2opi" in ptx
