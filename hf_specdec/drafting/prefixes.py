"""Trees of drafts whose positions were predicted at once: the most probable prefixes (DDTree, arXiv:2604.12989).

The candidates of the positions form a lattice: a prefix takes one of each of the first positions, and its
log-probability is the sum of theirs. A position has one table of candidates, whatever stands before it, or several,
and then the candidate before says which of them counts (DFlash 2). The `budget` best prefixes are a tree, since a
prefix is at most as probable as what it continues. Equally probable ones are taken in the order of their ranks (the
places of their tokens in their tables), a prefix before what continues it.

Where nodes get all their children at once (JetSpec, arXiv:2606.18394, "accum_logp"), the tree is made of the best
prefixes that have children, in this order, and of `siblings` children of each.

Shapes: R rows, K positions, P tables of a position, C candidates of a table, N nodes of a draft, L prefixes in a list,
V vocabulary. Cells number the candidates, position by position and table by table from 1 on; 0 is the anchor.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .draw import DepthLimits
from .growth import DraftNodes


# Devices where a heap on the host is faster than launches: 0.1 ms against 1.9 for 20 nodes of 15 positions on a CPU.
_HOST_DEVICES = ("cpu", "mps")

# Log-probability of what cannot be: finite, so that sums of it are ordered and it comes before what is no prefix.
_IMPOSSIBLE = -1e30

# Logits that are turned into float32 at once: on a CPU what its caches hold, elsewhere what memory can spare.
_CHUNK_SIZE = 1 << 26
_CHUNK_SIZES = {"cpu": 1 << 20}

# Cells or tokens of nodes, their parents, and the log-probabilities of their prefixes, each `(R, N)`.
_Nodes = tuple[torch.LongTensor, torch.LongTensor, torch.Tensor]


class Lattice(NamedTuple):
    """Candidates of the positions of a block."""

    tokens: torch.LongTensor  # (R, K, P, C): their tokens, in the target's ids
    # (R, K, P, C): their log-probabilities, at most 0 and the best first. NaN counts as minus infinity.
    log_probs: torch.FloatTensor
    tables: torch.LongTensor  # (R, K, P, C): after each, the table of the next position that counts

    @classmethod
    def independent(cls, tokens: torch.LongTensor, log_probs: torch.FloatTensor) -> Lattice:
        """One table for each position, from candidates `(R, K, C)`."""
        return cls(tokens[:, :, None], log_probs[:, :, None], torch.zeros_like(tokens)[:, :, None])


def best_candidates(logits: torch.Tensor, count: int, ids: torch.LongTensor | None = None) -> Lattice:
    """The `count` most probable tokens of each position by logits `(R, K, V)`, whatever stands before it.

    There is one table for each position; log-probabilities are in float32. A tree of N nodes has no use for more
    than N candidates. Where the draft's tokens have other ids, `ids` `(V,)` are the target's.
    """
    best = logits.topk(min(count, logits.shape[-1]))
    tokens = best.indices if ids is None else ids[best.indices]
    # The difference of large logits is exact, that to their logsumexp is not.
    steps = best.values.float() - best.values[..., :1].float()
    return Lattice.independent(tokens, steps + confidences(logits).log()[..., None])


def confidences(logits: torch.Tensor) -> torch.FloatTensor:
    """The largest probability of each position, in float32: `(R, K, V)` to `(R, K)`. Never NaN."""
    # Against the exponential of a difference of large numbers (the maximum and the logsumexp) this is exact at 1000,
    # and unlike a plain sum the kernels of softmax compute a row alike whatever is around it.
    size = _CHUNK_SIZES.get(logits.device.type, _CHUNK_SIZE)
    chunks = logits.flatten(0, 1).split(max(1, size // logits.shape[-1]))
    largest = torch.cat([chunk.softmax(-1, dtype=torch.float32).amax(-1) for chunk in chunks])
    return largest.view(logits.shape[:2]).nan_to_num_(nan=0.0)


def best_prefixes(lattice: Lattice, budget: int, limits: DepthLimits, siblings: int | None = None) -> DraftNodes:
    """The most probable prefixes of candidates, the best first, with at most `budget` nodes of a row.

    In graphs and on a GPU it is done by operations of fixed shapes alone, and nothing waits. Sums are taken in float64
    from the first position on, so that every device finds the same tree. With `siblings` a node gets so many children
    at once or none, and the last one that gets any maybe fewer.
    """
    lattice = Lattice(*(part[:, : limits.deepest, :, : siblings or budget] for part in lattice))
    log_probs = lattice.log_probs.nan_to_num(nan=_IMPOSSIBLE, neginf=_IMPOSSIBLE).double()
    lattice = lattice._replace(log_probs=log_probs)
    width, device = lattice.tokens.shape[3], lattice.tokens.device
    depths = limits.depths.to(device, non_blocking=True)
    best_cells = _cells_by_a_heap if limits.waits and device.type in _HOST_DEVICES else _cells_by_levels
    if siblings is None:
        cells, parents, totals = best_cells(lattice, budget, depths)
        tokens = lattice.tokens.flatten(1).gather(1, cells - 1)
    else:
        tokens, parents, totals = _children(lattice, *best_cells(lattice, -(-budget // width) - 1, depths - 1))
    sizes = [num_nodes(width, depth, budget, siblings) for depth in range(limits.deepest + 1)]
    return DraftNodes(tokens[:, :budget], parents[:, :budget], sizes, totals[:, :budget].float())


def _children(lattice: Lattice, cells: torch.LongTensor, above: torch.LongTensor, totals: torch.Tensor) -> _Nodes:
    """The children of the anchor, then those of the best prefixes that have any."""
    rows, depth, num_tables, width = lattice.tokens.shape
    # The anchor comes first among those with children.
    cells, totals = F.pad(cells, (1, 0)), F.pad(totals, (1, 0))
    levels = _depths(cells, num_tables * width).clamp(max=depth - 1)
    first = (levels * num_tables + _tables_after(lattice, cells)) * width
    children = (first[..., None] + torch.arange(width, device=cells.device)).flatten(1)
    totals = totals[..., None] + lattice.log_probs.flatten(1).gather(1, children).view(rows, -1, width)
    # A node's number is that of its parent among those with children, times their number, plus its own rank.
    numbers = (above + 1) * width + (cells[:, 1:] - 1) % width
    parents = F.pad(numbers, (1, 0), value=-1).repeat_interleave(width, dim=1)
    return lattice.tokens.flatten(1).gather(1, children), parents, totals.flatten(1)


def _cells_by_a_heap(lattice: Lattice, budget: int, limits: torch.LongTensor) -> _Nodes:
    """The best prefixes of each row. A node leaves the heap before its next sibling and its first child enter."""
    rows, _, num_tables, width = lattice.tokens.shape
    trees = []
    for row, limit in enumerate(limits.tolist()):
        log_probs, tables = lattice.log_probs[row].tolist(), lattice.tables[row].tolist()
        nodes: list[tuple[int, int, float]] = []
        # An entry: log-probability with the sign changed, ranks, the same of the parent, the parent's node, the table.
        heap = [(-log_probs[0][0][0], (0,), 0.0, -1, 0)] if limit > 0 else []
        while heap and len(nodes) < budget:
            cost, ranks, parent_cost, parent, table = heapq.heappop(heap)
            level, rank = len(ranks) - 1, ranks[-1]
            if level + 1 < limit:
                below = tables[level][table][rank]
                heapq.heappush(heap, (cost - log_probs[level + 1][below][0], (*ranks, 0), cost, len(nodes), below))
            if rank + 1 < width:
                next_cost = parent_cost - log_probs[level][table][rank + 1]
                heapq.heappush(heap, (next_cost, (*ranks[:-1], rank + 1), parent_cost, parent, table))
            nodes.append(((level * num_tables + table) * width + rank + 1, parent, -cost))
        # What fills up a row counts for nothing.
        trees.append(nodes + [(1, -1, -math.inf)] * (budget - len(nodes)))
    cells, parents, totals = torch.tensor(trees, dtype=torch.float64).view(rows, budget, 3).unbind(2)
    return cells.long(), parents.long(), totals


def _cells_by_levels(lattice: Lattice, budget: int, limits: torch.LongTensor) -> _Nodes:
    """The best prefixes of all rows at once, one position after the other.

    The best prefixes of the first positions are kept in a list, in the order of their ranks: a prefix, then at once
    what continues it. There the children of those that end at the last position are inserted, and a stable sort picks
    the best of them all, so that equal ones are taken in this order too.
    """
    rows, depth, num_tables, width = lattice.tokens.shape
    device, per_position = lattice.tokens.device, num_tables * width
    too_deep = torch.arange(depth, device=device) >= limits[:, None]
    log_probs = lattice.log_probs.masked_fill(too_deep[..., None, None], -math.inf)
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

    # A node's parent is the last one before it that is one shallower; the anchor's is itself.
    depths, indices = _depths(cells, per_position), torch.arange(cells.shape[1], device=device)
    is_above = (depths[:, None] == depths[..., None] - 1) & (indices < indices[:, None])
    parents = torch.where(is_above, indices, 0).amax(-1)
    # From the order of the ranks to that of the probabilities, without the anchor.
    order = _descending(totals[:, 1:])[:, : num_prefixes(width, depth, budget)] + 1
    nodes = torch.arange(order.shape[1], device=device).expand_as(order)
    places = torch.full_like(cells, -1).scatter_(1, order, nodes)
    parents = places.gather(1, parents.gather(1, order))
    return cells.gather(1, order), parents, totals.gather(1, order)


def _tables_after(lattice: Lattice, cells: torch.LongTensor) -> torch.LongTensor:
    """The table that counts at the position after each cell; there is one after the anchor."""
    tables = lattice.tables.flatten(1).gather(1, (cells - 1).clamp(min=0))
    return torch.where(cells > 0, tables, 0)


def _descending(values: torch.Tensor) -> torch.LongTensor:
    return values.sort(dim=1, descending=True, stable=True).indices


def _depths(cells: torch.LongTensor, per_position: int) -> torch.LongTensor:
    """Positions that a prefix takes, from the cell of its last token (0: the anchor)."""
    return (cells + (per_position - 1)).div(per_position, rounding_mode="floor")


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
