"""Ancestors of the nodes of draft trees, from their parents alone, inside of captured forwards.

    bits[i] = bits[parent[i]] | 1 << i          depth[i] = depth[parent[i]] + 1

Shapes: R rows, N draft nodes, T = N + 1 verified nodes (node 0 is the anchor, node i + 1 is draft node i), at most 64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ._triton import tl, triton, use_triton


def grow_ancestors(parents: torch.LongTensor) -> tuple[torch.LongTensor, torch.LongTensor]:
    """Ancestors as bits, and depths, each `(R, T)`, from parents `(R, N)`, -1 for the anchor's children."""
    run = _grow_triton if use_triton(parents) else _grow_torch
    return run(parents)


def _grow_torch(parents):
    links = F.pad(parents + 1, (1, 0))
    size = links.shape[1]
    nodes = torch.arange(size, device=links.device)
    bits, depths = (1 << nodes).expand_as(links), (nodes > 0).long().expand_as(links)
    # The way that has been gone is doubled in each step.
    for _ in range((size - 1).bit_length()):
        bits, depths = bits | bits.gather(1, links), depths + depths.gather(1, links)
        links = links.gather(1, links)
    return bits, depths


@triton.jit
def _grow_kernel(
    parents_ptr,  # [R, N]
    bits_ptr,  # [R, T], written
    depths_ptr,  # [R, T], written
    N,
    BLOCK_T: tl.constexpr,
):
    # A program: one row, whose nodes all go up to the anchor at once.
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_T)
    node = tl.where(index <= N, index, 0)
    one = tl.full([BLOCK_T], 1, tl.int64)
    bits = one << node.to(tl.int64)
    depths = tl.zeros([BLOCK_T], tl.int64)
    while tl.max(node, axis=0) > 0:
        depths += (node > 0).to(tl.int64)
        node = tl.load(parents_ptr + row * N + node - 1, mask=node > 0, other=-1).to(tl.int32) + 1
        bits = bits | (one << node.to(tl.int64))
    tl.store(bits_ptr + row * (N + 1) + index, bits, mask=index <= N)
    tl.store(depths_ptr + row * (N + 1) + index, depths, mask=index <= N)


def _grow_triton(parents):
    rows, size = parents.shape
    bits, depths = (parents.new_empty((rows, size + 1)) for _ in range(2))
    with torch.cuda.device_of(parents):
        _grow_kernel[(rows,)](
            parents.contiguous(), bits, depths, size, BLOCK_T=triton.next_power_of_2(size + 1), num_warps=1
        )
    return bits, depths
