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

from ..kernels._triton import fuses
from ..kernels.experts import MOST_TOKENS, Routing, Shared, mixture
from .llama import DirectModule, GatedMLP, activation_kind, is_hooked, is_plain, may_fuse
from .structure import form_of, same_code


# Implementations of transformers' that compute the same; others were chosen by somebody.
_USUAL = (None, "eager", "batched_mm", "grouped_mm")


# How the weights of experts lie, in the words of transformers.
_LAYOUT = {"has_gate": True, "is_concatenated": True, "is_transposed": False, "has_bias": False}


class MixtureOfExperts(DirectModule):
    """A block of experts that is known, see [`~layers.structure.MixtureForm`].

    Args:
        block (`nn.Module`): transformers' own.
    """

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block
        self.form: Any = form_of(block, "mixture")
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

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the experts add to the stream, `(R, T, H)`."""
        block: Any = self._modules["block"]
        if may_fuse(hidden) and hidden.shape[:-1].numel() <= MOST_TOKENS and self._may_run(block, hidden):
            return self._mixture(block, hidden.reshape(-1, hidden.shape[-1])).view(hidden.shape)
        return block(hidden)

    def _may_run(self, block: Any, hidden: torch.Tensor) -> bool:
        """Tells whether kernels do what the modules would do."""
        experts, gate = block.experts, block.gate
        weights = (gate.weight, experts.gate_up_proj, experts.down_proj)
        is_hooked_anywhere = any(map(is_hooked, (block, gate, experts)))
        # transformers 5.17 has no such attribute.
        is_parallel = getattr(experts, "_is_expert_parallel", False)
        if is_hooked_anywhere or is_parallel or not all(map(_is_dense, weights)):
            return False
        if block.training and getattr(block, "jitter_noise", 0):
            return False
        is_usual = getattr(experts.config, "_experts_implementation", None) in _USUAL
        return is_usual and activation_kind(experts.act_fn) is not None and fuses(hidden, *weights)

    def _mixture(self, block: Any, hidden: torch.Tensor) -> torch.Tensor:
        experts, logits = block.experts, F.linear(hidden, block.gate.weight)
        given = hidden, logits, experts.gate_up_proj, experts.down_proj, self.routing, activation_kind(experts.act_fn)
        if not self.form.has_shared_expert:
            return mixture(*given)
        shared, gate = _shared(block.shared_expert, hidden), block.shared_expert_gate
        if is_plain(gate) and gate.bias is None and _is_dense(gate.weight) and fuses(hidden, shared, gate.weight):
            return mixture(*given, Shared(shared, gate.weight))
        return mixture(*given) + F.sigmoid(gate(hidden)) * shared


def _shared(expert: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    is_known = form_of(expert, "mlp") is not None and not is_hooked(expert)
    return GatedMLP.sharing(expert)(hidden) if is_known else expert(hidden)


def _is_dense(weight: torch.Tensor) -> bool:
    return weight.is_contiguous() and not is_traceable_wrapper_subclass(weight)
