"""Experts in the place of a layer's MLP: transformers' own block, and on a GPU for few tokens its kernels.

Shapes: R rows, T tokens, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.integrations import moe

from ..kernels import experts as kernels
from ..kernels.experts import MOST_TOKENS, Routing, Shared
from .llama import GatedMLP, activation_kind, sharing
from .plan import PartPlan, Way, is_hooked, matrix_of, way_of
from .structure import form_of, same_code


# Implementations of transformers' that compute the same; others were chosen by somebody.
_USUAL = (None, "eager", "batched_mm", "grouped_mm")

# How the weights of experts lie, in the words of transformers.
_LAYOUT = {"has_gate": True, "is_concatenated": True, "is_transposed": False, "has_bias": False}


class MixtureOfExperts(nn.Module):
    """A block of transformers' experts that is known."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block
        self.has_shared_expert: Any = form_of(block, "mixture")
        router = form_of(block.gate, "router")
        normalizes = (
            router.normalizes if isinstance(router.normalizes, bool) else getattr(block.gate, router.normalizes)
        )
        self.routing: Routing = Routing(block.gate.top_k, bool(normalizes), router.rounds)

    @classmethod
    def of(cls, block: nn.Module) -> nn.Module:
        """The block with kernels where its structure is known, otherwise itself."""
        if form_of(block, "mixture") is None or form_of(block.gate, "router") is None:
            return block
        experts: Any = block.experts
        gates = (getattr(part, name, None) for part, name in ((experts, "_apply_gate"), (moe, "_default_apply_gate")))
        layout = [getattr(experts, name, None) for name in _LAYOUT]
        is_known = form_of(experts, "experts") and same_code(*gates) and layout == list(_LAYOUT.values())
        return cls(block) if is_known else block

    def plan(self, way: Way, dtype: torch.dtype) -> PartPlan:
        """What it computes with: kernels where they do what the modules would do, else those."""
        block: Any = self._modules["block"]
        experts, shared, shared_gate = block.experts, None, None
        kind = None if way is Way.TORCH else activation_kind(experts.act_fn)
        weights = [block.gate.weight, experts.gate_up_proj, experts.down_proj]
        if self.has_shared_expert:
            expert, matrix = block.shared_expert, matrix_of(block.shared_expert_gate)
            is_known = form_of(expert, "mlp") is not None and not is_hooked(expert)
            shared = sharing(GatedMLP, expert) if is_known else expert
            shared_gate = None if matrix is None or matrix[1] is not None else matrix[0]
            weights.append(shared_gate)
        if kind is None or not (_is_usual(block) and all(_is_dense(weight, dtype) for weight in weights)):
            return PartPlan(block)

        def routed(hidden: torch.Tensor) -> torch.Tensor:
            if hidden.shape[:-1].numel() > MOST_TOKENS:
                return block(hidden)
            states, (router, gate_up, down, *_) = hidden.reshape(-1, hidden.shape[-1]), weights
            added = None if shared is None else Shared(shared(states), shared_gate)
            logits = F.linear(states, router)
            return kernels.mixture_triton(states, logits, gate_up, down, self.routing, kind, added).view(hidden.shape)

        return PartPlan(routed)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the experts add to the stream, `(R, T, H)`."""
        return self.plan(way_of(hidden), hidden.dtype).run(hidden)


def _is_usual(block: Any) -> bool:
    """Tells whether nobody has changed how the experts of a block are chosen and run."""
    experts = block.experts
    # transformers 5.17 has no such attribute.
    is_parallel = getattr(experts, "_is_expert_parallel", False)
    has_noise = block.training and getattr(block, "jitter_noise", 0)
    if is_parallel or has_noise or any(map(is_hooked, (block, block.gate, experts))):
        return False
    return getattr(experts.config, "_experts_implementation", None) in _USUAL


def _is_dense(weight: torch.Tensor | None, dtype: torch.dtype) -> bool:
    is_plain = weight is not None and weight.dtype == dtype and weight.is_contiguous()
    return is_plain and not is_traceable_wrapper_subclass(weight)
