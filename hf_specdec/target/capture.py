"""Recording what runs on a device, to repeat it on the same memory: CUDA graphs, and what they cannot repeat."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from ..threads import Lock


class CannotCaptureError(RuntimeError):
    """A forward does what a graph cannot repeat."""


aten = torch.ops.aten

# They bring a number to the host, or make a tensor whose size depends on one.
WAITING = {
    aten._local_scalar_dense,
    aten.bincount,
    aten.equal,
    aten.masked_select,
    aten.nonzero,
    aten.repeat_interleave,
    aten._unique2,
    aten.unique_consecutive,
    aten.unique_dim,
}

_COPIES = {aten._to_copy, aten.copy_}
_PICKING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}

# They make tensors of lists.
FROM_LISTS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)

# Lists may be indices.
INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class NoWaiting(TorchDispatchMode):
    """Inside, operations that make the host wait for the device raise a `CannotCaptureError`, in this thread."""

    # In a capture they would fail, too, and leave the GPU's random numbers and memory pools unusable.

    def __init__(self):
        super().__init__()
        self._functions = _NothingFromLists()

    def __enter__(self) -> NoWaiting:
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation.overloadpacket in WAITING or picks_by_mask(operation, args):
            raise CannotCaptureError(f"{operation} waits for the device")
        if operation.overloadpacket in _PICKING and args[0].device.type != "cpu":
            if any(index is not None and index.device.type == "cpu" for index in args[1]):
                raise CannotCaptureError(f"{operation} copies an index from the host")
        output = operation(*args, **kwargs)
        if operation.overloadpacket in _COPIES:
            tensors = [value for value in tree_iter((args, output)) if torch.is_tensor(value)]
            if len({tensor.device for tensor in tensors}) > 1:
                raise CannotCaptureError(f"{operation} copies between host and device")
        return output


def picks_by_mask(operation: Any, args: tuple[Any, ...]) -> bool:
    """A tensor is indexed by a mask, whose places are counted."""
    if operation.overloadpacket not in _PICKING:
        return False
    # A single number is filled in without counting the places.
    fills = operation.overloadpacket is not aten.index and args[2].numel() == 1
    return not fills and any(index is not None and index.dtype == torch.bool for index in args[1])


class _NothingFromLists(TorchFunctionMode):
    """Refuses lists that are copied to the device, and never become an operation on their way."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if function in FROM_LISTS and output.device.type != "cpu":
            data = args[1:] if function is torch.Tensor.new_tensor else args
            data = data or tuple((kwargs or {}).values())
            if not torch.is_tensor(data[0]):
                raise CannotCaptureError(f"{function.__name__}() copies from the host to the device")
        if function in INDEXING and args[0].device.type != "cpu":
            if any(isinstance(part, (list, tuple, range, np.ndarray)) for part in parts_of_index(args[1])):
                raise CannotCaptureError("a list as an index is copied from the host to the device")
        return output


def parts_of_index(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


# Only one capture may be underway in a process.
_capture_lock = Lock()


class CudaBackend:
    """CUDA graphs with one memory pool: their outputs hold until any of them runs again."""

    def __init__(self, device: torch.device):
        self.device = device
        self._pool = None
        self._stream: torch.cuda.Stream | None = None
        self._last_call: torch.cuda.Event | None = None

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Records `run`, which is called several times; returns what repeats it, and the output it writes again."""
        with _capture_lock, torch.cuda.device(self.device):
            if self._stream is None:
                # One for all captures: each stream has a workspace of its own.
                self._stream = torch.cuda.Stream()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    # Compiles kernels and allocates workspaces, which a capture cannot do.
                    run()
                    with NoWaiting():
                        run()
                    graph, output = self._record(run)
            finally:
                # Also after an error: what comes next writes to the same slots.
                current.wait_stream(self._stream)
            return graph.replay, output

    def _record(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        with suppress(torch.OutOfMemoryError):
            return self._record_at_once(run)
        # A capture cannot take back what is kept for others; of the broken one nothing is held any more.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return self._record_at_once(run)

    def _record_at_once(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        # `torch.cuda.graph` would wait for the device and give all free memory back beforehand, which in the middle of
        # a text takes longer than the capture.
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on with work of their own.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            output = run()
        except BaseException:
            # Ending a broken capture fails, too; the first error says more.
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return graph, output

    def forget(self) -> None:
        """Marks the end: what was recorded before is repeated no more."""
        # A pool ends with the last of its graphs.
        self._pool = None

    def begin_call(self) -> None:
        """A call takes over from the one before, which may have run in another stream."""
        if self._last_call is not None:
            torch.cuda.current_stream(self.device).wait_event(self._last_call)

    def end_call(self) -> None:
        """The call has launched its last work."""
        self._last_call = torch.cuda.current_stream(self.device).record_event()


def capture_backend(device: torch.device) -> CudaBackend | None:
    """Backend that captures forwards on a device; `None` where there is none."""
    return CudaBackend(device) if device.type == "cuda" else None


# Bytes for which a copy is worth while, such as of the logits of several nodes.
_LARGE_OUTPUT = 1 << 20


class SharedOutputs:
    """Memory for what graphs return, the same for all of them: each holds until the next one runs."""

    def __init__(self):
        self.memory: torch.Tensor | None = None

    def put(self, output: Any) -> Any:
        """The output, nested or not, with its large tensors copied to the shared memory."""
        large = [value for value in tree_iter(output) if torch.is_tensor(value) and value.nbytes >= _LARGE_OUTPUT]
        if not large:
            return output
        sizes = [-(-tensor.nbytes // 256) * 256 for tensor in large]
        if self.memory is None or len(self.memory) < sum(sizes):
            with torch.inference_mode(False):
                self.memory = torch.empty(sum(sizes), dtype=torch.uint8, device=large[0].device)
        parts = iter(self.memory[: sum(sizes)].split(sizes))

        def place(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.nbytes < _LARGE_OUTPUT:
                return tensor
            return next(parts)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

        return tree_map_only(torch.Tensor, place, output)
