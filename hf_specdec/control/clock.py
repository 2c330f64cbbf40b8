"""What a cycle took, without waiting for the device.

On a GPU a draft has only been launched when `propose` returns. Its time is that between two events. They are recorded
in passing, and read when the cycle has waited for the target's verdict anyway, so that they lie behind it.
"""

from __future__ import annotations

from time import perf_counter

import torch


class CycleClock:
    """Times one cycle after the other: `begin`, then `drafted` if there was a draft, then `end`."""

    def __init__(self, device: torch.device):
        is_cuda = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_cuda else None
        self._device = device
        self._began = self._draft_seconds = 0.0
        self._has_drafted = False

    def begin(self) -> None:
        self._began, self._has_drafted = perf_counter(), False
        self._record(0)

    def drafted(self) -> None:
        self._draft_seconds, self._has_drafted = perf_counter() - self._began, True
        self._record(1)

    def end(self) -> tuple[float | None, float]:
        """Seconds of the draft, `None` without one, and of everything else in the cycle."""
        total = perf_counter() - self._began
        if not self._has_drafted:
            return None, total
        seconds = self._draft_seconds
        if self._events is not None and all(event.query() for event in self._events):
            seconds = self._events[0].elapsed_time(self._events[1]) / 1000
        return seconds, max(total - seconds, 0.0)

    def _record(self, index: int) -> None:
        if self._events is not None:
            self._events[index].record(torch.cuda.current_stream(self._device))
