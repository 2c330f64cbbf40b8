"""Trees out of a block that was predicted at once: the most probable prefixes (DDTree, arXiv:2604.12989).

Each position has its own distribution, whatever stands at the others, so the candidates form a lattice: a prefix takes
one of each of the first positions, and its log-probability is the sum of theirs. The `budget` best prefixes are a
tree, since a prefix is at most as probable as what it continues. Equally probable ones are taken in the order of their
ranks (the places of their tokens among the candidates), a prefix before what continues it.

Shapes: R rows, K positions, C candidates of each, N nodes of a draft, L prefixes in a list, V vocabulary.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import torch

from ...drafts import DraftTree
from ...transfers import upload
from .denoising import confidences


# Devices where a host-side heap beats kernel launches.
_HOST_DEVICES = ("cpu", "mps")

# Log-probability of what cannot be: finite, so that sums of it are ordered and it comes before what is no prefix.
_IMPOSSIBLE = -1e30


def best_candidates(
    logits: torch.Tensor, count: int, ids: torch.LongTensor | None = None
) -> tuple[torch.LongTensor, torch.FloatTensor]:
    """The most probable tokens of each position.

    Args:
        logits (`torch.Tensor` of shape `(R, K, V)`): Of the draft, in any floating dtype.
        count (`int`): Candidates wanted; a tree of N nodes has no use for more than N.
        ids (`torch.LongTensor` of shape `(V,)`, *optional*): The target's id of each of the draft's, if others.

    Returns:
        `tuple`: Tokens and their log-probabilities in float32, `(R, K, C)` each, the best first.
    """
    best = logits.topk(min(count, logits.shape[-1]))
    tokens = best.indices if ids is None else ids[best.indices]
    # The difference of large logits is exact, that to their logsumexp is not.
    steps = best.values.float() - best.values[..., :1].float()
    return tokens, steps + confidences(logits).log()[..., None]


def best_prefixes(
    tokens: torch.LongTensor, log_probs: torch.FloatTensor, budget: int, limits: Sequence[int] | None = None
) -> DraftTree:
    """The most probable prefixes as drafts, the best first.

    On a GPU nothing waits for the device. Sums are taken in float64 from the first position on, so that every device
    finds the same tree.

    Args:
        tokens (`torch.LongTensor` of shape `(R, K, C)`): Candidates of each position.
        log_probs (`torch.FloatTensor` of shape `(R, K, C)`): Their log-probabilities, at most 0 and the best first.
            NaN counts as minus infinity.
        budget (`int`): Most nodes of a row.
        limits (`Sequence[int]` of length R, *optional*): Largest depth of each row, K by default.
    """
    depth, width = log_probs.shape[1:]
    limits = [min(limit, depth) for limit in limits or [depth] * len(tokens)]
    depth, width = max(limits, default=0), min(width, budget)
    if depth < 1 or width < 1:
        return DraftTree.empty(len(tokens), tokens.device)
    tokens, log_probs = tokens[:, :depth, :width], log_probs[:, :depth, :width]
    log_probs = log_probs.nan_to_num(nan=_IMPOSSIBLE, neginf=_IMPOSSIBLE)
    if tokens.device.type in _HOST_DEVICES:
        return _from_heaps(tokens, log_probs, budget, limits)
    drafted, parents = _from_levels(tokens, log_probs, budget, upload(limits, tokens.device))
    counts = [num_prefixes(width, limit, budget) for limit in limits]
    return DraftTree(drafted[:, : max(counts)], parents[:, : max(counts)], counts)


def _from_heaps(
    tokens: torch.LongTensor, log_probs: torch.FloatTensor, budget: int, limits: Sequence[int]
) -> DraftTree:
    rows = zip(tokens.tolist(), log_probs.tolist(), limits)
    drafts = [_pop_best(row_tokens, scores, budget, limit) for row_tokens, scores, limit in rows]
    return DraftTree.from_lists([draft for draft, _ in drafts], tokens.device, [parents for _, parents in drafts])


def _pop_best(
    tokens: list[list[int]], log_probs: list[list[float]], budget: int, limit: int
) -> tuple[list[int], list[int]]:
    """One row's nodes and their parents. A node leaves the heap before its next sibling and its first child enter."""
    drafted: list[int] = []
    parents: list[int] = []
    # An entry: log-probability with the sign changed, ranks, the same of the parent, the parent's node.
    heap = [(-log_probs[0][0], (0,), 0.0, -1)] if limit > 0 else []
    while heap and len(drafted) < budget:
        cost, ranks, parent_cost, parent = heapq.heappop(heap)
        node, depth, rank = len(drafted), len(ranks), ranks[-1]
        drafted.append(tokens[depth - 1][rank])
        parents.append(parent)
        if depth < limit:
            heapq.heappush(heap, (cost - log_probs[depth][0], (*ranks, 0), cost, node))
        scores = log_probs[depth - 1]
        if rank + 1 < len(scores):
            heapq.heappush(heap, (parent_cost - scores[rank + 1], (*ranks[:-1], rank + 1), parent_cost, parent))
    return drafted, parents


def prefix_nodes(
    tokens: torch.LongTensor, log_probs: torch.FloatTensor, budget: int, limits: torch.LongTensor
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """Finds the best prefixes by operations of fixed shapes alone, as graphs need them.

    Args:
        tokens, log_probs, budget: As for [`best_prefixes`].
        limits (`torch.LongTensor` of shape `(R,)`): Largest depth of each row.

    Returns:
        `tuple`: The nodes' tokens and parents `(R, N)`. Only the first `num_prefixes` of a row count.
    """
    log_probs = log_probs.nan_to_num(nan=_IMPOSSIBLE, neginf=_IMPOSSIBLE)
    return _from_levels(tokens, log_probs, budget, limits)


def _from_levels(
    tokens: torch.LongTensor, log_probs: torch.FloatTensor, budget: int, limits: torch.LongTensor
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """All rows at once, one position after the other.

    The best prefixes of the first positions are kept in a list, in the order of their ranks: a prefix, then at once
    what continues it. There the children of those that end at the last position are inserted, and a stable sort picks
    the best of them all, so that equal ones are taken in this order too.
    """
    device = tokens.device
    depth, width = log_probs.shape[1:]
    too_deep = torch.arange(depth, device=device) >= limits[:, None]
    log_probs = log_probs.double().masked_fill(too_deep[..., None], -math.inf)

    # Cells number the candidates, position by position from 1 on; 0 is the anchor.
    all_cells = torch.arange(1, depth * width + 1, device=device).view(depth, 1, 1, width)
    totals, cells = log_probs.new_zeros((len(tokens), 1)), tokens.new_zeros((len(tokens), 1))
    for level in range(depth):
        is_longest = cells > (level - 1) * width
        children = torch.where(is_longest[..., None], totals[..., None] + log_probs[:, None, level], -math.inf)
        totals = torch.cat([totals[..., None], children], dim=-1).flatten(1)
        cells = torch.cat([cells[..., None], all_cells[level].expand_as(children)], dim=-1).flatten(1)
        best = _descending(totals)[:, : budget + 1].sort(dim=1).values
        totals, cells = totals.gather(1, best), cells.gather(1, best)

    parents = _preorder_parents(_depths(cells, width))
    # From the order of the ranks to that of the probabilities, without the anchor.
    order = _descending(totals[:, 1:])[:, : num_prefixes(width, depth, budget)] + 1
    nodes = torch.arange(order.shape[1], device=device).expand_as(order)
    places = torch.full_like(cells, -1).scatter_(1, order, nodes)
    parents = places.gather(1, parents.gather(1, order))
    return tokens.flatten(1).gather(1, cells.gather(1, order) - 1), parents


def _descending(values: torch.Tensor) -> torch.LongTensor:
    return values.sort(dim=1, descending=True, stable=True).indices


def _depths(cells: torch.LongTensor, width: int) -> torch.LongTensor:
    """Positions that a prefix takes, from the cell of its last token (0: the anchor)."""
    return (cells + (width - 1)).div(width, rounding_mode="floor")


def _preorder_parents(depths: torch.LongTensor) -> torch.LongTensor:
    """Index of each node's parent (the anchor's is itself), from depths `(R, L)` in the order of ranks."""
    # The last one before it that is one shallower.
    indices = torch.arange(depths.shape[1], device=depths.device)
    is_above = (depths[:, None] == depths[..., None] - 1) & (indices < indices[:, None])
    return torch.where(is_above, indices, 0).amax(-1)


def num_prefixes(width: int, depth: int, budget: int) -> int:
    """Number of prefixes of up to `depth` positions that fit into the budget."""
    total, level = 0, 1
    for _ in range(depth):
        level *= width
        total += level
        if total >= budget:
            return budget
    return total
