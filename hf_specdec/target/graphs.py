"""CUDA graphs of forwards over slots: verifications, plain decoding, and what draft networks do in a cycle.

A forward of a few tokens launches hundreds of kernels from Python, which takes longer than they run. A graph is
recorded once and launches all of them in one go. It repeats the same kernels on the same memory, so everything that
changes from cycle to cycle is read from tensors that stay where they are: the inputs, and the slots.

The story of a forward is `CallGraphs.run`. A graph is found by its key: the place of its slots, its rows, and whatever
is built into it. If there is none, its inputs (`GraphInputs`) are made and filled, and it is captured; otherwise the
inputs are filled and it is replayed. Inside of `CallGraphs.ahead` the run is remembered: the next run with the same
key finds the output, and replays nothing.

Rows are padded to few sizes and nodes to those of a full draft, so that a handful of graphs serves all forwards. Rows
leave a call one after the other, so the first forward captures the graphs for fewer rows, too. Graphs and slots belong
to a model and outlive the call; one call at a time has them, others go on without.

Shapes: R rows and T nodes of a graph, r and t of them in use.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only
from transformers.utils import logging

from ..kernels.tree_attention import MAX_NODES
from ..threads import Lock
from ..transfers import RowNumbers, holding, on_host
from .cache import Place, SlotCache, SlotStore, padded_rows, row_sizes
from .capture import CudaBackend, SharedOutputs, capture_backend
from .facts import model_profile


logger = logging.get_logger(__name__)


class GraphInputs:
    """Buffers that a graph reads: they stay where they are, and are filled in front of each run."""

    def __init__(
        self,
        rows: int,
        device: torch.device,
        numbers: dict[str, int],  # names of integers of the rows, and those of rows of padding
        like: dict[Any, torch.Tensor],  # other tensors (r, ...), or with a length (r, t, ...); padding has zeros
        length: int | None = None,  # the largest t
    ):
        self._padding = numbers.values()
        # A call may run in inference mode, and a later one outside of it.
        with torch.inference_mode(False):
            # One table, which arrives in one copy. Kernels are compiled for lines at multiples of 16 bytes.
            self._table = torch.zeros((len(numbers), rows + rows % 2), dtype=torch.long, device=device)
            self.tensors: dict[Any, torch.Tensor] = {}
            for name, values in like.items():
                shape = values.shape[1:] if length is None else (length, *values.shape[2:])
                self.tensors[name] = torch.zeros((rows, *shape), dtype=values.dtype, device=device)
        self.numbers: dict[str, torch.LongTensor] = dict(zip(numbers, self._table[:, :rows]))

    def fill(self, count: int, numbers: dict[str, RowNumbers], tensors: dict[Any, torch.Tensor]) -> None:
        """Copies in what the first `count` rows read; tensors may be smaller than their buffers, with zeros after."""
        for name, values in tensors.items():
            buffer, values = self.tensors[name], values[:count]
            if values.shape != buffer.shape:
                buffer.zero_()
            buffer[tuple(map(slice, values.shape))].copy_(values, non_blocking=True)
        if not numbers:
            return
        lines = []
        for name, padding in zip(self.numbers, self._padding):
            values = numbers[name]
            line = values[:count] if isinstance(values, list) else [padding] * count
            lines.append([*line, *[padding] * (self._table.shape[1] - count)])
        self._table.copy_(on_host(lines, self._table.device), non_blocking=True)
        for name, values in numbers.items():
            if isinstance(values, torch.Tensor):
                self.numbers[name][:count].copy_(values[:count])


@dataclass
class CapturedForward:
    """A recorded forward."""

    inputs: Any
    output: Any
    repeat: Callable[[], None]
    held: Any = None  # what it reads beside its inputs

    def replay(self) -> None:
        self.repeat()

    def of_rows(self, count: int) -> Any:
        """The output for the first rows, to be used before the next graph runs."""
        return tree_map_only(torch.Tensor, lambda values: values[:count], self.output)


@dataclass(frozen=True)
class Variant:
    """Part of a key of which there may be any number, such as the settings of calls: those used last are kept."""

    value: Any


_MOST_VARIANTS = 4


class ModelGraphs:
    """The captured forwards of one model, and the slots that they read and write."""

    def __init__(self):
        # Weak, so that the memory is free as soon as nobody has the graphs.
        owner = weakref.ref(self)

        def on_dropped(place: Place) -> None:
            if (graphs := owner()) is not None:
                graphs.keep_forwards(lambda key: key[0] != place)

        self.store: SlotStore = SlotStore(on_dropped)
        self.outputs = SharedOutputs()
        self.floats: torch.FloatTensor | None = None
        self.forwards: dict[tuple[Any, ...], CapturedForward] = {}
        self.why_eager: str | None = None  # nothing more is captured, since a capture has failed
        self.backend: CudaBackend | None = None
        self._variants: list[Variant] = []
        self._state: tuple[Any, ...] | None = None
        self.owner: Callable[[], CallGraphs | None] = lambda: None  # the call that has them
        self.lock: Lock = Lock()

    def acquire(self, call: CallGraphs, backend: CudaBackend, state: tuple[Any, ...]) -> bool:
        """Gives the graphs to a call, unless another one has them; after a change of `state` they are worthless."""
        with self.lock:
            if self.owner() is not None:
                return False
            # A call that was given up without an end leaves nothing behind but a dead reference.
            self.owner = weakref.ref(call)
        self.store.place = None
        if state != self._state:
            self.keep_forwards(lambda key: False)
            self.store.clear()
            self.backend, self.why_eager, self._state = backend, None, state
        self.backend.begin_call()
        return True

    def use(self, key: tuple[Any, ...]) -> None:
        """Keeps the variants of a key, and forgets the one used longest ago where there are too many."""
        used = [part for part in key if isinstance(part, Variant)]
        if not used:
            return
        self._variants = [variant for variant in self._variants if variant not in used] + used
        for old in self._variants[:-_MOST_VARIANTS]:
            self.keep_forwards(lambda key, old=old: old not in key)
        self._variants = self._variants[-_MOST_VARIANTS:]

    def keep_forwards(self, stays: Callable[[tuple[Any, ...]], bool]) -> None:
        """Forgets the forwards whose keys do not stay."""
        self.forwards = {key: captured for key, captured in self.forwards.items() if stays(key)}
        if not self.forwards:
            self.outputs: SharedOutputs = SharedOutputs()
            self.floats = None
            if self.backend is not None:
                self.backend.forget()


class CallGraphs:
    """The graphs of a model during one call; the arguments are those of [`graphs_for`]."""

    # Captures of the process, failed ones included, for those who time forwards.
    all_captures: ClassVar[int] = 0

    def __init__(
        self,
        model: torch.nn.Module,
        backend: CudaBackend,
        largest: int = 1,
        why_eager: str | None = None,
        shared: tuple[torch.nn.Module, ...] = (),
    ):
        self.num_replays: int = 0
        self.num_captures: int = 0
        self.largest = largest  # nodes of a full draft, the anchor included
        self._name = type(model).__name__
        self._why_eager = why_eager
        self._shared: ModelGraphs | None = None
        self.store: SlotStore | None = None  # the buffers of the slots, where graphs are used
        self._runs_ahead = False
        self._copies_output = False
        # The graph that has run ahead, with what it is found by: its key, its rows and their limits.
        self._ahead: tuple[tuple[Any, ...], CapturedForward] | None = None
        if why_eager is None:
            with _models_lock:
                graphs = _models.setdefault(model, ModelGraphs())
            # Built in: how attention is computed and how far it sees, and the addresses of all weights.
            config = getattr(model, "config", None)
            state = [getattr(config, name, None) for name in ("_attn_implementation", "sliding_window")]
            state += [(tensor.data_ptr(), tensor.dtype) for tensor in _weights((model, *shared))]
            if graphs.acquire(self, backend, tuple(state)):
                self._shared, self.store = graphs, graphs.store
            else:
                self._why_eager = "another call is using the graphs of the model"

    @property
    def why_eager(self) -> str | None:
        """Reason why forwards run without graphs; `None` where they run as graphs."""
        return self._why_eager or (None if self._shared is None else self._shared.why_eager)

    @property
    def pads_drafts(self) -> bool:
        """Fewer nodes than those of a full draft take as long."""
        return self.why_eager is None and self.largest <= MAX_NODES

    def shared_floats(self, shape: tuple[int, ...], device: torch.device) -> torch.FloatTensor:
        """A large input of a graph: memory of float32 numbers, which all graphs share that fill it before they run."""
        memory, count = self._shared.floats, math.prod(shape)
        if memory is None or len(memory) < count:
            with torch.inference_mode(False):
                memory = self._shared.floats = torch.zeros(count, device=device)
        return memory[:count].view(shape)

    def run(
        self,
        key: tuple[Any, ...],  # what is built into the graph: sizes, and whatever else is not among its inputs
        rows: int,
        make_inputs: Callable[[int], Any],  # for R rows
        fill: Callable[[Any, int], None],  # for the first r of them
        read: Callable[..., Any],  # the forward of inputs, and of so many slots of a cache; can be repeated
        cache: SlotCache | None = None,
        width: int = 0,  # most slots after the longest row that are written
        limits: tuple[int, ...] = (),  # of the rows, among the inputs; a run ahead with others is of no use
    ) -> CapturedForward | None:
        """Runs a forward as a graph, whose output holds until the next one runs; `None` where there is none."""
        if self.why_eager is not None:
            return None
        place, columns = None, ()
        if cache is not None:
            # The same place in all of the call, unless the slots must grow.
            cache.reserve(max(cache.lengths) + width)
            place = self.store.place
            columns = (place.slots,)
        self._shared.use(key)
        full_key = (place, padded_rows(rows), *key)
        if full_key not in self._shared.forwards:
            for size in row_sizes(rows):
                if (place, size, *key) in self._shared.forwards:
                    continue
                inputs = make_inputs(size)
                fill(inputs, min(size, rows))
                captured = self._capture(inputs, partial(read, inputs, *columns))
                if captured is None:
                    return None
                self._shared.forwards[(place, size, *key)] = captured
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == (full_key, rows, limits):
            captured = ahead[1]
        else:
            captured = self._shared.forwards[full_key]
            fill(captured.inputs, rows)
            captured.replay()
            self.num_replays += 1
            if self._copies_output:
                captured = replace(captured, output=tree_map_only(torch.Tensor, torch.clone, captured.output))
        if self._runs_ahead:
            self._ahead = (full_key, rows, limits), captured
        return captured

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Lets the graph inside of the block run ahead: the next run of its key finds the output."""
        self._runs_ahead = True
        try:
            yield
        finally:
            self._runs_ahead = False

    @property
    def has_run_ahead(self) -> bool:
        """A graph has run ahead, and nothing after it."""
        return self._ahead is not None

    def forget_ahead(self) -> bool:
        """Lets the next run be one of its own; tells whether a graph has run ahead, for nothing then."""
        has_run, self._ahead = self.has_run_ahead, None
        return has_run

    def _capture(self, inputs: Any, run: Callable[[], Any]) -> CapturedForward | None:
        CallGraphs.all_captures += 1
        outputs = self._shared.outputs
        try:
            with torch.inference_mode(False), torch.no_grad(), holding() as held:
                replay, output = self._shared.backend.capture(lambda: outputs.put(run()))
        except Exception as error:  # noqa: BLE001 - of any kind: whatever it was, the forward can run eagerly
            reason = next(iter(str(error).splitlines()), "")
            self._shared.why_eager = f"capturing failed: {type(error).__name__}: {reason}"
            self._shared.keep_forwards(lambda key: False)
            logger.warning_once(f"{self._name} runs without CUDA graphs; {self.why_eager}.")
            return None
        self.num_captures += 1
        return CapturedForward(inputs, output, replay, held)

    def beside(self) -> CallGraphs:
        """The same graphs and memory for another use of the model in this call, which the call itself ends."""
        other = copy(self)
        other._copies_output = True  # another use may run before it is read
        other.num_replays = other.num_captures = 0
        other._runs_ahead = False
        other._ahead = None
        return other

    def switch_off(self, why: str) -> None:
        """Lets the rest of the call run without graphs."""
        self._why_eager = self._why_eager or why

    def close(self) -> None:
        """Ends the call; the graphs are free for the next one."""
        shared = self._shared
        if shared is not None:
            with shared.lock:
                if shared.owner() is self:
                    shared.backend.end_call()
                    shared.owner = lambda: None

    def __str__(self) -> str:
        return "on" if self.why_eager is None else f"off: {self.why_eager}"


def graphs_for(
    model: torch.nn.Module,
    reasons: dict[str, bool],  # what would make the call run without graphs, and whether it holds
    shared: tuple[torch.nn.Module, ...] = (),  # modules of others that the forwards go through
    largest: int = 1,  # nodes of a full draft, the anchor included
) -> CallGraphs | None:
    """Graphs of a model for one call; `None` where its device has none."""
    backend = capture_backend(next(model.parameters()).device)
    if backend is None:
        return None
    weights, modules = _weights((model, *shared)), [module for part in (model, *shared) for module in part.modules()]
    # What cannot be captured, or would not follow a change made between two calls.
    reasons |= {
        "it is split over several processes": (getattr(model, "tp_size", None) or 1) > 1,
        "its weights are wrapped tensors, whose addresses are not known": any(
            map(is_traceable_wrapper_subclass, weights)
        ),
        "its weights lie on several devices": len({tensor.device for tensor in weights}) > 1,
        "it is in training mode": any(part.training for part in (model, *shared)),
        "it has adapters, which may be switched": any(hasattr(module, "active_adapter") for module in modules),
        "its modules have hooks, or forwards of their own": any(map(_is_watched, modules)),
        "autocast is on": torch.is_autocast_enabled(next(model.parameters()).device.type),
    }
    why_eager = next((why for why, holds in reasons.items() if holds), None)
    graphs = CallGraphs(model, backend, largest, why_eager, shared)
    if graphs.why_eager is not None:
        logger.info(f"{type(model).__name__} runs without CUDA graphs: {graphs.why_eager}.")
    return graphs


def call_graphs(
    model: torch.nn.Module,
    largest: int = 1,
    enforce_eager: bool = False,
    all_hidden_states: bool = False,
    row_inputs: tuple[str, ...] = (),
) -> CallGraphs | None:
    """[`graphs_for`] a causal language model; `row_inputs` are what it reads of each row beside its tokens."""
    profile = model_profile(model)
    reasons = {
        "enforce_eager=True": enforce_eager,
        "the hidden states of all layers are returned": all_hidden_states,
        f"it reads {', '.join(row_inputs)}": bool(row_inputs),
        "it has layers with a recurrent state": profile.is_recurrent,
        "it tells positions from the slots of its cache": profile.counts_slots or profile.counted is not None,
        "it reads an encoder's output": profile.has_encoder,
    }
    return graphs_for(model, reasons, largest=largest)


def _weights(parts: tuple[torch.nn.Module, ...]) -> list[torch.Tensor]:
    return [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]


def _is_watched(module: torch.nn.Module) -> bool:
    """Code of others runs in the module's forward, which a graph would leave out."""
    # transformers leaves hooks behind that collect states when asked to; those of this package see their own thread.
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    packages = {(getattr(hook, "__module__", None) or "").partition(".")[0] for hook in hooks}
    return "forward" in vars(module) or not packages <= {"transformers", "hf_specdec"}


_models: weakref.WeakKeyDictionary[torch.nn.Module, ModelGraphs] = weakref.WeakKeyDictionary()
_models_lock = Lock()


def forget_graphs(model: torch.nn.Module | None = None) -> None:
    """Frees the graphs and slots of one model, or of all; a running call keeps its own until it ends."""
    with _models_lock:
        if model is None:
            _models.clear()
        else:
            _models.pop(model, None)
