"""What follows from the modules of a model, kept from call to call until somebody changes one of them."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, is_
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.modules import module as every_module

from .kernels.products import OwnForward


# Attributes that a module computes with, beside its tensors and parts.
_PLAIN = {bool, int, float, str, NoneType}

# Types of tensors whose memory is at one address, where they are not sparse.
_DENSE = (nn.Parameter, torch.Tensor)

# Types of devices that have autocast.
_CASTING = tuple(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))

# Tells whether anything runs beside the forwards of all modules.
has_hooks_of_all: Callable[[], Any] = every_module._has_any_global_hook

# What runs beside the forward of a module, by number.
hooks_of: Callable[[nn.Module], tuple[Any, ...]] = attrgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)


class Kept(dict[Any, Any]):
    """What follows from the modules of an owner; under a function or class, what that finds in the owner."""

    def __init__(self, *modules: nn.Module):
        super().__init__()
        self._modules = tuple(map(ref, modules))

    def __missing__(self, find: Any) -> Any:
        modules = [module() for module in self._modules]
        found = find(modules[0])
        # Meanwhile a call of another thread may have had its hooks in the modules, which are gone later.
        if kept_for(*modules) is self:
            self[find] = found
        return found


_kept: WeakKeyDictionary[nn.Module, tuple[list[Any], list[int], Kept]] = WeakKeyDictionary()


def kept_for(owner: nn.Module, *others: nn.Module) -> Kept:
    """A dict for what follows from the modules of an owner, and of others that it goes through.

    It is a new one when a module, a tensor, an attribute, a hook or the config is another than before, or autocast is;
    numbers written to the `data` of a buffer are not seen. What is put there must not hold the owner.
    """
    parts, marks = _state([owner, *others])
    before, marks_before, values = _kept.get(owner) or ([], [], None)
    # By identity: tensors are not to be compared, and numbers stay the same objects until others are assigned.
    if values is None or marks != marks_before or len(parts) != len(before) or not all(map(is_, parts, before)):
        values = Kept(owner, *others)
        _kept[owner] = parts, marks, values
    return values


def _state(modules: list[nn.Module]) -> tuple[list[Any], list[int]]:
    """What decides what modules and their parts compute, without the first one, and marks of the memory of tensors."""
    state: list[Any] = [has_hooks_of_all(), *(kind for kind in _CASTING if torch.is_autocast_enabled(kind))]
    marks, configs = [], set()
    for module in modules:
        attributes, tensors = vars(module), [*module._parameters.values(), *module._buffers.values()]
        modules += [part for part in module._modules.values() if part is not None]
        # A function in the place of the forward may hold the owner. That of this package computes the same.
        own_forward, compiled = type(attributes.get("forward")), attributes.get("_compiled_call_impl") is None
        own_forward = NoneType if own_forward is OwnForward else own_forward
        kind, forward = type(module), getattr(type(module), "forward", None)
        state += (kind, forward, own_forward, compiled, *tensors, *module._modules.values())
        state += [value for value in attributes.values() if type(value) in _PLAIN]
        # A tensor can be given another memory, and what was computed of a buffer ends where it is written to.
        plain = [tensor for tensor in tensors if type(tensor) in _DENSE and tensor.layout is torch.strided]
        marks += [tensor.data_ptr() for tensor in plain]
        marks += [tensor._version for tensor in plain if type(tensor) is torch.Tensor and not tensor.is_inference()]
        for hooks in hooks_of(module):
            # Each has a number of its own.
            state += hooks
        config = attributes.get("config")
        if config is not None and id(config) not in configs:
            configs.add(id(config))
            state += getattr(config, "__dict__", {}).values()
    return state, marks


def forget_kept(owner: nn.Module | None = None) -> None:
    """Frees what is kept for one owner, or for all, with the tensors that it no longer has."""
    if owner is None:
        _kept.clear()
    else:
        _kept.pop(owner, None)
