"""Linear layers of decoders and drafters, as functions where nobody has wrapped or hooked into them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels import _triton, products, projections
from ..kernels.projections import Unnormed


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


def project(linear: nn.Module, hidden: torch.Tensor | Unnormed) -> torch.Tensor:
    """Applies a linear layer, a quantised, wrapped or hooked one by its own call."""
    if not is_plain(linear):
        return linear(as_normed(hidden))
    parameters = linear._parameters
    if may_fuse(hidden) and projections.takes(hidden, alone := [(parameters["weight"], parameters["bias"])]):
        return projections.products(hidden, alone)[0]
    if isinstance(hidden, Unnormed):
        hidden = hidden.normed()
    # Spares small models a call for each of their layers.
    if not products.ways_of_shapes:
        return F.linear(hidden, parameters["weight"], parameters["bias"])
    return products.product(hidden, parameters["weight"], parameters["bias"])


def project_together(linears: Sequence[nn.Module], hidden: torch.Tensor | Unnormed) -> Sequence[torch.Tensor]:
    """Applies linear layers to the same states."""
    on_gpu = may_fuse(hidden)
    parameters = plain_parameters(linears) if on_gpu or products.ways_of_shapes else None
    if parameters is None or (on_gpu and not projections.takes(hidden, parameters)):
        hidden = as_normed(hidden)
        return [project(linear, hidden) for linear in linears]
    return (projections if on_gpu else products).products(hidden, parameters)


def plain_parameters(linears: Sequence[nn.Module]) -> list[projections.Linear] | None:
    """Weights and biases of linear layers, `None` where one of them is not plain."""
    if not all(map(is_plain, linears)):
        return None
    return [(linear._parameters["weight"], linear._parameters["bias"]) for linear in linears]


def is_plain(linear: nn.Module) -> bool:
    """Tells whether a linear layer is not hooked, wrapped or packed."""
    return type(linear) is nn.Linear and not is_hooked(linear) and "weight" in linear._parameters


def as_normed(hidden: torch.Tensor | Unnormed) -> torch.Tensor:
    """What linear layers read, for whoever else reads it."""
    return hidden.normed() if isinstance(hidden, Unnormed) else hidden


def may_fuse(tensor: torch.Tensor) -> bool:
    """Spares small models on a CPU the question of [`fuses`], which decides."""
    return not tensor.is_cpu or _triton.CHOICE == "triton"
