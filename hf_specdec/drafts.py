"""Drafts as trees: the tokens proposed for a batch in one cycle, and who follows whom.

A chain is the tree without branches, so everything behind a drafter (cache, masks, acceptance) speaks of trees only.

Shapes: B rows of the batch, N draft nodes of a row, T = N + 1 verified nodes (node 0 is the anchor), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F


if TYPE_CHECKING:
    from .token_trees import TokenTree


@dataclass
class DraftTree:
    """The drafts of one cycle.

    Args:
        tokens (`torch.LongTensor` of shape `(B, N)`):
            Draft tokens, parents before their children. Columns from `num_nodes` on are padding.
        parents (`torch.LongTensor` of shape `(N,)` or `(B, N)`):
            Index of each node's parent, -1 for a child of the anchor. `parents[i] < i`.
        num_nodes (`torch.LongTensor` of shape `(B,)`):
            Valid nodes of each row, 0 to N.
        probs (`torch.FloatTensor` of shape `(B, N, V)`, *optional*):
            The distribution each node was sampled from, in the order in which siblings were drawn. `None` if the
            draft was chosen deterministically (a point mass on the drafted token).
        node_lists (`list[list[int]]`, *optional*):
            The valid tokens of each row on the host, where the drafter has them already.
        is_chain (`bool`): Node i is the child of node i - 1.
        shape (`TokenTree`, *optional*): The static tree that all rows share; what follows from it is computed once.
        node_parents (`list[list[int]]`, *optional*): The parents of the valid nodes on the host, like `node_lists`.
    """

    tokens: torch.LongTensor
    parents: torch.LongTensor
    num_nodes: torch.LongTensor
    probs: torch.FloatTensor | None = None
    node_lists: list[list[int]] | None = field(default=None, repr=False)
    is_chain: bool = False
    shape: TokenTree | None = field(default=None, repr=False)
    node_parents: list[list[int]] | None = field(default=None, repr=False)

    @classmethod
    def chain(
        cls,
        tokens: torch.LongTensor,
        num_nodes: torch.LongTensor | None = None,
        probs: torch.FloatTensor | None = None,
        node_lists: list[list[int]] | None = None,
    ) -> DraftTree:
        """Drafts without branches from tokens of shape `(B, N)`; `num_nodes=None` means that all N are valid."""
        batch_size, size = tokens.shape
        if num_nodes is None:
            num_nodes = torch.full((batch_size,), size, dtype=torch.long, device=tokens.device)
        return cls(tokens, chain_parents(size, tokens.device), num_nodes, probs, node_lists, is_chain=True)

    @classmethod
    def from_lists(
        cls,
        drafts: list[list[int]],
        device: torch.device | str = "cpu",
        parents: list[list[int]] | None = None,
    ) -> DraftTree:
        """Chains of different lengths from one list of tokens per row, or with their parents trees of any shapes.

        Args:
            drafts (`list[list[int]]`): Each row's tokens.
            device (`torch.device`): Where the tensors go.
            parents (`list[list[int]]`, *optional*): Each token's parent, -1 for a child of the anchor. Where no row
                branches, the drafts are chains all the same, which cost less to verify.
        """
        size = max(map(len, drafts), default=0)
        tokens = torch.tensor(_padded(drafts, size, 0), dtype=torch.long, device=device).view(len(drafts), size)
        num_nodes = torch.tensor([len(draft) for draft in drafts], device=device)
        if parents is None or all(row == list(range(-1, len(row) - 1)) for row in parents):
            return cls.chain(tokens, num_nodes, node_lists=drafts)
        # Rows that share their parents, as a single one does, share a topology and its masks.
        shared = all(row == parents[0] for row in parents)
        padded = parents[0] if shared else _padded(parents, size, -1)
        return cls(tokens, torch.tensor(padded, device=device), num_nodes, node_lists=drafts, node_parents=parents)

    @classmethod
    def empty(cls, batch_size: int, device: torch.device | str = "cpu") -> DraftTree:
        """No drafts: the cycle verifies the anchors alone, which is plain decoding."""
        return cls.from_lists([[] for _ in range(batch_size)], device)

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def size(self) -> int:
        """N, the padded number of nodes of a row."""
        return self.tokens.shape[1]

    @cached_property
    def topology(self) -> TreeTopology:
        """Depths and ancestors of the verified nodes, the anchor included."""
        if self.is_chain:
            return chain_topology(self.size, self.tokens.device)
        if self.shape is not None:
            return self.shape.topology(self.tokens.device)
        if self.parents.dim() == 1:
            parents = self.parents.tolist() if self.node_parents is None else self.node_parents[0]
            return static_topology(tuple(parents), self.tokens.device)
        return TreeTopology.from_parents(self.parents)

    def token_lists(self) -> list[list[int]]:
        """The valid tokens of each row as lists of ints (one transfer to the host if the drafter gave none)."""
        if self.node_lists is None:
            counts = self.num_nodes.tolist()
            self.node_lists = [row[:count] for row, count in zip(self.tokens.tolist(), counts)]
        return self.node_lists

    def parent_lists(self) -> list[list[int]]:
        """The parents of each row's valid nodes as lists of ints."""
        if self.node_parents is not None:
            return self.node_parents
        counts = [len(tokens) for tokens in self.token_lists()]
        parents = self.parents.tolist() if self.shape is None else list(self.shape.parents)
        if self.parents.dim() == 1:
            return [parents[:count] for count in counts]
        return [row[:count] for row, count in zip(parents, counts)]

    def max_depths(self) -> list[int]:
        """How deep each row's draft is."""
        if self.is_chain:
            return list(map(len, self.token_lists()))
        if self.shape is not None:
            # The deepest nodes come last.
            depths = (0, *self.shape.depths)
            return [depths[len(tokens)] for tokens in self.token_lists()]
        return [max(node_depths(parents), default=0) for parents in self.parent_lists()]


@dataclass(frozen=True, eq=False)
class TreeTopology:
    """What follows from the parents alone. Node 0 is the anchor, node i + 1 is draft node i.

    Attributes:
        parents (`torch.LongTensor` of shape `(T,)` or `(B, T)`): Parent of each verified node; the anchor's is itself.
        depths (`torch.LongTensor` of shape `(T,)` or `(B, T)`): Edges to the anchor.
        ancestors (`torch.BoolTensor` of shape `(T, T)` or `(B, T, T)`): `[i, j]`: j is i or one of its ancestors.
        max_depth (`int`): Upper bound of the depths.
        is_chain (`bool`): Node i follows node i - 1.
    """

    parents: torch.LongTensor
    depths: torch.LongTensor
    ancestors: torch.BoolTensor
    max_depth: int
    is_chain: bool = False

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
        return cls(parents, reach.sum(-1).long() - 1, reach.bool(), size - 1)


def node_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each draft node, from parents that come before their children (-1: the anchor, of depth 0)."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def _padded(rows: list[list[int]], size: int, filler: int) -> list[list[int]]:
    return [row + [filler] * (size - len(row)) for row in rows]


@lru_cache(maxsize=256)
def chain_parents(size: int, device: torch.device) -> torch.LongTensor:
    """Parents of a chain of `size` draft nodes: -1, 0, 1, ..."""
    return torch.arange(-1, size - 1, device=device)


@lru_cache(maxsize=256)
def chain_topology(size: int, device: torch.device) -> TreeTopology:
    depths = torch.arange(size + 1, device=device)
    ancestors = depths[None, :] <= depths[:, None]
    return TreeTopology((depths - 1).clamp_(min=0), depths, ancestors, size, is_chain=True)


@lru_cache(maxsize=256)
def static_topology(parents: tuple[int, ...], device: torch.device) -> TreeTopology:
    topology = TreeTopology.from_parents(torch.tensor(parents, dtype=torch.long, device=device))
    return replace(topology, max_depth=max(node_depths(parents), default=0))
