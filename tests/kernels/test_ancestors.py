"""Ancestors from parents: the kernel says what the topology of a tree says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.drafts import TreeTopology
from hf_specdec.kernels.ancestors import _grow_torch, _grow_triton
from hf_specdec.kernels.tree_attention import MAX_NODES, pack_words
from tests.kernels.conftest import every_gpu


@st.composite
def parents_of_rows(draw):
    size = draw(st.one_of(st.integers(0, 12), st.just(MAX_NODES - 1)))
    rows = [[draw(st.integers(-1, node - 1)) for node in range(size)] for _ in range(draw(st.integers(1, 3)))]
    return torch.tensor(rows, dtype=torch.long).view(len(rows), size)


def check(grown, parents):
    topology = TreeTopology.from_parents(parents)
    assert torch.equal(grown[0].cpu()[..., None], pack_words(topology.ancestors))
    assert torch.equal(grown[1].cpu(), topology.depths)


@given(parents_of_rows())
def test_reference(parents):
    check(_grow_torch(parents), parents)


@pytest.mark.smoke
def test_kernel_with_the_longest_chain_and_a_bush(device):
    """All 64 bits."""
    size = MAX_NODES - 1
    parents = torch.stack([torch.arange(-1, size - 1), torch.arange(size) // 3 - 1])
    check(_grow_triton(parents.to(device)), parents)


@every_gpu
@pytest.mark.parametrize("size", [0, MAX_NODES - 1])
def test_kernel_compiles(compile_for, size):
    with compile_for():
        _grow_triton(torch.full((2, size), -1))
