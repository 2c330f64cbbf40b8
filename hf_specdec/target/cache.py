"""Key/value storage for speculation: every row has its own length, drafts live in the slots after it.

A verification writes anchor and draft nodes to the slots `length ... length + T - 1` of each row; `commit` moves the
accepted path to the front of them and advances each row by its own count. Nothing is concatenated: the buffers are
allocated once and doubled when a generation outgrows them. Those that graphs read where they are outlive the call, and
have few sizes.

Shapes: B allocated rows of which the first R are active, H key/value heads, C slots, D head size, T nodes of a cycle,
M nodes of an accepted path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, StaticCache

from ..errors import SpecConfigError, UnsupportedModelError
from ..kernels._triton import use_triton
from ..kernels.cache import WritePlan, move_slots, write_slots
from ..kernels.indexing import arange
from ..transfers import RowNumbers, kept_tensor, upload
from .parts.recurrent_state import RecurrentState


class Place(NamedTuple):
    """Sizes of the buffers that a call has: B rows of C slots. Graphs of one place read the same buffers."""

    rows: int
    slots: int


class SlotStore:
    """Buffers of keys and values that outlive a call, so that graphs find them in their place."""

    def __init__(self, on_dropped: Callable[[Place], None]):
        self._on_dropped = on_dropped  # called with a place whose buffers have made way
        # The one that was used last comes last.
        self.places: dict[Place, dict[tuple[int, str], torch.Tensor]] = {}
        self.place: Place | None = None  # of the call that has the buffers, once it has asked for one

    def take(self, layer: int, name: str, rows: int, heads: int, capacity: int, like: torch.Tensor) -> torch.Tensor:
        """A layer's buffer of zeros `(B, heads, C, D)` like some states, with B at least `rows`, and C `capacity`."""
        # All layers of a call have the same place, once all of them have asked for the largest capacity.
        if self.place is None or self.place.rows < rows or self.place.slots < capacity:
            # The smallest one with room, else a new one; few that were used before are kept.
            slots = padded_slots(capacity)
            fitting = (
                place
                for place in self.places
                if place.rows >= rows and capacity <= place.slots <= _MOST_TIMES_LONGER * slots
            )
            new = Place(padded_rows(rows), slots)
            self.place = min(fitting, key=lambda place: place.rows * place.slots, default=new)
            self.places[self.place] = self.places.pop(self.place, {})
            # Whoever makes way may have been the largest.
            while sum(sizes := [place.rows * place.slots for place in self.places]) > 2 * max(sizes):
                self._drop(next(iter(self.places)))
        shape, key = (self.place.rows, heads, self.place.slots, like.shape[-1]), (layer, name)
        kept = self.places[self.place].get(key)
        if kept is not None:
            if (kept.shape, kept.dtype, kept.device) == (shape, like.dtype, like.device):
                return kept.zero_()
            del kept, self.places[self.place][key]
            self._on_dropped(self.place)
        with torch.inference_mode(False):
            try:
                buffer = torch.zeros(shape, dtype=like.dtype, device=like.device)
            except torch.OutOfMemoryError:
                for place in [place for place in self.places if place != self.place]:
                    self._drop(place)
                buffer = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.places[self.place][key] = buffer
        return buffer

    def _drop(self, place: Place) -> None:
        del self.places[place]
        self._on_dropped(place)

    def clear(self) -> None:
        self.places.clear()
        self.place = None


# Few sizes of buffers: graphs are captured for each of them.
_LEAST_SLOTS, _LAST_DOUBLED = 1024, 8192

# Longer buffers than a call needs spare it captures; masked attention and zeroing go through all slots, though.
_MOST_TIMES_LONGER = 8


def padded_slots(count: int) -> int:
    """Slots of the buffers for this many: powers of two from 1024 to 8192, then four sizes in each doubling."""
    doubled = max(padded_size(count), _LEAST_SLOTS)
    step = doubled if doubled <= _LAST_DOUBLED else doubled // 8
    return -(-count // step) * step


def padded_size(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def padded_rows(count: int) -> int:
    """Rows of the graph for this many: powers of two to 8, then multiples of it, because each has slots of its own."""
    return padded_size(count) if count <= 8 else -(-count // 8) * 8


def row_sizes(count: int) -> list[int]:
    """Rows of the graphs for this many and all smaller numbers, the largest first."""
    return sorted({padded_rows(rows) for rows in range(1, count + 1)}, reverse=True)


class SlotLayer(CacheLayerMixin):
    """One layer's buffers `keys` and `values` `(B, H, C, D)`, or its recurrent state, or both."""

    keys: Any
    values: Any
    indexer_keys: torch.Tensor | None = None  # (B, 1, C, D), of layers that choose their keys by an index

    def __init__(self, capacity: int, limit: int | None = None, take: Callable | None = None):
        super().__init__()
        self.capacity: int = capacity  # slots to allocate at first
        self.limit = limit  # slots that the call can fill at most
        self._take = take  # [`SlotStore.take`] for this layer: buffers that outlive the call, and may be larger
        self.length: int = 0
        # Slots that are returned, the last ones, to a forward that counts on it. Else masks limit what is seen.
        self.window: int | None = None
        self.recurrent: RecurrentState = RecurrentState()
        self._plan: WritePlan | None = None

    @property
    def is_sliding(self) -> bool:
        return self.window is not None

    def _first(self, columns: int) -> int:
        """The first of so many slots that is returned."""
        return 0 if self.window is None else max(columns - self.window, 0)

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [buffer for buffer in (self.keys, self.values, self.indexer_keys) if buffer is not None]

    # What the mixers of transformers before 5.18 ask the layer for.

    record_past = False

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        return self.recurrent.conv_states

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        return self.recurrent.recurrent_states

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # Zeros, not empty: a masked slot has weight 0, and 0 * NaN would still be NaN.
        self.keys = self._allocated("keys", key_states)
        self.values = self._allocated("values", value_states)
        self._has_kernel = use_triton(key_states, value_states)
        self.is_initialized = True

    def _allocated(self, name: str, states: torch.Tensor, least_rows: int = 0) -> torch.Tensor:
        rows, heads, _, size = states.shape
        rows = max(rows, least_rows)
        if self._take is None:
            return states.new_zeros((rows, heads, self.capacity, size))
        buffer = self._take(name, rows, heads, self.capacity, states)
        self.capacity = buffer.shape[2]
        return buffer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, plan: WritePlan | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes where a plan says, or after what is there; returns the slots that are seen."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if plan is None:
            plan = WritePlan(self.length + key_states.shape[2], self.length)
            self.length = plan.columns
        if plan.columns > self.capacity:
            self.grow(plan.columns)
        self._plan = plan
        self._write((self.keys, self.values), (key_states, value_states))
        rows, seen = key_states.shape[0], slice(self._first(plan.columns), plan.columns)
        return self.keys[:rows, :, seen], self.values[:rows, :, seen]

    def _write(self, buffers: tuple[torch.Tensor, ...], states: tuple[torch.Tensor, ...]) -> None:
        """Writes states `(R, H, T, D)` to the slots of the plan; in rows of equal length they are one slice."""
        plan = self._plan
        if plan.offset is None or (self._has_kernel and plan.firsts is not None):
            write_slots(buffers, states, plan)
            return
        for buffer, new in zip(buffers, states):
            buffer[: len(new), :, plan.offset : plan.columns] = new

    def update_indexer(self, key_states: torch.Tensor) -> torch.Tensor:
        """Writes indexer keys `(R, T, D)` to the slots of the last `update`; returns all of them `(R, S, D)`."""
        states = key_states[:, None]
        if self.indexer_keys is None:
            self.indexer_keys = self._allocated("indexer_keys", states)
        self._write((self.indexer_keys,), (states,))
        return self.indexer_keys[: len(states), 0, : self._plan.columns]

    def grow(self, columns: int, rows: int = 0) -> None:
        """Makes room for at least `columns` slots, doubling up to the limit so that copies stay rare, and `rows`."""
        filled = self.capacity
        if columns > filled:
            doubled = 2 * filled if self.limit is None else min(2 * filled, self.limit)
            self.capacity = max(columns, doubled)
        for name in ("keys", "values", "indexer_keys"):
            old = getattr(self, name)
            if old is not None:
                setattr(self, name, self._allocated(name, old, rows))
                # There may be more rows than before.
                getattr(self, name)[: len(old), :, :filled].copy_(old)

    def join(self, other: SlotLayer, first: int, parts: list[slice]) -> None:
        """Copies the slots `parts[i]` of row i of another layer to row `first + i`, from the first slot on."""
        if not (self.is_initialized or other.is_initialized):
            return
        rows, columns = first + len(parts), max(part.stop - part.start for part in parts)
        if not self.is_initialized:
            self.lazy_initialization(*(buffer[:1].expand(rows, -1, -1, -1) for buffer in (other.keys, other.values)))
        if self.indexer_keys is None and other.indexer_keys is not None:
            self.indexer_keys = self._allocated("indexer_keys", other.indexer_keys, len(self.keys))
        if len(self.keys) < rows or self.capacity < columns:
            self.grow(columns, rows)
        for buffer, source in zip(self.buffers, other.buffers if other.is_initialized else []):
            for index, part in enumerate(parts):
                buffer[first + index, :, : part.stop - part.start].copy_(source[index, :, part])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        columns = self.length + query_length
        return columns - self._first(columns), self._first(columns)

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    # The same question in transformers before 5.19.
    get_max_cache_shape = get_max_length


class SlotCache(Cache):
    """The cache of a whole model: one that grows, with one length of all rows, until `start_slots`."""

    # Prefix tuning asks, and makes a cache without limit.
    max_cache_len = -1

    # An empty cache would count as compileable, and get ready-made masks for the prefill.
    is_compileable = False

    def __init__(self, capacity: int, limit: int | None = None):
        super().__init__(layers=[])
        self.capacity: int = capacity
        self.limit = limit
        self.store: SlotStore | None = None  # has the buffers, where captured forwards read and write them
        self.lengths: Any = []  # (R,): slots in use; a tensor in a graph, empty during the prefill
        self.columns: int | None = None  # slots that attention reads in a graph; else what the longest row needs
        self.plan: WritePlan | None = None
        self.plans: dict[Any, Any] = {}  # what is kept for the model that writes here, see [`~modules.kept_for`]
        self.last_recurrent_layer = -1
        self.has_slots = True  # some layers attend; else all have recurrent states, whose tokens are counted

    def load(self, cache: Cache) -> None:
        """Copies in what earlier calls have left in a `DynamicCache` or `StaticCache`."""
        for index, layer in enumerate(cache.layers):
            if getattr(layer, "conv_states", None):
                sizes: Any = layer.conv_kernel_size
                last = {
                    key: state[..., -sizes[key] :] for key, state in layer.conv_states.items() if state is not None
                }
                states = {key: state for key, state in layer.recurrent_states.items() if state is not None}
                self.layer_at(index).recurrent = RecurrentState(last, states).clone()
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or values is None:
                continue
            # A static layer counts in a tensor, and has room after what it holds.
            length = int(layer.get_seq_length())
            keys, values = keys[:, :, :length], values[:, :, :length]
            if keys.numel():
                # A window holds the last tokens only; the slots before them stay empty and are never seen.
                self.plan = WritePlan(length, length - keys.shape[2])
                self.update(keys, values, index)
                if getattr(layer, "is_indexer_initialized", False):
                    self.update_indexer(layer.indexer_keys[:, :length], index)
                self.layers[index].length = length
        self.plan = None

    def layer_at(self, layer_idx: int) -> SlotLayer:
        """A layer, which is made if there is none yet, with those before it."""
        while len(self.layers) <= layer_idx:
            take = None if self.store is None else partial(self.store.take, len(self.layers))
            self.layers.append(SlotLayer(self.capacity, self.limit, take))
        return self.layers[layer_idx]

    def reserve(self, columns: int) -> None:
        """Makes room for at least `columns` slots, and for as many in all layers as in the largest one."""
        layers = [layer for layer in self.layers if layer.is_initialized]
        # A layer that grows may get more than it asks for.
        while min(layer.capacity for layer in layers) < (columns := max(columns, *(one.capacity for one in layers))):
            for layer in layers:
                if layer.capacity < columns:
                    layer.grow(columns)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer_at(layer_idx).update(key_states, value_states, self.plan)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if layer_idx > 0:
            return self.layers[layer_idx].length if layer_idx < len(self.layers) else 0
        # Asked about the cache as a whole; its first layers may have a recurrent state and no slots.
        if self.has_slots:
            return next((layer.length for layer in self.layers if layer.is_initialized), 0)
        if self.lengths:
            return max(self.lengths)
        return max((layer.recurrent.num_read for layer in self.layers), default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        if layer_idx < len(self.layers) and self.layers[layer_idx].is_sliding:
            return self.layers[layer_idx].get_mask_sizes(query_length)
        return self.get_seq_length(layer_idx) + query_length, 0

    @property
    def is_linear(self) -> list[bool]:
        """Which layers have a recurrent state alone: masks are made for one of the others."""
        return [bool(layer.recurrent) and not layer.is_initialized for layer in self.layers]

    # Recurrent layers, whose mixers come here

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        # Asked about the cache as a whole, which its first layers may ask when only they have read something.
        index = self.last_recurrent_layer if layer_idx is None else layer_idx
        return 0 <= index < len(self.layers) and bool(self.layers[index].recurrent)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.layer_at(layer_idx).recurrent.conv_states.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.layer_at(layer_idx).recurrent.recurrent_states.get(state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: Any = None, **_: Any
    ) -> torch.Tensor:
        return self._changing_state(layer_idx).update_conv_state(conv_states, state_idx, conv_kernel_size)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        return self._changing_state(layer_idx).update_recurrent_state(recurrent_states, state_idx)

    def _changing_state(self, layer_idx: int) -> RecurrentState:
        state = self.layer_at(layer_idx).recurrent
        if state.is_committed:
            raise UnsupportedModelError(
                f"Layer {layer_idx} updates a recurrent state in an unknown place, so it cannot be kept while drafts "
                "are verified. Leave the speculative arguments out to use plain generate()."
            )
        return state

    @contextmanager
    def kept(self, like: Cache | None = None) -> Iterator[None]:
        """Lets tokens of all rows be read as in plain generation; after the block the cache is as it was."""
        # `like` is that of plain generation: windows show their last slots alone.
        before = self.lengths, self.plan, [(layer, layer.length, layer.recurrent) for layer in self.layers]
        self.lengths = []
        self.plan = None
        for layer, model_layer in zip_longest(self.layers, [] if like is None else like.layers[: len(self.layers)]):
            layer.recurrent = layer.recurrent.clone()
            layer.window = getattr(model_layer, "sliding_window", None)
        try:
            yield
        finally:
            self.lengths, self.plan, layers = before
            for layer, length, recurrent in layers:
                layer.length, layer.recurrent, layer.window = length, recurrent, None

    # Slots

    def start_slots(self, batch_size: int) -> None:
        """Ends the prefill: from now on rows have their own lengths, which are all equal at first."""
        self.lengths = [self.get_seq_length()] * batch_size

    def in_a_graph(self, lengths: torch.LongTensor, columns: int) -> SlotCache:
        """The same slots as a graph sees them, that reads `columns` of them, with lengths unknown to the host."""
        cache = copy(self)
        cache.lengths, cache.columns = lengths, columns
        return cache

    def plan_write(self, nodes: int, ahead: int = 0) -> WritePlan:
        """Decides where the next forward's `nodes` go: after the slots in use and `ahead` nodes of the same tree."""
        if self.columns is not None:
            columns, offset = self.columns, None
            firsts = self.lengths + ahead if ahead else self.lengths
        else:
            longest = max(self.lengths)
            columns = longest + ahead + nodes
            offset = longest + ahead if min(self.lengths) == longest else None
            firsts = [length + ahead for length in self.lengths]
            for layer in self.layers:
                layer.length = longest
        # None before all have buffers.
        layers = list(self.layers) if all([layer.is_initialized for layer in self.layers]) else []
        for layer in layers:
            if layer.capacity < columns:
                layer.grow(columns)
        self.plan = WritePlan(columns, offset, firsts, nodes, layers)
        return self.plan

    def commit(self, counts: RowNumbers, path: torch.LongTensor | None = None) -> None:
        """Keeps `counts[r]` nodes of the last forward, anchor included: of a path `(R, M)`, or the first ones."""
        # The anchor alone lies in place, too.
        moves = path is not None and path.shape[1] > 1
        if moves and path.device.type == "cpu":
            # Elsewhere asking costs more than moving what lies in place.
            moves = not (path <= arange(path.shape[1], path.device)).all()
        if moves:
            buffers = [buffer for layer in self.layers for buffer in layer.buffers]
            move_slots(buffers, upload(self.lengths, path.device), path)
        if self.columns is None:
            self.lengths = [length + count for length, count in zip(self.lengths, counts)]
        else:
            # What the host knows there is the same for all rows.
            self.lengths = self.lengths + (counts[0] if isinstance(counts, list) else counts)

    def keep_rows(self, keep: list[int], behind: Sequence[int] = ()) -> None:
        """Goes on with these rows, in this order; the slots of the rows `behind` follow as they are."""
        columns, order = max(self.lengths), [*keep, *behind]
        targets = tuple(place for place, row in enumerate(order) if place != row)
        sources = tuple(order[place] for place in targets)
        for buffer in (buffer for layer in self.layers for buffer in layer.buffers if targets):
            filled = buffer[:, :, :columns]
            moved = filled.index_select(0, kept_tensor(sources, buffer.device))
            filled.index_copy_(0, kept_tensor(targets, buffer.device), moved)
        self.lengths = [self.lengths[row] for row in keep]

    def join(self, other: SlotCache, starts: list[int]) -> None:
        """Copies in the rows of another cache after the own ones, each from its slot `starts[i]` on."""
        parts = [slice(start, length) for start, length in zip(starts, other.lengths)]
        for index, layer in enumerate(other.layers):
            # It was that of other rows.
            self.layer_at(index).limit = None
            self.layers[index].join(layer, len(self.lengths), parts)
        self.limit = None
        self.lengths = self.lengths + [part.stop - part.start for part in parts]

    def row_states(self, row: int) -> list[tuple[torch.Tensor, ...]]:
        """Copies of an active row's buffers `(H, C', D)` in every layer, as far as they are filled."""
        length = self.lengths[row]
        return [tuple(buffer[row, :, :length].clone() for buffer in layer.buffers) for layer in self.layers]


def check_room(cache: StaticCache, batch_size: int, columns: int) -> None:
    """Refuses a user's `StaticCache` of other rows than the call's, or with no room for `columns` tokens."""
    layers = [layer for layer in cache.layers if hasattr(layer, "max_cache_len")]
    rows = {len(layer.keys) for layer in layers if layer.is_initialized}
    if rows - {batch_size}:
        raise SpecConfigError(
            f"The StaticCache was made for {max(rows)} rows, and this call has {batch_size}. Pass a new one."
        )
    room = min((layer.max_cache_len for layer in layers if not layer.is_sliding), default=columns)
    if columns - 1 > room:
        raise SpecConfigError(
            f"The StaticCache has room for {room} tokens, and this call may read {columns - 1}. Make it with "
            f"max_cache_len={columns - 1} or more, or set `max_new_tokens` so that it stays below."
        )


def fill_cache(cache: Cache, layers: Iterable[Sequence[torch.Tensor]]) -> None:
    """Puts each layer's keys, values and indexer keys `(B, H, S, D)`, if any, into an empty cache; it copies them."""
    for index, (keys, values, *indexer_keys) in ((index, layer) for index, layer in enumerate(layers) if layer):
        cache.update(keys, values, index)
        if indexer_keys:
            cache.update_indexer(indexer_keys[0][:, 0], index)


def compact(finished: list[bool]) -> list[int]:
    """Old positions of the rows that go on, at their new places: holes are filled from the end, so few rows move."""
    keep = [row for row, done in enumerate(finished) if not done]
    size = len(keep)
    movers = [row for row in keep if row >= size]
    return [row if not finished[row] else movers.pop() for row in range(size)]
