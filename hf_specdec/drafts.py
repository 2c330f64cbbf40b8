"""Drafts as trees: the tokens proposed for a batch in one cycle, and who follows whom.

A chain is the tree without branches, so everything behind a drafter (cache, masks, acceptance) speaks of trees only.

Shapes: B rows of the batch, N draft nodes of a row, T = N + 1 verified nodes (node 0 is the anchor), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch


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
    """

    tokens: torch.LongTensor
    parents: torch.LongTensor
    num_nodes: torch.LongTensor
    probs: torch.FloatTensor | None = None
    node_lists: list[list[int]] | None = field(default=None, repr=False)
    is_chain: bool = False

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
    def from_lists(cls, drafts: list[list[int]], device: torch.device | str = "cpu") -> DraftTree:
        """Chains of different lengths from one list of tokens per row."""
        size = max(map(len, drafts), default=0)
        padded = [draft + [0] * (size - len(draft)) for draft in drafts]
        tokens = torch.tensor(padded, dtype=torch.long, device=device).view(len(drafts), size)
        return cls.chain(tokens, torch.tensor([len(d) for d in drafts], device=device), node_lists=drafts)

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
        if self.parents.dim() == 1:
            return static_topology(tuple(self.parents.tolist()), self.tokens.device)
        return TreeTopology.from_parents(self.parents)

    def token_lists(self) -> list[list[int]]:
        """The valid tokens of each row as lists of ints (one transfer to the host if the drafter gave none)."""
        if self.node_lists is None:
            counts = self.num_nodes.tolist()
            self.node_lists = [row[:count] for row, count in zip(self.tokens.tolist(), counts)]
        return self.node_lists

    def parent_lists(self) -> list[list[int]]:
        """The parents of each row's valid nodes as lists of ints."""
        counts = [len(tokens) for tokens in self.token_lists()]
        parents = self.parents.tolist()
        if self.parents.dim() == 1:
            return [parents[:count] for count in counts]
        return [row[:count] for row, count in zip(parents, counts)]


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
        anchor = draft_parents.new_zeros((*draft_parents.shape[:-1], 1))
        parents = torch.cat([anchor, draft_parents + 1], dim=-1)
        size = parents.shape[-1]
        one_step = torch.nn.functional.one_hot(parents, size).float()
        reach = (one_step + torch.eye(size, device=parents.device)).clamp_(max=1.0)
        # Squaring doubles the number of generations reached.
        for _ in range(max(size - 1, 1).bit_length()):
            reach = (reach @ reach).clamp_(max=1.0)
        ancestors = reach > 0
        return cls(parents, ancestors.sum(-1) - 1, ancestors, size - 1)


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
    max_depth = int(topology.depths.max())
    return TreeTopology(topology.parents, topology.depths, topology.ancestors, max_depth)
