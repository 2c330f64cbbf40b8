"""Drafts as trees: the tokens proposed for a batch in one cycle, and who follows whom.

A chain is the tree without branches, so everything after a drafter (cache, masks, acceptance) speaks of trees only.

What follows from the parents of the nodes alone is a draft's topology.

Shapes: B rows of the batch, N draft nodes of a row, T = N + 1 verified nodes (node 0 is the anchor), V vocabulary.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F

from ..threads import cached_property
from ..transfers import kept_on_device, kept_tensor, read_together, upload, upload_together


if TYPE_CHECKING:
    from .static import TokenTree

Number = TypeVar("Number", int, float)


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


@dataclass
class DraftTree:
    """The drafts of one cycle.

    Args:
        tokens (`torch.LongTensor` of shape `(B, N)`): Draft tokens, parents before their children. Columns from
            `num_nodes` on are padding.
        parents (`torch.LongTensor` of shape `(N,)` or `(B, N)`): Index of each node's parent, -1 for a child of the
            anchor. `parents[i] < i`.
        num_nodes (`torch.LongTensor` of shape `(B,)`, or `list[int]`): Valid nodes of each row, 0 to N; a list where
            the host knows them. The attribute is a tensor.
        probs (`torch.FloatTensor` of shape `(B, N, V)`, *optional*): The distribution each node was sampled from, in
            the order in which siblings were drawn. `None` if the draft was chosen deterministically (a point mass on
            the drafted token).
        node_lists (`list[list[int]]`, *optional*): The valid tokens of each row, where the host has them already.
        is_chain (`bool`): Node i is the child of node i - 1.
        shape (`TokenTree`, *optional*): The static tree that all rows share; what follows from it is computed once.
        node_parents (`list[list[int]]`, *optional*): The parents of the valid nodes on the host, like `node_lists`.
        path_log_probs (`torch.FloatTensor` of shape `(B, N)`, *optional*): Log-probability of the path to each node,
            -inf for padding, by which a smaller tree can be cut out of this one. Of a chain: that all of the path is
            accepted, as the drafter foresees it from the tokens before each node.

    Attributes:
        batch_size (`int`): B.
        size (`int`): N, the padded number of nodes of a row.
        node_counts (`list[int]`, *optional*): `num_nodes` on the host.
        why_empty (`str`): For the statistics, where no row has a draft: "nothing_found", or why none was tried.
        drafters (`list[str]`, *optional*): The method that made each row's draft, where several share the work.
        masks (`list[NodeMasks]`, *optional*): Of each row the tokens that its grammar allows after the anchor and
            every node; `None` for rows without a grammar.
    """

    tokens: torch.LongTensor
    parents: torch.LongTensor
    num_nodes: torch.LongTensor
    probs: torch.FloatTensor | None = None
    node_lists: list[list[int]] | None = field(default=None, repr=False)
    is_chain: bool = False
    shape: TokenTree | None = field(default=None, repr=False)
    node_parents: list[list[int]] | None = field(default=None, repr=False)
    path_log_probs: torch.FloatTensor | None = field(default=None, repr=False)
    batch_size: int = field(init=False, repr=False)
    size: int = field(init=False, repr=False)
    node_counts: list[int] | None = field(default=None, init=False, repr=False)
    why_empty: str = field(default="nothing_found", init=False, repr=False)
    drafters: list[str] | None = field(default=None, init=False, repr=False)
    masks: list[Any] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.batch_size, self.size = self.tokens.shape
        if self.is_chain:
            self.topology = chain_topology(self.size, self.tokens.device)
            self.parents = self.topology.draft_parents
        if isinstance(self.num_nodes, list):
            self.node_counts = self.num_nodes
            self.num_nodes = kept_tensor(tuple(self.num_nodes), self.tokens.device)
        elif self.node_lists is not None:
            self.node_counts = list(map(len, self.node_lists))

    @classmethod
    def chain(
        cls,
        tokens: torch.LongTensor,
        num_nodes: torch.LongTensor | list[int] | None = None,
        probs: torch.FloatTensor | None = None,
        node_lists: list[list[int]] | None = None,
    ) -> DraftTree:
        """Drafts without branches from tokens of shape `(B, N)`; `num_nodes=None` means that all N are valid."""
        if num_nodes is None:
            num_nodes = [tokens.shape[1]] * len(tokens)
        # The parents follow from the size.
        return cls(tokens, None, num_nodes, probs, node_lists, is_chain=True)

    @classmethod
    def from_lists(
        cls,
        drafts: list[list[int]],
        device: torch.device | str = "cpu",
        parents: list[list[int]] | None = None,
        path_log_probs: list[list[float]] | None = None,
    ) -> DraftTree:
        """Chains of different lengths from one list of tokens per row, or with their parents trees of any shapes.

        Args:
            drafts (`list[list[int]]`): Each row's tokens.
            device (`torch.device`): Where the tensors go.
            parents (`list[list[int]]`, *optional*): Each token's parent, -1 for a child of the anchor. Where no row
                branches, the drafts are chains all the same, which cost less to verify.
            path_log_probs (`list[list[float]]`, *optional*): Log-probability of the path to each node of a tree.
        """
        device = torch.device(device)
        counts = list(map(len, drafts))
        size = max(counts, default=0)
        flat_tokens = [token for row in _padded(drafts, size, 0) for token in row]
        if parents is None or all(row == list(range(-1, len(row) - 1)) for row in parents):
            tokens, num_nodes = upload_together(device, flat_tokens, counts)
            return cls.chain(tokens.view(len(drafts), size), num_nodes, node_lists=drafts)
        # Rows that share their parents, as a single one does, share a topology and its masks.
        shared = all(row == parents[0] for row in parents)
        flat_parents = parents[0] if shared else [parent for row in _padded(parents, size, -1) for parent in row]
        tokens, num_nodes, padded = upload_together(device, flat_tokens, counts, flat_parents)
        padded = padded if shared else padded.view(len(drafts), size)
        draft = cls(tokens.view(len(drafts), size), padded, num_nodes, node_lists=drafts, node_parents=parents)
        if path_log_probs is not None:
            draft.path_log_probs = upload(_padded(path_log_probs, size, -math.inf), device, torch.float32)
        return draft

    @classmethod
    def of_shape(
        cls, shape: TokenTree, tokens: torch.LongTensor, max_depths: Sequence[int] | None = None
    ) -> DraftTree:
        """Drafts that share a static tree.

        Args:
            shape (`TokenTree`): The tree.
            tokens (`torch.LongTensor` of shape `(B, N)`): The nodes' tokens.
            max_depths (`Sequence[int]` of length B, *optional*): Depth to which each row may draft.
        """
        counts = [len(shape.paths)] * tokens.shape[0]
        if max_depths is not None and min(max_depths) < shape.max_depth:
            counts = [bisect_right(shape.depths, depth) for depth in max_depths]
            shape = shape if shape.is_chain else shape.up_to(max(max_depths))
            tokens = tokens[:, : max(counts)]
        if shape.is_chain:
            return cls.chain(tokens, counts)
        topology = shape.topology(tokens.device)
        draft = cls(tokens, topology.draft_parents, counts, shape=shape)
        draft.topology = topology
        return draft

    @classmethod
    def empty(cls, batch_size: int, device: torch.device | str = "cpu", why: str = "nothing_found") -> DraftTree:
        """Makes a draft of no tokens: the cycle verifies the anchors alone, which is plain decoding."""
        tokens = torch.empty((batch_size, 0), dtype=torch.long, device=device)
        draft = cls.chain(tokens, node_lists=[[] for _ in range(batch_size)])
        draft.why_empty = why
        return draft

    @cached_property
    def topology(self) -> TreeTopology:
        """Depths and ancestors of the verified nodes, the anchor included."""
        if self.shape is not None:
            return self.shape.topology(self.tokens.device)
        if self.parents.dim() == 1 and self.node_parents and len(self.node_parents[0]) == self.size:
            return static_topology(tuple(self.node_parents[0]), self.tokens.device)
        if self.parents.dim() == 1 and self.parents.device.type == "cpu":
            return static_topology(tuple(self.parents.tolist()), self.tokens.device)
        # Asking a device for the parents would make the host wait.
        return TreeTopology.from_parents(self.parents)

    def of_rows(self, rows: Sequence[int]) -> DraftTree:
        """The drafts of some rows; the host reads the shapes of all of them."""
        counts = self.counts()
        parents = None if self.is_chain or self.shape is not None else self.parent_lists()
        lists = self.node_lists
        index = upload(rows, self.tokens.device)
        some = DraftTree(
            self.tokens.index_select(0, index),
            self.parents if self.parents.dim() == 1 else self.parents.index_select(0, index),
            [counts[row] for row in rows],
            None if self.probs is None else self.probs.index_select(0, index),
            None if lists is None else [lists[row] for row in rows],
            is_chain=self.is_chain,
            shape=self.shape,
            node_parents=None if parents is None else [parents[row] for row in rows],
        )
        some.masks = None if self.masks is None else [self.masks[row] for row in rows]
        return some

    def without_probs(self) -> DraftTree:
        """A copy without its distributions, for those who keep it when they are not needed any more."""
        if self.probs is None:
            return self
        draft = copy(self)
        draft.probs = None
        return draft

    @property
    def is_rated(self) -> bool:
        """Whether the draft is a tree that rates its nodes, by itself or by its shape."""
        return not self.is_chain and self.probs is None and (self.shape is not None or self.path_log_probs is not None)

    def shortened(self, most: list[int]) -> DraftTree:
        """Chains of at most so many tokens of each row, as narrow as the longest."""
        counts = list(map(min, self.counts(), most))
        if counts == self.counts():
            return self
        size = max(counts, default=0)
        lists, ratings = self.node_lists, self.path_log_probs
        shorter = DraftTree.chain(
            self.tokens[:, :size],
            counts,
            None if self.probs is None or not size else self.probs[:, :size].contiguous(),
            None if lists is None else [row[:count] for row, count in zip(lists, counts)],
        )
        shorter.drafters = self.drafters
        if ratings is not None:
            padding = torch.arange(size, device=ratings.device) >= shorter.num_nodes[:, None]
            shorter.path_log_probs = ratings[:, :size].masked_fill(padding, -math.inf)
        return shorter

    def probs_by_rank(self) -> torch.FloatTensor | None:
        """Probabilities `(N,)` that a row's best node is accepted, the next best one, ...; `None` if unknown."""
        if not self.is_rated:
            return None
        if self.shape is not None:
            return torch.tensor(sorted(self.shape.prior_probs, reverse=True), device="cpu")
        return self.path_log_probs.exp().sort(dim=1, descending=True).values.mean(0)

    def likeliest(self, count: int) -> DraftTree:
        """The likeliest nodes of each row to be accepted, at most `count`; the whole draft if it rates none."""
        if count >= self.size or not self.is_rated:
            return self
        if self.shape is not None:
            shape, nodes = self.shape.likeliest(count)
            tokens = self.tokens.index_select(1, kept_tensor(nodes, self.tokens.device))
            # Rows that may not draft so deep have the first nodes only.
            counts = [bisect_left(nodes, row_count) for row_count in self.counts()]
            parents = shape.topology(tokens.device).draft_parents
            fewer = DraftTree(tokens, parents, counts, is_chain=shape.is_chain, shape=shape)
        else:
            log_probs = self.path_log_probs
            best = log_probs.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
            parents = renumbered(self.parents.expand_as(self.tokens).gather(1, best), best, self.size)
            if self.node_counts is None:
                counts = self.num_nodes.clamp(max=count)
            else:
                counts = [min(row_count, count) for row_count in self.node_counts]
            fewer = DraftTree(self.tokens.gather(1, best), parents, counts, path_log_probs=log_probs.gather(1, best))
        fewer.drafters = self.drafters
        return fewer

    def unknown_tables(self) -> dict[str, torch.LongTensor]:
        """Tables that the host lacks of the drafts; [`learn`] takes them after a transfer."""
        tables = {}
        if self.node_counts is None:
            tables["num_nodes"] = self.num_nodes[:, None]
        if self.node_parents is None and self.shape is None and not self.is_chain:
            tables["parents"] = self.parents.expand(self.tokens.shape)
        if self.node_lists is None:
            tables["tokens"] = self.tokens
        return tables

    def learn(self, tables: dict[str, list[list[int]]]) -> None:
        """Takes the tables of [`unknown_tables`], now on the host."""
        if "num_nodes" in tables:
            self.node_counts = [row[0] for row in tables["num_nodes"]]
        if "parents" in tables:
            self.node_parents = [row[:count] for row, count in zip(tables["parents"], self.node_counts)]
        if "tokens" in tables:
            self.node_lists = [row[:count] for row, count in zip(tables["tokens"], self.node_counts)]

    def _read(self) -> None:
        """Reads what the host does not know, in one transfer."""
        self.learn(read_together(self.unknown_tables()))

    def token_lists(self) -> list[list[int]]:
        """The valid tokens of each row as lists of ints (one transfer to the host if the drafter gave none)."""
        if self.node_lists is None:
            self._read()
        return self.node_lists

    def parent_lists(self) -> list[list[int]]:
        """The parents of each row's valid nodes as lists of ints."""
        if self.node_parents is None and (self.is_chain or self.shape is not None):
            parents = range(-1, self.size - 1) if self.is_chain else self.shape.parents
            self.node_parents = [list(parents[:count]) for count in self.counts()]
        elif self.node_parents is None:
            self._read()
        return self.node_parents

    def counts(self) -> list[int]:
        """Number of valid nodes of each row."""
        if self.node_counts is None:
            self._read()
        return self.node_counts

    def max_depths(self) -> list[int]:
        """Depth of each row's draft."""
        if self.is_chain:
            return self.counts()
        if self.shape is not None:
            # The deepest nodes come last.
            depths = (0, *self.shape.depths)
            return [depths[count] for count in self.counts()]
        return [max(node_depths(parents), default=0) for parents in self.parent_lists()]


def _padded(rows: list[list[Number]], size: int, filler: Number) -> list[list[Number]]:
    return [row + [filler] * (size - len(row)) for row in rows]
