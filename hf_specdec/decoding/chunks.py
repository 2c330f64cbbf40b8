"""Recurrent mixers that read a few tokens as a chunk of their own size.

transformers' reference functions for the gated delta rule and for Mamba-2 read a text in chunks of 64 to 256 tokens,
to which they pad what there is. A verification has a handful, so nearly all of that work is about padding. The
functions take the size of a chunk as an argument; mixers that call them with a fixed one are run with the same code
and functions that take smaller chunks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..threads import OwnForwards
from .recurrent_state import RecurrentState


_SIZE = "chunk_size"

_of_models: WeakKeyDictionary[nn.Module, OwnForwards] = WeakKeyDictionary()


def own_chunks(model: nn.Module, mixers: Sequence[nn.Module]) -> OwnForwards:
    """Forwards with which the mixers of a model read a verification on a CPU in chunks no larger than that."""
    if model not in _of_models:
        forwards = [(mixer, _in_own_chunks(type(mixer))) for mixer in mixers]
        _of_models.setdefault(model, OwnForwards((mixer, _OwnChunks(mixer, own)) for mixer, own in forwards if own))
    return _of_models[model]


class _OwnChunks:
    """Takes the place of a mixer's forward; for calls that do not verify a draft it is the class's own."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        self.module, self.forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        verifies = any(isinstance(value, RecurrentState) for value in kwargs.values())
        is_small = verifies and next(self.module.parameters()).device.type == "cpu"
        return (self.forward if is_small else type(self.module).forward)(self.module, *args, **kwargs)


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
