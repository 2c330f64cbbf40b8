"""Kernels that begin before the ones in front of them have ended: compiled ahead of time, they wait before they read.

That they run, and what it gains, takes a GPU to see (`benchmarks/gpu.py`).
"""

from __future__ import annotations

import re

import pytest
import torch

from hf_specdec.kernels import launching, projections, tree_attention
from hf_specdec.kernels.gates import SILU, gated_triton
from hf_specdec.kernels.heads import place_heads_triton
from hf_specdec.kernels.norms import Norm, add_norm_triton
from hf_specdec.kernels.tiles import Gpu
from hf_specdec.kernels.tree_attention import SlotTree, tree_attention_triton
from tests.helpers.layer_references import slots_of
from tests.helpers.levels import when_slow
from tests.kernels.conftest import SHARED_MEMORY


TRIGGER, WAIT, FETCH = "griddepcontrol.launch_dependents", "griddepcontrol.wait", "prefetch.global.L2"
MEMORY = re.compile(r"\b(ld|st|atom|red)\.(\w+\.)*?(global|acquire|release|gpu)|cp\.async")


def launch_a_layer() -> None:
    """All kernels of a layer over 16 tokens, with 8 heads of keys and values."""
    draw = {"dtype": torch.bfloat16}
    hidden, rows = torch.empty(1, 16, 4096, **draw), torch.zeros(1, dtype=torch.long)
    weights = [(torch.empty(width, 4096, **draw), None) for width in (4096, 1024, 1024)]
    heads = tuple(torch.empty(1, 16, count, 128, **draw) for count in (32, 8, 8))
    buffers = [torch.empty(1, 8, 1024, 128, **draw) for _ in range(2)]
    tree = SlotTree(rows, rows, rows.expand(1, 16, 1), rows.expand(16))
    add_norm_triton(hidden, hidden, None, Norm(torch.empty(4096, **draw), 1e-5))
    projections.products_triton(hidden, weights)
    place_heads_triton(heads, (torch.empty(1, 16, 1, 128, **draw),) * 2, None, slots_of(buffers, rows, 1024), 0, False)
    tree_attention_triton(heads[0].transpose(1, 2), *buffers, tree, num_splits=8)
    stream, squares = projections.added_product_triton(hidden, weights[0], hidden)
    projections.products_triton(projections.Unnormed(stream, squares, Norm(torch.empty(4096, **draw), 1e-5)), weights)
    projections.gated_product_triton(hidden, *weights[1:], SILU)
    gated_triton(hidden, hidden, SILU)


@pytest.mark.parametrize("compile_for", [90, *when_slow(100, 120)], indirect=True)
def test_nothing_is_touched_before_the_wait(compile_for, request, monkeypatch):
    gpu = Gpu(132, SHARED_MEMORY[request.node.callspec.params["compile_for"]])
    for module in (projections, tree_attention):
        monkeypatch.setattr(module, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(launching, "launches_early", lambda tensor: True)
    with compile_for() as kernels:
        launch_a_layer()
    assert len(kernels) == 8
    for kernel in kernels:
        assert kernel.metadata.launch_pdl
        ptx = kernel.asm["ptx"]
        assert ptx.count(TRIGGER) == ptx.count(WAIT) == 1
        before, after = ptx.split(WAIT)
        # Programs of products leave no room for those of the next kernel.
        assert (TRIGGER in after) == (kernel.name == "_product_kernel")
        assert not MEMORY.search(before), kernel.name
        assert MEMORY.search(after)
        # Weights, which no kernel writes, are on their way before.
        assert (FETCH in before) == (kernel.name == "_product_kernel")
        assert FETCH not in after
