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


def grafted(
    trees: Iterable[tuple[Sequence[int], Sequence[int], int]], most: int | None = None
) -> tuple[list[int], list[int]]:
    """One tree without equal siblings, up to `most` nodes, of trees that each go on from a node of those before."""
    nodes: dict[tuple[int, int], int] = {}  # by parent and token
    for tokens, parents, root in trees:
        places: list[int] = []
        for token, parent in zip(tokens, parents):
            key = (places[parent] if parent >= 0 else root, token)
            if len(nodes) == most and key not in nodes:
                break
            places.append(nodes.setdefault(key, len(nodes)))
    return [token for _, token in nodes], [parent for parent, _ in nodes]


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
