"""Functions that numba compiles for the CPU; without numba, loops run in Python and torch computes products.

Only modules of kernels import this one, and they are imported when they are first needed: numba takes 0.4 s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from transformers.utils import logging


try:
    import numba
except (ImportError, OSError) as error:
    # OSError: the library of llvmlite cannot be loaded.
    numba = None
    logging.get_logger(__name__).warning(
        f"numba cannot be imported ({error}). Loops on the CPU run in Python, and torch computes all matrix products "
        "there, which is slower. Install it with `pip install numba`."
    )

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(signature: str) -> Callable[[Function], Function]:
    if numba is None:
        return lambda function: function
    return partial(kept_on_disk, partial(numba.njit, signature))


def kept_on_disk(compile_it: Callable[..., Callable[[Function], Any]], function: Function) -> Any:
    """Compiles a function with one of numba's decorators, and keeps the code on disk where there is a place for it."""
    try:
        return compile_it(cache=True)(function)
    except (RuntimeError, OSError):
        # No folder that can be written to, or no room.
        return compile_it(cache=False)(function)
