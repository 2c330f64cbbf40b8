"""Trees that an MLP speculator grows level by level: those of the most probable nodes, or of the best whole sequences.

Shapes: B active rows, N draft nodes, S nodes that were looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...drafting.growth import most_probable
from ...drafts import DraftTree, renumbered
from ...threads import cached_property
from ...transfers import kept_on_device, upload


@dataclass(frozen=True)
class GrowthPlan:
    """Shape of trees that differ from row to row: the nodes that are looked at, and those that are drafted.

    Args:
        widths (`tuple[int, ...]`): Continuations of each node, by depth.
        num_nodes (`int`): Draft this many most probable nodes.
        num_candidates (`int`, *optional*): Instead, draft the nodes of this many most probable sequences.
    """

    widths: tuple[int, ...]
    num_nodes: int
    num_candidates: int | None = None

    is_chain = False

    @property
    def max_depth(self) -> int:
        return len(self.widths)

    @cached_property
    def num_reads(self) -> tuple[int, ...]:
        """Nodes of each level that are continued."""
        counts, size = [], 1
        for depth, width in enumerate(self.widths, start=1):
            size *= width
            if self.num_candidates is None:
                # More nodes than these rarely have children among the chosen: reading all that could gains no tokens.
                size = min(size, -(-self.num_nodes // (2 * depth + 1)))
            counts.append(size)
        return tuple(counts)

    def __len__(self) -> int:
        """Most nodes that are drafted."""
        sizes = [reads * width for reads, width in zip((1, *self.num_reads), self.widths)]
        if self.num_candidates is None:
            return min(self.num_nodes, sum(sizes))
        return sum(min(size, self.num_candidates) for size in sizes)


@dataclass
class GrownTree:
    """All nodes that were looked at, level by level.

    Attributes:
        tokens (`torch.LongTensor` of shape `(B, S)`): Their tokens.
        parents (`torch.LongTensor` of shape `(B, S)`): Index of each node's parent, -1 for a child of the anchor.
        scores (`torch.FloatTensor` of shape `(B, S)`): Log-probability of the path to each node.
        level_sizes (`list[int]`): Nodes of each level.
    """

    tokens: torch.LongTensor
    parents: torch.LongTensor
    scores: torch.FloatTensor
    level_sizes: list[int]

    def chosen(self, plan: GrowthPlan) -> ChosenNodes:
        """The nodes that the plan chooses."""
        if plan.num_candidates is None:
            nodes, counts = most_probable(self.scores, plan.num_nodes), None
        else:
            nodes, counts = self._best_sequences(plan)
        tokens, scores = self.tokens.gather(1, nodes), self.scores.gather(1, nodes)
        parents = renumbered(self.parents.gather(1, nodes), nodes, self.tokens.shape[1])
        return ChosenNodes(tokens, parents, scores, nodes, counts, tuple(self.level_sizes))

    def _best_sequences(self, plan: GrowthPlan) -> tuple[torch.LongTensor, torch.LongTensor]:
        """The nodes `(B, N)` of the sequences, in the order of levels, and how many are valid `(B,)`."""
        leaves = self.scores[:, -self.level_sizes[-1] :]
        best = leaves.topk(min(plan.num_candidates, leaves.shape[1])).indices
        chosen = torch.zeros_like(leaves, dtype=torch.bool).scatter_(1, best, True)
        levels = [chosen]
        for size in reversed(self.level_sizes[:-1]):
            chosen = chosen.unflatten(1, (size, -1)).any(-1)
            levels.insert(0, chosen)
        chosen = torch.cat(levels, dim=1)
        return chosen.byte().sort(dim=1, descending=True, stable=True).indices[:, : len(plan)], chosen.sum(1)


class ChosenNodes(NamedTuple):
    """The nodes of a tree that are drafted, in the order of levels.

    Attributes:
        tokens, parents (`torch.LongTensor` of shape `(B, N)`): Of the nodes.
        scores (`torch.FloatTensor` of shape `(B, N)`): Log-probability of the path to each.
        places (`torch.LongTensor` of shape `(B, N)`): Their places among the nodes that were looked at.
        counts (`torch.LongTensor` of shape `(B,)`, *optional*): Number of valid ones; `None` for all.
        level_sizes (`tuple[int, ...]`): Nodes of each level that were looked at.
    """

    tokens: torch.LongTensor
    parents: torch.LongTensor
    scores: torch.FloatTensor
    places: torch.LongTensor
    counts: torch.LongTensor | None
    level_sizes: tuple[int, ...]

    def draft(self, limits: list[int], device: torch.device) -> DraftTree:
        """The draft, each row cut to its limit."""
        tokens, parents, scores = self.tokens, self.parents, self.scores
        if self.counts is not None and self.counts.device.type == "cpu":
            # How many prefixes sequences share is not known before. A GPU is not asked: padding costs it less.
            widest = int(self.counts.max())
            tokens, parents, scores = tokens[:, :widest], parents[:, :widest], scores[:, :widest]
        if min(limits) < len(self.level_sizes):
            counts = self._num_within(limits).to(device)
        elif self.counts is not None:
            counts = self.counts.to(device)
        else:
            counts = [tokens.shape[1]] * len(limits)
        log_probs = scores.to(device)
        if not isinstance(counts, list):
            is_padding = torch.arange(log_probs.shape[1], device=device) >= counts[:, None]
            log_probs = log_probs.masked_fill(is_padding, -torch.inf)
        return DraftTree(tokens.to(device), parents.to(device), counts, path_log_probs=log_probs)

    def _num_within(self, limits: list[int]) -> torch.LongTensor:
        """Number of each row's valid nodes that are not deeper than its limit; they come first."""
        device = self.places.device
        is_drafted = _depths_of_levels(self.level_sizes, device)[self.places] <= upload(limits, device)[:, None]
        if self.counts is not None:
            is_drafted &= torch.arange(self.places.shape[1], device=device) < self.counts[:, None]
        return is_drafted.sum(1)


@kept_on_device
def _depths_of_levels(sizes: tuple[int, ...], device: torch.device) -> torch.LongTensor:
    """The depth of each node, level by level."""
    return upload([depth for depth, size in enumerate(sizes, start=1) for _ in range(size)], device)
