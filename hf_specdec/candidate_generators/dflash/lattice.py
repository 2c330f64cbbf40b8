"""Trees out of a block that was predicted at once: the most probable prefixes (DDTree, arXiv:2604.12989).

The candidates of the positions form a lattice: a prefix takes one of each of the first positions, and its
log-probability is the sum of theirs. A position has one table of candidates, whatever stands before it, or several,
and then the candidate before says which of them counts (DFlash 2). The `budget` best prefixes are a tree, since a
prefix is at most as probable as what it continues. Equally probable ones are taken in the order of their ranks (the
places of their tokens in their tables), a prefix before what continues it.

Where nodes get all their children at once (JetSpec, arXiv:2606.18394, "accum_logp"), the tree is made of the best
prefixes that have children, in this order, and of `siblings` children of each.

Shapes: R rows, K positions, P tables of a position, C candidates of a table, N nodes of a draft, L prefixes in a list,
V vocabulary.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...drafts import DraftTree
from ...transfers import upload
from .denoising import confidences


# Devices where a host-side heap beats kernel launches.
_HOST_DEVICES = ("cpu", "mps")

# Log-probability of what cannot be: finite, so that sums of it are ordered and it comes before what is no prefix.
_IMPOSSIBLE = -1e30

# Cells or tokens of nodes, their parents, and the log-probabilities of their prefixes, each `(R, N)`.
_Found = tuple[torch.LongTensor, torch.LongTensor, torch.Tensor]


def best_candidates(logits: torch.Tensor, count: int, ids: torch.LongTensor | None = None) -> Lattice:
    """The most probable tokens of each position, whatever stands before it.

    Args:
        logits (`torch.Tensor` of shape `(R, K, V)`): Of the draft, in any floating dtype.
        count (`int`): Candidates wanted; a tree of N nodes has no use for more than N.
        ids (`torch.LongTensor` of shape `(V,)`, *optional*): The target's id of each of the draft's, if others.

    Returns:
        `Lattice`: One table for each position, with log-probabilities in float32.
    """
    best = logits.topk(min(count, logits.shape[-1]))
    tokens = best.indices if ids is None else ids[best.indices]
    # The difference of large logits is exact, that to their logsumexp is not.
    steps = best.values.float() - best.values[..., :1].float()
    return Lattice.independent(tokens, steps + confidences(logits).log()[..., None])


class Lattice(NamedTuple):
    """Candidates of the positions of a block.

    Attributes:
        tokens (`torch.LongTensor` of shape `(R, K, P, C)`): Their tokens, in the target's ids.
        log_probs (`torch.FloatTensor` of shape `(R, K, P, C)`): Their log-probabilities, at most 0 and the best first.
            NaN counts as minus infinity.
        tables (`torch.LongTensor` of shape `(R, K, P, C)`): After each, the table of the next position that counts.
    """

    tokens: torch.LongTensor
    log_probs: torch.FloatTensor
    tables: torch.LongTensor

    @classmethod
    def independent(cls, tokens: torch.LongTensor, log_probs: torch.FloatTensor) -> Lattice:
        """One table for each position, from candidates `(R, K, C)`."""
        return cls(tokens[:, :, None], log_probs[:, :, None], torch.zeros_like(tokens)[:, :, None])

    def cut(self, depth: int, width: int) -> Lattice:
        """The first positions, and the best candidates of their tables."""
        return Lattice(*(part[:, :depth, :, :width] for part in self))

    def to(self, device: torch.device) -> Lattice:
        return Lattice(*(part.to(device) for part in self))


class Prefixes(NamedTuple):
    """Nodes of trees by operations of fixed shapes, as graphs need them; how many of a row count, the host knows.

    Attributes:
        tokens, parents (`torch.LongTensor` of shape `(R, N)`): Tokens of the nodes, and their parents.
        log_probs (`torch.FloatTensor` of shape `(R, N)`): Log-probabilities of the prefixes.
        width (`int`): C.
    """

    tokens: torch.LongTensor
    parents: torch.LongTensor
    log_probs: torch.FloatTensor
    width: int

    def draft(self, budget: int, limits: Sequence[int], siblings: int | None, device: torch.device) -> DraftTree:
        """The drafts, each row cut to what it has room for."""
        counts = [num_nodes(self.width, limit, budget, siblings) for limit in limits]
        tokens, parents, log_probs = (part[:, : max(counts)].to(device) for part in self[:3])
        return DraftTree(tokens, parents, counts, path_log_probs=log_probs)


def best_prefixes(
    lattice: Lattice, budget: int, limits: Sequence[int] | None = None, siblings: int | None = None
) -> DraftTree:
    """The most probable prefixes as drafts, the best first.

    On a GPU nothing waits for the device. Sums are taken in float64 from the first position on, so that every device
    finds the same tree.

    Args:
        lattice (`Lattice`): The candidates.
        budget (`int`): Most nodes of a row.
        limits (`Sequence[int]` of length R, *optional*): Largest depth of each row, K by default.
        siblings (`int`, *optional*): Children that a node gets at once, all of them or none; the last one that gets
            any may have fewer. `None`: the best prefixes, whatever their parents are.
    """
    rows, most, _, width = lattice.tokens.shape
    limits = [min(limit, most) for limit in limits or [most] * rows]
    depth, width = max(limits, default=0), min(width, siblings or budget)
    device = lattice.tokens.device
    if depth < 1 or width < 1 or budget < 1:
        return DraftTree.empty(rows, device)
    if device.type not in _HOST_DEVICES:
        found = prefix_nodes(lattice.cut(depth, width), budget, upload(limits, device), siblings)
        return found.draft(budget, limits, siblings, device)
    tables = zip(*(part.tolist() for part in _finite(lattice.cut(depth, width))), limits)
    grow = _pop_best if siblings is None else _pop_parents
    found = [grow(*row, budget) for row in tables]
    return DraftTree.from_lists(
        [row.tokens for row in found],
        device,
        [row.parents for row in found],
        [row.log_probs for row in found],
    )


def _finite(lattice: Lattice) -> Lattice:
    return lattice._replace(log_probs=lattice.log_probs.nan_to_num(nan=_IMPOSSIBLE, neginf=_IMPOSSIBLE))


@dataclass
class _Nodes:
    """One row's nodes on the host."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def add(self, token: int, parent: int, cost: float) -> int:
        """Adds a node and returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.log_probs.append(-cost)
        return len(self.tokens) - 1


# Tables of a row: `(K, P, C)` as lists.
_Rows = list[list[list[int]]]


def _pop_best(tokens: _Rows, log_probs: list, tables: _Rows, limit: int, budget: int) -> _Nodes:
    """The best prefixes of a row. A node leaves the heap before its next sibling and its first child enter."""
    found = _Nodes()
    # An entry: log-probability with the sign changed, ranks, the same of the parent, the parent's node, the table.
    heap = [(-log_probs[0][0][0], (0,), 0.0, -1, 0)] if limit > 0 else []
    while heap and len(found.tokens) < budget:
        cost, ranks, parent_cost, parent, table = heapq.heappop(heap)
        depth, rank = len(ranks), ranks[-1]
        node = found.add(tokens[depth - 1][table][rank], parent, cost)
        if depth < limit:
            below = tables[depth - 1][table][rank]
            heapq.heappush(heap, (cost - log_probs[depth][below][0], (*ranks, 0), cost, node, below))
        scores = log_probs[depth - 1][table]
        if rank + 1 < len(scores):
            entry = (parent_cost - scores[rank + 1], (*ranks[:-1], rank + 1), parent_cost, parent, table)
            heapq.heappush(heap, entry)
    return found


def _pop_parents(tokens: _Rows, log_probs: list, tables: _Rows, limit: int, budget: int) -> _Nodes:
    """The nodes of a row that get all their children when they leave the heap."""
    found = _Nodes()
    # An entry: log-probability with the sign changed, ranks, the node, the table of its children.
    heap: list[tuple[float, tuple[int, ...], int, int]] = [(0.0, (), -1, 0)] if limit > 0 else []
    while heap and len(found.tokens) < budget:
        cost, ranks, parent, table = heapq.heappop(heap)
        level = len(ranks)
        here = zip(tokens[level][table], log_probs[level][table], tables[level][table])
        for rank, (token, log_prob, below) in enumerate(islice(here, budget - len(found.tokens))):
            node = found.add(token, parent, cost - log_prob)
            if level + 1 < limit:
                heapq.heappush(heap, (cost - log_prob, (*ranks, rank), node, below))
    return found


def prefix_nodes(lattice: Lattice, budget: int, limits: torch.LongTensor, siblings: int | None = None) -> Prefixes:
    """Finds the nodes by operations of fixed shapes alone.

    Args:
        lattice, budget, siblings: As for [`best_prefixes`].
        limits (`torch.LongTensor` of shape `(R,)`): Largest depth of each row.

    Returns:
        `Prefixes`: Of these the first `num_nodes` of a row count.
    """
    depth = lattice.tokens.shape[1]
    lattice = _finite(lattice.cut(depth, siblings or budget))
    found = (_from_levels if siblings is None else _from_parents)(lattice, budget, limits)
    tokens, parents, totals = found
    return Prefixes(tokens, parents, totals.float(), lattice.tokens.shape[3])


def _from_levels(lattice: Lattice, budget: int, limits: torch.LongTensor) -> _Found:
    cells, parents, totals = _best_cells(lattice, budget, limits)
    return lattice.tokens.flatten(1).gather(1, cells - 1), parents, totals


def _from_parents(lattice: Lattice, budget: int, limits: torch.LongTensor) -> _Found:
    """The children of the anchor, then those of the best prefixes that have any."""
    rows, depth, num_tables, width = lattice.tokens.shape
    num_parents = -(-budget // width) - 1
    cells, above, totals = _best_cells(lattice, num_parents, limits - 1)
    # The anchor comes first among those with children.
    cells, totals = F.pad(cells, (1, 0)), F.pad(totals, (1, 0))
    levels = _depths(cells, num_tables * width).clamp(max=depth - 1)
    first = (levels * num_tables + _tables_after(lattice, cells)) * width
    children = (first[..., None] + torch.arange(width, device=cells.device)).flatten(1)
    totals = totals[..., None] + lattice.log_probs.double().flatten(1).gather(1, children).view(rows, -1, width)
    # A node's number is that of its parent among those with children, times their number, plus its own rank.
    own = (above + 1) * width + (cells[:, 1:] - 1) % width
    parents = F.pad(own, (1, 0), value=-1).repeat_interleave(width, dim=1)
    nodes = (lattice.tokens.flatten(1).gather(1, children), parents, totals.flatten(1))
    return tuple(part[:, :budget] for part in nodes)


def _best_cells(lattice: Lattice, budget: int, limits: torch.LongTensor) -> _Found:
    """The best prefixes of all rows at once, one position after the other: cells, parents and log-probabilities.

    The best prefixes of the first positions are kept in a list, in the order of their ranks: a prefix, then at once
    what continues it. There the children of those that end at the last position are inserted, and a stable sort picks
    the best of them all, so that equal ones are taken in this order too.
    """
    rows, depth, num_tables, width = lattice.tokens.shape
    device, per_position = lattice.tokens.device, num_tables * width
    too_deep = torch.arange(depth, device=device) >= limits[:, None]
    log_probs = lattice.log_probs.double().masked_fill(too_deep[..., None, None], -math.inf)

    # Cells number the candidates, position by position and table by table from 1 on; 0 is the anchor.
    all_cells = torch.arange(1, depth * per_position + 1, device=device).view(depth, num_tables, width)
    totals, cells = log_probs.new_zeros((rows, 1)), lattice.tokens.new_zeros((rows, 1))
    for level in range(depth):
        is_longest = cells > (level - 1) * per_position
        tables = _tables_after(lattice, cells)
        steps = log_probs[:, level].gather(1, tables[..., None].expand(-1, -1, width))
        children = torch.where(is_longest[..., None], totals[..., None] + steps, -math.inf)
        totals = torch.cat([totals[..., None], children], dim=-1).flatten(1)
        cells = torch.cat([cells[..., None], all_cells[level][tables]], dim=-1).flatten(1)
        best = _descending(totals)[:, : budget + 1].sort(dim=1).values
        totals, cells = totals.gather(1, best), cells.gather(1, best)

    parents = _preorder_parents(_depths(cells, per_position))
    # From the order of the ranks to that of the probabilities, without the anchor.
    order = _descending(totals[:, 1:])[:, : num_prefixes(width, depth, budget)] + 1
    nodes = torch.arange(order.shape[1], device=device).expand_as(order)
    places = torch.full_like(cells, -1).scatter_(1, order, nodes)
    parents = places.gather(1, parents.gather(1, order))
    return cells.gather(1, order), parents, totals.gather(1, order)


def _tables_after(lattice: Lattice, cells: torch.LongTensor) -> torch.LongTensor:
    """The table that counts at the position after each cell; there is one after the anchor."""
    found = lattice.tables.flatten(1).gather(1, (cells - 1).clamp(min=0))
    return torch.where(cells > 0, found, 0)


def _descending(values: torch.Tensor) -> torch.LongTensor:
    return values.sort(dim=1, descending=True, stable=True).indices


def _depths(cells: torch.LongTensor, per_position: int) -> torch.LongTensor:
    """Positions that a prefix takes, from the cell of its last token (0: the anchor)."""
    return (cells + (per_position - 1)).div(per_position, rounding_mode="floor")


def _preorder_parents(depths: torch.LongTensor) -> torch.LongTensor:
    """Index of each node's parent (the anchor's is itself), from depths `(R, L)` in the order of ranks."""
    # The last one before it that is one shallower.
    indices = torch.arange(depths.shape[1], device=depths.device)
    is_above = (depths[:, None] == depths[..., None] - 1) & (indices < indices[:, None])
    return torch.where(is_above, indices, 0).amax(-1)


def num_nodes(width: int, depth: int, budget: int, siblings: int | None = None) -> int:
    """Number of nodes of up to `depth` positions, see [`best_prefixes`], that fit into the budget."""
    if siblings is None or depth < 1:
        return num_prefixes(width, depth, budget)
    num_parents = num_prefixes(width, depth - 1, -(-budget // width) - 1) + 1
    return min(num_parents * width, budget)


def num_prefixes(width: int, depth: int, budget: int) -> int:
    """Number of prefixes of up to `depth` positions that fit into the budget."""
    total, level = 0, 1
    for _ in range(depth):
        level *= width
        total += level
        if total >= budget:
            return budget
    return total
