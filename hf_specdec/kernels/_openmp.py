"""Compiled code in the threads that torch has started: a second pool would compete with them for the processors."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch


def run_in_parallel(entry: Any, address: int, num_threads: int) -> None:
    """Calls a kernel with an address in as many of torch's own threads; it returns when all have returned."""
    parallel = _openmp()
    if num_threads > 1 and parallel is not None:
        parallel(entry, address, num_threads, 0)
    else:
        entry(address)


def threads_of_torch() -> int:
    """Threads that a kernel may use: torch's setting, where its threads can be had."""
    return 1 if _openmp() is None else torch.get_num_threads()


@cache
def _openmp() -> Any | None:
    """OpenMP's entry to a parallel region, from the library that torch has loaded; `None` where it has no such."""
    folder = Path(torch.__file__).parent
    libraries = [*folder.glob("lib/lib*omp*.so*"), *folder.parent.glob("torch.libs/lib*omp*.so*")]
    for library in libraries:
        try:
            parallel = ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return parallel
    return None
