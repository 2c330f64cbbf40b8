"""Recurrent mixers that read a few tokens as a chunk of their own size.

transformers' reference functions for the gated delta rule and for Mamba-2 read a text in chunks of 64 to 256 tokens,
to which they pad what there is. A verification has a handful, so nearly all of that work is about padding. The
functions take the size of a chunk as an argument; mixers that call them with a fixed one are run with the same code
and functions that take smaller chunks.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from threading import Lock
from types import FunctionType
from typing import Any

import torch


_SIZE = "chunk_size"

_lock = Lock()
_users: Counter[torch.nn.Module] = Counter()


class _OwnChunks:
    """Takes the place of a mixer's forward; for calls that do not verify a draft it is the class's own."""

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any], state_class: type):
        self.module, self.forward, self.state_class = module, forward, state_class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_ours = any(isinstance(value, self.state_class) for value in kwargs.values())
        forward = self.forward if is_ours else type(self.module).forward
        return forward(self.module, *args, **kwargs)


@contextmanager
def own_chunks(modules: Sequence[torch.nn.Module], state_class: type) -> Iterator[None]:
    """Lets mixers on a CPU read what they are given with a `state_class` in chunks no larger than that.

    Args:
        modules (`Sequence[nn.Module]`): The mixers; those whose forward is replaced already stay as they are. Calls of
            other threads may have them in use, too.
        state_class (`type`): Of the caches of verifications.
    """
    forwards = {module: _in_own_chunks(type(module)) for module in modules if _is_on_cpu(module)}
    with _lock:
        free = [module for module in forwards if _users[module] or "forward" not in vars(module)]
        mine = [module for module in free if forwards[module]]
        for module in mine:
            _users[module] += 1
            vars(module).setdefault("forward", _OwnChunks(module, forwards[module], state_class))
    try:
        yield
    finally:
        with _lock:
            for module in mine:
                _users[module] -= 1
                if not _users[module]:
                    del _users[module], vars(module)["forward"]


def _is_on_cpu(module: torch.nn.Module) -> bool:
    return next(module.parameters()).device.type == "cpu"


@lru_cache(maxsize=256)
def _in_own_chunks(module_class: type) -> Callable[..., Any] | None:
    """The forward of a class with other functions in the place of those that read in chunks; `None` without such."""
    # What wraps it in transformers looks for kernels, of which there are none for a CPU.
    forward = inspect.unwrap(module_class.forward)
    if not isinstance(forward, FunctionType):
        return None
    known = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    smaller = {name: _with_small_chunks(function) for name, function in known.items() if _reads_in_chunks(function)}
    if not smaller:
        return None
    scope = {**forward.__globals__, **smaller}
    own = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return own


def _reads_in_chunks(function: Any) -> bool:
    return isinstance(function, FunctionType) and _SIZE in inspect.signature(function).parameters


def _with_small_chunks(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @wraps(function)
    def with_small_chunks(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(first, *args, **kwargs)
        call.apply_defaults()
        # The tokens of `(R, W, ...)`.
        call.arguments[_SIZE] = min(call.arguments[_SIZE], first.shape[1])
        return function(*call.args, **call.kwargs)

    return with_small_chunks
