"""Layers with a recurrent state: linear attention, Mamba, short convolutions.

Such a state sums up all tokens that were read; it can neither branch nor be cut back to the accepted tokens. So it
stays at a committed token while a draft is verified, and the tokens accepted since are replayed in front of the next
draft: not by the model, whose keys and values lie in their slots, but by the recurrent layers alone, from the inputs
they had when these tokens were verified. A cycle stays one forward, and a layer reads its weights once for replayed
and new tokens together. When the replay grows long, the state is first moved to its end.

Layers that know their state after every token replay nothing: short convolutions, whose state is their last inputs,
and mixers that go on from a state by one token at a time.

Shapes: R rows, T nodes of a verification, W tokens read by a layer (replayed and new), K kernel size.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from threading import get_ident
from typing import Any

import torch

from .chunks import own_chunks
from .recurrent_state import ConvolutionReading, Reading, RecurrentState, on_device_of


# Replayed tokens of a row that set off moving its state. Replaying costs arithmetic, moving reads the weights again.
MAX_REPLAY = 16

# Mixers that start from an empty state for several tokens at once, whatever the cache holds (Mamba-1).
_STEPWISE = ("falcon_mamba", "jamba", "mamba", "zamba")

_NO_LIMITS = (0.0, float("inf"))


@dataclass
class _Plan:
    """Tokens that all layers read in one verification: each row's replayed tokens, then the new ones.

    Attributes:
        nodes (`int`): T, new tokens of a row.
        replayed (`list[int]`): Tokens that each row replays.
        moves (`list[tuple[int, list[int]]]`): Rows that first move their state by a number of tokens; together all
            or none.
    """

    nodes: int
    replayed: list[int]
    moves: list[tuple[int, list[int]]]
    _indices: dict = field(default_factory=dict)

    @property
    def width(self) -> int:
        """W, those of the longest row; shorter ones are padded on the right."""
        return max(self.replayed) + self.nodes

    @property
    def is_ragged(self) -> bool:
        return min(self.replayed) != max(self.replayed)

    def joined(self, recorded: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Replayed tokens of `(R, W', ...)` and new ones `(R, T, ...)` as `(R, W, ...)`."""
        longest = max(self.replayed)
        both = torch.cat([recorded[:, :longest], new], dim=1)
        if not self.is_ragged:
            return both
        steps = torch.arange(self.width)
        counts = torch.tensor(self.replayed)[:, None]
        after = (longest - counts + steps).clamp(max=self.width - 1)
        return _take(both, self._index("join", lambda: torch.where(steps < counts, steps, after), both.device))

    def new_ones(self, output: torch.Tensor) -> torch.Tensor:
        """The new tokens `(R, T, ...)` of `(R, W, ...)`."""
        if not self.is_ragged:
            return output[:, max(self.replayed) :]
        counts = torch.tensor(self.replayed)[:, None]
        return _take(output, self._index("new", lambda: counts + torch.arange(self.nodes), output.device))

    def _index(self, name: str, make, device) -> torch.LongTensor:
        if (name, device) not in self._indices:
            self._indices[name, device] = make().to(device, non_blocking=True)
        return self._indices[name, device]


def _take(values: torch.Tensor, index: torch.LongTensor) -> torch.Tensor:
    """Columns `(R, M)` of `(R, W, ...)`, row by row."""
    return values[torch.arange(len(index), device=index.device)[:, None], index]


class RecurrentLayers:
    """Recurrent layers of a model during one call.

    Args:
        model (`PreTrainedModel`): Its mixers are found by what they do: they update states of a cache.
        cache (`SlotCache`): Has seen the prompt.
        batch_size (`int`): R.

    Attributes:
        states (`dict[int, RecurrentState]`): At a committed token of each row, by the number of the layer.
        replayed (`list[int]`): Committed tokens of each row after its state. A verification has at most `MAX_REPLAY`
            of them in front of its own.
    """

    def __init__(self, model: torch.nn.Module, cache: Any, batch_size: int):
        self.cache = cache
        self.replayed = [0] * batch_size
        self.plan: _Plan | None = None
        model_type = model.config.get_text_config(decoder=True).model_type
        self.states: dict[int, RecurrentState] = cache.recurrent_states()
        self._mixers = [
            _driver(module, self.states[module.layer_idx], model_type)(self, module)
            for module in mixers(model)
            if module.layer_idx in self.states
        ]
        self._chunks = own_chunks(model, [mixer.module for mixer in self._mixers])
        self._replays = any(isinstance(mixer, _ReplayingMixer) for mixer in self._mixers)

    @contextmanager
    def reading(self, nodes: int):
        """Lets a forward of the model read `nodes` tokens a row in the block; the states stay where they are."""
        moves = self._moves(MAX_REPLAY)
        self.plan = _Plan(nodes, [0] * len(self.replayed) if moves else list(self.replayed), moves)
        with ExitStack() as hooks:
            hooks.enter_context(self._chunks.in_place())
            for mixer in self._mixers:
                for handle in mixer.hook():
                    hooks.callback(handle.remove)
            yield
        self.replayed = list(self.plan.replayed)

    def _moves(self, limit: int, rows: list[int] | None = None) -> list[tuple[int, list[int]]]:
        """Rows of one replay length together, for a mixer reads all rows of a batch to the same end."""
        if max(self.replayed) <= limit:
            return []
        groups: dict[int, list[int]] = {}
        for row in range(len(self.replayed)) if rows is None else rows:
            groups.setdefault(self.replayed[row], []).append(row)
        groups.pop(0, None)
        return list(groups.items())

    def commit(self, counts: list[int]) -> None:
        """Keeps the first `counts` tokens of each row of the last forward."""
        plan = self.plan
        ends = [replayed + count for replayed, count in zip(plan.replayed, counts)]
        # Where all that was read is kept, the state after it is the state.
        whole = [row for row, end in enumerate(ends) if end == plan.width]
        for mixer in self._mixers:
            mixer.commit(counts, whole)
        if self._replays:
            self.replayed = [0 if end == plan.width else end for end in ends]

    def keep_rows(self, keep: list[int]) -> None:
        self.replayed = [self.replayed[row] for row in keep]
        index = torch.tensor(keep)
        for state in self.states.values():
            state.put(state.rows(index))
        for mixer in self._mixers:
            mixer.keep_rows(index)

    def join(self, other: RecurrentLayers) -> None:
        """Takes over the rows of another call after its own."""
        for count, rows in other._moves(0):
            for mixer in other._mixers:
                mixer.move(count, rows)
        for layer, state in self.states.items():
            state.join(other.states[layer])
        for mixer in self._mixers:
            mixer.add_rows(len(other.replayed))
        self.replayed = self.replayed + [0] * len(other.replayed)

    def row_states(self, row: int) -> dict[int, RecurrentState]:
        """The states of one row after its last committed token, by the number of the layer."""
        for count, _ in self._moves(0, [row]):
            for mixer in self._mixers:
                mixer.move(count, [row])
            self.replayed[row] = 0
        index = torch.tensor([row])
        return {layer: state.rows(index) for layer, state in self.states.items()}

    def mark(self) -> tuple[Any, ...]:
        """State of the rows, for `return_to`. Tensors are never written to, so none is copied."""
        states = {layer: state.copy() for layer, state in self.states.items()}
        return list(self.replayed), states, [mixer.inputs for mixer in self._mixers]

    def return_to(self, mark: tuple[Any, ...]) -> None:
        """Forgets what was read since. The rows must be the same."""
        replayed, states, inputs = mark
        self.replayed: list[int] = list(replayed)
        for layer, state in states.items():
            self.states[layer].put(state)
        for mixer, own in zip(self._mixers, inputs):
            mixer.inputs = own


class _Mixer:
    """Drives the mixer of one layer through the hooks of its module.

    Attributes:
        state (`RecurrentState`): At a committed token of each row.
        after (`Reading`, *optional*): What it becomes by the last forward.
        inputs (`dict[str, torch.Tensor]`): What was read since `state`, each `(R, W, ...)`, if it may be replayed.
    """

    reading: type[Reading] = Reading

    def __init__(self, layers: RecurrentLayers, module: torch.nn.Module):
        self.layers, self.module, self.state = layers, module, layers.states[module.layer_idx]
        self.after: Reading | None = None
        self.inputs: dict[str, torch.Tensor] = {}
        signature = inspect.signature(inspect.unwrap(type(module).forward))
        self._names = [name for name in signature.parameters if name != "self"]

    def hook(self) -> list:
        """Registers what makes the module work on behalf of this call; the handles that take it back."""
        return [
            self.module.register_forward_pre_hook(self.on_entering, with_kwargs=True),
            self.module.register_forward_hook(self.on_leaving, with_kwargs=True),
        ]

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
        self.after = self.reading(self.state, self.layers.plan.nodes)
        return {**arguments, cache_name: self.after}

    def leave(self, output):
        """Return value of the module in the place of `output`."""
        return output

    def commit(self, counts: list[int], whole: list[int]) -> None:
        raise NotImplementedError

    def move(self, count: int, rows: list[int]) -> None:
        """Replays `count` tokens of some rows and keeps the state after them."""

    def keep_rows(self, index: torch.Tensor) -> None:
        self.inputs = {name: value[on_device_of(index, value)] for name, value in self.inputs.items()}

    def add_rows(self, count: int) -> None:
        """Makes room for rows that have nothing to replay."""
        self.inputs = {
            name: torch.cat([value, value.new_zeros((count, *value.shape[1:]))]) for name, value in self.inputs.items()
        }


class _ReplayingMixer(_Mixer):
    """Reads several tokens from a state, and knows the state after the last one only."""

    def __init__(self, layers, module):
        super().__init__(layers, module)
        self._arguments: dict = {}
        self._cache_name = ""

    def enter(self, arguments, cache_name):
        plan = self.layers.plan
        for count, rows in plan.moves:
            self.move(count, rows)
        self._arguments, self._cache_name = arguments, cache_name
        new = {name: value for name, value in arguments.items() if _is_sequence(value, len(plan.replayed), plan.nodes)}
        if any(plan.replayed):
            new = {name: plan.joined(self.inputs[name], value) for name, value in new.items()}
        self.inputs = new
        self.after = self.reading(self.state, plan.width)
        return {**arguments, **new, cache_name: self.after}

    def leave(self, output):
        plan = self.layers.plan
        if not any(plan.replayed):
            return output
        if torch.is_tensor(output):
            return plan.new_ones(output)
        return tuple(plan.new_ones(part) if torch.is_tensor(part) else part for part in output)

    def commit(self, counts, whole):
        if len(whole) == len(counts):
            self.state.put(self.after)
        elif whole:
            index = torch.tensor(whole)
            self.state.put(self.after.rows(index), index)
        self.after = None

    def move(self, count, rows):
        everyone = len(rows) == len(self.layers.replayed)
        index = None if everyone else torch.tensor(rows)
        inputs = {
            name: value[:, :count] if everyone else value[on_device_of(index, value), :count]
            for name, value in self.inputs.items()
        }
        after = Reading(self.state if everyone else self.state.rows(index), count)
        self.module.forward(**{**self._arguments, **inputs, self._cache_name: after})
        self.state.put(after, index)


class _Convolution(_Mixer):
    """A short convolution, whose state is its last inputs."""

    reading = ConvolutionReading

    def commit(self, counts, whole):
        for key, seen in self.after.conv_states.items():
            size = self.state.conv_states[key].shape[-1]
            # One token may have been read in place.
            self.state.conv_states[key] = seen if seen.shape[-1] == size else _windows(seen, counts, size)
        self.after = None


def _windows(seen: torch.Tensor, starts: list[int], size: int) -> torch.Tensor:
    """`size` columns of `(R, channels, columns)`, from another start in each row."""
    if len(set(starts)) == 1:
        return seen[..., starts[0] : starts[0] + size].contiguous()
    columns = torch.tensor(starts)[:, None] + torch.arange(size)
    return seen.gather(2, on_device_of(columns, seen)[:, None].expand(-1, seen.shape[1], -1))


class _StepwiseMixer(_Mixer):
    """Goes on from a state by one token at a time.

    Its large projections still read all tokens at once: while the module steps through them, the first ones are given
    nothing to do and return their part of what they have computed before, and the last one collects what it is given.
    """

    def __init__(self, layers, module):
        super().__init__(layers, module)
        self._thread = get_ident()
        self._step: int | None = None
        self._states: list[Reading] = []
        self._first = [child for name, child in module.named_children() if name.startswith("in_proj")]
        self._projected: dict[torch.nn.Module, torch.Tensor] = {}
        self._collected: list[torch.Tensor] = []

    def hook(self):
        return [
            *super().hook(),
            *(projection.register_forward_pre_hook(self._skip) for projection in self._first),
            *(projection.register_forward_hook(self._share) for projection in self._first),
            self.module.out_proj.register_forward_pre_hook(self._collect),
        ]

    @property
    def _present_step(self) -> int | None:
        return self._step if get_ident() == self._thread else None

    def _skip(self, module, args):
        return None if self._present_step is None else (args[0][:, :0],)

    def _share(self, module, args, output):
        step = self._present_step
        return None if step is None else self._projected[module][:, step : step + 1].contiguous()

    def _collect(self, module, args):
        if self._present_step is None:
            return None
        self._collected.append(args[0])
        return (args[0][:, :0],)

    def enter(self, arguments, cache_name):
        nodes, hidden = self.layers.plan.nodes, arguments["hidden_states"]
        self.after, self._states, self._collected = self.state, [], []
        self._projected = {projection: projection(hidden) for projection in self._first} if nodes > 1 else {}
        for step in range(nodes):
            self._step = step if nodes > 1 else None
            self.after = Reading(self.after, 1)
            self._states.append(self.after)
            call = {**arguments, "hidden_states": hidden[:, step : step + 1], cache_name: self.after}
            # The last one is left to the module's own call.
            if step + 1 < nodes:
                self.module.forward(**call)
        return call

    def leave(self, output):
        if self._step is None:
            return output
        self._step = None
        return self.module.out_proj(torch.cat(self._collected, dim=1))

    def commit(self, counts, whole):
        for count in set(counts):
            if len(set(counts)) == 1:
                self.state.put(self._states[count - 1])
            else:
                index = torch.tensor([row for row, other in enumerate(counts) if other == count])
                self.state.put(self._states[count - 1].rows(index), index)
        self.after, self._states, self._projected, self._collected = None, [], {}, []


def _driver(module: torch.nn.Module, state: RecurrentState, model_type: str) -> type[_Mixer]:
    if not state.recurrent_states:
        return _Convolution
    # Several tokens at once are held to these limits, a single one is not.
    limits = tuple(getattr(module, "time_step_limit", None) or _NO_LIMITS)
    return _StepwiseMixer if model_type in _STEPWISE or limits != _NO_LIMITS else _ReplayingMixer


def _is_sequence(value, rows: int, nodes: int) -> bool:
    return torch.is_tensor(value) and value.shape[:2] == (rows, nodes)


def mixers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of a model that update a recurrent state of its cache, in order."""
    return [module for module in model.modules() if hasattr(module, "layer_idx") and _updates_state(type(module))]


@lru_cache(maxsize=4096)
def _updates_state(module_class: type) -> bool:
    code = getattr(inspect.unwrap(module_class.forward), "__code__", None)
    return code is not None and not {"update_conv_state", "update_recurrent_state"}.isdisjoint(code.co_names)
