"""How decoder layers run, decided when a call first drives them and not in every layer of every forward.

A plan binds the matrices and numbers of a layer's parts to the functions that compute with them. There are three ways:

    TORCH      by torch: on a CPU, where there are gradients, under autocast
    KERNELS    on a GPU: what lies between two products is one kernel
    FEW        on a GPU over few tokens: products also norm what they read and add what they compute to the stream

Parts that somebody hooks into, or has wrapped, replaced or quantised, run by their own calls in any way.

Shapes: R rows, T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..kernels import _triton, norms, products, projections
from ..kernels.norms import Norm, Scale
from ..kernels.projections import Linear, Unnormed
from ..modules import hooks_of


# What the linear layers after a norm read: the normed stream, or one that they norm themselves.
Read = torch.Tensor | Unnormed


class Way(Enum):
    TORCH, KERNELS, FEW = range(3)


def way_of(stream: torch.Tensor) -> Way:
    """The way of layers over a stream `(R, T, H)`."""
    if (stream.is_cpu and _triton.CHOICE != "triton") or not _triton.fuses(stream):
        return Way.TORCH
    return Way.FEW if projections.takes_tokens(stream) else Way.KERNELS


class Normed(NamedTuple):
    """A norm of the stream, by its numbers or as a module, and whether it is left to the products that read it."""

    norm: Any = None
    is_left: bool = False


def reading(norm: Any, takes_unnormed: bool, dtype: torch.dtype) -> Normed:
    """A norm from [`norm_of`] in front of products that take an [`Unnormed`], or do not."""
    return Normed(norm, takes_unnormed and projections.can_norm(norm) and is_known(norm, dtype))


class PartPlan(NamedTuple):
    """Attention or an MLP without its last linear layer."""

    run: Callable[..., torch.Tensor]  # computes what that reads; without one, what is added to the stream
    last: nn.Module | None = None
    norms: bool = False  # `run` takes an [`Unnormed`]


@dataclass(frozen=True)
class LayerPlan:
    """Bound functions of a decoder layer."""

    reads: Normed  # what attention reads
    norms: dict[str | None, Callable[[torch.Tensor], torch.Tensor]]  # each by itself, by name; `None` changes nothing
    attend: Callable[..., torch.Tensor]  # as [`RotaryAttention.mixed`]
    add_attention: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, Read]]  # to the stream, and the norm
    activate: Callable[[Read], torch.Tensor]
    add_mlp: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, Read]]


def planned(owner: Any, stream: torch.Tensor, cache: Any, *details: Any) -> Any:
    """What `owner.plan` decides for a stream: once for the `plans` of a cache, and again when somebody hooks in."""
    plans, how = getattr(cache, "plans", None), (way_of(stream), stream.dtype, *details)
    if plans is None:
        return owner.plan(*how)
    # Plans outlive calls, and hold no owner.
    key, newest_hook = (id(owner), *how), RemovableHandle.next_id
    plan, hooks, known_hook = plans.get(key) or (None, (), -1)
    if known_hook != newest_hook:
        if plan is None or any(hooks):
            plan, modules = owner.plan(*how), [*owner.modules(), *getattr(owner, "shared_modules", ())]
            # Where hooks would be registered that are not yet there.
            hooks = [hooks for module in modules for hooks in hooks_of(module) if not hooks]
        plans[key] = plan, hooks, newest_hook
    return plan


def plan_layers(layers: Sequence[Any], following: Normed, way: Way, dtype: torch.dtype) -> list[LayerPlan]:
    """Plans of layers that run one after the other, and leave the stream to a norm."""
    plans: list[LayerPlan] = []
    for layer in reversed(layers):
        plans.append(layer.plan(way, dtype, following))
        following = plans[-1].reads
    return plans[::-1]


def is_hooked(module: nn.Module) -> bool:
    """Tells whether a call of the module is more, or another, than the forward of its class."""
    forward = module.__dict__.get("forward")
    is_own = forward is None or type(forward) is products.OwnForward
    return any(hooks_of(module)) or module._compiled_call_impl is not None or not is_own


def matrix_of(linear: nn.Module) -> Linear | None:
    """Weights and bias of a linear layer; `None` where it is hooked, wrapped or packed."""
    if type(linear) is not nn.Linear or is_hooked(linear) or "weight" not in linear._parameters:
        return None
    return linear._parameters["weight"], linear._parameters["bias"]


def first_outputs(linear: nn.Module, count: int) -> nn.Module:
    """A linear layer that computes the first outputs of another one with its weights; that one, if it is not plain."""
    matrix = matrix_of(linear)
    if matrix is None or count >= len(matrix[0]):
        return linear
    weight, bias = (None if numbers is None else nn.Parameter(numbers[:count].detach(), False) for numbers in matrix)
    part = nn.Linear(weight.shape[1], count, bias is not None, device="meta")
    part.weight, part.bias = weight, bias
    return part


def bind_linear(linear: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    matrix = matrix_of(linear)
    if matrix is None:
        return linear
    weight, bias = matrix
    # Spares small models a call for each of their layers. Quantised weights want their arguments by position.
    product = products.product if products.are_large([weight]) else F.linear
    return lambda hidden: product(hidden, weight, bias)


def bind_linears(
    way: Way, dtype: torch.dtype, linears: Sequence[nn.Module]
) -> tuple[Callable[[Read], Sequence[torch.Tensor]], bool]:
    """Linear layers over the same states, and whether they take an [`Unnormed`]."""
    matrices = fused_matrices(way, dtype, linears)
    if matrices is not None:
        return partial(projections.products_triton, linears=matrices), True
    plain = [matrix for linear in linears if (matrix := matrix_of(linear)) is not None]
    if way is Way.TORCH and len(plain) == len(linears) and products.are_large([weight for weight, _ in plain]):
        return partial(products.products, matrices=plain), False
    bound = [bind_linear(linear) for linear in linears]
    return lambda read: [linear(read) for linear in bound], False


def fused_matrices(way: Way, dtype: torch.dtype, linears: Sequence[nn.Module]) -> list[Linear] | None:
    """The matrices of linear layers that run as one kernel over few tokens; `None` where they do not."""
    if way is not Way.FEW:
        return None
    matrices = [matrix for linear in linears if (matrix := matrix_of(linear)) is not None]
    fits = len(matrices) == len(linears) and matrices[0][0].dtype == dtype and projections.takes_linears(matrices)
    return matrices if fits else None


def project(linear: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Applies a linear layer that stands alone."""
    return bind_linears(way_of(hidden), hidden.dtype, [linear])[0](hidden)[0]


def norm_of(module: nn.Module | None) -> Any:
    """The numbers of a norm of this package that nobody hooks into, `None` for the identity, else the module."""
    if module is None or is_hooked(module):
        return module
    return None if type(module) is nn.Identity else getattr(module, "norm", module)


def is_known(norm: Any, dtype: torch.dtype) -> bool:
    """Tells whether kernels compute with a norm from [`norm_of`]."""
    return norm is None or (isinstance(norm, (Norm, Scale)) and (norm.weight is None or norm.weight.dtype == dtype))


def bind_norm(norm: Any, way: Way, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """A norm from [`norm_of`] by itself."""
    if norm is None:
        return lambda hidden: hidden
    if way is not Way.TORCH and is_known(norm, dtype):
        return lambda hidden: norms.add_norm_triton(hidden, None, None, norm)[1]
    is_one_call = isinstance(norm, Norm) and not (norm.rounds_last or norm.is_centered) and dtype == torch.float32
    if is_one_call and not torch.is_autocast_enabled("cpu"):
        return partial(torch.rms_norm, normalized_shape=norm.weight.shape, weight=norm.weight, eps=norm.eps)
    return norm
