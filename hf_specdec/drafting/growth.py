"""Growing drafts level by level: chains, static trees and dynamic trees.

A step of the network reads the nodes of a level, each a token and the state that its parent has left, and says what
follows them; a draw chooses among that. A static tree takes the candidates of given ranks. A dynamic tree follows the
network's confidence: the best nodes of a level are expanded, and the most probable of all candidates are drafted
(EAGLE-2, arXiv:2406.16858, section 4), or those of the most probable sequences.

The log-probability of a node or candidate is that of the path to it. The sizes of a dynamic tree are the numbers of
candidates in its first 0, 1, ... levels together.

Where positions were predicted at once, their logits are those of all nodes of a level: what a network predicts there
does not depend on the tokens before, but what the grammar of a row allows does.

Shapes: R active rows, F nodes of a level that are read, W candidates of each, C candidates of a whole tree, N nodes of
the draft, h hidden size of the network, U its vocabulary, of which `token_ids` `(U,)` are the target's where these are
others; K positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..drafts import DraftTree, TokenTree, renumbered
from ..kernels.best import best_tokens
from ..transfers import kept_tensor, upload
from .draw import DepthLimits, Draw
from .state import Entries


# Reads the next level: tokens (R, F) after states (R, F, h) that their parents have handed on, and the parents, nodes
# (F,) or (R, F) of the level before or a slice of them. Returns states (R, F, h) to hand on, and logits (R, F, U).
Step = Callable[[torch.LongTensor, torch.Tensor, torch.LongTensor | slice], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class DynamicTree:
    """Shape of a tree that follows the confidence of the network."""

    widths: tuple[int, ...]  # candidates of each node that is expanded, by depth
    expanded: tuple[int, ...]  # best nodes of each level that are expanded, of all levels but the last
    num_nodes: int  # most that are drafted
    num_sequences: int | None = None  # draft the nodes of the most probable sequences of full depth instead
    # A row of less room than others has what is not too deep of the nodes that are chosen for these; else nodes are
    # chosen among those that it has room for.
    cuts_chosen: bool = False

    is_chain = False

    @classmethod
    def of(cls, depth: int, top_k: int, total_tokens: int) -> DynamicTree:
        """A tree whose best nodes are expanded `depth` times, all alike; the anchor is one of the `total_tokens`."""
        # A deeper node would need more nodes above it than there are.
        depth = min(depth, total_tokens - 2)
        return cls((top_k,) * (depth + 1), (top_k,) * depth, total_tokens - 1)

    @property
    def max_depth(self) -> int:
        return len(self.widths)

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Most candidates of each level."""
        return tuple(count * width for count, width in zip((1, *self.expanded), self.widths))

    def __len__(self) -> int:
        """Most nodes that are drafted."""
        if self.num_sequences is not None:
            return sum(min(size, self.num_sequences) for size in self.level_sizes)
        return min(self.num_nodes, sum(self.level_sizes))

    @property
    def num_reads(self) -> int:
        """Most nodes that are expanded; many of them need not be drafted."""
        return sum(self.expanded)


class DraftNodes(NamedTuple):
    """A draft as deep as it was grown; rows may have room for less."""

    tokens: torch.LongTensor  # (R, N): the target's ids
    # Of a dynamic tree.
    parents: torch.LongTensor | None = None  # (R, N)
    sizes: list[int] | None = None
    log_probs: torch.FloatTensor | None = None  # (R, N), of paths; also of a chain, where they are known
    places: torch.LongTensor | None = None  # (R, N): among the candidates, where what was chosen is to be cut
    counts: torch.LongTensor | None = None  # (R,): valid nodes, where not all are
    # Of a chain that was drawn.
    probs: torch.FloatTensor | None = None  # (R, N, V): what its tokens were sampled from
    # Where rows may end before their limits.
    depths: torch.LongTensor | None = None  # (R,)

    def draft(self, plan: TokenTree | DynamicTree, limits: list[int], device: torch.device) -> DraftTree:
        """The draft in the shape that was grown, each row cut to its limit; waits for the depths, where there are."""
        depths = limits if self.depths is None else self.depths.tolist()
        if self.parents is None:
            if self.probs is not None:
                draft = DraftTree.chain(self.tokens.to(device), probs=self.probs).shortened(depths)
            else:
                draft = DraftTree.of_shape(plan, self.tokens.to(device), depths)
            if self.log_probs is not None:
                padding = torch.arange(draft.size, device=device) >= draft.num_nodes[:, None]
                draft.path_log_probs = self.log_probs[:, : draft.size].to(device).masked_fill(padding, -math.inf)
            return draft
        assert self.sizes is not None, "nodes of a dynamic tree without sizes"
        assert self.log_probs is not None, "nodes of a dynamic tree without log-probabilities"
        parts = self.tokens, self.parents, self.log_probs
        ends = [self.sizes[min(depth, len(self.sizes) - 1)] for depth in depths]
        counts, widest = self.counts, self.tokens.shape[1]
        if self.places is not None and min(ends) < self.sizes[-1]:
            is_drafted = self.places < upload(ends, self.places.device)[:, None]
            if counts is not None:
                is_drafted &= torch.arange(widest, device=self.places.device) < counts[:, None]
            counts = is_drafted.sum(1)
        if counts is None:
            counts = [min(end, widest) for end in ends]
            widest = max(counts)
        elif counts.device.type == "cpu":
            # A GPU is not asked how many there are: padding costs it less.
            widest = int(counts.max())
        tokens, parents, log_probs = (values[:, :widest].to(device) for values in parts)
        if isinstance(counts, torch.Tensor):
            counts = counts.to(device)
            padding = torch.arange(widest, device=device) >= counts[:, None]
            log_probs = log_probs.masked_fill(padding, -math.inf)
        return DraftTree(tokens, parents, counts, path_log_probs=log_probs)


def grow(
    plan: TokenTree | DynamicTree,
    step: Step,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    limits: DepthLimits,
    draw: Draw,
) -> DraftNodes:
    """Grows a draft in a shape after the last entry of each row, which hands on states `(R, h)`, with logits `(R, U)`.

    Limits are at most the depth of the shape.
    """
    hidden, logits = hidden[:, None], logits[:, None]
    if isinstance(plan, DynamicTree):
        return _grow_dynamic(plan, step, hidden, logits, limits, draw)
    # Of a static tree candidates of given ranks are taken, and only nodes that have children are read.
    log_probs = hidden.new_zeros(hidden.shape[:2], dtype=torch.float32) if limits.threshold else None
    levels, drafted, nodes = plan.levels(logits.device), [], None
    for depth, level in enumerate(levels, start=1):
        tokens, log_probs = draw.candidates(logits, level.width, log_probs, nodes)
        drafted.append(tokens[:, level.picks])
        if depth < limits.deepest and log_probs is not None:
            log_probs = log_probs[:, level.read_picks]
            limits.stop_low_confidence(log_probs, depth)
            log_probs = torch.zeros_like(log_probs) if limits.by_token else log_probs
        if depth >= min(limits.deepest, len(levels)):
            break
        nodes = read, parents = tokens[:, level.read_picks], level.read_parents
        hidden, logits = step(read, hidden[:, parents], parents)
    tokens = torch.cat(drafted, dim=1)
    return DraftNodes(tokens, probs=draw.all_probs, depths=limits.depths if limits.threshold else None)


def _grow_dynamic(
    plan: DynamicTree,
    step: Step,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    limits: DepthLimits,
    draw: Draw,
) -> DraftNodes:
    """Expands the best nodes of each level, and takes the most probable of all candidates."""
    log_probs: Any = hidden.new_zeros(hidden.shape[:2], dtype=torch.float32)
    # Nodes that the candidates of a level follow, each as many as its width: their places, -1 for the anchor.
    read = [torch.full_like(log_probs, -1, dtype=torch.long)]
    levels: list[tuple[torch.Tensor, torch.Tensor]] = []
    sizes, nodes = [0], None
    while True:
        depth, width = len(levels), plan.widths[len(levels)]
        tokens, log_probs = draw.candidates(logits, width, log_probs, nodes)
        levels.append((tokens, log_probs))
        sizes.append(sizes[-1] + tokens.shape[1])
        if depth + 1 < limits.deepest:
            limits.stop_low_confidence(log_probs, depth + 1)
        if depth + 1 == limits.deepest:
            break
        count = plan.expanded[depth]
        # The candidates of a single node come in their order, and where all are expanded it does not matter.
        is_sorted = depth == 0
        if is_sorted or count == plan.level_sizes[depth]:
            order = kept_tensor(tuple(range(tokens.shape[1])), tokens.device).expand_as(tokens)
        else:
            # Stable: of equally probable nodes the first one counts, so that a parent comes before its child.
            log_probs, order = log_probs.sort(dim=1, descending=True, stable=True)
            is_sorted = True
        if limits.waits and is_sorted and plan.num_sequences is None:
            count = num_expandable(plan, levels, log_probs[:, :count])
            if not count:
                break
        best, log_probs = order[:, :count], log_probs[:, :count]
        parents = best // width
        read.append(best + sizes[-2])
        nodes = tokens.gather(1, best), parents
        hidden, logits = step(nodes[0], pick_nodes(hidden, parents), parents)
    tokens, log_probs = (torch.cat(parts, dim=1) for parts in zip(*levels))
    counts = None
    if plan.num_sequences is not None:
        chosen, counts = _of_best_sequences(log_probs, sizes, plan.num_sequences)
    else:
        log_probs = log_probs if plan.cuts_chosen else limits.within(log_probs, sizes)
        # Stable: of equally probable ones the first count, so that a parent is chosen before its child.
        order = log_probs.sort(dim=1, descending=True, stable=True).indices
        chosen = order[:, : min(sizes[-1], plan.num_nodes)].sort(dim=1).values
    if len(set(plan.widths)) == 1:
        parents = torch.cat(read, dim=1).gather(1, chosen // plan.widths[0])
    else:
        above = [places[..., None].expand(-1, -1, width).flatten(1) for places, width in zip(read, plan.widths)]
        parents = torch.cat(above, dim=1).gather(1, chosen)
    parents = renumbered(parents, chosen, tokens.shape[1])
    depths, places = limits.depths if limits.threshold else None, chosen if plan.cuts_chosen else None
    return DraftNodes(
        tokens.gather(1, chosen), parents, sizes, log_probs.gather(1, chosen), places, counts, depths=depths
    )


def _of_best_sequences(
    log_probs: torch.FloatTensor, sizes: list[int], num_sequences: int
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """Places `(R, N)` of the nodes of the best sequences among all candidates `(R, C)`, and how many are valid."""
    leaves = log_probs[:, sizes[-2] :]
    best = leaves.topk(min(num_sequences, leaves.shape[1])).indices
    chosen = torch.zeros_like(leaves, dtype=torch.bool).scatter_(1, best, True)
    levels = [chosen]
    for begin, end in zip(sizes[-3::-1], sizes[-2:0:-1]):
        chosen = chosen.unflatten(1, (end - begin, -1)).any(-1)
        levels.insert(0, chosen)
    is_chosen = torch.cat(levels, dim=1)
    most = sum(min(end - begin, num_sequences) for begin, end in zip(sizes, sizes[1:]))
    order = is_chosen.byte().sort(dim=1, descending=True, stable=True).indices
    return order[:, :most], is_chosen.sum(1)


def num_expandable(
    plan: DynamicTree, levels: list[tuple[torch.Tensor, torch.Tensor]], log_probs: torch.FloatTensor
) -> int:
    """Number of nodes `(R, W)` of a level whose children can still be drafted; reading others would change nothing.

    A child is never more probable than its parent. So it can be drafted only if its parent is among the most probable
    of all candidates so far, one place of the draft being the child's own. The nodes come in decreasing order; levels
    are tokens and log-probabilities of candidates.
    """
    places = plan.num_nodes - 1
    if not places:
        return 0
    so_far = torch.cat([values for _, values in levels], dim=1)
    # On other devices asking costs more than reading the nodes.
    if so_far.device.type != "cpu" or so_far.shape[1] <= places:
        return log_probs.shape[1]
    least = so_far.topk(places, dim=1).values[:, -1:]
    return int(((log_probs >= least) & (log_probs > -math.inf)).sum(1).max())


def pick_nodes(values: torch.Tensor, nodes: torch.LongTensor | slice) -> torch.Tensor:
    """Picks nodes `(F,)` or `(R, F)` from each row's values `(R | 1, F', X)`: `(R | 1, F, X)`."""
    if isinstance(nodes, slice):
        return values[:, nodes]
    if nodes.dim() == 1:
        return values.index_select(1, nodes)
    values = values.expand(len(nodes), -1, -1)
    return values.gather(1, nodes[..., None].expand(-1, -1, values.shape[-1]))


class Positions:
    """Positions with logits `(R, K, U)`, through which a draft grows as through the steps of a network."""

    def __init__(self, logits: torch.Tensor):
        self.position_logits: torch.Tensor = logits
        self.position: int = 0

    def step(
        self, tokens: torch.LongTensor, hidden: torch.Tensor, parents: torch.LongTensor | slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Goes on to the next position, after tokens `(R, F)`."""
        self.position += 1
        return hidden, self.logits(tokens.to(self.position_logits.device))

    def logits(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Logits `(R, F, U)` of the position after tokens `(R, F)`."""
        return self.position_logits[:, self.position, None].expand(-1, tokens.shape[1], -1)

    def grow(
        self, plan: TokenTree | DynamicTree, anchors: torch.LongTensor, limits: DepthLimits, draw: Draw
    ) -> DraftNodes:
        """Grows a draft after anchors `(R,)`; the other arguments are those of [`~drafting.growth.grow`]."""
        # There is no state that nodes would hand on.
        hidden = self.position_logits.new_empty((len(anchors), 0), dtype=torch.float32)
        return grow(plan, self.step, hidden, self.logits(anchors[:, None])[:, 0], limits, draw)


def draft_chain(
    plan: TokenTree | DynamicTree, logits: torch.Tensor, new: Entries, limits: DepthLimits, draw: Draw
) -> DraftNodes:
    """Chains after new entries by logits `(R, K, U)`: the best tokens at once by a plain draw."""
    if not draw.is_plain:
        return Positions(logits).grow(plan, new.last(new.tokens), limits, draw)
    tokens = best_tokens(logits)
    if limits.threshold:
        paths = logits.log_softmax(-1, dtype=torch.float32).max(-1).values
        paths = paths if limits.by_token else paths.cumsum(1)
        for depth in range(1, limits.deepest):
            limits.stop_low_confidence(paths[:, depth - 1 : depth], depth)
    tokens = tokens if draw.token_ids is None else draw.token_ids[tokens]
    return DraftNodes(tokens, depths=limits.depths if limits.threshold else None)
