"""Work of the host that the next forward does not depend on: statistics, traces, streamers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch


class DeferredWork:
    """Work that is put off until the device is busy with the next forward, in the order in which it came.

    Args:
        device (`torch.device`): Where forwards run. On a CPU, which has nothing to overlap with, work is done at once.
    """

    def __init__(self, device: torch.device):
        self._is_async = is_async(device)
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, work: Callable[[], None]) -> None:
        """Puts work off, or does it at once where forwards are not asynchronous."""
        if self._is_async:
            self._waiting.append(work)
        else:
            work()

    def flush(self) -> None:
        """Does what has been put off."""
        while self._waiting:
            self._waiting.popleft()()


def is_async(device: torch.device) -> bool:
    """Tells whether a forward goes on after its call has returned."""
    return device.type != "cpu"
