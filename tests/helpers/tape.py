"""CUDA graphs without a GPU: a tape of the operations of a forward, which runs them again on the same tensors.

What Python does between two operations is not on the tape, as it is not in a graph: numbers that were read from the
text while recording stay what they were, and a forward that waits for the result of an operation cannot be recorded.
Tapes of one backend share their memory as graphs with one pool do: running one spoils what the others have computed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from hf_specdec.kernels import acceptance as kernels_of_acceptance
from hf_specdec.kernels import best as kernels_of_best
from hf_specdec.target import graphs
from hf_specdec.target.capture import CannotCaptureError, CudaBackend, NoWaiting
from tests.helpers.other_device import Elsewhere, leaves_of, numbers, on_cpu


class Step(NamedTuple):
    """An operation, what it is given, and the tensors that it has allocated, by their place in its output."""

    operation: Callable
    args: tuple
    kwargs: dict
    made: list[tuple[int, torch.Tensor]]


class Tape(NoWaiting):
    """Records the operations inside, in order, and the numbers of what lies on the other device of the tests."""

    def __init__(self):
        super().__init__()
        self.steps: list[Step] = []
        # What operations have allocated, by address, and whether somebody may take it for a result.
        self.made: dict[int, torch.Tensor] = {}
        self.has_results = True

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = super().__torch_dispatch__(operation, types, args, kwargs)
        tensors = [value for value in leaves_of((args, kwargs)) if isinstance(value, torch.Tensor)]
        results = leaves_of(output)
        if any(isinstance(value, Elsewhere) for value in (*tensors, *results)):
            operation, kwargs = on_cpu(operation, numbers(kwargs))
            args, tensors, results = numbers(args), numbers(tensors), numbers(results)
        given = set(map(_memory, tensors))
        made = [
            (place, value)
            for place, value in enumerate(results)
            if isinstance(value, torch.Tensor) and _memory(value) not in given
        ]
        self.made.update({_memory(tensor): tensor for _, tensor in made})
        if made or not _is_view(operation):
            self.steps.append(Step(operation, args, kwargs, made))
        return output

    def replay(self) -> None:
        self.has_results = True
        with _without_modes():
            for operation, args, kwargs, made in self.steps:
                results = leaves_of(operation(*args, **kwargs))
                for place, tensor in made:
                    tensor.copy_(results[place])

    def spoil(self) -> None:
        """Spoils the results, which stay so until the tape runs again."""
        if self.has_results:
            self.has_results = False
            with _without_modes():
                for tensor in self.made.values():
                    spoil(tensor)


@contextmanager
def _without_modes() -> Iterator[None]:
    """A graph runs below all of Python."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def spoil(tensor: torch.Tensor) -> None:
    """Fills a tensor with what nobody can take for a result."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
    else:
        tensor.logical_not_()


def spoil_all(inputs: graphs.GraphInputs) -> None:
    """Spoils all that is filled in for a graph."""
    for tensor in (*inputs.tensors.values(), *vars(inputs).values()):
        if torch.is_tensor(tensor) and tensor is not vars(inputs).get("_padding_nodes"):
            spoil(tensor)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_view(operation) -> bool:
    return operation.is_view or not operation._schema.is_mutable


class NothingToHost(TorchFunctionMode):
    """Mode in which reading a tensor as a list raises; on a CPU no operation does it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.tolist, torch.Tensor.numpy):
            raise CannotCaptureError(f"{function.__name__}() waits for the device")
        return function(*args, **(kwargs or {}))


class TapeBackend(CudaBackend):
    """Records on tapes, on any device.

    Attributes:
        tapes (`list[Tape]`): All that were recorded.
        calls (`list[str]`): "begin" and "end" of the calls that have used them.
    """

    def __init__(self):
        self.tapes: list[Tape] = []
        self.calls: list[str] = []
        self._lock = threading.Lock()

    def capture(self, run):
        run()
        tape = Tape()
        with tape, NothingToHost():
            output = run()
        self.tapes.append(tape)

        def replay() -> None:
            # Two calls at once would ruin each other's results.
            assert self._lock.acquire(blocking=False)
            try:
                with torch.inference_mode(False), torch.no_grad():
                    for other in self.tapes:
                        other.spoil()
                    tape.replay()
            finally:
                self._lock.release()

        return replay, output

    def forget(self):
        self.tapes.clear()

    def begin_call(self):
        self.calls.append("begin")

    def end_call(self):
        self.calls.append("end")


def tape_everything(monkeypatch) -> list[TapeBackend]:
    """Lets all captures go onto tapes from now on: returns the list of all backends."""
    used: list[TapeBackend] = []

    def backend(device: torch.device) -> TapeBackend:
        used.append(TapeBackend())
        return used[-1]

    monkeypatch.setattr(graphs, "capture_backend", backend)
    # On a CPU it goes through numpy, which is not on a tape.
    best = kernels_of_best.best_tokens
    # Others' modules may import something for every name that they are asked for.
    here = [module for name, module in list(sys.modules.items()) if name.startswith("hf_specdec.")]
    for module in here:
        if vars(module).get("best_tokens") is best:
            monkeypatch.setattr(module, "best_tokens", lambda scores: scores.argmax(-1))
    # There it asks what a tape would wait for.
    monkeypatch.setattr(kernels_of_acceptance, "nowhere", lambda mask: False)
    return used


def spoil_inputs(monkeypatch) -> None:
    """Lets nothing be read by a replay from now on that was not filled for it."""
    monkeypatch.setattr(graphs.GraphInputs, "fill", _filling_spoiled(graphs.GraphInputs.fill))


def _filling_spoiled(fill: Callable) -> Callable:
    def fill_spoiled(self, *args, **kwargs) -> None:
        spoil_all(self)
        fill(self, *args, **kwargs)

    return fill_spoiled
