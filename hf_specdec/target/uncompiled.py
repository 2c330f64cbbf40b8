"""Compiled modules as they were before, for as long as a call drives them.

Code that `torch.compile` has made runs no hooks, by which hidden states are collected, and would have to be traced
anew for the cache in slots and for the kernels of this package, with other lengths in every cycle. The loop has its
own ways to be fast, so what is compiled is set aside while it runs.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

from ..layers.known import modules_of
from ..threads import Lock, StandIns, is_of_class
from .forward import Part


# What a call of a module may run: `compile()` leaves the first, accelerate's hooks keep the last.
_PLACES = ("_compiled_call_impl", "forward", "_old_forward")


# Of each module that somebody drives, by its id: what stands in for what is compiled.
_set_aside: WeakValueDictionary[int, StandIns] = WeakValueDictionary()
_lock = Lock()


class Uncompiled(Part):
    """Has the modules of a model uncompiled until it is closed or forgotten; several calls share them."""

    def __init__(self, model: nn.Module):
        self._stack = ExitStack()
        self.has_modules: bool = False  # there are compiled ones
        with _lock:
            for module in modules_of(model):
                is_compiled = hasattr(getattr(type(module), "forward", None), "_torchdynamo_orig_callable")
                if is_compiled or id(module) in _set_aside or not vars(module).keys().isdisjoint(_PLACES[:2]):
                    places = [(module, name, _before(module, name)) for name in _PLACES]
                    places = [place for place in places if place[2] is not vars(module).get(place[1])]
                    stand_ins = _set_aside.get(id(module)) or StandIns(places)
                    if stand_ins.places:
                        self._stack.enter_context(stand_ins.in_place())
                        _set_aside[id(module)] = stand_ins
                        self.has_modules = True

    def close(self) -> None:
        """Has them compiled again. Where it is interrupted, it can be called again."""
        if (stack := vars(self).get("_stack")) is not None:
            stack.close()

    __del__ = close


def _before(module: nn.Module, name: str) -> Any:
    """What has been at a place of a module before it was compiled; `None`: nothing."""
    if name == _PLACES[0]:
        return None
    of_module = vars(module).get(name)
    function = module.forward if name == "forward" and of_module is None else of_module
    inner = function
    while hasattr(inner, "_torchdynamo_orig_callable"):
        # Functions around the one that was compiled may have copies of its attributes.
        own_id = id(getattr(inner, "__func__", inner))
        if getattr(inner, "_torchdynamo_wrapper_id", own_id) != own_id:
            break
        inner = inner._torchdynamo_orig_callable
    if inner is function:
        return of_module
    if of_module is None:
        # The class's own is compiled.
        return inner.__get__(module)
    return None if name == "forward" and is_of_class(inner, module) else inner
