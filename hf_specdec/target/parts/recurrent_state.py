"""The state of a recurrent layer, which sums up all tokens that were read, and what becomes of it by reading more.

Shapes: R rows, T nodes of a verification, W tokens read by a layer, K kernel size.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicCache

from .nodes import Nodes


_States = dict[int, torch.Tensor]


class RecurrentState:
    """The states of one layer in all rows, in the form in which transformers' mixers ask a cache for them.

    It answers as the cache (5.18 and later) and as the layer of a cache (before).

    Attributes:
        conv_states (`dict[int, torch.Tensor]`): The last inputs of each convolution, `(R, channels, K)`.
        recurrent_states (`dict[int, torch.Tensor]`): Each `(R, ...)`.
        num_read (`int`): Tokens of a row that the first convolution has read.
        nodes (`Nodes`, *optional*): Those of a verification, where it reads several.
    """

    record_past = False
    nodes: Nodes | None = None

    def __init__(self, conv_states: _States | None = None, recurrent_states: _States | None = None, num_read: int = 0):
        self.conv_states: dict[int, torch.Tensor] = conv_states or {}
        self.recurrent_states: dict[int, torch.Tensor] = recurrent_states or {}
        self.num_read: int = num_read

    def __bool__(self) -> bool:
        return bool(self.conv_states or self.recurrent_states)

    # As a cache

    def get_conv_state(self, layer_idx: int = 0, state_idx: int = 0) -> torch.Tensor | None:
        return _entry(self.conv_states, state_idx)

    def get_recurrent_state(self, layer_idx: int = 0, state_idx: int = 0) -> torch.Tensor | None:
        return _entry(self.recurrent_states, state_idx)

    def has_previous_state(self, layer_idx: int = 0, state_idx: int | None = None) -> bool:
        return bool(self)

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        return False

    @property
    def layers(self) -> _Everywhere:
        return _Everywhere(self)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int = 0, state_idx: int = 0, conv_kernel_size: Any = None, **_: Any
    ) -> torch.Tensor:
        """Appends inputs `(R, channels, W)`; returns them after those that were kept, with which they are read."""
        past = self.get_conv_state(layer_idx, state_idx)
        if state_idx == 0:
            self.num_read += conv_states.shape[-1]
        if past is None:
            size = conv_kernel_size or conv_states.shape[-1]
            seen = F.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        else:
            size = past.shape[-1]
            seen = torch.cat([past, conv_states], dim=-1)
        self._keep_inputs(state_idx, seen, size)
        return seen

    def _keep_inputs(self, state_idx: int, seen: torch.Tensor, size: int) -> None:
        self.conv_states[state_idx] = seen[..., -size:].clone(memory_format=torch.contiguous_format)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int = 0, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        past = self.get_recurrent_state(layer_idx, state_idx)
        new = recurrent_states if past is None else recurrent_states.to(past.dtype)
        self.recurrent_states[state_idx] = new
        return new

    # By rows

    def rows(self, index: torch.Tensor) -> RecurrentState:
        """A copy of some rows."""
        return RecurrentState(
            *({key: state[on_device_of(index, state)] for key, state in part.items()} for part in self._parts)
        )

    def put(self, other: RecurrentState, index: torch.Tensor | None = None) -> None:
        """Takes over the states of `other`, as all rows or as those of the index. Tensors are never written to."""
        for own, new in zip(self._parts, other._parts):
            for key, state in new.items():
                own[key] = state if index is None else own[key].index_copy(0, on_device_of(index, state), state)

    def join(self, other: RecurrentState) -> None:
        """Takes over the rows of `other` after its own."""
        for own, new in zip(self._parts, other._parts):
            for key, state in new.items():
                own[key] = torch.cat([own[key], state.to(own[key])])

    def copy(self) -> RecurrentState:
        """Another holder of the same tensors."""
        return RecurrentState(*map(dict, self._parts))

    def clone(self) -> RecurrentState:
        """A holder of copies."""
        copies = ({key: state.clone() for key, state in part.items()} for part in self._parts)
        return RecurrentState(*copies, self.num_read)

    @property
    def _parts(self) -> tuple[dict, dict]:
        return self.conv_states, self.recurrent_states


class _Everywhere:
    """The layers of a cache that holds one layer, whatever its number."""

    def __init__(self, state: RecurrentState):
        self.state = state

    def __getitem__(self, layer_idx: int) -> RecurrentState:
        return self.state

    def __len__(self) -> int:
        return 1 << 30


class _Entries(dict):
    """Begins as another dict, and keeps what is put into it to itself.

    Reading one token, fused kernels write into the states that they are given; those they get as copies.
    """

    def __init__(self, source: dict, copies: bool):
        super().__init__()
        self.source, self.copies = source, copies

    def __missing__(self, key):
        if not self.copies:
            return self.source[key]
        self[key] = self.source[key].clone()
        return self[key]


class Reading(RecurrentState):
    """Successors of a state, by reading the nodes of a verification in every row, while the state itself stays.

    Args:
        start (`RecurrentState`): At the last committed token of each row.
        nodes (`Nodes`, *optional*): The T nodes; `None` for a single token.

    Attributes:
        num_scans (`int`): Parts of the recurrent state that have been read, by mixers that read it in parts.
    """

    def __init__(self, start: RecurrentState, nodes: Nodes | None = None):
        super().__init__()
        self.start: RecurrentState = start
        self.nodes: Nodes | None = nodes
        self.num_scans = 0
        self.conv_states: _States = _Entries(start.conv_states, copies=nodes is None)
        self.recurrent_states: _States = _Entries(start.recurrent_states, copies=nodes is None)
        self._after: dict[int, NodeStates] = {}

    def __bool__(self) -> bool:
        return bool(self.start)

    def _keep_inputs(self, state_idx: int, seen: torch.Tensor, size: int) -> None:
        if self.nodes is None:
            super()._keep_inputs(state_idx, seen, size)
        else:
            # All inputs `(R, channels, K + T)`, from which follows the state after every node.
            self.conv_states[state_idx] = seen

    def update_recurrent_state(
        self, recurrent_states: Any, layer_idx: int = 0, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        if self.nodes is None:
            return super().update_recurrent_state(recurrent_states, layer_idx, state_idx)
        self._after[state_idx] = (
            EveryState(recurrent_states) if torch.is_tensor(recurrent_states) else recurrent_states
        )
        return recurrent_states

    def after(self, last: torch.LongTensor) -> RecurrentState:
        """The states of all rows after node `last` `(R,)` of each and its ancestors."""
        if self.nodes is None:
            return self.copy()
        sizes = {key: state.shape[-1] for key, state in self.start.conv_states.items()}
        return RecurrentState(
            {key: self.nodes.last_inputs(seen, sizes[key], last) for key, seen in self.conv_states.items()},
            {key: states.after(last).to(self.start.recurrent_states[key]) for key, states in self._after.items()},
        )


class NodeStates:
    """The recurrent states of one layer after every node of a verification, or what they follow from."""

    def after(self, last: torch.LongTensor) -> torch.Tensor:
        """The states `(R, ...)` after node `last` `(R,)` of each row and its ancestors."""
        raise NotImplementedError

    def to(self, *args: Any) -> NodeStates:
        """Itself: what a mixer does with the state after its last token."""
        return self


class EveryState(NodeStates):
    """States `(R, ..., T)` that were kept for all nodes, because they are small."""

    def __init__(self, states: torch.Tensor):
        self.states = states

    def after(self, last: torch.LongTensor) -> torch.Tensor:
        rows = torch.arange(len(last), device=self.states.device)
        return self.states.movedim(-1, 1)[rows, on_device_of(last, self.states)]


def _entry(entries: dict, key) -> torch.Tensor | None:
    with suppress(KeyError):
        return entries[key]
    return None


def on_device_of(index: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return index.to(other.device, non_blocking=True)


def load_state(layer: Any) -> RecurrentState:
    """A copy of what a recurrent layer of a `DynamicCache` holds."""
    sizes = layer.conv_kernel_size
    return RecurrentState(
        {key: state[..., -sizes[key] :].clone() for key, state in layer.conv_states.items() if state is not None},
        {key: state.clone() for key, state in layer.recurrent_states.items() if state is not None},
    )


def store_states(cache: DynamicCache, rows: list[dict[int, RecurrentState]]) -> None:
    """Fills the recurrent layers of a cache with what `RecurrentLayers.row_states` returned for each row."""
    for layer_idx, state in rows[0].items():
        for key in state.conv_states:
            joined = torch.cat([row[layer_idx].conv_states[key] for row in rows])
            cache.update_conv_state(joined, layer_idx, state_idx=key, conv_kernel_size=joined.shape[-1])
        for key in state.recurrent_states:
            joined = torch.cat([row[layer_idx].recurrent_states[key] for row in rows])
            cache.update_recurrent_state(joined, layer_idx, state_idx=key)
