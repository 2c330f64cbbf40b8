"""Static draft trees: which ranks of a drafter's candidates are drafted, decided before anything is generated.

A node is named by its path of child ranks: (1, 0) is the best continuation of the second best first token. The usual
spellings are read: paths (Medusa's choices, EAGLE-1, vLLM's `speculative_token_tree`), parents, SGLang's three
numbers, and the names of published trees.

Shapes: B rows of the batch, N draft nodes.
"""

from __future__ import annotations

import ast
import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from numbers import Integral
from typing import Any, NamedTuple

import torch

from ..errors import SpecConfigError, shown
from ..transfers import kept_on_device, upload
from ..validation import MOST_DRAFT_TOKENS
from .topology import TreeTopology, chain_topology, static_topology


Path = tuple[int, ...]

# Leaves of the published trees, one digit a rank. Medusa's were derived from head accuracies on the named models
# (FasterDecoding/Medusa), EAGLE-1's is the default of its first version.
_PUBLISHED_LEAVES = {
    "mc_sim_7b_63": (
        "0000 0001 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 08 09 100 "
        "101 11 12 13 14 15 16 200 21 22 30 31 40 50 60 70 80 90"
    ),
    "vicuna_7b_stage2": (
        "0000 0001 0002 0003 0010 0020 003 004 005 006 007 008 0100 011 012 013 020 021 030 040 050 06 07 "
        "08 09 100 101 102 110 12 13 14 200 21 30 31 40 50 60 70 8 9"
    ),
    "vicuna_7b_stage1": (
        "0000 001 002 003 004 005 006 007 008 010 011 012 020 021 030 040 050 06 07 08 09 100 101 11 12 13 "
        "14 15 16 200 21 22 23 30 31 32 40 41 50 51 60 70 80 90"
    ),
    "vicuna_13b_stage2": (
        "0000 0001 0002 0003 0010 0011 0020 003 004 005 006 007 008 009 0100 011 012 013 020 021 030 040 "
        "050 06 07 08 09 1000 101 102 110 12 13 200 21 300 40 50 6 7 8 9"
    ),
    "vicuna_33b_stage2": (
        "0000 0001 0002 0010 002 003 004 005 006 007 008 009 0100 011 012 013 020 021 030 040 050 06 07 08 "
        "09 100 101 102 110 12 13 14 200 21 22 30 31 40 50 60 70 8 9"
    ),
    "zephyr_stage2": (
        "0000 0001 0010 002 003 004 005 006 007 008 009 010 011 012 013 020 021 030 040 050 06 07 08 09 "
        "100 101 110 12 13 14 15 200 21 22 23 30 31 40 41 50 60 70 8 9"
    ),
    "eagle_1": ("00000 00001 0001 0002 001 002 010 011 020 021 100 11 20 21 30"),
}

PUBLISHED_TREES = tuple(_PUBLISHED_LEAVES)

_SGLANG_KEYS = ("num_steps", "topk", "num_draft_tokens")

MAX_NODES = MOST_DRAFT_TOKENS


def prior_accuracies(max_depth: int, max_children: int) -> list[tuple[float, ...]]:
    """Accuracies to assume where none were measured: of the candidate of each rank, at every depth alike."""
    return [tuple(0.6 / rank**2 for rank in range(1, max_children + 1))] * max_depth


class Level(NamedTuple):
    """One depth of a static tree.

    Attributes:
        width (`int`): W, candidates that are asked of every node that is read, R of them (at first the anchor).
        picks (`torch.LongTensor` or `slice`): Which of the R * W candidates the nodes of this depth are; a slice where
            they are all of them in their order.
        read_picks (`torch.LongTensor` or `slice`): Those of them that have children, so that they are read next.
        read_parents (`torch.LongTensor` or `slice`): Which of the R nodes that were read each of these continues.
    """

    width: int
    picks: torch.LongTensor | slice
    read_picks: torch.LongTensor | slice
    read_parents: torch.LongTensor | slice


@dataclass(frozen=True)
class TokenTree:
    """A static tree.

    Args:
        paths (`tuple[tuple[int, ...], ...]`): Every node's path of child ranks, shorter ones first, equally long ones
            in the order of their ranks. Every prefix of a path is a path.
        rank_accuracies (`tuple[float, ...]`): How often the candidate of each rank is right, at every depth alike;
            empty where nothing was measured.

    Attributes:
        parents (`tuple[int, ...]` of length N): Index of each node's parent, -1 for a child of the anchor.
        depths (`tuple[int, ...]` of length N): Length of each node's path.
        ranks (`tuple[int, ...]` of length N): Each node's place among the candidates of its parent.
    """

    paths: tuple[Path, ...]
    rank_accuracies: tuple[float, ...] = ()

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> TokenTree:
        """Makes a tree of paths in any order.

        Raises:
            SpecConfigError: A path lacks its parent.
        """
        ordered = tuple(sorted({tuple(map(int, path)) for path in paths}, key=lambda path: (len(path), path)))
        known = {(), *ordered}
        orphan = next((path for path in ordered if path[:-1] not in known), None)
        if orphan:
            raise SpecConfigError(
                f"`speculative_token_tree` has the node {orphan} without its parent {orphan[:-1]}. Add the parent."
            )
        return cls(ordered)

    @classmethod
    def from_parents(cls, parents: Sequence[int]) -> TokenTree:
        """Makes a tree of each node's parent, 0 for the anchor and i for the i-th node, as in `[0, 0, 0, 1, 1]`.

        Raises:
            SpecConfigError: A node comes before its parent.
        """
        paths: list[Path] = [()]
        num_children = [0]
        for index, parent in enumerate(parents):
            if not 0 <= parent <= index:
                raise SpecConfigError(
                    f"`speculative_token_tree` as a list of parents has {parent} for node {index + 1}. Give 0 for a "
                    "child of the anchor, or the number of an earlier node."
                )
            paths.append((*paths[parent], num_children[parent]))
            num_children[parent] += 1
            num_children.append(0)
        return cls.from_paths(paths[1:])

    @classmethod
    @lru_cache(maxsize=256)
    def chain(cls, length: int) -> TokenTree:
        """The best candidate at each of `length` depths."""
        return cls(tuple((0,) * depth for depth in range(1, length + 1)))

    @classmethod
    def published(cls, name: str) -> TokenTree:
        """A tree of `PUBLISHED_TREES`."""
        leaves = [tuple(map(int, leaf)) for leaf in _PUBLISHED_LEAVES[name].split()]
        return cls.from_paths(leaf[:depth] for leaf in leaves for depth in range(1, len(leaf) + 1))

    @classmethod
    def from_accuracies(
        cls, accuracies: Sequence[Sequence[float]], num_nodes: int, max_children: int | None = None
    ) -> TokenTree:
        """The nodes that are most likely to be right (Cai et al. 2024, arXiv:2401.10774, section 2.3.3).

        A node's probability is the product of the accuracies along its path. From the anchor's best child on, the most
        likely neighbour (a node's next sibling or first child) is added until the tree is full.

        Args:
            accuracies (`Sequence[Sequence[float]]`): `[d][r]`: how often the candidate of rank r at depth d is right,
                given that its parent is.
            num_nodes (`int`): Nodes wanted; fewer where the accuracies have no more.
            max_children (`int`, *optional*): Most children of a node.
        """
        widths = [min(len(ranks), max_children or len(ranks)) for ranks in accuracies]
        heap: list[tuple[float, Path]] = []

        def add(path: Path) -> None:
            if len(path) <= len(widths) and path[-1] < widths[len(path) - 1]:
                probability = math.prod(ranks[rank] for ranks, rank in zip(accuracies, path))
                heapq.heappush(heap, (-probability, path))

        add((0,))
        chosen: list[Path] = []
        while heap and len(chosen) < num_nodes:
            _, path = heapq.heappop(heap)
            chosen.append(path)
            add((*path[:-1], path[-1] + 1))
            add((*path, 0))
        return cls.from_paths(chosen)

    @classmethod
    def from_sglang(cls, num_steps: int, topk: int, num_draft_tokens: int) -> TokenTree:
        """The static counterpart of SGLang's dynamic tree: its limits, filled with what is likely in general.

        Args:
            num_steps (`int`): Most depth.
            topk (`int`): Most children of a node.
            num_draft_tokens (`int`): Verified tokens, the anchor included.

        Raises:
            SpecConfigError: The numbers contradict each other.
        """
        most = num_steps if topk == 1 else topk + (num_steps - 1) * topk**2 if num_steps > 0 else 0
        if num_steps < 1 or topk < 1 or not num_steps < num_draft_tokens <= most + 1:
            raise SpecConfigError(
                f"`speculative_token_tree` with num_steps={num_steps}, topk={topk} and num_draft_tokens="
                f"{num_draft_tokens}: {num_steps} steps of {topk} candidates give {num_steps + 1} to {most + 1} "
                "tokens, the anchor included."
            )
        _check_size(num_draft_tokens - 1)
        return cls.from_accuracies(prior_accuracies(num_steps, min(topk, num_draft_tokens)), num_draft_tokens - 1)

    @classmethod
    def of_size(cls, num_nodes: int, max_depth: int, max_children: int = 10) -> TokenTree:
        """A tree of `num_nodes` nodes where nothing has been measured yet."""
        return cls.from_accuracies(prior_accuracies(max_depth, max_children), num_nodes)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def num_reads(self) -> int:
        """Most nodes that a network reads which has to read a node to find its children."""
        return len(self.paths)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Once: a tree is looked up several times a cycle.
        return hash(self.paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        index = {path: node for node, path in enumerate(self.paths)}
        return tuple(index.get(path[:-1], -1) for path in self.paths)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        return tuple(map(len, self.paths))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
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

    def num_nodes_to(self, depth: int) -> int:
        """Nodes of at most this depth; they come first."""
        return bisect_right(self.depths, depth)

    def up_to(self, depth: int) -> TokenTree:
        """The tree without what lies deeper."""
        return self if depth >= self.max_depth else _prefix(self, max(depth, 0))

    @cached_property
    def prior_probs(self) -> tuple[float, ...]:
        """Probability of each node, by the accuracies to assume where none were measured."""
        accuracies = self.rank_accuracies or prior_accuracies(1, max(self.widths, default=1))[0]
        return tuple(math.prod(accuracies[rank] for rank in path) for path in self.paths)

    def likeliest(self, count: int) -> tuple[TokenTree, tuple[int, ...]]:
        """The tree of the `count` nodes with the largest `prior_probs`, and which nodes they are."""
        return _likeliest(self, count)

    def topology(self, device: torch.device) -> TreeTopology:
        """Depths and ancestors, computed once per device."""
        return chain_topology(len(self), device) if self.is_chain else static_topology(self.parents, device)

    def levels(self, device: torch.device) -> tuple[Level, ...]:
        """The tree depth by depth, for drafters that read nodes to find their children; computed once per device."""
        return _levels(self, device)

    @cached_property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))


@lru_cache(maxsize=256)
def _prefix(tree: TokenTree, depth: int) -> TokenTree:
    return replace(tree, paths=tree.paths[: tree.num_nodes_to(depth)])


@lru_cache(maxsize=256)
def _likeliest(tree: TokenTree, count: int) -> tuple[TokenTree, tuple[int, ...]]:
    # Of equal ones the first: parents come before their children.
    order = sorted(range(len(tree)), key=lambda node: -tree.prior_probs[node])
    nodes = tuple(sorted(order[:count]))
    return replace(tree, paths=tuple(tree.paths[node] for node in nodes)), nodes


@kept_on_device
def _levels(tree: TokenTree, device: torch.device) -> tuple[Level, ...]:
    with_children = {path[:-1] for path in tree.paths}
    read: list[tuple[int, ...]] = [()]
    levels = []
    for depth, width in enumerate(tree.widths):
        place = {path: index for index, path in enumerate(read)}
        num_candidates = len(read) * width
        nodes = [path for path in tree.paths if len(path) == depth + 1]
        read = [path for path in nodes if path in with_children]
        picks, read_picks = ([place[path[:-1]] * width + path[-1] for path in paths] for paths in (nodes, read))
        levels.append(
            Level(
                width,
                _index(picks, num_candidates, device),
                _index(read_picks, num_candidates, device),
                _index([place[path[:-1]] for path in read], len(place), device),
            )
        )
    return tuple(levels)


def _index(places: list[int], size: int, device: torch.device) -> torch.LongTensor | slice:
    """Places among so many; a slice, which costs nothing, where they are all of them in their order."""
    return slice(None) if places == list(range(size)) else upload(places, device)


def parse_token_tree(value: Any) -> tuple[Path, ...]:
    """The paths of a tree in any of its spellings.

    Args:
        value: A `TokenTree`; a list of paths `[(0,), (0, 0), (1,)]`; a list of parents `[0, 0, 1]` (0: the anchor); a
            dict with SGLang's `num_steps`, `topk` and `num_draft_tokens`; text of one of these; or the name of a
            published tree.

    Raises:
        SpecConfigError: It is none of them, or not a tree.
    """
    if isinstance(value, TokenTree):
        return value.paths
    if isinstance(value, str) and value in PUBLISHED_TREES:
        return TokenTree.published(value).paths
    found = value
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = None
    if isinstance(value, Mapping):
        tree = _from_numbers(value)
    elif not isinstance(value, (list, tuple)) or not value:
        raise _not_a_tree(found)
    elif all(map(_is_rank, value)):
        _check_size(len(value))
        tree = TokenTree.from_parents(value)
    elif all(map(_is_path, value)):
        highest = max(map(max, value))
        if highest >= MAX_NODES:
            raise SpecConfigError(
                f"`speculative_token_tree` has the child rank {shown(highest)}. Ranks are from 0 to {MAX_NODES - 1}."
            )
        tree = TokenTree.from_paths(value)
        _check_size(len(tree))
    else:
        raise _not_a_tree(found)
    return tree.paths


def _from_numbers(value: Mapping[Any, Any]) -> TokenTree:
    # SGLang's own names of its command line are taken too.
    short = {str(key).removeprefix("speculative_").removeprefix("eagle_"): number for key, number in value.items()}
    if set(short) != set(_SGLANG_KEYS) or not all(map(_is_rank, short.values())):
        raise SpecConfigError(
            f"`speculative_token_tree` as a dict must have the integers {', '.join(_SGLANG_KEYS)}, got {shown(value)}."
        )
    return TokenTree.from_sglang(**short)


def _check_size(num_nodes: int) -> None:
    if num_nodes > MAX_NODES:
        raise SpecConfigError(f"`speculative_token_tree` has {num_nodes} nodes. Use at most {MAX_NODES}.")


def _not_a_tree(found: Any) -> SpecConfigError:
    return SpecConfigError(
        "`speculative_token_tree` must be a list of paths of child ranks, such as [(0,), (1,), (0, 0)] for two "
        "children of the anchor of which the first has a child; the same as parents, [0, 0, 1]; a dict of num_steps, "
        f"topk and num_draft_tokens; or the name of a published tree ({', '.join(PUBLISHED_TREES)}), got "
        f"{shown(found)}."
    )


def _is_rank(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _is_path(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(map(_is_rank, value))
