"""Functions that run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


# Only to fail instead of hanging for ever.
PATIENCE = 120


def in_threads(*functions: Callable) -> list:
    """Results of functions that begin together, each in a thread of its own; their first error is raised here."""
    begin = threading.Barrier(len(functions))

    def run(function):
        begin.wait(PATIENCE)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(run, function) for function in functions]]
