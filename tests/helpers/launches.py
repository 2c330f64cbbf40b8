"""Counts the kernels that a cycle launches on a GPU, on a machine without one.

Calls run on a device that the host cannot see into, computed by the CPU (`other_device`), with their forwards on tapes
in the place of graphs (`tape`). Every operation on the device counts as the kernels that torch launches for it on a
GPU, every Triton kernel as one, attention of torch as one; weights stand for those of 16 bits. Counted are the cycles
of a second call, or a later one, in which all graphs are there and every row has room for the deepest draft after any
verdict; figures are medians of a cycle. Waits are those between a verification and the next draft, or the next
verification where the host drafts. Nothing is timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import chain
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hf_specdec import Speculator
from hf_specdec.drafts import DraftTree
from hf_specdec.kernels import (
    _triton,
    acceptance,
    ancestors,
    best,
    experts,
    gates,
    heads,
    matches,
    norms,
    philox,
    projections,
    sampling,
    tree_attention,
    warpers,
)
from hf_specdec.kernels import cache as cache_kernels
from hf_specdec.kernels.tiles import Gpu
from hf_specdec.layers.llama import DecoderLayer, place_heads
from hf_specdec.loop.ahead import Ahead
from hf_specdec.loop.loop import DecodingLoop
from hf_specdec.target import attention, cache, graphs
from hf_specdec.target import model as target

from . import layer_references
from .other_device import Elsewhere, Wait, move, other_device
from .tape import TapeBackend


# Kernels of a layer; those outside of graphs in a cycle that drafts and verifies greedily; copies to the host; and
# waits for the device between a verification and the next draft.
AIMS = {"per_layer": 14, "outside": 10, "copies_to_host": 1, "waits": 0}

# It drafts on the host, when what was accepted is known there: one wait is inherent.
HOST_DRAFTS = "recycling"

_GPU = Gpu(processors=132, shared_memory=227 << 10)  # an H200

# Cycles without captures that are counted, in the second call or a later one.
_LEAST_CYCLES, _MOST_CALLS = 3, 5

aten = torch.ops.aten

# Operations that launch no kernel, or several; all others launch one.
_KERNELS_OF = {
    **dict.fromkeys(
        (aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided), 0
    ),
    **dict.fromkeys((aten.constant_pad_nd, aten.scatter, aten.index_put, aten.masked_fill), 2),
    aten.sort: 3,
    aten.topk: 4,
    aten.linalg_solve_triangular: 6,
}


@dataclass
class Counts:
    """Launches, and copies between host and device.

    Attributes:
        kernels (`Counter`): Launches by the name of the kernel, or of torch's operation.
        of_layers (`int`): Those of decoder layers.
        layers (`int`): Decoder layers that have run.
        uploads (`int`): Copies from the host to the device.
    """

    kernels: Counter = field(default_factory=Counter)
    of_layers: int = 0
    layers: int = 0
    uploads: int = 0


@dataclass
class Cycle:
    """Attributes:
    outside (`Counts`): Outside of graphs.
    target, draft (`list[Counts]`): The graphs that ran, those of the target and of the drafter.
    reads (`list[Wait]`): Where the host has read from the device.
    waits (`list[Wait]`, *optional*): Where it has waited between the verification and the next draft, once that has
        begun.
    is_steady (`bool`): Nothing was captured, the target has run as a graph, and no row is near its end.
    """

    outside: Counts = field(default_factory=Counts)
    target: list[Counts] = field(default_factory=list)
    draft: list[Counts] = field(default_factory=list)
    reads: list[Wait] = field(default_factory=list)
    waits: list[Wait] | None = None
    num_captures: int = 0
    has_room: bool = True

    @property
    def is_steady(self) -> bool:
        return bool(self.target) and not self.num_captures and self.has_room and self.waits is not None


class LaunchCounter(TorchDispatchMode):
    """Counts what runs on the other device. It lies above the mode that computes, and below that of a tape.

    Args:
        waits (`list[Wait]`): Of the device.

    Attributes:
        cycles (`list[Cycle]`): Of all calls inside.
    """

    def __init__(self, waits: list[Wait]):
        super().__init__()
        self.cycles: list[Cycle] = []
        self._waits = waits
        self._counts: Counts | None = None
        self._verifies = False
        self._depth = 0
        # The cycle whose verification has run last, and the waits before that.
        self._verified: tuple[Cycle, int] | None = None
        # The graphs of a verification that has run ahead of its cycle, and the loop that it belongs to.
        self._ahead: tuple[Ahead, list[Counts]] | None = None

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        output = operation(*args, **(kwargs or {}))
        if self._counts is not None:
            self._count(operation, args, kwargs or {}, output)
        return output

    def _count(self, operation, args, kwargs, output) -> None:
        far = [isinstance(value, Elsewhere) for value in tree_iter((args, kwargs)) if torch.is_tensor(value)]
        is_far = any(isinstance(value, Elsewhere) for value in tree_iter(output))
        packet = operation.overloadpacket
        if operation.is_view or not (is_far or any(far)):
            return
        if packet in (aten._to_copy, aten.copy_) and len({*far, is_far}) > 1:
            self._counts.uploads += is_far
            return
        self.launch(str(packet).removeprefix("aten."), _KERNELS_OF.get(packet, 1))

    def launch(self, name: str, times: int = 1) -> None:
        if self._counts is not None and times:
            self._counts.kernels[name] += times
            self._counts.of_layers += times if self._depth else 0

    def replayed(self, graph: Counts) -> None:
        """A graph runs that launches so much."""
        cycle = self.cycles[-1]
        if self._verified is not None:
            verified, before = self._verified
            verified.waits, self._verified = self._waits[before:], None
        if self._verifies and self._ahead is not None:
            self._ahead[1].append(graph)
        elif self._verifies:
            cycle.target.append(graph)
            self._verified = cycle, len(self._waits)
        else:
            cycle.draft.append(graph)

    @contextmanager
    def into(self, counts: Counts | None) -> Iterator[None]:
        """Counts into `counts`, or not at all."""
        before, self._counts = self._counts, counts
        try:
            yield
        finally:
            self._counts = before

    @contextmanager
    def attached(self, model: torch.nn.Module) -> Iterator[LaunchCounter]:
        """Counts calls of a model inside of `other_device`, through the classes and not any object."""
        kinds = {*map(type, model.get_decoder().layers)}
        layers = [(DecoderLayer, "advance", self._layer), *((kind, "forward", self._layer) for kind in kinds)]
        places = [
            (DecodingLoop, "cycle", self._cycle),
            (DecodingLoop, "verify", self._verification),
            (Ahead, "_verify", self._verification_ahead),
        ]
        with ExitStack() as stack:
            for owner, name, wrap in (*places, *layers):
                stack.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))
            for module in _READERS_OF_THE_DEVICE:
                stack.enter_context(patch.object(module, "use_triton", _is_far))
            stack.enter_context(patch.object(_triton, "fuses", _is_far))
            # As if the weights were of 16 bits and of sizes for the kernel.
            stack.enter_context(patch.object(projections, "takes_tokens", _are_few))
            stack.enter_context(
                patch.object(projections, "takes_linears", lambda linears: _is_far(*chain.from_iterable(linears)))
            )
            for name in ("products", "gated_product", "added_product"):
                launcher = self._computed_by(
                    lambda *args, name=name, **kwargs: self.launch(name), getattr(layer_references, name)
                )
                stack.enter_context(patch.object(projections, f"{name}_triton", launcher))
            stack.enter_context(patch.object(graphs, "capture_backend", lambda device: CountingBackend(self)))
            # Unknown of a device that does not exist.
            stack.enter_context(patch.object(torch, "is_autocast_enabled", lambda *kind: False))
            stack.enter_context(patch.object(tree_attention, "gpu_of", lambda device: _GPU))
            stack.enter_context(
                patch.object(Elsewhere, "data_ptr", lambda tensor: tensor.inner.data_ptr(), create=True)
            )
            for module in _KERNEL_FILES:
                for name in [name for name in vars(module) if name.endswith("_kernel")]:
                    stack.enter_context(patch.object(module, name, CountedKernel(self, name)))
                for name in [name for name in vars(module) if name.endswith("_triton") and name != "use_triton"]:
                    reference = _REFERENCES.get(name, getattr(module, name.replace("_triton", "_torch"), None))
                    if reference is not None:
                        launcher = self._computed_by(getattr(module, name), reference)
                        stack.enter_context(patch.object(module, name, launcher))
            stack.enter_context(self)
            stack.enter_context(_Attention(self))
            yield self

    def _cycle(self, run: Callable) -> Callable:
        @wraps(run)
        def counted(loop):
            self.cycles.append(cycle := Cycle())
            before = len(self._waits)
            with self.into(cycle.outside):
                run(loop)
            cycle.reads = [wait for wait in self._waits[before:] if wait.what == "read"]

        return counted

    def _verification(self, run: Callable) -> Callable:
        @wraps(run)
        def counted(loop, step, draft):
            drafter, most = loop.drafter, loop.target.most_committed
            has_room = min(loop.rows.depths(drafter.num_speculative_tokens, most)) == drafter.num_speculative_tokens
            cycle = self.cycles[-1]
            cycle.has_room = has_room or not drafter.drafts_ahead
            owner, graphs_ahead = self._ahead or (None, [])
            self._ahead = None
            if owner is loop.ahead and graphs_ahead:
                cycle.target += graphs_ahead
                self._verified = cycle, len(self._waits)
            with self._verifying():
                return run(loop, step, draft)

        return counted

    def _verification_ahead(self, run: Callable) -> Callable:
        @wraps(run)
        def counted(ahead, *args):
            self._ahead = ahead, []
            with self._verifying():
                return run(ahead, *args)

        return counted

    @contextmanager
    def _verifying(self) -> Iterator[None]:
        self._verifies = True
        try:
            yield
        finally:
            self._verifies = False

    def _layer(self, run: Callable) -> Callable:
        @wraps(run)
        def counted(*args, **kwargs):
            self._depth += 1
            if self._counts is not None and self._depth == 1:
                self._counts.layers += 1
            try:
                return run(*args, **kwargs)
            finally:
                self._depth -= 1

        return counted

    def _computed_by(self, launcher: Callable, reference: Callable) -> Callable:
        """Counts what a launcher does, and leaves the numbers to the torch reference."""

        @wraps(launcher)
        def counted(*args, **kwargs):
            launcher(*args, **kwargs)
            with self.into(None):
                return reference(*args, **kwargs)

        return counted


class CountedKernel:
    """Stands for a Triton kernel; it computes nothing."""

    def __init__(self, counter: LaunchCounter, name: str):
        self._launch, self._name = counter.launch, name.strip("_")

    def __getitem__(self, grid) -> Callable:
        return lambda *args, **kwargs: self._launch(self._name)


class _Attention(TorchFunctionMode):
    """Torch's attention is one kernel, into which nobody sees."""

    def __init__(self, counter: LaunchCounter):
        super().__init__()
        self._counter = counter

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.nn.functional.scaled_dot_product_attention or not isinstance(args[0], Elsewhere):
            return function(*args, **(kwargs or {}))
        self._counter.launch("scaled_dot_product_attention")
        with self._counter.into(None):
            return function(*args, **(kwargs or {}))


class CountingBackend(TapeBackend):
    """Records on tapes, with what each of them launches."""

    def __init__(self, counter: LaunchCounter):
        super().__init__()
        self._counter = counter

    def capture(self, run):
        counter, found = self._counter, Counts()

        def counted():
            nonlocal found
            found = Counts()
            with counter.into(found):
                return run()

        with counter.into(None):
            replay, output = super().capture(counted)
        counter.cycles[-1].num_captures += 1

        def replay_counted() -> None:
            counter.replayed(found)
            with counter.into(None):
                replay()

        return replay_counted, output


_KERNEL_FILES = (
    *(acceptance, ancestors, best, cache_kernels, experts, gates),
    *(heads, matches, norms, philox, sampling, tree_attention, warpers),
)
_READERS_OF_THE_DEVICE = (
    *(acceptance, ancestors, best, cache_kernels, matches, philox, sampling, warpers),
    *(attention, cache, target),
)


def _reject(draft: DraftTree, *given: torch.Tensor) -> acceptance.Acceptance:
    run = acceptance._reject_chain_torch if draft.is_chain else acceptance._reject_tree_torch
    return run(draft, *given)


def _are_few(x: torch.Tensor) -> bool:
    return x.numel() <= projections.MAX_TOKENS * x.shape[-1]


# Of launchers whose references have other names.
_REFERENCES = {
    "add_norm_triton": layer_references.add_norm,
    "_best_triton": lambda scores: scores.argmax(-1),
    "_ranked_triton": lambda logits, count: tuple(logits.float().log_softmax(-1).topk(count)),
    "_reject_triton": _reject,
    "_sample_triton": sampling.sample_torch,
    "gated_triton": layer_references.gated,
    "mixture_triton": layer_references.mixture,
    "rotary_angles_triton": layer_references.rotary_angles,
    "tree_attention_triton": layer_references.tree_attention,
    "warped_triton": layer_references.warped,
    "place_heads_triton": place_heads,
}


def _is_far(*tensors: torch.Tensor | None) -> bool:
    return all(tensor is None or isinstance(tensor, Elsewhere) for tensor in tensors)


@dataclass
class Row:
    """A cycle of a method, in the median.

    Attributes:
        per_layer (`float`, *optional*): Kernels of a decoder layer of the target, in its graph; `None` if too many
            nodes are verified for one.
        draft (`float`): Kernels in the graphs of the drafter.
        outside (`float`): Kernels outside of graphs.
        copies_to_host (`float`): How often the host reads from the device.
        waits (`float`): How often it waits for the device, in any way, between a verification and the next draft.
        uploads (`float`): Copies from the host to the device.
        replays (`float`): Graphs that run.
    """

    per_layer: float | None
    draft: float
    outside: float
    copies_to_host: float
    waits: float
    uploads: float
    replays: float

    @classmethod
    def of(cls, cycles: list[Cycle]) -> Row:
        def middle(count: Callable[[Cycle], float]) -> float:
            return median(map(count, cycles))

        layers = [graph.of_layers / graph.layers for cycle in cycles for graph in cycle.target]
        return cls(
            per_layer=round(median(layers), 2) if layers else None,
            draft=middle(lambda cycle: sum(graph.kernels.total() for graph in cycle.draft)),
            outside=middle(lambda cycle: cycle.outside.kernels.total()),
            copies_to_host=middle(lambda cycle: len(cycle.reads)),
            waits=middle(lambda cycle: len(cycle.waits)),
            uploads=middle(lambda cycle: cycle.outside.uploads),
            replays=middle(lambda cycle: len(cycle.target) + len(cycle.draft)),
        )

    def missed(self, method: str = "") -> list[str]:
        """Names of the figures above their aims; where the host drafts, one wait is none of them."""
        aims = {**AIMS, "waits": 1} if method == HOST_DRAFTS else AIMS
        found = {name: getattr(self, name) for name in aims}
        return [name for name, aim in aims.items() if found[name] is None or found[name] > aim]


def steady_cycles(
    model: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    speculator: Speculator,
    new_tokens: int,
    **sampling: Any,
) -> list[Cycle]:
    """Cycles in which all graphs are there, of a call that is made until there are some. The model is moved."""
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **sampling}
    with other_device() as waits:
        moved = {key: move(values) for key, values in inputs.items()}
        move(model)
        speculator.resources = _moved(speculator.resources)
        with LaunchCounter(waits).attached(model) as counter:
            for call in range(_MOST_CALLS):
                counter.cycles.clear()
                model.generate(**moved, **settings, assistant=speculator.without_texts(model))
                steady = [cycle for cycle in counter.cycles if cycle.is_steady]
                if call and len(steady) >= _LEAST_CYCLES:
                    break
    return steady


def _moved(loaded: Any) -> Any:
    """What a method has loaded, with all networks and tensors in it moved, nested or not."""
    if isinstance(loaded, torch.nn.Module) or torch.is_tensor(loaded):
        return move(loaded)
    if isinstance(loaded, (list, tuple)):
        parts = list(map(_moved, loaded))
        return type(loaded)(*parts) if hasattr(loaded, "_fields") else type(loaded)(parts)
    if type(loaded).__module__.startswith("hf_specdec"):
        for name, part in list(getattr(loaded, "__dict__", {}).items()):
            moved = _moved(part)
            if moved is not part:
                object.__setattr__(loaded, name, moved)
    return loaded
