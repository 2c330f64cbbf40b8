"""The draft of one row as lists: tokens, and parents that come before their children (-1: the anchor)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..drafts import node_depths


def first_path(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The path that always takes the first child."""
    node, path = -1, []
    for place, (token, parent) in enumerate(zip(tokens, parents)):
        if parent == node:
            node = place
            path.append(token)
    return path


def shallow(tokens: list[int], parents: list[int], depth: int) -> tuple[list[int], list[int]]:
    """The tree without what lies deeper."""
    if len(tokens) <= depth:
        return tokens, parents
    kept = [node for node, node_depth in enumerate(node_depths(parents)) if node_depth <= depth]
    place = {node: index for index, node in enumerate(kept)}
    return [tokens[node] for node in kept], [place.get(parents[node], -1) for node in kept]


def depth_sums(values: Iterable[float], parents: Sequence[int]) -> list[float]:
    """Sums of the nodes' values at depth 1, 2, ..."""
    sums: list[float] = []
    for value, depth in zip(values, node_depths(parents)):
        sums += [0.0] * (depth - len(sums))
        sums[depth - 1] += value
    return sums
