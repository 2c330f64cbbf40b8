"""Compiled modules as they were before, for as long as a call drives them.

Code that `torch.compile` has made runs no hooks, by which hidden states are collected, and would have to be traced
anew for the cache in slots and for the kernels of this package, with other lengths in every cycle. The loop has its
own ways to be fast, so what is compiled is set aside while it runs.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..layers.known import modules_of
from ..threads import Lock, is_of_class
from .forward import Part


# What a call of a module may run: `compile()` leaves the first, accelerate's hooks keep the last.
_PLACES = ("_compiled_call_impl", "forward", "_old_forward")

# By module: ids of those who need it uncompiled, and at each place the compiled function and what stands in for it.
_set_aside: WeakKeyDictionary[nn.Module, tuple[set[int], dict[str, tuple[Any, Any]]]] = WeakKeyDictionary()
_lock = Lock()


class Uncompiled(Part):
    """Has the modules of a model uncompiled until it is closed or forgotten; several calls share them."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._modules: list[nn.Module] = []
        with _lock:
            for module in modules_of(model):
                is_own = not vars(module).keys().isdisjoint(_PLACES[:2])
                if is_own or module in _set_aside or hasattr(type(module).forward, "_torchdynamo_orig_callable"):
                    # In front of the first change, so that none stays wherever an exception comes.
                    self._modules.append(module)
                    if not _set_it_aside(module, id(self)):
                        self._modules.pop()

    @property
    def has_modules(self) -> bool:
        """Tells whether there are compiled modules."""
        return bool(self._modules)

    def without_rows(self) -> Uncompiled:
        return Uncompiled(self._model)

    def close(self) -> None:
        """Has them compiled again. Where it is interrupted, it can be called again."""
        with _lock:
            for module in vars(self).get("_modules", ()):
                users, changes = _set_aside.get(module, (set(), {}))
                users.discard(id(self))
                if users:
                    continue
                for name, (compiled, stand_in) in changes.items():
                    if vars(module).get(name) is stand_in:
                        _set(module, name, compiled)
                _set_aside.pop(module, None)

    __del__ = close


def _set_it_aside(module: nn.Module, user: int) -> bool:
    """Tells whether there is something of the module to set aside."""
    if module not in _set_aside:
        changes = {name: (vars(module).get(name), _before(module, name)) for name in _PLACES}
        changes = {name: change for name, change in changes.items() if change[0] is not change[1]}
        if not changes:
            return False
        _set_aside[module] = set(), changes
    users, changes = _set_aside[module]
    users.add(user)
    for name, (_, stand_in) in changes.items():
        _set(module, name, stand_in)
    return True


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


def _set(module: nn.Module, name: str, value: Any) -> None:
    if value is None:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value
