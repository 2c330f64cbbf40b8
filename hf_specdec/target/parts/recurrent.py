"""Layers with a recurrent state: linear attention, Mamba, short convolutions.

Such a state sums up all tokens that were read and cannot be cut back to the accepted ones. So it stays at the last
committed token while a draft is verified: every node of the draft continues what its parent has left, and the state is
moved to the last accepted node afterwards. Mixers of known functions read all nodes at once (`recurrences.py`) and
keep what the state after any of them follows from; all others are called for one depth of the tree after the other.

Shapes: R rows, T nodes of a verification.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ...transfers import upload
from ..cache import SlotCache, SlotLayer
from ..forward import Part, SlotForward, running
from .adapters import adapter_hooks, telling
from .recurrences import over_nodes, reads_nodes
from .recurrent_state import Nodes, Reading, RecurrentState


class RecurrentLayers(Part):
    """Recurrent layers of a model during one call, over a cache that has seen the prompt."""

    def __init__(self, model: torch.nn.Module, cache: SlotCache):
        self.cache = cache
        self.put(self.states)
        self._mixers: dict[int, list[torch.nn.Module]] = {}
        for module, number in mixers(model).items():
            if number in self.states:
                self._mixers.setdefault(number, []).append(module)
        self._forwards = over_nodes(model, [module for modules in self._mixers.values() for module in modules])
        self._reads_trees: set[int] = set()
        self._reads_chains: set[int] = set()  # convolutions that share a layer (Inkling 2), by their own code
        for number, state in self.states.items():
            modules, parts = self._mixers.get(number, []), (bool(state.conv_states), bool(state.recurrent_states))
            if all(reads_nodes(module, *parts) for module in modules):
                self._reads_trees.add(number)
            elif len(modules) > 1 and not state.recurrent_states:
                self._reads_chains.add(number)
        self._read: dict[int, Any] = {}  # what they have become by the last forward

    @contextmanager
    def reading(self, forward: SlotForward) -> Iterator[None]:
        """Gives mixers, inside of the block, other states to change; those of the rows stay where they are."""
        if forward.topology is None:
            yield
            return
        topology, self._read = forward.topology, forward.readings
        self._device = topology.depths.device
        with ExitStack() as hooks:
            hooks.enter_context(self._forwards.in_place())
            for number, modules in self._mixers.items():
                layer = self.cache.layers[number]
                state = layer.recurrent
                hooks.callback(setattr, layer, "recurrent", state)
                if topology.depths.shape[-1] == 1:
                    # Fused kernels write into the states that they are given.
                    self._read[number] = layer.recurrent = state.clone()
                elif number in self._reads_trees or (topology.is_chain and number in self._reads_chains):
                    self._read[number] = layer.recurrent = Reading(state, Nodes.of(topology))
                elif len(modules) == 1:
                    self._read[number] = _Steps(modules[0], layer, forward, Nodes.of(topology), hooks)
            yield

    def commit(self, counts: list[int], path: torch.LongTensor | None) -> None:
        """Moves the states to the last accepted nodes."""
        last = upload([count - 1 for count in counts], self._device)
        if path is not None:
            last = path.gather(1, last[:, None])[:, 0]
        self.put({number: read.after(last) for number, read in self._read.items()})
        self._read = {}

    def keep_rows(self, keep: list[int]) -> None:
        self.put(self.of_rows(keep))

    def join(self, other: RecurrentLayers) -> None:
        joined = {number: [state, other.states[number]] for number, state in self.states.items()}
        self.put({number: RecurrentState.joined(states) for number, states in joined.items()})

    @property
    def states(self) -> dict[int, RecurrentState]:
        """At the last committed token of each row, by the number of the layer."""
        return {index: layer.recurrent for index, layer in enumerate(self.cache.layers) if layer.recurrent}

    def of_rows(self, rows: list[int]) -> dict[int, RecurrentState]:
        """Copies of the states of some rows after their last committed tokens, by the number of the layer."""
        index = torch.tensor(rows, device="cpu")
        return {number: state.rows(index) for number, state in self.states.items()}

    def put(self, states: dict[int, RecurrentState]) -> None:
        """Goes on from other states; those before are never written to."""
        for number, state in states.items():
            state.is_committed = True
            self.cache.layers[number].recurrent = state


class _Steps:
    """What a mixer makes of a state by calls for single tokens: the nodes of one depth are a batch."""

    def __init__(
        self, module: torch.nn.Module, layer: SlotLayer, forward: SlotForward, nodes: Nodes, hooks: ExitStack
    ):
        self.layer, self.forward, self.nodes = layer, forward, nodes
        self._states: list[RecurrentState] = []  # after the nodes of each depth
        self._outputs: list[Any] = []
        self._places = torch.empty(0, device="cpu")  # (R, T), of the nodes in the order of the calls
        hooks.callback(module.register_forward_pre_hook(self._on_entering, with_kwargs=True).remove)
        hooks.callback(module.register_forward_hook(self._on_leaving).remove)
        self._told = hooks.enter_context(ExitStack())

    def _on_entering(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> Any:
        if running.get() is not self.forward:
            return None  # of another thread
        names = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters)[1:]
        call = arguments = {**dict(zip(names, args)), **kwargs}
        shape, adapters = arguments["hidden_states"].shape[:2], adapter_hooks(module)
        for rows, nodes, parents in self._levels(shape[0]):
            if self._states:
                with self._told:
                    self._outputs.append(module.forward(**call))
            before = self.layer.recurrent
            self.layer.recurrent = before.rows(parents) if self._states else before.clone()
            self._states.append(self.layer.recurrent)
            of_nodes = {
                name: value[rows, nodes][:, None]
                for name, value in arguments.items()
                if torch.is_tensor(value) and value.shape[:2] == shape
            }
            call = {**arguments, **of_nodes}
            # Adapters of the rows of these nodes.
            self._told.enter_context(telling(adapters, rows.tolist(), of_call=False))
        return (), call

    def _on_leaving(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if running.get() is not self.forward:
            return None
        self._told.close()
        outputs = [*self._outputs, output]
        if torch.is_tensor(output):
            return self._joined(outputs)
        return tuple(self._joined(parts) if torch.is_tensor(parts[0]) else parts[-1] for parts in zip(*outputs))

    def _levels(self, num_rows: int) -> Iterator[tuple[torch.LongTensor, ...]]:
        """Rows and nodes of each depth, and the places of their parents in the one above, each `(N,)`."""
        depths, parents = (
            values.cpu().view(-1, self.nodes.count).expand(num_rows, -1)
            for values in (self.nodes.topology.depths, self.nodes.topology.parents)
        )
        self._places = torch.zeros_like(depths)
        first, next_place = 0, 0
        for depth in range(int(depths.max()) + 1):
            rows, nodes = (depths == depth).nonzero().unbind(1)
            above = self._places[rows, parents[rows, nodes]] - first
            first, next_place = next_place, next_place + len(rows)
            self._places[rows, nodes] = torch.arange(first, next_place, device="cpu")
            yield rows, nodes, above

    def _joined(self, parts: Any) -> torch.Tensor:
        """Outputs `(nodes of a depth, 1, ...)` of all depths as `(R, T, ...)`."""
        return torch.cat(parts)[:, 0][self._places.to(parts[0].device, non_blocking=True)]

    def after(self, last: torch.LongTensor) -> RecurrentState:
        places = self._places.to(last.device, non_blocking=True).gather(1, last[:, None])[:, 0]
        return RecurrentState.joined(self._states).rows(places)


def mixers(model: torch.nn.Module) -> dict[torch.nn.Module, int]:
    """The modules of a model that update a recurrent state, in order, with the numbers of their layers in a cache."""
    numbers = {}
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
            if code is not None and not {"update_conv_state", "update_recurrent_state"}.isdisjoint(code.co_names):
                numbers[module] = module.layer_idx
    return numbers
