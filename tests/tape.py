"""CUDA graphs without a GPU: a tape of the operations of a forward, which runs them again on the same tensors.

What Python does between two operations is not on the tape, as it is not in a graph: numbers that were read from the
text while recording stay what they were, and a forward that waits for the result of an operation cannot be recorded.
Tapes of one backend share their memory as graphs with one pool do: running one spoils what the others have computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from hf_specdec.candidate_generators.dflash import corrections, denoising, generator, selector
from hf_specdec.candidate_generators.mlp_speculator import generator as mlp_speculator
from hf_specdec.decoding import following, graphs
from hf_specdec.decoding.capture import CannotCaptureError, CaptureBackend, NoWaiting
from hf_specdec.decoding.node_inputs import NodeInputs
from hf_specdec.drafting import chain, growth
from hf_specdec.drafting.graphs import RowInputs
from hf_specdec.drafting.slots import DraftInputs
from hf_specdec.kernels import acceptance as kernels_of_acceptance
from hf_specdec.logits import acceptance, rules
from tests.other_device import Elsewhere


class Tape(NoWaiting):
    """Records the operations inside, in order."""

    def __init__(self):
        super().__init__()
        self.steps: list[tuple[Callable, tuple, dict, list]] = []
        self.made: dict[int, torch.Tensor] = {}  # what operations have allocated, by address

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = super().__torch_dispatch__(operation, types, args, kwargs)
        given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        fresh = [tensor for tensor in _tensors(output) if _memory(tensor) not in given]
        self.made.update({_memory(tensor): tensor for tensor in fresh})
        if fresh or not _is_view(operation):
            self.steps.append((operation, args, kwargs, fresh))
        return output

    def replay(self) -> None:
        for operation, args, kwargs, fresh in self.steps:
            output = operation(*args, **kwargs)
            given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
            again = [tensor for tensor in _tensors(output) if _memory(tensor) not in given]
            for old, new in zip(fresh, again, strict=True):
                old.copy_(new)

    def spoil(self) -> None:
        for tensor in self.made.values():
            spoil(tensor)


def spoil(tensor: torch.Tensor) -> None:
    """Fills a tensor with what nobody can take for a result."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
    else:
        tensor.logical_not_()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_iter(values) if torch.is_tensor(value)]


def _memory(tensor: torch.Tensor) -> int:
    inner = tensor.inner if isinstance(tensor, Elsewhere) else tensor
    return inner.untyped_storage()._cdata


def _is_view(operation) -> bool:
    return operation.is_view or not operation._schema.is_mutable


class NothingToHost(TorchFunctionMode):
    """Mode in which reading a tensor as a list raises; on a CPU no operation does it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.tolist, torch.Tensor.numpy):
            raise CannotCaptureError(f"{function.__name__}() waits for the device")
        return function(*args, **(kwargs or {}))


class TapeBackend(CaptureBackend):
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
    for module in (
        *(corrections, denoising, generator, selector, growth, chain, mlp_speculator, following, rules, acceptance),
    ):
        # On a CPU it goes through numpy, which is not on a tape.
        monkeypatch.setattr(module, "best_tokens", lambda scores: scores.argmax(-1))
    # There it asks what a tape would wait for.
    monkeypatch.setattr(kernels_of_acceptance, "nowhere", lambda mask: False)
    return used


def spoil_inputs(monkeypatch) -> None:
    """Lets nothing be read by a replay from now on that was not filled for it."""
    for inputs in (NodeInputs, DraftInputs, RowInputs):
        monkeypatch.setattr(inputs, "fill", _filling_spoiled(inputs.fill))


def _filling_spoiled(fill: Callable) -> Callable:
    def fill_spoiled(self, *args, **kwargs) -> None:
        for buffer in self.buffers:
            spoil(buffer)
        fill(self, *args, **kwargs)

    return fill_spoiled
