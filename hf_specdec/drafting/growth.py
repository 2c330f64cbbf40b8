"""Growing drafts level by level: chains, static trees and dynamic trees.

A network reads the nodes of a level, each a token and the state that its parent has left, and says what follows them.
A static tree takes the candidates of given ranks. A dynamic tree follows the network's confidence: the best nodes of
a level are expanded, and the most probable of all candidates are drafted (EAGLE-2, arXiv:2406.16858, section 4).

The log-probability of a node or candidate is that of the path to it. The sizes of a dynamic tree are the numbers of
candidates in its first 0, 1, ... levels together.

Shapes: R active rows, F nodes of a level that are read, W candidates of each, C candidates of a whole tree, N nodes of
the draft, h hidden size of the network, U its vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..drafts import DraftTree, TokenTree, renumbered
from ..drafts.static import Level
from ..kernels.best import best_log_probs, best_tokens
from ..logits.grammar.masks import GrowingMasks
from ..transfers import kept_tensor
from .entries import DraftEntries, pick_nodes


@dataclass(frozen=True)
class DynamicTree:
    """Shape of a tree that follows the confidence of the network."""

    depth: int  # how often the best nodes of a level are expanded
    top_k: int  # candidates of each node, and nodes of a level that are expanded
    total_tokens: int  # verified tokens, the anchor included

    is_chain = False

    @property
    def max_depth(self) -> int:
        # A deeper node would need more nodes above it than there are.
        return min(self.depth + 1, self.total_tokens - 1)

    def __len__(self) -> int:
        """Most nodes that are drafted."""
        return min(self.total_tokens - 1, self.top_k + (self.max_depth - 1) * self.top_k**2)

    def up_to(self, depth: int) -> DynamicTree:
        """The shape of trees that are no deeper, 1 at least."""
        return self if depth >= self.max_depth else replace(self, depth=depth - 1)

    def levels(self, device: torch.device) -> DynamicTree:
        """The shape itself, where that of a static tree has its levels."""
        return self

    @property
    def num_reads(self) -> int:
        """Most nodes that are expanded; many of them need not be drafted."""
        return (self.max_depth - 1) * self.top_k


class DraftNodes(NamedTuple):
    """A draft as deep as it was grown; rows may have room for less."""

    tokens: torch.LongTensor  # (R, N): the target's ids
    # Of a dynamic tree.
    parents: torch.LongTensor | None = None  # (R, N)
    sizes: list[int] | None = None
    log_probs: torch.FloatTensor | None = None  # (R, N)

    def draft(self, plan: TokenTree | DynamicTree, depths: list[int], device: torch.device) -> DraftTree:
        """The draft in the shape that was grown, each row cut to its depth."""
        if self.sizes is None:
            return DraftTree.of_shape(plan, self.tokens.to(device), depths)
        assert self.parents is not None, "nodes of a dynamic tree without parents"
        assert self.log_probs is not None, "nodes of a dynamic tree without log-probabilities"
        deepest = len(self.sizes) - 1
        counts = [min(self.sizes[min(depth, deepest)], plan.total_tokens - 1) for depth in depths]
        tokens, parents, log_probs = (
            values[:, : max(counts)].to(device) for values in (self.tokens, self.parents, self.log_probs)
        )
        return DraftTree(tokens, parents, counts, path_log_probs=log_probs)


class DepthLimits:
    """Largest depth of each row's draft, `(R,)`; on the host, if `deepest` is left out.

    Nodes are expanded while the probability of their path exceeds `threshold`; 0 for any. With `deepest` drafts are
    grown to this depth whatever the limits are, as in a graph. Without, the host waits for the device to learn which
    rows end, and forwards that no row needs are not launched.
    """

    def __init__(self, depths: torch.LongTensor, threshold: float = 0.0, deepest: int | None = None):
        self.depths: torch.Tensor = depths
        self.threshold = threshold
        self.waits: bool = deepest is None
        self.deepest: int = int(depths.max()) if deepest is None else deepest

    def stop_low_confidence(self, log_probs: torch.FloatTensor, depth: int) -> None:
        """Ends rows at `depth` where no node that would be expanded is probable enough by its `(R, F)`."""
        if not self.threshold:
            return
        is_probable = (log_probs.amax(1) > math.log(self.threshold)).to(self.depths.device)
        self.depths = torch.where(is_probable, self.depths, self.depths.clamp(max=depth))
        if self.waits:
            self.deepest = int(self.depths.max())

    def within(self, log_probs: torch.FloatTensor, sizes: list[int]) -> torch.FloatTensor:
        """Log-probabilities `(R, C)` of candidates level by level, -inf for those too deep for their row."""
        if self.waits and int(self.depths.min()) == self.deepest:
            return log_probs
        depths = self.depths.to(log_probs.device, non_blocking=True)
        ends = kept_tensor(tuple(sizes), depths.device)[depths.clamp(0, len(sizes) - 1)]
        places = torch.arange(log_probs.shape[1], device=log_probs.device)
        return log_probs.masked_fill(places >= ends[:, None], -math.inf)


def grow(
    shape: DynamicTree | tuple[Level, ...],
    entries: DraftEntries,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    limits: DepthLimits,
    masks: GrowingMasks | None = None,
) -> DraftNodes:
    """Grows a draft in a shape, or in the levels of a static one, after the last entry of each row.

    The entries are prepared for a draft; the last ones hand on states `(R, h)`, with logits `(R, U)` after them.
    Limits are at most the depth of the shape, masks those of the rows' grammars, outside of graphs.
    """
    grow_shape = _grow_dynamic if isinstance(shape, DynamicTree) else _grow_static
    return grow_shape(shape, entries, hidden[:, None], logits[:, None], limits, masks)


def _grow_static(
    levels: tuple[Level, ...],
    entries: DraftEntries,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    limits: DepthLimits,
    masks: GrowingMasks | None,
) -> DraftNodes:
    """Takes the candidates of the given ranks; only nodes that have children are read."""
    network = entries.network
    log_probs = hidden.new_zeros(hidden.shape[:2], dtype=torch.float32) if limits.threshold else None
    drafted = []
    for depth, level in enumerate(levels, start=1):
        tokens, log_probs = _candidates(network, logits, level.width, log_probs, masks)
        drafted.append(tokens[:, level.picks])
        if depth < limits.deepest and log_probs is not None:
            log_probs = log_probs[:, level.read_picks]
            limits.stop_low_confidence(log_probs, depth)
        if depth == limits.deepest:
            break
        read, parents = tokens[:, level.read_picks], level.read_parents
        if masks is not None:
            masks.follow(read, parents)
        hidden, output = entries.read_nodes(read, hidden[:, parents], parents)
        logits = network.logits(output)
    return DraftNodes(torch.cat(drafted, dim=1))


def _grow_dynamic(
    plan: DynamicTree,
    entries: DraftEntries,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    limits: DepthLimits,
    masks: GrowingMasks | None,
) -> DraftNodes:
    """Expands the best nodes of each level, and takes the most probable of all candidates."""
    network, width = entries.network, plan.top_k
    log_probs = hidden.new_zeros(hidden.shape[:2], dtype=torch.float32)
    # Nodes that each W successive candidates follow: places among the candidates, -1 for the anchor.
    read = [torch.full_like(log_probs, -1, dtype=torch.long)]
    levels: list[tuple[torch.Tensor, torch.Tensor]] = []
    sizes = [0]
    while True:
        tokens, log_probs = _candidates(network, logits, width, log_probs, masks)
        levels.append((tokens, log_probs))
        sizes.append(sizes[-1] + tokens.shape[1])
        # Stable: of equally probable nodes the first one counts, so that a parent comes before its child.
        log_probs, order = log_probs.sort(dim=1, descending=True, stable=True)
        if len(levels) < limits.deepest:
            limits.stop_low_confidence(log_probs, len(levels))
        if len(levels) == limits.deepest:
            break
        count = num_expandable(plan, levels, log_probs[:, :width]) if limits.waits else width
        if not count:
            break
        best, log_probs = order[:, :count], log_probs[:, :count]
        parents = best // width
        read.append(best + sizes[-2])
        best = tokens.gather(1, best)
        if masks is not None:
            masks.follow(best, parents)
        hidden, output = entries.read_nodes(best, pick_nodes(hidden, parents), parents)
        logits = network.logits(output)
    tokens, log_probs, read = (torch.cat(parts, dim=1) for parts in (*zip(*levels), read))
    log_probs = limits.within(log_probs, sizes)
    chosen = most_probable(log_probs, min(sizes[-1], plan.total_tokens - 1))
    parents = renumbered(read.gather(1, chosen // width), chosen, tokens.shape[1])
    return DraftNodes(tokens.gather(1, chosen), parents, sizes, log_probs.gather(1, chosen))


def num_expandable(
    plan: DynamicTree, levels: list[tuple[torch.Tensor, torch.Tensor]], log_probs: torch.FloatTensor
) -> int:
    """Number of nodes `(R, W)` of a level whose children can still be drafted; reading others would change nothing.

    A child is never more probable than its parent. So it can be drafted only if its parent is among the most probable
    of all candidates so far, one place of the draft being the child's own. The nodes come in decreasing order; levels
    are tokens and log-probabilities of candidates.
    """
    places = plan.total_tokens - 2
    so_far = torch.cat([values for _, values in levels], dim=1)
    # On other devices asking costs more than reading the nodes.
    if so_far.device.type != "cpu" or so_far.shape[1] <= places:
        return log_probs.shape[1]
    least = so_far.topk(places, dim=1).values[:, -1:]
    return int(((log_probs >= least) & (log_probs > -math.inf)).sum(1).max())


def most_probable(log_probs: torch.FloatTensor, count: int) -> torch.LongTensor:
    """Places `(R, count)` of the most probable candidates of each row, in their order."""
    # Stable: of equally probable ones the first count, so that a parent is chosen before its child.
    order = log_probs.sort(dim=1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=1).values


def _candidates(
    network: nn.Module,
    logits: torch.Tensor,
    width: int,
    log_probs: torch.FloatTensor | None,
    masks: GrowingMasks | None,
) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
    """The target's ids `(R, F * W)` of the best continuations by logits `(R, F, U)` after the nodes.

    The second result are their log-probabilities, if those of the nodes, `(R, F)`, are given.
    """
    if masks is not None:
        logits = masks.apply(logits, network.token_ids)
    if width == 1 and log_probs is None:
        tokens = best_tokens(logits)
    else:
        if log_probs is None:
            values, tokens = logits.topk(width)
        elif logits.is_cpu:
            values, tokens = F.log_softmax(logits, -1, dtype=torch.float32).topk(width)
        else:
            values, tokens = best_log_probs(logits, width)
        if masks is not None:
            # Where nothing may follow there is no distribution.
            values = values.nan_to_num(nan=-math.inf, neginf=-math.inf)
        tokens = tokens.flatten(1)
        log_probs = None if log_probs is None else (log_probs[..., None] + values).flatten(1)
    # Where they differ, the network has the target's id of each of its tokens.
    token_ids = network.token_ids
    return tokens if token_ids is None else token_ids[tokens], log_probs
