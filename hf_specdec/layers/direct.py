"""Modules that are called like functions, and the question of what their calls would be beside that."""

from __future__ import annotations

from collections import OrderedDict
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.activations import ACT2FN

from ..kernels import _triton, products
from ..kernels.gates import GELU_TANH, SILU


Module = TypeVar("Module", bound="DirectModule")


# Ends of the names under which `nn.Module` keeps hooks.
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


class DirectModule(nn.Module):
    """Module that is called like a function while nothing hooks into its calls."""

    # Torch has each of them as optional; a subclass knows which it has.
    _modules: dict[str, Any]
    _parameters: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(_additions(self)):
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)

    @classmethod
    def sharing(cls: type[Module], module: nn.Module, **changed: Any) -> Module:
        """A module of this class with the attributes of another, its parameters and parts among them, but no hooks.

        Args:
            module (`nn.Module`): The other module.
            changed (`Any`): Attributes to have in the place of some of these.
        """
        made = cls.__new__(cls)
        hooks = {name: OrderedDict() for name in module.__dict__ if name.endswith(_HOOKS)}
        made.__dict__.update(module.__dict__, **hooks, **changed)
        return made


# All that a call of a module runs beside, or in the place of, its `forward`.
_additions = attrgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_compiled_call_impl"
)


def is_hooked(module: nn.Module) -> bool:
    """Tells whether a call of the module is more, or another, than the forward of its class."""
    forward = module.__dict__.get("forward")
    return any(_additions(module)) or not (forward is None or type(forward) is products.OwnForward)


def may_fuse(tensor: torch.Tensor) -> bool:
    """Spares small models on a CPU the question of [`fuses`], which decides."""
    return not tensor.is_cpu or _triton.CHOICE == "triton"


_ACTIVATIONS = {
    type(ACT2FN[name]): kind for name, kind in (("silu", SILU), ("swish", SILU), ("gelu_pytorch_tanh", GELU_TANH))
}


def activation_kind(activation: nn.Module) -> str | None:
    """The name of an activation that kernels know, and nothing hooks into; `None` for others."""
    return None if is_hooked(activation) else _ACTIVATIONS.get(type(activation))
