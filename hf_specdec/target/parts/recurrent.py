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
from .nodes import Level, Nodes
from .recurrences import over_nodes, reads_nodes
from .recurrent_state import Reading, RecurrentState


class RecurrentLayers(Part):
    """Recurrent layers of a model during one call, over a cache that has seen the prompt."""

    def __init__(self, model: torch.nn.Module, cache: SlotCache):
        self.cache = cache
        self.nodes: Nodes | None = None  # of the last verification
        # At the last committed token of each row, by the number of the layer.
        self.states: dict[int, RecurrentState] = cache.recurrent_states()
        known = {module: number for module, number in mixers(model).items() if number in self.states}
        self._forwards = over_nodes(model, list(known))
        self._mixers = []
        for module, number in known.items():
            state = self.states[number]
            is_known = reads_nodes(module, bool(state.conv_states), bool(state.recurrent_states))
            self._mixers.append((_Mixer if is_known else _SteppedMixer)(self, module, state))

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

    def commit(self, counts: list[int], path: torch.LongTensor | None) -> None:
        last = upload([count - 1 for count in counts], self.nodes.visible.device)
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
        """Copies of the states of one row after its last committed token, by the number of the layer."""
        index = torch.tensor([row], device="cpu")
        return {layer: state.rows(index) for layer, state in self.states.items()}

    def mark(self) -> dict[int, RecurrentState]:
        """State of the rows, for `return_to`. Tensors are never written to, so none is copied."""
        return {
            layer: RecurrentState(state.conv_states, state.recurrent_states) for layer, state in self.states.items()
        }

    def return_to(self, mark: dict[int, RecurrentState]) -> None:
        """Forgets what was read since. The rows must be the same."""
        for layer, state in mark.items():
            self.states[layer].put(state)


class _Mixer:
    """Drives a mixer that reads all nodes at once, through the hooks of its module."""

    def __init__(self, layers: RecurrentLayers, module: torch.nn.Module, state: RecurrentState):
        self.layers, self.module = layers, module
        self.state = state  # at the last committed token of each row
        self.read: RecurrentState | None = None  # what it becomes by the last forward
        signature = inspect.signature(inspect.unwrap(type(module).forward))
        self._names = [name for name in signature.parameters if name != "self"]

    def hook(self, hooks: ExitStack) -> None:
        """Registers what makes the module work on behalf of this call, until the stack is closed."""
        hooks.callback(self.module.register_forward_pre_hook(self._on_entering, with_kwargs=True).remove)
        hooks.callback(self.module.register_forward_hook(self._on_leaving, with_kwargs=True).remove)

    # Torch calls hooks without keyword arguments in another thread, while this one takes them back.

    def _on_entering(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> Any:
        if kwargs is None:
            return None
        arguments = {**dict(zip(self._names, args)), **kwargs}
        cache_name = next((name for name, value in arguments.items() if value is self.layers.cache), None)
        # Another thread may run a call of its own on the same model.
        return None if cache_name is None else ((), self.enter(arguments, cache_name))

    def _on_leaving(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = None) -> Any:
        if output is None or self.read is None or not any(value is self.read for value in kwargs.values()):
            return None
        return self.leave(output)

    def enter(self, arguments: dict[str, Any], cache_name: str) -> dict[str, Any]:
        """Arguments for the module in the place of `arguments`."""
        nodes = self.layers.nodes
        # Reading one token, fused kernels write into the states that they are given.
        self.read = Reading(self.state, nodes) if nodes.count > 1 else self.state.clone()
        return {**arguments, cache_name: self.read}

    def leave(self, output: Any) -> Any:
        """Return value of the module in the place of `output`."""
        if not isinstance(output, tuple):
            return output
        return tuple(self.layers.cache if part is self.read else part for part in output)

    def commit(self, last: torch.LongTensor) -> None:
        """Moves the state to node `last` `(R,)` of each row."""
        self.state.put(self.read.after(last))
        self.read = None


class _SteppedMixer(_Mixer):
    """Drives a mixer by calls for single tokens: the nodes of one depth, in all rows, are a batch."""

    _levels: list[Level]
    _places: torch.LongTensor  # (R, T), of the nodes in the order of the calls

    def hook(self, hooks: ExitStack) -> None:
        super().hook(hooks)
        self._told = hooks.enter_context(ExitStack())  # names of adapters for the module's own call
        self._reads: list[RecurrentState] = []
        self._outputs: list[Any] = []

    def enter(self, arguments: dict[str, Any], cache_name: str) -> dict[str, Any]:
        shape = arguments["hidden_states"].shape[:2]
        adapters = RowAdapters(self.module)
        self._levels, self._places = self.layers.nodes.levels(shape[0])
        call = arguments
        for level in self._levels:
            if call is not arguments:
                # The last call is left to the module itself.
                with self._told:
                    self._outputs.append(self.module.forward(**call))
            self.read = self.read.rows(level.parents) if self._reads else self.state.clone()
            self._reads.append(self.read)
            of_nodes = {
                name: value[level.rows, level.nodes][:, None]
                for name, value in arguments.items()
                if torch.is_tensor(value) and value.shape[:2] == shape
            }
            call = {**arguments, **of_nodes, cache_name: self.read}
            self._told.enter_context(adapters.telling(level.rows.tolist(), of_call=False))
        return call

    def leave(self, output: Any) -> Any:
        self._told.close()
        outputs, self._outputs = [*self._outputs, output], []
        if torch.is_tensor(output):
            return self._joined(outputs)
        return tuple(self._joined(parts) if torch.is_tensor(parts[0]) else parts[-1] for parts in zip(*outputs))

    def _joined(self, parts: Any) -> torch.Tensor:
        """Outputs `(nodes of a depth, 1, ...)` of all depths as `(R, T, ...)`."""
        return torch.cat(parts)[:, 0][self._places.to(parts[0].device, non_blocking=True)]

    def commit(self, last: torch.LongTensor) -> None:
        states = self._reads[0]
        for other in self._reads[1:]:
            states.join(other)
        places = self._places.to(last.device, non_blocking=True)
        self.state.put(states.rows(places.gather(1, last[:, None])[:, 0]))
        self.read = None


def mixers(model: torch.nn.Module) -> dict[torch.nn.Module, int]:
    """The modules of a model that update a recurrent state, in order, with the numbers of their layers in a cache."""
    known = (module for module in model.modules() if hasattr(module, "layer_idx") and _updates_state(type(module)))
    return {module: module.layer_idx for module in known}


@lru_cache(maxsize=4096)
def _updates_state(module_class: type) -> bool:
    code = getattr(inspect.unwrap(module_class.forward), "__code__", None)
    return code is not None and not {"update_conv_state", "update_recurrent_state"}.isdisjoint(code.co_names)
