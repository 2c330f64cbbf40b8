"""CUDA graphs of forwards over slots: verifications, plain decoding, and what draft networks do in a cycle.

A forward of a few tokens launches hundreds of kernels from Python, which takes longer than they run. A graph is
recorded once and launches all of them in one go. It repeats the same kernels on the same memory, so everything that
changes from cycle to cycle is read from tensors that stay where they are: the inputs, and the slots.

Rows and nodes are padded to few sizes, so that a handful of graphs serves all forwards. Graphs and slots belong to a
model and outlive the call; one call at a time has them, others go on without.

Shapes: R rows and T nodes of a graph, r and t of them in use.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter, tree_map_only
from transformers.utils import logging

from ..drafts import TreeTopology
from ..kernels.tree_attention import MAX_NODES, SlotTree
from ..threads import Lock
from ..transfers import holding
from .masks import RowState, ancestor_bits
from .target import SlotModel, SlotOutput, model_profile


if TYPE_CHECKING:
    from .cache import SlotCache


logger = logging.get_logger(__name__)

# A size that comes up once, as at the end of a text, is not worth a capture.
_USES_BEFORE_CAPTURE = 1

_NO_LIMIT = torch.iinfo(torch.long).max


class NodeInputs:
    """The buffers from which a captured forward reads what changes.

    Args:
        rows (`int`): R.
        nodes (`int`): T.
        device (`torch.device`): Where they lie.
    """

    def __init__(self, rows: int, nodes: int, device: torch.device):
        # A call may run in inference mode, and a later one outside of it.
        with torch.inference_mode(False):
            self.tokens, self.ancestors, self.depths = (
                torch.zeros((rows, nodes), dtype=torch.long, device=device) for _ in range(3)
            )
            # Each part begins at a multiple of 16 bytes, for which kernels are compiled in any case.
            self._rows = torch.zeros((4, rows + rows % 2), dtype=torch.long, device=device)
        self.lengths, self.starts, self._first_positions, self._last_positions = self._rows[:, :rows]

    def fill(
        self, tokens: torch.LongTensor, topology: TreeTopology, rows: RowState, max_position: int | None = None
    ) -> None:
        """Copies in the nodes `tokens` `(r, t)` of a forward; the other arguments are those of [`SlotModel`].

        Rows of padding are empty, and write to slots that no row uses. Nodes of padding see themselves and the
        committed slots, and lie behind the nodes in use.
        """
        num_rows, num_nodes = self.tokens.shape
        missing = num_nodes - tokens.shape[1]
        self.tokens.copy_(_with_rows(F.pad(tokens, (0, missing)), num_rows))
        bits, depths = ancestor_bits(topology), topology.depths
        if missing:
            itself = 1 << torch.arange(tokens.shape[1], num_nodes, device=bits.device)
            bits = torch.cat([bits, itself.expand(*bits.shape[:-1], -1)], dim=-1)
            depths = F.pad(depths, (0, missing))
        self.ancestors.copy_(_with_rows(bits, num_rows))
        self.depths.copy_(_with_rows(depths, num_rows))
        first = [length - start + offset for length, start, offset in zip(rows.lengths, rows.starts, rows.offsets)]
        last = [_NO_LIMIT if max_position is None else max_position] * len(first)
        padding = [0] * (self._rows.shape[1] - len(first))
        table = torch.tensor([values + padding for values in (rows.lengths, rows.starts, first, last)])
        self._rows.copy_(table, non_blocking=True)

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [self.tokens, self.ancestors, self.depths, self._rows]

    @property
    def tree(self) -> SlotTree:
        return SlotTree(self.lengths, self.starts, self.ancestors, self.depths)

    @property
    def positions(self) -> torch.LongTensor:
        """Position ids `(R, T)`."""
        return torch.minimum(self._first_positions[:, None] + self.depths, self._last_positions[:, None])


def _with_rows(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Values `(r, T)` with copies of the first row behind them; `(T,)` stand for all rows."""
    missing = rows - len(values)
    return values if values.dim() == 1 or not missing else torch.cat([values, values[:1].expand(missing, -1)])


class CannotCaptureError(RuntimeError):
    """A forward does what a graph cannot repeat."""


class NoWaiting(TorchDispatchMode):
    """Inside, operations that make the host wait for the device raise a `CannotCaptureError`, in this thread.

    In the middle of a capture they would fail as well, and leave the GPU's random numbers and memory pools unusable.
    """

    def __init__(self):
        super().__init__()
        self._functions = _NothingFromLists()

    def __enter__(self):
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
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
    """The same for lists that are copied to the device, and never become an operation on their way."""

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


def parts_of_index(index: Any) -> tuple:
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


def picks_from_host(operation, args) -> bool:
    """Whether a tensor on a device is indexed by one on the host."""
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
    """How forwards are recorded, and repeated on the same memory. All records of one backend share memory."""

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Records `run`, which may be called several times and does the same each time.

        Returns:
            `tuple`: A function that repeats it, and what `run` returned: tensors that each repetition writes again.
            They hold until the next repetition of any record of this backend.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement capture().")

    def forget(self) -> None:
        """Nothing that was recorded before is repeated any more."""

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

    def capture(self, run):
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

    def forget(self):
        # A pool ends with the last of its graphs.
        self._pool = None

    def begin_call(self):
        if self._last_call is not None:
            torch.cuda.current_stream(self.device).wait_event(self._last_call)

    def end_call(self):
        self._last_call = torch.cuda.current_stream(self.device).record_event()


# Only one capture may be underway in a process.
_capture_lock = Lock()


def capture_backend(device: torch.device) -> CaptureBackend | None:
    """How forwards on a device are captured; `None` where they are not."""
    return CudaBackend(device) if device.type == "cuda" else None


class Place(NamedTuple):
    """Sizes of the buffers that a call has: B rows of C slots. Graphs of one place read the same buffers."""

    rows: int
    slots: int


class SlotStore:
    """Buffers of keys and values that outlive a call, so that graphs find them in their place.

    There may be several places, for calls of different lengths: those that were used last, as long as together they
    are at most twice as large as the largest one.

    Args:
        on_dropped (`Callable`): Called with a place whose buffers have to make way.

    Attributes:
        place (`Place`, *optional*): Of the call that has the buffers, once it has asked for one.
    """

    def __init__(self, on_dropped: Callable[[Place], None]):
        self._on_dropped = on_dropped
        # The one that was used last comes last.
        self._places: dict[Place, dict[tuple[int, str], torch.Tensor]] = {}
        self.place: Place | None = None

    def take(self, layer: int, name: str, rows: int, heads: int, capacity: int, like: torch.Tensor) -> torch.Tensor:
        """A layer's buffer of this name, zeros of shape `(B, heads, C, D)`, B at least `rows`, C `capacity`.

        All layers of a call have the same B and C, once all of them have asked for the largest `capacity`.

        Args:
            like (`torch.Tensor`): Says head size, dtype and device.
        """
        if self.place is None or self.place.rows < rows or self.place.slots < capacity:
            self._move(rows, capacity)
        shape, key = (self.place.rows, heads, self.place.slots, like.shape[-1]), (layer, name)
        kept = self._places[self.place].get(key)
        if kept is not None:
            if (kept.shape, kept.dtype, kept.device) == (shape, like.dtype, like.device):
                return kept.zero_()
            del kept, self._places[self.place][key]
            self._on_dropped(self.place)
        with torch.inference_mode(False):
            buffer = self._places[self.place][key] = self._zeros(shape, like)
        return buffer

    def _move(self, rows: int, capacity: int) -> None:
        """To the smallest place with these slots that has enough rows; else to a new one."""
        slots = padded_slots(capacity)
        fitting = [place for place in self._places if place.slots == slots and place.rows >= rows]
        self.place = min(fitting, default=Place(padded_rows(rows), slots))
        self._places[self.place] = self._places.pop(self.place, {})
        sizes = {place: place.rows * place.slots for place in self._places}
        room = 2 * max(sizes.values())
        for place in reversed(sizes):
            room -= sizes[place]
            if room < 0:
                self._drop(place)

    def _zeros(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        try:
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        except torch.OutOfMemoryError:
            for place in [place for place in self._places if place != self.place]:
                self._drop(place)
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def _drop(self, place: Place) -> None:
        del self._places[place]
        self._on_dropped(place)

    @property
    def num_bytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.nbytes for buffers in self._places.values() for buffer in buffers.values())

    def begin_call(self) -> None:
        self.place = None

    def clear(self) -> None:
        self._places.clear()
        self.place = None


# Few sizes of buffers: graphs are captured for each of them.
_LEAST_SLOTS, _LAST_DOUBLED = 1024, 8192


def padded_slots(count: int) -> int:
    """Slots of the buffers for this many: powers of two from 1024 to 8192, then four sizes in each doubling."""
    doubled = max(padded_size(count), _LEAST_SLOTS)
    step = doubled if doubled <= _LAST_DOUBLED else doubled // 8
    return -(-count // step) * step


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
        needed = sum(map(_aligned_bytes, large))
        if large and (self._memory is None or len(self._memory) < needed):
            with torch.inference_mode(False):
                self._memory = torch.empty(needed, dtype=torch.uint8, device=large[0].device)
        free = 0

        def place(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal free
            if not _is_large(tensor):
                return tensor
            part = self._memory[free : free + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            free += _aligned_bytes(tensor)
            return part.copy_(tensor)

        return tree_map_only(torch.Tensor, place, output)


# Bytes for which a copy is worth while, such as of the logits of several nodes.
_LARGE_OUTPUT = 1 << 20


def _is_large(value: Any) -> bool:
    return torch.is_tensor(value) and value.nbytes >= _LARGE_OUTPUT


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // 256) * 256


def padded_size(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def padded_rows(count: int) -> int:
    """Rows of the graph for this many: powers of two to 8, then multiples of it, because each has slots of its own."""
    return padded_size(count) if count <= 8 else -(-count // 8) * 8


@dataclass
class CapturedForward:
    """A recorded forward.

    Attributes:
        inputs, output (`Any`): What it reads and writes.
        repeat (`Callable`): Runs it again.
        held (`Any`): What it reads beside its inputs.
    """

    inputs: Any
    output: Any
    repeat: Callable[[], None]
    held: Any = None

    def replay(self) -> None:
        self.repeat()


class ModelGraphs:
    """The captured forwards of one model, and the slots that they read and write.

    Attributes:
        why_eager (`str`, *optional*): Why nothing more is captured, since a capture has failed.
    """

    def __init__(self):
        self.store = SlotStore(self._drop_place)
        self.outputs = SharedOutputs()
        self.forwards: dict[tuple, CapturedForward] = {}
        self.uses: Counter = Counter()
        self.why_eager: str | None = None
        self.backend: CaptureBackend | None = None
        self._state: tuple | None = None
        self._owner: Callable[[], CallGraphs | None] = lambda: None
        self._lock = Lock()

    def acquire(self, call: CallGraphs, backend: CaptureBackend, state: tuple) -> bool:
        """Gives the graphs to a call, unless another one has them.

        Args:
            state (`tuple`): What is built into the graphs; after a change of it they are worthless.
        """
        with self._lock:
            if self._owner() is not None:
                return False
            # A call that was given up without an end leaves nothing behind but a dead reference.
            self._owner = weakref.ref(call)
        if state != self._state:
            self._drop_forwards()
            self.store.clear()
            self.backend, self.why_eager, self._state = backend, None, state
        self.store.begin_call()
        self.backend.begin_call()
        return True

    def release(self, call: CallGraphs) -> None:
        with self._lock:
            if self._owner() is call:
                self.backend.end_call()
                self._owner = lambda: None

    def _drop_forwards(self) -> None:
        self._keep_forwards(lambda key: False)

    def _drop_place(self, place: Place) -> None:
        self._keep_forwards(lambda key: key[0] != place)

    def _keep_forwards(self, stays: Callable[[tuple], bool]) -> None:
        self.forwards = {key: captured for key, captured in self.forwards.items() if stays(key)}
        self.uses = Counter({key: count for key, count in self.uses.items() if stays(key)})
        if not self.forwards:
            self.outputs = SharedOutputs()
            if self.backend is not None:
                self.backend.forget()

    def fail(self, error: Exception, name: str) -> None:
        """Gives up capturing this model."""
        reason = next(iter(str(error).splitlines()), "")
        self.why_eager = f"capturing failed: {type(error).__name__}: {reason}"
        self._drop_forwards()
        logger.warning_once(f"{name} runs without CUDA graphs; {self.why_eager}.")


class CallGraphs:
    """The graphs of a model during one call.

    Args:
        model (`PreTrainedModel`): The model.
        backend (`CaptureBackend`): Captures its forwards, if nothing has been captured before.
        largest (`int`): Nodes of a full draft; such forwards get graphs of their own size.
        why_eager (`str`, *optional*): Why this call runs without graphs.
        shared (`tuple[nn.Module, ...]`): Modules of others that its forwards go through.

    Attributes:
        num_replays, num_captures (`int`): Forwards that ran as graphs; those that were captured for it.
        all_captures (`int`): Captures of the process, failed ones included, for those who time forwards.
    """

    all_captures: ClassVar[int] = 0

    def __init__(
        self,
        model: torch.nn.Module,
        backend: CaptureBackend,
        largest: int = 1,
        why_eager: str | None = None,
        shared: tuple[torch.nn.Module, ...] = (),
    ):
        self.num_replays = self.num_captures = 0
        self._largest = largest
        self._name = type(model).__name__
        self._why_eager = why_eager
        self._shared: ModelGraphs | None = None
        if why_eager is None:
            graphs = _graphs_of(model)
            if graphs.acquire(self, backend, _captured_state((model, *shared))):
                self._shared = graphs
            else:
                self._why_eager = "another call is using the graphs of the model"

    @property
    def why_eager(self) -> str | None:
        """Why forwards run without graphs; `None` where they do not."""
        return self._why_eager or (None if self._shared is None else self._shared.why_eager)

    @property
    def store(self) -> SlotStore | None:
        """The buffers of the slots, where graphs are used."""
        return None if self._shared is None else self._shared.store

    def forward(self, driver: SlotModel, tokens: torch.LongTensor, topology: TreeTopology) -> SlotOutput | None:
        """The output of [`SlotModel.forward`] from a graph; `None` where the forward has to run without one."""
        rows, nodes = tokens.shape
        if nodes > MAX_NODES:
            return None
        size = padded_rows(rows), self._padded_nodes(nodes)

        def fill(inputs: NodeInputs) -> None:
            inputs.fill(tokens, topology, driver.rows, driver.max_position)
            driver.cache.plan_write(nodes)

        def read(inputs: NodeInputs, columns: int) -> tuple:
            output, layers = driver.read_static(inputs, columns)
            return output.logits, output.hidden_states, layers

        captured = self.run_on_slots(
            (*size, driver.states),
            lambda: NodeInputs(*size, tokens.device),
            fill,
            read,
            driver.cache,
            ahead=size[1],
        )
        if captured is None:
            return None
        logits, states, driver.attention_layers = captured.output
        # Only what concerns the nodes in use.
        return SlotOutput(logits[:rows, :nodes], {key: state[:rows, :nodes] for key, state in states.items()})

    def _padded_nodes(self, nodes: int) -> int:
        padded = padded_size(nodes)
        return min(padded, self._largest) if nodes <= self._largest else padded

    def run_on_slots(
        self,
        key: tuple,
        make_inputs: Callable[[], Any],
        fill: Callable[[Any], None],
        read: Callable[[Any, int], Any],
        cache: SlotCache,
        ahead: int,
    ) -> CapturedForward | None:
        """Runs a forward that reads and writes slots as a graph, see [`CallGraphs.run`].

        Args:
            read (`Callable`): The forward. Takes the inputs, and how many slots it is to read; returns tensors.
            cache (`SlotCache`): The slots.
            ahead (`int`): Slots behind the longest row that it writes.
        """
        if self.why_eager is not None:
            return None
        place = self._place(cache, ahead)
        return self.run(key, make_inputs, fill, lambda inputs: read(inputs, place.slots), place)

    def run(
        self,
        key: tuple,
        make_inputs: Callable[[], Any],
        fill: Callable[[Any], None],
        read: Callable[[Any], Any],
        place: Place | None = None,
    ) -> CapturedForward | None:
        """Runs a forward as a graph.

        Args:
            key (`tuple`): What is built into it: its sizes, and whatever else it does not read from its inputs.
            make_inputs (`Callable`): Makes the buffers that it reads; they live as long as the graph.
            fill (`Callable`): Fills them, in front of each run.
            read (`Callable`): The forward. Takes the inputs, and returns tensors.
            place (`Place`, *optional*): Where its slots are, if it has any.

        Returns:
            [`CapturedForward`] that has run, its output to be read before the next one runs; `None` where the forward
            has to run without a graph.
        """
        if self.why_eager is not None:
            return None
        shared, key = self._shared, (place, *key)
        shared.uses[key] += 1
        captured = shared.forwards.get(key)
        if captured is None and shared.uses[key] <= _USES_BEFORE_CAPTURE:
            return None
        inputs = make_inputs() if captured is None else captured.inputs
        fill(inputs)
        if captured is None:
            captured = self._capture(inputs, lambda: read(inputs))
            if captured is None:
                return None
            shared.forwards[key] = captured
        captured.replay()
        self.num_replays += 1
        return captured

    def _place(self, cache: SlotCache, ahead: int) -> Place:
        """Where the slots are: the same place in the call, unless they must grow."""
        cache.reserve(max(cache.lengths) + ahead)
        # In all layers, of which the last to grow may have asked for more than the others.
        while cache.allocated < self.store.place.slots:
            cache.reserve(self.store.place.slots)
        return self.store.place

    def _capture(self, inputs: Any, run: Callable[[], Any]) -> CapturedForward | None:
        CallGraphs.all_captures += 1
        outputs = self._shared.outputs
        try:
            with torch.inference_mode(False), torch.no_grad(), holding() as held:
                repeat, output = self._shared.backend.capture(lambda: outputs.put(run()))
        except Exception as error:  # noqa: BLE001 - of any kind: whatever it was, the forward can run eagerly
            self._shared.fail(error, self._name)
            return None
        self.num_captures += 1
        return CapturedForward(inputs, output, repeat, held)

    def switch_off(self, why: str) -> None:
        """Lets the rest of the call run without graphs."""
        self._why_eager = self._why_eager or why

    def close(self) -> None:
        """Ends the call; the graphs are free for the next one."""
        if self._shared is not None:
            self._shared.release(self)

    def __str__(self) -> str:
        return "on" if self.why_eager is None else f"off: {self.why_eager}"


def call_graphs(
    model: torch.nn.Module,
    largest: int = 1,
    enforce_eager: bool = False,
    all_hidden_states: bool = False,
    row_inputs: tuple[str, ...] = (),
) -> CallGraphs | None:
    """The graphs of a causal language model for one call; `None` where its device has none.

    Args:
        largest (`int`): Nodes of a full draft, the anchor included.
        enforce_eager (`bool`): The user wants none.
        all_hidden_states (`bool`): The forwards return the hidden states of all layers.
        row_inputs (`tuple[str, ...]`): What the forwards read of each row beside its tokens.
    """
    backend = _backend_of(model)
    if backend is None:
        return None
    profile = model_profile(model)
    reasons = {
        "enforce_eager=True": enforce_eager,
        "the hidden states of all layers are returned": all_hidden_states,
        f"it reads {', '.join(row_inputs)}": bool(row_inputs),
        "it has layers with a recurrent state": profile.is_recurrent,
        "it tells positions from the slots of its cache": profile.counts_slots,
    }
    return _call_graphs(model, (), backend, reasons, largest)


def draft_graphs(
    network: torch.nn.Module, shared: tuple[torch.nn.Module, ...] = (), enforce_eager: bool = False
) -> CallGraphs | None:
    """The graphs of a draft network for one call; `None` where its device has none.

    Args:
        network (`nn.Module`): The network.
        shared (`tuple[nn.Module, ...]`): Modules of the target that its forward goes through.
        enforce_eager (`bool`): The user wants none.
    """
    backend = _backend_of(network)
    return None if backend is None else _call_graphs(network, shared, backend, {"enforce_eager=True": enforce_eager})


def _backend_of(model: torch.nn.Module) -> CaptureBackend | None:
    return capture_backend(next(model.parameters()).device)


def _call_graphs(
    model: torch.nn.Module,
    shared: tuple[torch.nn.Module, ...],
    backend: CaptureBackend,
    reasons: dict[str, bool],
    largest: int = 1,
) -> CallGraphs:
    parts = (model, *shared)
    why_eager = next((why for why, holds in reasons.items() if holds), None)
    why_eager = why_eager or next((why for why, holds in _WHY_EAGER.items() if holds(parts)), None)
    graphs = CallGraphs(model, backend, largest, why_eager, shared)
    if graphs.why_eager is not None:
        logger.info(f"{type(model).__name__} runs without CUDA graphs: {graphs.why_eager}.")
    return graphs


def _weights(parts: tuple[torch.nn.Module, ...]) -> list[torch.Tensor]:
    return [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]


def _is_watched(module: torch.nn.Module) -> bool:
    """Whether code of others runs in the module's forward: a graph would leave it out."""
    return "forward" in vars(module) or any(map(_is_foreign, _hooks(module)))


def _hooks(module: torch.nn.Module) -> list[Callable]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _is_foreign(hook: Callable) -> bool:
    # transformers leaves hooks behind that collect states when asked to; those of this package see their own thread.
    return (getattr(hook, "__module__", None) or "").partition(".")[0] not in ("transformers", "hf_specdec")


def _any_module(holds: Callable[[torch.nn.Module], bool]) -> Callable[[tuple[torch.nn.Module, ...]], bool]:
    return lambda parts: any(holds(module) for part in parts for module in part.modules())


# What cannot be captured, or would not follow a change made between two calls: of a model, and modules of others that
# its forward goes through.
_WHY_EAGER: dict[str, Callable[[tuple[torch.nn.Module, ...]], bool]] = {
    "it is split over several processes": lambda parts: (getattr(parts[0], "tp_size", None) or 1) > 1,
    "its weights are wrapped tensors, whose addresses are not known": lambda parts: any(
        map(is_traceable_wrapper_subclass, _weights(parts))
    ),
    "its weights lie on several devices": lambda parts: len({tensor.device for tensor in _weights(parts)}) > 1,
    "it is in training mode": lambda parts: any(part.training for part in parts),
    "it is compiled": _any_module(lambda module: bool(module._compiled_call_impl)),
    "it has adapters, which may be switched": _any_module(lambda module: hasattr(module, "active_adapter")),
    "its modules have hooks, or forwards of their own": _any_module(_is_watched),
    "autocast is on": lambda parts: torch.is_autocast_enabled(next(parts[0].parameters()).device.type),
}


def _captured_state(parts: tuple[torch.nn.Module, ...]) -> tuple:
    """What graphs hold on to: the addresses of all weights, and how attention is computed."""
    attention = getattr(getattr(parts[0], "config", None), "_attn_implementation", None)
    return attention, tuple((tensor.data_ptr(), tensor.dtype) for tensor in _weights(parts))


_models: weakref.WeakKeyDictionary[torch.nn.Module, ModelGraphs] = weakref.WeakKeyDictionary()
_models_lock = Lock()


def _graphs_of(model: torch.nn.Module) -> ModelGraphs:
    with _models_lock:
        return _models.setdefault(model, ModelGraphs())


def forget_graphs(model: torch.nn.Module | None = None) -> None:
    """Frees the graphs and slots of one model, or of all; a running call keeps its own until it ends."""
    with _models_lock:
        if model is None:
            _models.clear()
        else:
            _models.pop(model, None)
