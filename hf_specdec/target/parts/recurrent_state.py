"""The state of a recurrent layer, which sums up all tokens that were read, and what becomes of it by reading more.

Of the nodes of a verification, chains or trees, each continues what its parent has left.

Shapes: R rows, T nodes of a verification, W tokens read by a layer, K kernel size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map
from transformers.cache_utils import DynamicCache

from ...drafts import TreeTopology


_States = dict[int, torch.Tensor]


class RecurrentState:
    """The states of one layer in all rows."""

    is_committed = False  # at the last committed token of each row, so that no mixer may change it

    def __init__(self, conv_states: _States | None = None, recurrent_states: _States | None = None, num_read: int = 0):
        self.conv_states: _States = dict(conv_states or {})  # the last inputs of each convolution, (R, channels, K)
        self.recurrent_states: _States = dict(recurrent_states or {})  # each (R, ...)
        self.num_read: int = num_read  # tokens of a row that the first convolution has read

    def __bool__(self) -> bool:
        return bool(self.conv_states or self.recurrent_states)

    def update_conv_state(
        self, inputs: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """Appends inputs `(R, channels, W)`; returns them after those that were kept, with which they are read."""
        past = self.conv_states.get(state_idx)
        if state_idx == 0:
            self.num_read += inputs.shape[-1]
        if past is None:
            size = conv_kernel_size or inputs.shape[-1]
            seen = F.pad(inputs, (max(size - inputs.shape[-1], 0), 0))
        else:
            size = past.shape[-1]
            seen = torch.cat([past, inputs], dim=-1)
        self._keep_inputs(state_idx, seen, size)
        return seen

    def _keep_inputs(self, state_idx: int, seen: torch.Tensor, size: int) -> None:
        self.conv_states[state_idx] = seen[..., -size:].clone(memory_format=torch.contiguous_format)

    def update_recurrent_state(self, states: Any, state_idx: int = 0) -> Any:
        past = self.recurrent_states.get(state_idx)
        self.recurrent_states[state_idx] = states if past is None else states.to(past.dtype)
        return self.recurrent_states[state_idx]

    # By rows. Tensors are never written to, except by fused kernels that read one token.

    def after(self, last: torch.LongTensor) -> RecurrentState:
        """The states of all rows after node `last` `(R,)` of each and its ancestors; here after a single token."""
        return self

    def rows(self, index: torch.Tensor) -> RecurrentState:
        """A copy of some rows."""
        return self._changed(lambda state: state[index.to(state.device, non_blocking=True)])

    def clone(self) -> RecurrentState:
        """A holder of copies."""
        return self._changed(torch.clone)

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> RecurrentState:
        return RecurrentState(*tree_map(change, (self.conv_states, self.recurrent_states)), self.num_read)

    @classmethod
    def joined(cls, states: Sequence[RecurrentState]) -> RecurrentState:
        """The rows of several states, one after the other."""
        every = [(state.conv_states, state.recurrent_states) for state in states]
        return cls(*tree_map(lambda *parts: torch.cat([part.to(parts[0]) for part in parts]), *every))


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

    @classmethod
    def of(cls, topology: TreeTopology) -> Nodes:
        # Topologies that differ from row to row differ from cycle to cycle, too; others keep their nodes.
        if topology.depths.dim() > 1:
            return cls(topology)
        return vars(topology).get("nodes") or vars(topology).setdefault("nodes", cls(topology))

    def on(self, device: torch.device) -> torch.BoolTensor:
        """`visible`, where a layer lies."""
        return self.visible.to(device, non_blocking=True)

    def walk(self, start: torch.Tensor, step: Callable[[int, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        """States `(R, ...)` after all nodes, by what a node makes of its parent's; of the root it is `start`."""
        states = [step(0, start)]
        for node in range(1, self.count):
            if self.parents is not None:
                before = states[self.parents[node]]
            else:
                parents = self.topology.parents[:, node].to(start.device, non_blocking=True)
                before = torch.stack(states, dim=1)[torch.arange(len(parents), device=start.device), parents]
            states.append(step(node, before))
        return states

    def last_columns(self, seen: torch.Tensor, size: int) -> torch.LongTensor:
        """Places `(1 | R, T, size)` of each node's last inputs, its own being the last, among those of `windows`."""
        past = seen.shape[-1] - self.count
        key = past, size, seen.device
        if key not in self._columns:
            parents, depths = (values.view(-1, self.count) for values in (self.topology.parents, self.topology.depths))
            node, places = torch.arange(self.count, device=parents.device).expand_as(parents), []
            for distance in range(size):
                places.append(torch.where(distance <= depths, past + node, past + depths - distance))
                node = parents.gather(1, node)
            self._columns[key] = torch.stack(places[::-1], dim=-1).to(seen.device, non_blocking=True)
        return self._columns[key]

    def windows(self, seen: torch.Tensor, size: int) -> torch.Tensor:
        """The last `size` inputs of every node `(R, channels, T, size)`, of all of them `(R, channels, past + T)`."""
        columns = self.last_columns(seen, size)
        places = columns.flatten(1)[:, None].expand(len(seen), seen.shape[1], -1)
        return seen.gather(2, places).unflatten(-1, columns.shape[1:])


class Reading(RecurrentState):
    """What the nodes of a verification make of a state, which stays: its successors follow from what is kept here."""

    def __init__(self, start: RecurrentState, nodes: Nodes):
        super().__init__(start.conv_states, start.recurrent_states)
        self.nodes = nodes
        self.num_scans = 0  # parts of the recurrent state that were read, by mixers that read it in parts
        self._inputs: _States = {}  # of each convolution, (R, channels, K + T)
        # The states (R, ..., T) after all nodes, or what they follow from by its `after`.
        self._after: dict[int, Any] = {}

    def _keep_inputs(self, state_idx: int, seen: torch.Tensor, size: int) -> None:
        self._inputs[state_idx] = seen

    def update_recurrent_state(self, states: Any, state_idx: int = 0) -> Any:
        self._after[state_idx] = states
        return states

    def after(self, last: torch.LongTensor) -> RecurrentState:
        recurrent_states = {}
        for key, states in self._after.items():
            if torch.is_tensor(states):
                index = last.to(states.device, non_blocking=True)
                state = states.movedim(-1, 1)[torch.arange(len(index), device=index.device), index]
            else:
                state = states.after(last)
            recurrent_states[key] = state.to(self.recurrent_states[key])
        conv_states = {}
        for key, state in self.conv_states.items():
            if (seen := self._inputs.get(key)) is not None:
                # The last inputs (R, channels, K) up to the last node of each row.
                index = last.to(seen.device, non_blocking=True)
                columns = self.nodes.last_columns(seen, state.shape[-1]).expand(len(index), -1, -1)
                places = columns[torch.arange(len(index), device=seen.device), index]
                conv_states[key] = seen.gather(2, places[:, None].expand(-1, seen.shape[1], -1))
        return RecurrentState(conv_states, recurrent_states)


def store_states(cache: DynamicCache, rows: list[dict[int, RecurrentState]]) -> None:
    """Fills the recurrent layers of a cache with what `RecurrentLayers.of_rows` returned for each row."""
    for layer_idx in rows[0]:
        joined = RecurrentState.joined([states[layer_idx] for states in rows])
        for key, state in joined.conv_states.items():
            cache.update_conv_state(state, layer_idx, state_idx=key, conv_kernel_size=state.shape[-1])
        for key, state in joined.recurrent_states.items():
            cache.update_recurrent_state(state, layer_idx, state_idx=key)
