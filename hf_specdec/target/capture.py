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


class NoWaiting(TorchDispatchMode):
    """Inside, operations that make the host wait for the device raise a `CannotCaptureError`, in this thread.

    In the middle of a capture they would fail as well, and leave the GPU's random numbers and memory pools unusable.
    """

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
        if operation.overloadpacket in _WAITING or _picks_by_mask(operation, args):
            raise CannotCaptureError(f"{operation} waits for the device")
        if picks_from_host(operation, args):
            raise CannotCaptureError(f"{operation} copies an index from the host")
        output = operation(*args, **kwargs)
        if operation.overloadpacket in _COPIES and len(_devices_of((args, output))) > 1:
            raise CannotCaptureError(f"{operation} copies between host and device")
        return output


class _NothingFromLists(TorchFunctionMode):
    """Refuses lists that are copied to the device, and never become an operation on their way."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        data = args[function is torch.Tensor.new_tensor :] or tuple((kwargs or {}).values())
        if function in FROM_LISTS and output.device.type != "cpu" and not torch.is_tensor(data[0]):
            raise CannotCaptureError(f"{function.__name__}() copies from the host to the device")
        if function in INDEXING and args[0].device.type != "cpu" and any(map(_is_list, parts_of_index(args[1]))):
            raise CannotCaptureError("a list as an index is copied from the host to the device")
        return output


# They make tensors of lists.
FROM_LISTS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)

# Lists may be indices.
INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def parts_of_index(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_list(part: Any) -> bool:
    return isinstance(part, (list, tuple, range, np.ndarray))


aten = torch.ops.aten

# They bring a number to the host, or make a tensor whose size depends on one.
_WAITING = {
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


_PICKING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


def picks_from_host(operation: Any, args: tuple[Any, ...]) -> bool:
    """Tells whether a tensor on a device is indexed by one on the host."""
    if operation.overloadpacket not in _PICKING or args[0].device.type == "cpu":
        return False
    return any(index is not None and index.device.type == "cpu" for index in args[1])


def _picks_by_mask(operation, args) -> bool:
    if operation.overloadpacket not in _PICKING:
        return False
    # A single number is filled in without counting the places.
    fills = operation.overloadpacket is not aten.index and args[2].numel() == 1
    return not fills and any(index is not None and index.dtype == torch.bool for index in args[1])


def _devices_of(values: Any) -> set[torch.device]:
    return {value.device for value in tree_iter(values) if torch.is_tensor(value)}


class CaptureBackend:
    """Records forwards, and repeats them on the same memory. All records of one backend share memory."""

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Records `run`, which may be called several times and does the same each time.

        Returns:
            `tuple`: A function that repeats it, and what `run` returned: tensors that each repetition writes again.
            They hold until the next repetition of any record of this backend.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement capture().")

    def forget(self) -> None:
        """Marks the end: what was recorded before is repeated no more."""

    def begin_call(self) -> None:
        """A call takes over from the one before, which may have run in another stream."""

    def end_call(self) -> None:
        """The call has launched its last work."""


class CudaBackend(CaptureBackend):
    """CUDA graphs with one memory pool.

    Args:
        device (`torch.device`): The GPU.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._pool = None
        self._stream: torch.cuda.Stream | None = None
        self._last_call: torch.cuda.Event | None = None

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
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

    def _record(self, run):
        with suppress(torch.OutOfMemoryError):
            return self._record_at_once(run)
        # A capture cannot take back what is kept for others; of the broken one nothing is held any more.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return self._record_at_once(run)

    def _record_at_once(self, run):
        """Does not wait for the device and give all free memory back beforehand, as `torch.cuda.graph` does.

        In the middle of a text that would take longer than the capture.
        """
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
        # A pool ends with the last of its graphs.
        self._pool = None

    def begin_call(self) -> None:
        if self._last_call is not None:
            torch.cuda.current_stream(self.device).wait_event(self._last_call)

    def end_call(self) -> None:
        self._last_call = torch.cuda.current_stream(self.device).record_event()


# Only one capture may be underway in a process.
_capture_lock = Lock()


def capture_backend(device: torch.device) -> CaptureBackend | None:
    """Backend that captures forwards on a device; `None` where there is none."""
    return CudaBackend(device) if device.type == "cuda" else None


class SharedOutputs:
    """Memory for what graphs return, the same for all of them: each holds until the next one runs."""

    def __init__(self):
        self._memory: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def put(self, output: Any) -> Any:
        """The output, nested or not, with its large tensors copied to the shared memory, in a graph or in front of it.

        A graph that was captured before the memory had to grow keeps what it was captured with.
        """
        large = [tensor for tensor in tree_iter(output) if _is_large(tensor)]
        if not large:
            return output
        needed, memory = sum(map(_aligned_bytes, large)), self._memory
        if memory is None or len(memory) < needed:
            with torch.inference_mode(False):
                memory = self._memory = torch.empty(needed, dtype=torch.uint8, device=large[0].device)
        free = 0

        def place(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal free
            if not _is_large(tensor):
                return tensor
            part = memory[free : free + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            free += _aligned_bytes(tensor)
            return part.copy_(tensor)

        return tree_map_only(torch.Tensor, place, output)


# Bytes for which a copy is worth while, such as of the logits of several nodes.
_LARGE_OUTPUT = 1 << 20


def _is_large(value: Any) -> bool:
    return torch.is_tensor(value) and value.nbytes >= _LARGE_OUTPUT


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // 256) * 256
