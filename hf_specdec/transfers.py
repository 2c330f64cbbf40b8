"""Numbers between the host and a device, in as few copies as can be, and without waiting where nothing must be known.

A copy to a GPU waits for everything that was launched before it, unless it is told to go on by itself. A copy to the
host always waits: it is what a cycle of the decoding loop does once, for all that it wants to know.

Shapes: B rows, X columns of a table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any

import torch


# Integers of the rows: a list where the host knows them, else a tensor `(R,)` of a device, as in a graph.
RowNumbers = list[int] | torch.LongTensor


def on_cpu_unless_said(function: Callable) -> Callable:
    """Decorator: inside, tensors that are made without a device are on the CPU, whatever default device is set."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.get_default_device().type == "cpu":
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return called


# Caches of tensors that are made again when they are missed.
keepers: list[Any] = []


class _Holding(threading.local):
    values: dict[Any, Any] | None = None


_holding = _Holding()


@contextmanager
def holding() -> Iterator[dict[Any, Any]]:
    """Yields a dict that keeps cached values asked for inside, in this thread, as long as a graph that reads them."""
    _holding.values = held = {}
    try:
        yield held
    finally:
        _holding.values = None


def _cached_by_stream(make: Callable, is_written: bool) -> Callable:
    @lru_cache(maxsize=256)
    def cached(stream: int | None, *arguments: Any) -> Any:
        return make(*arguments)

    keepers.append(cached)

    @wraps(make)
    def made_or_cached(*arguments: Any) -> Any:
        held = _holding.values
        # No other kernel may run on memory that a graph writes to.
        if is_written and held is not None:
            key = (make, *arguments)
            if key not in held:
                held[key] = make(*arguments)
            return held[key]
        # The current stream fills the tensor, so every stream has its own.
        value = cached(_stream_of(arguments[-1]), *arguments)
        if held is not None:
            held[id(value)] = value
        return value

    return made_or_cached


def _stream_of(device: torch.device) -> int | None:
    # Asked first, because it takes less time than the type of a device.
    if not torch.cuda.is_initialized() or device.type != "cuda":
        return None
    return torch.cuda.current_stream(device).cuda_stream


def kept_on_device(make: Callable) -> Callable:
    """Decorator: caches what a function makes for a device, its last argument; [`holding`] keeps it longer."""
    return _cached_by_stream(make, is_written=False)


def written_on_device(make: Callable) -> Callable:
    """Decorator: as `kept_on_device`, for kernels that write to it and leave it as it was; graphs have their own."""
    return _cached_by_stream(make, is_written=True)


def upload(
    values: Sequence[Any] | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.long
) -> torch.Tensor:
    """Numbers, nested or not, as a tensor on `device`; the host goes on at once. A tensor is there already."""
    if isinstance(values, torch.Tensor):
        return values
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype, device="cpu")
    return on_host(values, device, dtype).to(device, non_blocking=True)


def on_host(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """Numbers as a tensor of the host, from where they are copied to `device` without a wait, if that is asked for."""
    # Pinned memory stays as it is until the copy has been made.
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


@kept_on_device
def kept_tensor(values: tuple[int, ...], device: torch.device) -> torch.LongTensor:
    """Integers as a cached tensor on `device`; not to be written to."""
    return upload(values, device)


def upload_together(device: torch.device, *tables: Sequence[int]) -> list[torch.LongTensor]:
    """Several lists of integers in one copy; each begins at a multiple of 16 bytes, which kernels are compiled for."""
    if device.type == "cpu":
        return [upload(table, device) for table in tables]
    sizes = [len(table) + len(table) % 2 for table in tables]
    packed = [value for table in tables for value in (*table, *[0] * (len(table) % 2))]
    parts = upload(packed, device).split(sizes)
    return [part[: len(table)] for part, table in zip(parts, tables)]


@dataclass(frozen=True)
class PackedTables:
    """Tables of integers side by side in one tensor, to be read by the host in one copy."""

    values: torch.LongTensor  # (B, X)
    places: dict[str, slice]  # the columns of each table, by name

    @classmethod
    def of(cls, tables: Mapping[str, torch.LongTensor]) -> PackedTables:
        """Packs tensors of shape `(B, X)`; X may differ."""
        places, end = {}, 0
        for name, table in tables.items():
            begin, end = end, end + table.shape[1]
            places[name] = slice(begin, end)
        return cls(torch.cat(list(tables.values()), dim=1), places)

    def __getitem__(self, name: str) -> torch.LongTensor:
        return self.values[:, self.places[name]]

    def copy_of_rows(self, count: int) -> PackedTables:
        """The first rows, in memory of their own."""
        return PackedTables(self.values[:count].clone(), self.places)

    def split(self, values: torch.LongTensor) -> dict[str, torch.LongTensor]:
        """A copy of the values as tables, by name."""
        return {name: values[:, place] for name, place in self.places.items()}


def read_together(tables: Mapping[str, torch.LongTensor]) -> dict[str, list[list[int]]]:
    """Tables `(B, X)` of integers on the host, by name, in one copy. Waits for the device."""
    packed = PackedTables.of(tables)
    return {name: table.tolist() for name, table in packed.split(packed.values.cpu()).items()}


class PendingRead:
    """Values on their way to the host, while the device goes on with what is launched after them."""

    def __init__(self, values: torch.Tensor):
        self._values, self._arrival = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrival = torch.cuda.current_stream(values.device).record_event()

    def get(self) -> torch.Tensor:
        """The values; waits until they are there."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._values


def select_rows(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """A copy of the rows of these numbers; unlike an index that is a list it does not wait."""
    return values.index_select(0, upload(rows, values.device))


def take_nodes(values: torch.Tensor, path: torch.LongTensor) -> torch.Tensor:
    """Entries `path` `(R, M)` of each row's values `(R, T, ...)`: `(R, M, ...)`."""
    path = path.to(values.device)
    return values[torch.arange(path.shape[0], device=path.device)[:, None], path]


def last_of_each(values: torch.Tensor, counts: RowNumbers) -> torch.Tensor:
    """Entry `counts[r] - 1` of each row of `(R, T, ...)`: `(R, ...)`."""
    if not torch.is_tensor(counts) and min(counts) == max(counts):
        return values[:, counts[0] - 1]
    places = upload(counts, values.device)
    return values[kept_tensor(tuple(range(len(places))), values.device), places - 1]


def widened(values: torch.Tensor, width: int) -> torch.Tensor:
    """Values `(B, M, ...)` with zeros after them: `(B, width, ...)`."""
    missing = width - values.shape[1]
    if not missing:
        return values
    return torch.cat([values, values.new_zeros((values.shape[0], missing, *values.shape[2:]))], dim=1)
