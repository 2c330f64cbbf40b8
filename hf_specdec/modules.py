"""What follows from the modules of a model, kept from call to call until somebody changes one of them."""

from __future__ import annotations

from operator import attrgetter, is_
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn


# Attributes that a module computes with, beside its tensors and parts.
_PLAIN = {bool, int, float, str, NoneType}

# Types of devices that have autocast.
_CASTING = tuple(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))

# What runs beside the forward of a module, by number.
hooks_of = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_kept: WeakKeyDictionary[nn.Module, tuple[list[Any], list[int], dict[Any, Any]]] = WeakKeyDictionary()


def kept_for(owner: nn.Module, *others: nn.Module) -> dict[Any, Any]:
    """A dict for what follows from the modules of an owner, and of others that it goes through.

    It is a new one when a module, a tensor, an attribute, a hook or the config is another than before, or autocast is.
    What is put there must not hold the owner.
    """
    parts, marks = _state([owner, *others])
    before, marks_before, values = _kept.get(owner) or ([], [], {})
    # By identity: tensors are not to be compared, and numbers stay the same objects until others are assigned.
    is_same = marks == marks_before and len(parts) == len(before) and all(map(is_, parts, before))
    if not is_same:
        values = {}
        _kept[owner] = parts, marks, values
    return values


def _state(modules: list[nn.Module]) -> tuple[list[Any], list[int]]:
    """What decides what modules and their parts compute, without the first one, and marks of the memory of tensors."""
    state: list[Any] = [kind for kind in _CASTING if torch.is_autocast_enabled(kind)]
    marks, configs = [], set()
    for module in modules:
        attributes, tensors = vars(module), [*module._parameters.values(), *module._buffers.values()]
        modules += [part for part in module._modules.values() if part is not None]
        # A function in the place of the forward may hold the owner.
        own_forward, compiled = type(attributes.get("forward")), attributes.get("_compiled_call_impl") is None
        state += (type(module), type(module).forward, own_forward, compiled, *tensors, *module._modules.values())
        state += [value for value in attributes.values() if type(value) in _PLAIN]
        # A tensor can be given another memory, and what was computed of a buffer ends where it is written to.
        plain = [tensor for tensor in tensors if type(tensor) in (nn.Parameter, torch.Tensor)]
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
