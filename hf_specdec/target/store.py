"""Buffers of slots that outlive a call, for graphs that read them where they are, and the few sizes that they have.

Shapes: B allocated rows, C slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


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
