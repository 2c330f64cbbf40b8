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
from functools import lru_cache
from typing import Any

import torch

from ...transfers import upload
from ..cache import SlotCache
from ..forward import Part, SlotNodes
from .adapters import RowAdapters
from .nodes import Nodes
from .recurrences import over_nodes, reads_nodes
from .recurrent_state import Reading, RecurrentState


class RecurrentLayers(Part):
    """Recurrent layers of a model during one call.

    Args:
        model (`PreTrainedModel`): Its mixers are found by what they do: they update states of a cache.
        cache (`SlotCache`): Has seen the prompt.

    Attributes:
        states (`dict[int, RecurrentState]`): At the last committed token of each row, by the number of the layer.
        nodes (`Nodes`, *optional*): Those of the last verification.
    """

    def __init__(self, model: torch.nn.Module, cache: SlotCache):
        self.cache = cache
        self.nodes: Nodes | None = None
        self.states: dict[int, RecurrentState] = cache.recurrent_states()
        known = {module: number for module, number in mixers(model).items() if number in self.states}
        self._forwards = over_nodes(model, list(known))
        self._mixers = [_driver(module, self.states[number])(self, module, number) for module, number in known.items()]

    @contextmanager
    def reading(self, nodes: SlotNodes) -> Iterator[None]:
        """Lets a forward of the model read the nodes in the block; the states stay where they are."""
        if nodes.topology is None:
            yield
            return
        self.nodes = Nodes.of(nodes.topology)
        with ExitStack() as hooks:
            hooks.enter_context(self._forwards.in_place())
            for mixer in self._mixers:
                mixer.hook(hooks)
            yield

    def commit(self, counts: list[int], path: torch.LongTensor | None = None) -> None:
        """Moves the states to the last accepted nodes; the arguments are those of [`SlotCache.commit`]."""
        device = self.nodes.visible.device
        last = upload([count - 1 for count in counts], device)
        if path is not None:
            last = path.gather(1, last[:, None])[:, 0]
        for mixer in self._mixers:
            mixer.commit(last)

    def keep_rows(self, keep: list[int]) -> None:
        index = torch.tensor(keep, device="cpu")
        for state in self.states.values():
            state.put(state.rows(index))

    def join(self, other: RecurrentLayers, num_rows: int) -> None:
        for layer, state in self.states.items():
            state.join(other.states[layer])

    def row_states(self, row: int) -> dict[int, RecurrentState]:
        """The states of one row after its last committed token, by the number of the layer."""
        index = torch.tensor([row], device="cpu")
        return {layer: state.rows(index) for layer, state in self.states.items()}

    def mark(self) -> dict[int, RecurrentState]:
        """State of the rows, for `return_to`. Tensors are never written to, so none is copied."""
        return {layer: state.copy() for layer, state in self.states.items()}

    def return_to(self, mark: dict[int, RecurrentState]) -> None:
        """Forgets what was read since. The rows must be the same."""
        for layer, state in mark.items():
            self.states[layer].put(state)


class _Mixer:
    """Drives a mixer that reads all nodes at once, through the hooks of its module.

    Attributes:
        state (`RecurrentState`): At the last committed token of each row.
        after (`Reading`, *optional*): What it becomes by the last forward.
    """

    def __init__(self, layers: RecurrentLayers, module: torch.nn.Module, number: int):
        self.layers, self.module, self.state = layers, module, layers.states[number]
        self.after: Reading | None = None
        signature = inspect.signature(inspect.unwrap(type(module).forward))
        self._names = [name for name in signature.parameters if name != "self"]

    def hook(self, hooks: ExitStack) -> None:
        """Registers what makes the module work on behalf of this call, until the stack is closed."""
        hooks.callback(self.module.register_forward_pre_hook(self.on_entering, with_kwargs=True).remove)
        hooks.callback(self.module.register_forward_hook(self.on_leaving, with_kwargs=True).remove)

    # Torch calls hooks without keyword arguments in another thread, while this one takes them back.

    def on_entering(self, module, args, kwargs=None):
        if kwargs is None:
            return None
        arguments = {**dict(zip(self._names, args)), **kwargs}
        cache_name = next((name for name, value in arguments.items() if value is self.layers.cache), None)
        # Another thread may run a call of its own on the same model.
        if cache_name is None:
            return None
        return (), self.enter(arguments, cache_name)

    def on_leaving(self, module, args, kwargs, output=None):
        if output is None or self.after is None or not any(value is self.after for value in kwargs.values()):
            return None
        return self.leave(output)

    def enter(self, arguments: dict, cache_name: str) -> dict:
        """Arguments for the module in the place of `arguments`."""
        nodes = self.layers.nodes
        self.after = Reading(self.state, nodes if nodes.count > 1 else None)
        return {**arguments, cache_name: self.after}

    def leave(self, output):
        """Return value of the module in the place of `output`."""
        if not isinstance(output, tuple):
            return output
        # Some pass their cache on.
        return tuple(self.layers.cache if part is self.after else part for part in output)

    def commit(self, last: torch.LongTensor) -> None:
        """Moves the state to node `last` `(R,)` of each row."""
        self.state.put(self.after.after(last))
        self.after = None


class _SteppedMixer(_Mixer):
    """Drives a mixer by calls for single tokens: the nodes of one depth, in all rows, are a batch.

    Attributes:
        depths (`list[list[tuple[int, int]]]`): Row and node of the tokens of each call.
    """

    def __init__(self, layers, module, number):
        super().__init__(layers, module, number)
        self.depths: list[list[tuple[int, int]]] = []
        self._states: list[Reading] = []
        self._outputs: list[Any] = []

    def enter(self, arguments, cache_name):
        rows, nodes = arguments["hidden_states"].shape[:2]
        parents = self.layers.nodes.topology.parents.view(-1, nodes).tolist() * rows
        self.depths = _by_depth(parents[:rows])
        self._states, self._outputs = [], []
        self._adapters = RowAdapters.of(self.module)
        for calls, pairs in enumerate(self.depths):
            before = self.state
            if calls:
                places = {pair: place for place, pair in enumerate(self.depths[calls - 1])}
                index = [places[row, parents[row][node]] for row, node in pairs]
                before = self.after.rows(torch.tensor(index, device="cpu"))
            self.after = Reading(before)
            self._states.append(self.after)
            own = {
                name: value[tuple(zip(*pairs))][:, None]
                for name, value in arguments.items()
                if torch.is_tensor(value) and value.shape[:2] == (rows, nodes)
            }
            call = {**arguments, **own, cache_name: self.after}
            self._adapters.tell([row for row, _ in pairs])
            # The last one is left to the module's own call.
            if calls + 1 < len(self.depths):
                self._outputs.append(self.module.forward(**call))
        return call

    def leave(self, output):
        self._adapters.tell_all()
        outputs = [*self._outputs, output]
        self._outputs = []
        if torch.is_tensor(output):
            return self._joined(outputs)
        return tuple(self._joined(parts) if torch.is_tensor(parts[0]) else parts[-1] for parts in zip(*outputs))

    def _joined(self, parts):
        """Outputs `(calls of a depth, 1, ...)` of all depths as `(R, T, ...)`."""
        return torch.cat(parts)[:, 0][self._places(parts[0].device)]

    def _places(self, device) -> torch.LongTensor:
        """Where the nodes `(R, T)` are in the order of the calls."""
        order = [pair for pairs in self.depths for pair in pairs]
        shape = len(self.depths[0]), len(order) // len(self.depths[0])
        places = torch.empty(shape, dtype=torch.long, device="cpu")
        places[tuple(zip(*order))] = torch.arange(len(order), device="cpu")
        return places.to(device, non_blocking=True)

    def commit(self, last):
        states = self._states[0].copy()
        for other in self._states[1:]:
            states.join(other)
        places = self._places(last.device)
        self.state.put(states.rows(places.gather(1, last[:, None])[:, 0]))
        self.after, self._states = None, []


def _by_depth(parents: list[list[int]]) -> list[list[tuple[int, int]]]:
    """Rows and nodes of each depth, from the parents of all nodes; the root is node 0, and parents come first."""
    levels: list[list[tuple[int, int]]] = []
    for row, of_row in enumerate(parents):
        depths = [0]
        for parent in of_row[1:]:
            depths.append(depths[parent] + 1)
        for node, depth in enumerate(depths):
            if depth == len(levels):
                levels.append([])
            levels[depth].append((row, node))
    return levels


def _driver(module: torch.nn.Module, state: RecurrentState) -> type[_Mixer]:
    has_inputs, has_state = bool(state.conv_states), bool(state.recurrent_states)
    return _Mixer if reads_nodes(module, has_inputs, has_state) else _SteppedMixer


def mixers(model: torch.nn.Module) -> dict[torch.nn.Module, int]:
    """The modules of a model that update a recurrent state, in order, with the numbers of their layers in a cache."""
    known = (module for module in model.modules() if hasattr(module, "layer_idx") and _updates_state(type(module)))
    return {module: module.layer_idx for module in known}


@lru_cache(maxsize=4096)
def _updates_state(module_class: type) -> bool:
    code = getattr(inspect.unwrap(module_class.forward), "__code__", None)
    return code is not None and not {"update_conv_state", "update_recurrent_state"}.isdisjoint(code.co_names)
