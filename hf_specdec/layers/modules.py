"""Modules that are called like functions while nothing hooks into them, and what tells whether anything does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..kernels import products


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


def is_untouched(module: nn.Module) -> bool:
    """Tells whether calling the module runs the forward that its class was published with, on plain weights."""
    if is_hooked(module) or not (is_published(type(module)) and is_published(type(module).forward)):
        return False
    if "weight" in module._buffers:
        return False  # packed
    weight = module._parameters.get("weight")
    if is_traceable_wrapper_subclass(weight) or (weight is None and getattr(module, "weight", None) is not None):
        return False  # in parts on several processes, or packed
    return weight is None or weight.dim() != 2 or type(module) in (nn.Linear, nn.Embedding)


def modules_of(model: nn.Module, left_out: Container[int] = ()) -> list[nn.Module]:
    """The model and all modules in it, in less time than `modules()`, and shared ones more than once.

    Args:
        left_out (`Container[int]`): Ids of modules that are left out, with all in them.
    """
    found = [model]
    for module in found:
        found += [part for part in module._modules.values() if part is not None and id(part) not in left_out]
    return found


@lru_cache(maxsize=256)
def is_published(definition: Any) -> bool:
    """Tells whether a class or function is torch's, transformers', or of this package."""
    return definition.__module__.partition(".")[0] in ("torch", "transformers", "hf_specdec")
