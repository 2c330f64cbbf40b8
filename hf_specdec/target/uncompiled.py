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


# What a call of a module may run: `compile()` leaves the first, accelerate's hooks keep the last.
_PLACES = ("_compiled_call_impl", "forward", "_old_forward")

# By module: who needs it uncompiled, and at each place the compiled function and what stands in for it.
_set_aside: WeakKeyDictionary[nn.Module, tuple[set[int], dict[str, tuple[Any, Any]]]] = WeakKeyDictionary()
_lock = Lock()


def may_be_compiled(model: nn.Module) -> list[nn.Module]:
    """The modules in a model, or the model itself, that may be; of most models none."""
    return [
        module
        for module in modules_of(model)
        if "forward" in module.__dict__
        or _PLACES[0] in module.__dict__
        or hasattr(type(module).forward, "_torchdynamo_orig_callable")
        or module in _set_aside
    ]


class Uncompiled:
    """Has modules uncompiled until it is closed or forgotten; several calls share them.

    Args:
        modules (`list[nn.Module]`): Of [`may_be_compiled`].
    """

    def __init__(self, modules: list[nn.Module]):
        self._modules: list[nn.Module] = []
        with _lock:
            for module in modules:
                _set_it_aside(module, self._modules, id(self))

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


def _set_it_aside(module: nn.Module, modules: list[nn.Module], user: int) -> None:
    # In front of the first change, so that none stays wherever an exception comes.
    modules.append(module)
    if module not in _set_aside:
        changes = {name: (vars(module).get(name), _before(module, name)) for name in _PLACES}
        changes = {name: change for name, change in changes.items() if change[0] is not change[1]}
        if not changes:
            modules.pop()
            return
        _set_aside[module] = set(), changes
    users, changes = _set_aside[module]
    users.add(user)
    for name, (_, stand_in) in changes.items():
        _set(module, name, stand_in)


def _before(module: nn.Module, name: str) -> Any:
    """What has been at a place of a module before it was compiled; `None`: nothing."""
    if name == _PLACES[0]:
        return None
    is_own = name in vars(module)
    function = vars(module)[name] if is_own else module.forward if name == "forward" else None
    inner = _inner(function)
    if inner is function:
        return vars(module).get(name)
    if not is_own:
        # The class's own is compiled.
        return inner.__get__(module)
    return None if name == "forward" and is_of_class(inner, module) else inner


def _inner(function: Any) -> Any:
    """The function that has been compiled, once or several times."""
    while hasattr(function, "_torchdynamo_orig_callable"):
        # Functions around it may have copies of its attributes.
        known = id(getattr(function, "__func__", function))
        if getattr(function, "_torchdynamo_wrapper_id", known) != known:
            break
        function = function._torchdynamo_orig_callable
    return function


def _set(module: nn.Module, name: str, value: Any) -> None:
    if value is None:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value
