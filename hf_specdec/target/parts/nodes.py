"""Nodes of a verification as recurrent layers read them: every node continues what its parent has left.

Shapes: R rows, T nodes, K inputs that a convolution keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from ...drafts import TreeTopology


class Level(NamedTuple):
    """The nodes of one depth in all rows, each `(N,)`."""

    rows: torch.LongTensor
    nodes: torch.LongTensor
    parents: torch.LongTensor  # places of their parents in the level above


class Nodes:
    """The nodes of one verification, of which the topology says who follows whom."""

    def __init__(self, topology: TreeTopology):
        self.topology = topology
        self.count: int = topology.depths.shape[-1]
        self.is_chain: bool = topology.is_chain
        # (1 | R, heads: 1, T, T); [.., i, j]: j is i or one of its ancestors
        self.visible: torch.BoolTensor = topology.ancestors.view(-1, 1, self.count, self.count)
        # The root is its own parent. None where the rows differ.
        self.parents: list[int] | None = topology.parents.tolist() if topology.parents.dim() == 1 else None
        self._columns: dict[tuple[int, int, torch.device], torch.LongTensor] = {}
        self._levels: dict[int, tuple[list[Level], torch.LongTensor]] = {}

    @classmethod
    def of(cls, topology: TreeTopology) -> Nodes:
        # Topologies that differ from row to row differ from cycle to cycle, too.
        return _shared_nodes(topology) if topology.depths.dim() == 1 else cls(topology)

    def on(self, device: torch.device) -> torch.BoolTensor:
        """`visible`, where a layer lies."""
        return self.visible.to(device, non_blocking=True)

    def levels(self, num_rows: int) -> tuple[list[Level], torch.LongTensor]:
        """The nodes by depth, and the place `(R, T)` of each node among those of all levels."""
        if num_rows not in self._levels:
            self._levels[num_rows] = self._by_depth(num_rows)
        return self._levels[num_rows]

    def _by_depth(self, num_rows: int) -> tuple[list[Level], torch.LongTensor]:
        depths, parents = (
            values.cpu().view(-1, self.count).expand(num_rows, -1)
            for values in (self.topology.depths, self.topology.parents)
        )
        levels, places, num_above = [], torch.zeros_like(depths), 0
        for depth in range(int(depths.max()) + 1):
            rows, nodes = (depths == depth).nonzero().unbind(1)
            first_above = num_above - len(levels[-1].rows) if levels else 0
            levels.append(Level(rows, nodes, places[rows, parents[rows, nodes]] - first_above))
            places[rows, nodes] = num_above + torch.arange(len(rows), device="cpu")
            num_above += len(rows)
        return levels, places

    def walk(self, start: torch.Tensor, step: Callable[[int, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        """States `(R, ...)` after all nodes, by what a node makes of its parent's; of the root it is `start`."""
        states: list[torch.Tensor] = []
        for node in range(self.count):
            states.append(step(node, start if node == 0 else self._of_parents(states, node)))
        return states

    def _of_parents(self, states: list[torch.Tensor], node: int) -> torch.Tensor:
        """The states of the parents of a node, which is another one in each row unless they share a topology."""
        if self.is_chain:
            return states[-1]
        if self.parents is not None:
            return states[self.parents[node]]
        parents = self.topology.parents[:, node].to(states[0].device, non_blocking=True)
        return torch.stack(states, dim=1)[torch.arange(len(parents), device=parents.device), parents]

    def _last_columns(self, past: int, size: int, device: torch.device) -> torch.LongTensor:
        """Places `(1 | R, T, size)` of each node's last inputs, its own being the last, after `past` earlier ones."""
        key = past, size, device
        if key not in self._columns:
            parents, depths = (values.view(-1, self.count) for values in (self.topology.parents, self.topology.depths))
            node, places = torch.arange(self.count, device=parents.device).expand_as(parents), []
            for distance in range(size):
                places.append(torch.where(distance <= depths, past + node, past + depths - distance))
                node = parents.gather(1, node)
            self._columns[key] = torch.stack(places[::-1], dim=-1).to(device, non_blocking=True)
        return self._columns[key]

    def windows(self, seen: torch.Tensor, size: int) -> torch.Tensor:
        """The last `size` inputs of every node `(R, channels, T, size)`, of all of them `(R, channels, past + T)`."""
        columns = self._last_columns(seen.shape[-1] - self.count, size, seen.device)
        flat = columns.flatten(1)
        if len(flat) == 1:
            return seen[..., flat[0]].unflatten(-1, columns.shape[1:])
        places = flat[:, None].expand(-1, seen.shape[1], -1)
        return seen.gather(2, places).unflatten(-1, columns.shape[1:])

    def last_inputs(self, seen: torch.Tensor, size: int, last: torch.LongTensor) -> torch.Tensor:
        """The last `size` inputs `(R, channels, size)` up to node `last` `(R,)` of each row."""
        columns = self._last_columns(seen.shape[-1] - self.count, size, seen.device).expand(len(last), -1, -1)
        last = last.to(seen.device, non_blocking=True)
        places = columns[torch.arange(len(last), device=seen.device), last]
        return seen.gather(2, places[:, None].expand(-1, seen.shape[1], -1))


@lru_cache(maxsize=256)
def _shared_nodes(topology: TreeTopology) -> Nodes:
    return Nodes(topology)
