"""Philox numbers: the reference has numpy's bits, and the kernel those of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.kernels.philox import _uniforms_torch, _uniforms_triton
from tests.kernels.conftest import every_gpu


WORDS = st.integers(0, 2**64 - 1)


@st.composite
def streams(draw):
    rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    firsts = [draw(st.integers(0, 2**40)) for _ in range(rows)]
    seeds, numbers = ([draw(WORDS) for _ in range(rows)] for _ in range(2))
    return seeds, numbers, firsts, width, draw(st.integers(0, 2)), draw(st.integers(0, 1))


def arguments(seeds, numbers, firsts, width, purpose, space):
    words = (torch.from_numpy(np.array(values, dtype=np.uint64).astype(np.int64)) for values in (seeds, numbers))
    return *words, torch.tensor(firsts)[:, None] + torch.arange(width), purpose, space


def by_numpy(seeds, numbers, firsts, width, purpose, space):
    lines = []
    for seed, number, first in zip(seeds, numbers, firsts):
        counter = np.array([first // 4, space, number, 0], dtype=np.uint64)
        generator = np.random.Generator(
            np.random.Philox(key=np.array([seed, purpose], dtype=np.uint64), counter=counter)
        )
        lines.append(generator.random(first % 4 + width)[first % 4 :])
    return torch.from_numpy(np.minimum(np.stack(lines), 1 - 2.0**-24))


@given(stream=streams())
def test_reference(stream):
    assert torch.equal(_uniforms_torch(*arguments(*stream)), by_numpy(*stream))


@pytest.mark.smoke
def test_many_numbers(device):
    """More than one program has them, of indices in any order."""
    seeds, numbers = torch.tensor([3, -1], device=device), torch.tensor([0, 5], device=device)
    indices = torch.randperm(300, generator=torch.Generator().manual_seed(0)).expand(2, -1).to(device)
    found = _uniforms_triton(seeds, numbers, indices, 1, 1).cpu()
    assert torch.equal(found, _uniforms_torch(seeds.cpu(), numbers.cpu(), indices.cpu(), 1, 1))
    assert found.unique().numel() == 600


@every_gpu
def test_kernel_compiles(compile_for):
    with compile_for() as kernels:
        rows = torch.zeros(8, dtype=torch.long)
        _uniforms_triton(rows, rows, torch.zeros(8, 16, dtype=torch.long), 0, 0)
    assert len(kernels) == 1
