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


@dataclass
class CycleTimes:
    """Seconds of a cycle. They are no numbers (NaN) where a CUDA graph was captured, which no other cycle pays for."""

    rest: float  # all but the draft, and the reading before it
    draft: float | None = None
    reading: float | None = None  # of handing over to the drafter what it has not read


class CycleClock:
    """Times one cycle after the other: `begin`, then a `mark` after reading, if there was any, and after the draft."""

    def __init__(self, device: torch.device):
        counts_work = device.type == "cpu" and torch.get_num_threads() == 1
        is_fine = get_clock_info("thread_time").resolution < _FINE
        self.now: Callable[[], float] = thread_time if counts_work and is_fine else perf_counter
        self._device = device
        self._marks: list[_Mark] = []
        self._num_captures: float = 0
        # What ran ahead: the draft of this cycle, and that of the next one.
        self._ahead: list[_Mark] = []
        self._next_ahead: list[_Mark] = []
        self._captures_ahead = False

    def begin(self) -> None:
        # No number of captures equals NaN.
        self._num_captures = nan if self._captures_ahead else CallGraphs.all_captures
        self._captures_ahead = False
        self._ahead, self._next_ahead, self._marks = self._next_ahead, [], []
        self.mark()

    def mark(self, marks: list[_Mark] | None = None) -> None:
        """Adds a mark, to those of this cycle if nothing else is said."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
        (self._marks if marks is None else marks).append((self.now(), event))

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Times what is drafted inside of the block for the next cycle."""
        num_captures, self._next_ahead = CallGraphs.all_captures, []
        self.mark(self._next_ahead)
        yield
        self.mark(self._next_ahead)
        self._captures_ahead = num_captures != CallGraphs.all_captures

    def end(self) -> CycleTimes:
        """The times since `begin`."""
        parts = _seconds_between(self._marks)
        rest = self.now() - self._marks[0][0] - sum(parts)
        has_device = self._device.type == "cuda"
        if self._ahead:
            (ahead,) = _seconds_between(self._ahead)
            rest -= has_device * ahead  # the device has drafted after the mark, the host before it
            if parts:
                parts[-1] += ahead
        if self._next_ahead and not has_device:
            # A device verifies while the host launches the next draft.
            rest -= sum(_seconds_between(self._next_ahead))
        if self._num_captures != CallGraphs.all_captures:
            return CycleTimes(nan, *[nan] * len(parts))
        return CycleTimes(max(rest, 0.0), *reversed(parts))


def _seconds_between(marks: list[_Mark]) -> list[float]:
    """From one mark to the next: on the device, if it has got there."""
    seconds = []
    for (began, first), (ended, last) in pairwise(marks):
        if first is not None and last is not None and first.query() and last.query():
            seconds.append(first.elapsed_time(last) / 1000)
        else:
            seconds.append(ended - began)
    return seconds
