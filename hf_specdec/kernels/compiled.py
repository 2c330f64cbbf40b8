"""Functions over numpy arrays that numba compiles; where it cannot be imported they run as they stand.

Only modules of kernels import this one, and they are imported when they are first needed: numba takes 0.4 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from transformers.utils import logging


try:
    import numba
except (ImportError, OSError) as error:
    # OSError: the library of llvmlite cannot be loaded.
    numba = None
    logging.get_logger(__name__).warning(
        f"numba cannot be imported ({error}), so loops on the CPU run in Python, which is slower. "
        "Install it with `pip install numba`."
    )

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(signature: str) -> Callable[[Function], Function]:
    """Compiles a function for one signature, and keeps the code on disk where there is a place for it."""

    def compile_it(function: Function) -> Function:
        if numba is None:
            return function
        try:
            return numba.njit(signature, cache=True)(function)
        except (RuntimeError, OSError):
            # No folder that can be written to, or no room.
            return numba.njit(signature)(function)

    return compile_it
