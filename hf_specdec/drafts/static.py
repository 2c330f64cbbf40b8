"""Static draft trees: which ranks of a drafter's candidates are drafted, decided before anything is generated.

A node is named by its path of child ranks, as in Medusa's choices, EAGLE-1 and vLLM's `speculative_token_tree`: (1, 0)
is the best continuation of the second best first token.

Shapes: N draft nodes, R nodes that are read at a depth, W candidates asked of each.
"""

from __future__ import annotations

import ast
import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Integral
from typing import Any, NamedTuple

import torch

from ..errors import SpecConfigError, shown
from ..method import MOST_DRAFT_TOKENS
from ..threads import cached_property
from ..transfers import kept_on_device, upload
from .tree import TreeTopology, chain_topology, static_topology


Path = tuple[int, ...]

# Numbers of children in the published trees, depth by depth: of the anchor, of its children, and so on. Nodes without
# a number have none. Medusa's trees were derived from head accuracies on the named models (FasterDecoding/Medusa),
# EAGLE-1's is the default of its first version.
_PUBLISHED_CHILDREN = {
    "mc_sim_7b_63": "10, 10 7 3 2 1 1 1 1 1 1, 10 3 2 1 1 1 1 1 0 0 2 0 0 0 0 0 0 1, 2",
    "vicuna_7b_stage2": "10, 10 5 2 2 1 1 1 1, 9 4 2 1 1 1 0 0 0 0 3 1 0 0 0 1, 4 1 1 0 0 0 0 0 0 1",
    "vicuna_7b_stage1": "10, 10 7 4 3 2 2 1 1 1 1, 9 3 2 1 1 1 0 0 0 0 2 0 0 0 0 0 0 1, 1",
    "vicuna_13b_stage2": (
        "10, 10 4 2 1 1 1, 10 4 2 1 1 1 0 0 0 0 3 1 0 0 1 0 1, 4 2 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0 1"
    ),
    "vicuna_33b_stage2": "10, 10 5 3 2 1 1 1 1, 10 4 2 1 1 1 0 0 0 0 3 1 0 0 0 1, 3 1 0 0 0 0 0 0 0 0 1",
    "zephyr_stage2": "10, 10 6 4 2 2 1 1 1, 10 4 2 1 1 1 0 0 0 0 2 1 0 0 0 0 1, 2 1",
    "eagle_1": "4, 3 2 2 1, 3 2 2 1, 3, 2",
}

PUBLISHED_TREES = tuple(_PUBLISHED_CHILDREN)

MAX_NODES = MOST_DRAFT_TOKENS


def prior_accuracies(max_depth: int, max_children: int) -> list[tuple[float, ...]]:
    """Accuracies to assume where none were measured: of the candidate of each rank, at every depth alike."""
    return [tuple(0.6 / rank**2 for rank in range(1, max_children + 1))] * max_depth


class Level(NamedTuple):
    """One depth of a static tree. Indices are slices where they are all places in their order."""

    width: int  # W, candidates that are asked of every node that is read, at first of the anchor
    picks: torch.LongTensor | slice  # which of the R * W candidates the nodes of this depth are
    read_picks: torch.LongTensor | slice  # those of them that have children, so that they are read next
    read_parents: torch.LongTensor | slice  # which of the R nodes that were read each of these continues


@dataclass(frozen=True)
class TokenTree:
    """A static tree, by every node's path of child ranks: shorter paths first, equally long ones in their order."""

    paths: tuple[Path, ...]  # every prefix of a path is a path
    # How often the candidate of each rank is right, at every depth alike; empty where nothing was measured.
    rank_accuracies: tuple[float, ...] = ()

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> TokenTree:
        """Makes a tree of paths in any order; a `SpecConfigError` if one lacks its parent."""
        ordered = tuple(sorted({tuple(map(int, path)) for path in paths}, key=lambda path: (len(path), path)))
        possible_parents = {(), *ordered}
        orphan = next((path for path in ordered if path[:-1] not in possible_parents), None)
        if orphan:
            raise SpecConfigError(
                f"`speculative_token_tree` has the node {orphan} without its parent {orphan[:-1]}. Add the parent."
            )
        return cls(ordered)

    @classmethod
    @lru_cache(maxsize=256)
    def chain(cls, length: int) -> TokenTree:
        """The best candidate at each of `length` depths."""
        return cls(tuple((0,) * depth for depth in range(1, length + 1)))

    @classmethod
    def published(cls, name: str) -> TokenTree:
        """A tree of `PUBLISHED_TREES`."""
        paths: list[Path] = []
        parents: list[Path] = [()]
        for counts in _PUBLISHED_CHILDREN[name].split(","):
            numbers = map(int, counts.split())
            parents = [(*path, rank) for path, count in zip(parents, numbers) for rank in range(count)]
            paths += parents
        return cls.from_paths(paths)

    @classmethod
    def from_accuracies(
        cls, accuracies: Sequence[Sequence[float]], num_nodes: int, max_children: int | None = None
    ) -> TokenTree:
        """The nodes that are most likely to be right (Cai et al. 2024, arXiv:2401.10774, section 2.3.3).

        `accuracies[d][r]` says how often the candidate of rank r at depth d is right, given that its parent is; a
        node's probability is the product of those along its path. `max_children` is the most of a node.
        """
        widths = [min(len(ranks), max_children or len(ranks)) for ranks in accuracies]
        heap: list[tuple[float, Path]] = []

        def add(path: Path) -> None:
            if len(path) <= len(widths) and path[-1] < widths[len(path) - 1]:
                probability = math.prod(ranks[rank] for ranks, rank in zip(accuracies, path))
                heapq.heappush(heap, (-probability, path))

        # From the anchor's best child on, the most likely next sibling or first child.
        add((0,))
        chosen: list[Path] = []
        while heap and len(chosen) < num_nodes:
            _, path = heapq.heappop(heap)
            chosen.append(path)
            add((*path[:-1], path[-1] + 1))
            add((*path, 0))
        return cls.from_paths(chosen)

    def __len__(self) -> int:
        return len(self.paths)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Once: a tree is looked up several times a cycle.
        return hash(self.paths)

    @property
    def num_reads(self) -> int:
        """Most nodes that a network reads which has to read a node to find its children."""
        return len(self.paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Index of each node's parent, -1 for a child of the anchor."""
        index = {path: node for node, path in enumerate(self.paths)}
        return tuple(index.get(path[:-1], -1) for path in self.paths)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        return tuple(map(len, self.paths))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Each node's place among the candidates of its parent."""
        return tuple(path[-1] for path in self.paths)

    @cached_property
    def max_depth(self) -> int:
        return max(self.depths, default=0)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Candidates that each depth asks of the drafter: 1 + the highest rank there."""
        highest = [0] * self.max_depth
        for depth, rank in zip(self.depths, self.ranks):
            highest[depth - 1] = max(highest[depth - 1], rank + 1)
        return tuple(highest)

    @lru_cache(maxsize=256)  # noqa: B019 - trees are small, and equal ones share what follows
    def up_to(self, depth: int) -> TokenTree:
        """The tree without what lies deeper."""
        return self if depth >= self.max_depth else replace(self, paths=self.paths[: bisect_right(self.depths, depth)])

    @cached_property
    def prior_probs(self) -> tuple[float, ...]:
        """Probability of each node, by the accuracies to assume where none were measured."""
        accuracies = self.rank_accuracies or prior_accuracies(1, max(self.widths, default=1))[0]
        return tuple(math.prod(accuracies[rank] for rank in path) for path in self.paths)

    @lru_cache(maxsize=256)  # noqa: B019 - as above
    def likeliest(self, count: int) -> tuple[TokenTree, tuple[int, ...]]:
        """The tree of the `count` nodes with the largest `prior_probs`, and which nodes they are."""
        # Of equal ones the first: parents come before their children.
        order = sorted(range(len(self)), key=lambda node: -self.prior_probs[node])
        nodes = tuple(sorted(order[:count]))
        return replace(self, paths=tuple(self.paths[node] for node in nodes)), nodes

    def topology(self, device: torch.device) -> TreeTopology:
        """Depths and ancestors, computed once per device."""
        return chain_topology(len(self), device) if self.is_chain else static_topology(self.parents, device)

    def levels(self, device: torch.device) -> Sequence[Level]:
        """The tree depth by depth, for drafters that read nodes to find their children."""
        if self.is_chain:
            return [Level(1, slice(None), slice(None), slice(None))] * len(self.paths)
        return self._levels(device)

    @kept_on_device
    def _levels(self, device: torch.device) -> list[Level]:
        with_children = {path[:-1] for path in self.paths}
        read: list[Path] = [()]
        levels = []
        for depth, width in enumerate(self.widths, start=1):
            place = {path: index for index, path in enumerate(read)}
            nodes = [path for path in self.paths if len(path) == depth]
            read = [path for path in nodes if path in with_children]
            picks, read_picks = ([place[path[:-1]] * width + path[-1] for path in paths] for paths in (nodes, read))
            indices = [(picks, len(place) * width), (read_picks, len(place) * width)]
            indices.append(([place[path[:-1]] for path in read], len(place)))
            # A slice costs nothing.
            levels.append(
                Level(width, *(slice(None) if at == list(range(size)) else upload(at, device) for at, size in indices))
            )
        return levels

    @cached_property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))


def parse_token_tree(value: Any) -> tuple[Path, ...]:
    """The paths of a tree that is given as such, as paths `[(0,), (0, 0), (1,)]` or their text, or by its name."""
    if isinstance(value, TokenTree):
        return value.paths
    if isinstance(value, str) and value in PUBLISHED_TREES:
        return TokenTree.published(value).paths
    paths = value
    if isinstance(value, str):
        try:
            paths = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            paths = None

    def is_path(value: Any) -> bool:
        is_list = isinstance(value, (list, tuple)) and len(value) > 0
        return is_list and all(
            isinstance(rank, Integral) and not isinstance(rank, bool) and int(rank) >= 0 for rank in value
        )

    if not isinstance(paths, (list, tuple)) or not paths or not all(map(is_path, paths)):
        raise SpecConfigError(
            "`speculative_token_tree` must be a list of paths of child ranks, such as [(0,), (1,), (0, 0)] for two "
            "children of the anchor of which the first has a child, or the name of a published tree "
            f"({', '.join(PUBLISHED_TREES)}), got {shown(value)}."
        )
    highest = max(map(max, paths))
    if highest >= MAX_NODES:
        raise SpecConfigError(
            f"`speculative_token_tree` has the child rank {shown(highest)}. Ranks are from 0 to {MAX_NODES - 1}."
        )
    tree = TokenTree.from_paths(paths)
    if len(tree) > MAX_NODES:
        raise SpecConfigError(f"`speculative_token_tree` has {len(tree)} nodes. Use at most {MAX_NODES}.")
    return tree.paths
