"""Time of a cycle, measured without waiting for the device.

On a GPU a draft has only been launched when `propose` returns. Its time is that between two events. They are recorded
in passing, and read when the cycle has waited for the target's verdict anyway, so that they lie after it.

On a CPU where torch computes in one thread, the time of that thread counts: it is the same whatever else the machine
does, while that of a clock on the wall tells more about other processes than about drafts.
"""

from __future__ import annotations

from collections.abc import Callable
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


class CycleClock:
    """Times one cycle after the other: `begin`, then `drafted` if there was a draft, then `end`.

    Attributes:
        now (`Callable`): Seconds on the clock that is used.
    """

    def __init__(self, device: torch.device):
        is_cuda = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_cuda else None
        self._device = device
        self.now = clock_of(device)
        self._began = self._draft_seconds = 0.0
        self._has_drafted = False
        self._captures = 0

    def begin(self) -> None:
        self._captures = CallGraphs.all_captures
        self._began, self._has_drafted = self.now(), False
        self._record(0)

    def drafted(self) -> None:
        self._draft_seconds, self._has_drafted = self.now() - self._began, True
        self._record(1)

    def end(self) -> tuple[float | None, float]:
        """Seconds of the draft, `None` without one, and of everything else in the cycle.

        They are no numbers (NaN) where a CUDA graph was captured meanwhile, which no other cycle pays for.
        """
        total = self.now() - self._began
        if self._captures != CallGraphs.all_captures:
            return (nan if self._has_drafted else None), nan
        if not self._has_drafted:
            return None, total
        seconds = self._draft_seconds
        if self._events is not None and all(event.query() for event in self._events):
            seconds = self._events[0].elapsed_time(self._events[1]) / 1000
        return seconds, max(total - seconds, 0.0)

    def _record(self, index: int) -> None:
        if self._events is not None:
            self._events[index].record(torch.cuda.current_stream(self._device))
