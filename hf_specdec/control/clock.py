"""Time of a cycle, measured without waiting for the device.

On a GPU a draft has only been launched when `propose` returns. Its time is that between two events. They are recorded
in passing, and read when the cycle has waited for the target's verdict anyway, so that they lie after it.

On a CPU where torch computes in one thread, the time of that thread counts: it is the same whatever else the machine
does, while that of a clock on the wall tells more about other processes than about drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from time import get_clock_info, perf_counter, thread_time

import torch

from ..target.graphs import CallGraphs


# Seconds; a cycle must be told from another one.
_FINE = 1e-4


def clock_of(device: torch.device) -> Callable[[], float]:
    """The clock by which cycles on this device are compared."""
    counts_work = device.type == "cpu" and torch.get_num_threads() == 1
    return thread_time if counts_work and get_clock_info("thread_time").resolution < _FINE else perf_counter


@dataclass
class CycleTimes:
    """Seconds of a cycle. They are no numbers (NaN) where a CUDA graph was captured, which no other cycle pays for."""

    rest: float  # all but the draft, and the reading before it
    draft: float | None = None
    reading: float | None = None  # of handing over to the drafter what it has not read


class CycleClock:
    """Times one cycle after the other: `begin`, then `read` and `drafted` as far as there was both, then `end`."""

    def __init__(self, device: torch.device):
        is_cuda = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if is_cuda else None
        # Two pairs, since a cycle ends when the draft of the next one has begun.
        pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(2)] if is_cuda else None
        self._pairs: list[tuple[torch.cuda.Event, ...]] | None = pairs
        # Seconds on the clock of the draft of this cycle that ran ahead, and of that of the next one.
        self._ahead = self._next_ahead = 0.0
        self._device = device
        self.now: Callable[[], float] = clock_of(device)
        self._marks: list[float] = []
        self._has_read = False
        self._captures: int | None = 0
        self._captures_ahead = False  # for the draft of the next cycle

    def begin(self) -> None:
        self._captures = None if self._captures_ahead else CallGraphs.all_captures
        self._captures_ahead = False
        self._marks, self._has_read = [], False
        self._ahead, self._next_ahead = self._next_ahead, 0.0
        if self._pairs is not None:
            self._pairs.reverse()
        self._mark()

    def read(self) -> None:
        self._has_read = True
        self._mark()

    def drafted(self) -> None:
        self._mark()

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Times what is drafted inside of the block for the next cycle."""
        began, captures = self.now(), CallGraphs.all_captures
        stream = None if self._pairs is None else torch.cuda.current_stream(self._device)
        if self._pairs is not None:
            self._pairs[1][0].record(stream)
        yield
        if self._pairs is not None:
            self._pairs[1][1].record(stream)
        self._next_ahead = self.now() - began
        self._captures_ahead = captures != CallGraphs.all_captures

    def _mark(self) -> None:
        if self._events is not None:
            self._events[len(self._marks)].record(torch.cuda.current_stream(self._device))
        self._marks.append(self.now())

    def end(self) -> CycleTimes:
        """The times since `begin`."""
        marks = self._marks
        parts = [self._between(index) for index in range(len(marks) - 1)]
        rest, has_device = self.now() - marks[0] - sum(parts), self._pairs is not None
        if self._ahead and parts:
            ahead = self._ahead_seconds()
            parts[-1] += ahead
            # The device has drafted after the mark, the host before it.
            rest -= ahead if has_device else 0.0
        # A device verifies while the host launches the next draft.
        rest -= 0.0 if has_device else self._next_ahead
        rest = max(rest, 0.0)
        if self._captures != CallGraphs.all_captures:
            rest, parts = nan, [nan] * len(parts)
        return CycleTimes(rest, parts[-1] if parts else None, parts[0] if self._has_read else None)

    def _ahead_seconds(self) -> float:
        if self._pairs is not None:
            first, second = self._pairs[0]
            if first.query() and second.query():
                return first.elapsed_time(second) / 1000
        return self._ahead

    def _between(self, index: int) -> float:
        """Seconds from one mark to the next."""
        if self._events is not None:
            first, second = self._events[index : index + 2]
            if first.query() and second.query():
                return first.elapsed_time(second) / 1000
        return self._marks[index + 1] - self._marks[index]
