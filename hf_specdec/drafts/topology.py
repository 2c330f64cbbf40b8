"""Topology of a draft: depths and ancestors of its nodes, which follow from their parents alone.

Shapes: B rows of the batch, N draft nodes of a row, T = N + 1 verified nodes (node 0 is the anchor).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ..transfers import kept_on_device, upload


@dataclass(frozen=True, eq=False)
class TreeTopology:
    """Depths and ancestors of verified nodes: node 0 is the anchor, node i + 1 is draft node i."""

    draft_parents: torch.LongTensor  # (N,) or (B, N): those of [`DraftTree`]
    parents: torch.LongTensor  # (T,) or (B, T); the anchor's is itself
    depths: torch.LongTensor  # (T,) or (B, T): edges to the anchor
    ancestors: torch.BoolTensor  # (T, T) or (B, T, T); [i, j]: j is i or one of its ancestors
    max_depth: int  # upper bound of the depths
    is_chain: bool = False  # node i follows node i - 1

    @classmethod
    def from_parents(cls, draft_parents: torch.LongTensor) -> TreeTopology:
        """The topology of draft parents of shape `(N,)` or `(B, N)` (-1: the anchor), without a loop over nodes."""
        parents = F.pad(draft_parents + 1, (1, 0))
        size = parents.shape[-1]
        # The dtype is named because the solver has no 16-bit version, and the user's default may be one.
        itself = torch.eye(size, dtype=torch.float32, device=parents.device)
        # A node reaches itself and what its parent reaches, and parents come first: a triangular system. The solver
        # takes the diagonal to be 1, whatever it holds.
        step = itself.new_zeros((*parents.shape, size)).scatter_(-1, parents[..., None], -1.0)
        reach = torch.linalg.solve_triangular(step, itself.expand_as(step), upper=False, unitriangular=True)
        return cls(draft_parents, parents, reach.sum(-1).long() - 1, reach.bool(), size - 1)


def renumbered(parents: torch.LongTensor, nodes: torch.LongTensor, size: int) -> torch.LongTensor:
    """Parents `(B, N)` of nodes `(B, N)` picked out of `size`, the anchor -1, in the new numbers of these nodes."""
    # Where each node has gone; entry 0 is the anchor.
    places = nodes.new_full((len(nodes), size + 1), -1)
    places.scatter_(1, nodes + 1, torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes))
    return places.gather(1, parents + 1)


def node_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each draft node, from parents that come before their children (-1: the anchor, of depth 0)."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


@kept_on_device
def chain_topology(size: int, device: torch.device) -> TreeTopology:
    depths = torch.arange(size + 1, device=device)
    parents, ancestors = (depths - 1).clamp_(min=0), depths[None, :] <= depths[:, None]
    # Graphs read them where they are, from the beginning of their memory on.
    draft_parents = torch.arange(-1, size - 1, device=device)
    return TreeTopology(draft_parents, parents, depths, ancestors, size, is_chain=True)


@kept_on_device
def static_topology(parents: tuple[int, ...], device: torch.device) -> TreeTopology:
    topology = TreeTopology.from_parents(upload(parents, device))
    return replace(topology, max_depth=max(node_depths(parents), default=0))
