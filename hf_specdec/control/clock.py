"""Time of a cycle, measured without waiting for the device.

On a GPU a draft has only been launched when `propose` returns. Its time is that between two events. They are recorded
in passing, and read when the cycle has waited for the target's verdict anyway, so that they lie after it.

On a CPU where torch computes in one thread, the time of that thread counts: it is the same whatever else the machine
does, while that of a clock on the wall tells more about other processes than about drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from time import get_clock_info, perf_counter, thread_time

import torch

from ..decoding.graphs import CallGraphs


# Seconds; a cycle must be told from another one.
_FINE = 1e-4


def clock_of(device: torch.device) -> Callable[[], float]:
    """The clock by which cycles on this device are compared."""
    counts_work = device.type == "cpu" and torch.get_num_threads() == 1
    return thread_time if counts_work and get_clock_info("thread_time").resolution < _FINE else perf_counter


@dataclass
class CycleTimes:
    """Seconds of a cycle. They are no numbers (NaN) where a CUDA graph was captured, which no other cycle pays for.

    Attributes:
        rest (`float`): All but the draft, and the reading before it.
        draft (`float`, *optional*): Of the draft; `None` without one.
        reading (`float`, *optional*): Of handing over to the drafter what it has not read; `None` if that was nothing.
    """

    rest: float
    draft: float | None = None
    reading: float | None = None


class CycleClock:
    """Times one cycle after the other: `begin`, then `read` and `drafted` as far as there was both, then `end`.

    Attributes:
        now (`Callable`): Seconds on the clock that is used.
    """

    def __init__(self, device: torch.device):
        is_cuda = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if is_cuda else None
        self._device = device
        self.now: Callable[[], float] = clock_of(device)
        self._marks: list[float] = []
        self._has_read = False
        self._captures = 0

    def begin(self) -> None:
        self._captures = CallGraphs.all_captures
        self._marks, self._has_read = [], False
        self._mark()

    def read(self) -> None:
        self._has_read = True
        self._mark()

    def drafted(self) -> None:
        self._mark()

    def _mark(self) -> None:
        if self._events is not None:
            self._events[len(self._marks)].record(torch.cuda.current_stream(self._device))
        self._marks.append(self.now())

    def end(self) -> CycleTimes:
        """The times since `begin`."""
        marks = self._marks
        parts = [self._between(index) for index in range(len(marks) - 1)]
        rest = max(self.now() - marks[0] - sum(parts), 0.0)
        if self._captures != CallGraphs.all_captures:
            rest, parts = nan, [nan] * len(parts)
        return CycleTimes(rest, parts[-1] if parts else None, parts[0] if self._has_read else None)

    def _between(self, index: int) -> float:
        """Seconds from one mark to the next."""
        if self._events is not None:
            first, second = self._events[index : index + 2]
            if first.query() and second.query():
                return first.elapsed_time(second) / 1000
        return self._marks[index + 1] - self._marks[index]
