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
from itertools import pairwise
from math import nan
from time import get_clock_info, perf_counter, thread_time

import torch

from ..target.graphs import CallGraphs


# Seconds; a cycle must be told from another one.
_FINE = 1e-4

# Seconds of the host, and an event of the device.
_Mark = tuple[float, torch.cuda.Event | None]


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
    """Times one cycle after the other: `begin`, then a `mark` after reading, if there was any, and after the draft."""

    def __init__(self, device: torch.device):
        self.now: Callable[[], float] = clock_of(device)
        self._device = device
        self._marks: list[_Mark] = []
        self._num_captures: float = 0
        # What ran ahead: the draft of this cycle, and that of the next one.
        self._ahead: tuple[_Mark, _Mark] | None = None
        self._next_ahead: tuple[_Mark, _Mark] | None = None
        self._captures_ahead = False

    def begin(self) -> None:
        # No number of captures equals NaN.
        self._num_captures = nan if self._captures_ahead else CallGraphs.all_captures
        self._captures_ahead = False
        self._ahead, self._next_ahead = self._next_ahead, None
        self._marks = [self._now()]

    def mark(self) -> None:
        self._marks.append(self._now())

    def _now(self) -> _Mark:
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
        return self.now(), event

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Times what is drafted inside of the block for the next cycle."""
        began, num_captures = self._now(), CallGraphs.all_captures
        yield
        self._next_ahead = began, self._now()
        self._captures_ahead = num_captures != CallGraphs.all_captures

    def end(self) -> CycleTimes:
        """The times since `begin`."""
        parts = [_seconds(*marks) for marks in pairwise(self._marks)]
        rest = self.now() - self._marks[0][0] - sum(parts)
        has_device = self._device.type == "cuda"
        if self._ahead is not None:
            ahead = _seconds(*self._ahead)
            rest -= has_device * ahead  # the device has drafted after the mark, the host before it
            if parts:
                parts[-1] += ahead
        if self._next_ahead is not None and not has_device:
            # A device verifies while the host launches the next draft.
            rest -= _seconds(*self._next_ahead)
        if self._num_captures != CallGraphs.all_captures:
            return CycleTimes(nan, *[nan] * len(parts))
        return CycleTimes(max(rest, 0.0), *reversed(parts))


def _seconds(first: _Mark, second: _Mark) -> float:
    """From one mark to the next: on the device, if it has got there."""
    if first[1] is not None and first[1].query() and second[1].query():
        return first[1].elapsed_time(second[1]) / 1000
    return second[0] - first[0]
