"""Medusa heads: residual blocks on the target's last hidden state, each with the logits of one further position.

Cai et al. 2024 (arXiv:2401.10774), section 2.1. With h the output of the target's final norm at position t, head i
predicts the token at position t + 2 + i:

    x_0 = h;    x_{j+1} = x_j + SiLU(W_ij x_j + b_ij);    logits_i = U_i x_L

U_i is the head's own lm_head, or the target's ("version 2" of the format).

Shapes: K heads, L layers, H hidden size, V vocabulary of the target, U rows of an own lm_head.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from ...checkpoints.header import TargetNeeds
from ...checkpoints.loading import LoadedNetwork, save_checkpoint
from ...checkpoints.reader import CheckpointReader
from ...errors import SpecConfigError
from ...layers.draft_network import over_vocabulary
from ...settings import SpeculativeConfig
from ...target_facts import vocabulary_size
from .formats import MEDUSA_FILES, MedusaReader


# Ranks of a head's candidates whose accuracy a checkpoint may tell; no published tree asks for more.
NUM_RANKS = 10


class MedusaHeads(LoadedNetwork):
    """All heads of a checkpoint, their weights stacked."""

    spec_method = "medusa"
    reader_class: ClassVar[type[MedusaReader]] = MedusaReader

    def __init__(
        self,
        hidden_size: int,  # H
        vocab_size: int,  # V, the width of the logits
        num_heads: int,  # K
        num_layers: int = 1,  # L, residual blocks of a head
        own_lm_heads: bool = True,  # otherwise `forward` needs the target's
        bias: bool = True,  # of the blocks
        *,
        one_lm_head: bool = False,  # all heads share the one lm_head that is stored with them
        lm_head_size: int | None = None,  # U; `None`: V
        has_token_map: bool = False,  # row u of an own lm_head is for token `token_map[u]`, not u
        logit_scale: float = 1.0,
        accuracies: list[list[float]] | None = None,  # [i][r]: how often head i's candidate of rank r was right
        base_model: str | None = None,  # that the heads were trained for
    ):
        super().__init__()
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.lm_head_size: int = lm_head_size or vocab_size
        self.logit_scale = logit_scale
        # At first zero, which is the identity.
        self.weights: nn.ParameterList = nn.ParameterList(
            torch.zeros(num_heads, hidden_size, hidden_size) for _ in range(num_layers)
        )
        self.biases: nn.ParameterList = nn.ParameterList(
            torch.zeros(num_heads, hidden_size) for _ in range(num_layers if bias else 0)
        )
        num_lm_heads = 1 if one_lm_head else num_heads
        shape = (num_lm_heads, self.lm_head_size, hidden_size)
        self.lm_heads: nn.Parameter | None = nn.Parameter(torch.zeros(shape)) if own_lm_heads else None
        token_map = torch.arange(self.lm_head_size) if has_token_map else None
        self.register_buffer("token_map", token_map)
        self.accuracies = accuracies
        self.base_model = base_model

    @classmethod
    def of_record(cls, record: dict[str, Any], target_model: nn.Module) -> MedusaHeads:
        return cls(**record)

    def forward(
        self, hidden: torch.Tensor, lm_head: nn.Module | torch.Tensor | None = None, num_heads: int | None = None
    ) -> torch.Tensor:
        """Logits `(K, ..., V)` of the first heads for `(..., H)`; -inf for tokens that an own lm_head lacks."""
        logits = self.short_logits(hidden, lm_head, num_heads)
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        return logits if self.lm_heads is None else over_vocabulary(logits, self.token_map, self.vocab_size)

    def short_logits(
        self, hidden: torch.Tensor, lm_head: nn.Module | torch.Tensor | None = None, num_heads: int | None = None
    ) -> torch.Tensor:
        """Logits over the rows of the lm_heads, `(K, ..., U)`, not scaled."""
        first, heads = self.weights[0], slice(num_heads)
        # (rows, H), then (K, rows, H)
        stream = hidden.to(first.device, first.dtype).reshape(-1, self.hidden_size)
        for layer, weight in enumerate(self.weights):
            bias = self.biases[layer][heads] if self.biases else None
            stream = stream + F.silu(_linear(stream, weight[heads], bias))
        states = stream.reshape(-1, *hidden.shape)
        if self.lm_heads is None:
            # torch multiplies a view of the transposed states by a 16-bit lm_head twenty times more slowly on a CPU.
            states = states.to(hidden.device, hidden.dtype).contiguous()
            return lm_head(states) if isinstance(lm_head, nn.Module) else F.linear(states, lm_head)
        if len(self.lm_heads) == 1:
            return F.linear(states, self.lm_heads[0])
        logits = _linear(stream, self.lm_heads[: len(states)])
        return logits.reshape(*states.shape[:-1], self.lm_head_size)

    @property
    def needs(self) -> TargetNeeds:
        """The target that they were made for."""
        return TargetNeeds(None, self.hidden_size, None if self.lm_heads is None else self.vocab_size)

    def fitted(
        self, config: SpeculativeConfig, target_model: nn.Module, reader: CheckpointReader | None = None
    ) -> MedusaHeads:
        size, last = vocabulary_size(target_model), 0 if self.token_map is None else int(self.token_map.max())
        if last >= size:
            raise SpecConfigError(
                f"The Medusa heads draft the token {last} (`token_map`), the target has {size} tokens. Pass those "
                "that were trained for this target."
            )
        if size == self.vocab_size:
            return self
        heads = copy.copy(self)
        heads.vocab_size = size
        if self.lm_heads is None:
            heads.lm_head_size = size
        elif self.token_map is None and size < self.lm_head_size:
            heads.lm_head_size = size
            rows = nn.Parameter(self.lm_heads.detach()[:, :size], requires_grad=False)
            # A copied module shares this table with the original.
            heads._parameters = {**self._parameters, "lm_heads": rows}
        return heads

    def save(
        self,
        folder: str | os.PathLike[str],
        base_model: str | None = None,
        accuracies: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """Writes `config.json` and weights in the published layout; the name of the target is by default as loaded."""
        if self.token_map is not None:
            raise SpecConfigError(
                "Medusa heads with a cut vocabulary (`token_map`) cannot be saved: the published layout has no place "
                "for the map. Keep the checkpoint that they were loaded from."
            )
        accuracies = self.accuracies if accuracies is None else accuracies
        config = {
            "base_model_name_or_path": base_model or self.base_model,
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "transformers_version": transformers.__version__,
        }
        if self.lm_heads is None:
            config["version"] = "2"
        if accuracies is not None:
            config["medusa_accuracies"] = [[round(float(share), 4) for share in ranks] for ranks in accuracies]
        tensors = {}
        for head in range(self.num_heads):
            for layer, weight in enumerate(self.weights):
                # Other readers count on the biases.
                bias = self.biases[layer][head] if self.biases else weight.new_zeros(self.hidden_size)
                tensors[f"{head}.{layer}.linear.weight"] = weight[head]
                tensors[f"{head}.{layer}.linear.bias"] = bias
            if self.lm_heads is not None:
                lm_head = self.lm_heads[min(head, len(self.lm_heads) - 1)]
                tensors[f"{head}.{self.num_layers}.weight"] = lm_head * self.logit_scale
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        save_checkpoint(folder, config, tensors, MEDUSA_FILES[0])


def _linear(stream: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Every head's linear map: `(K, R, out)` for a stream `(R, in)` that all heads read, or `(K, R, in)`."""
    if stream.dim() == 2:
        flat = F.linear(stream, weight.flatten(0, 1), None if bias is None else bias.flatten())
        return flat.unflatten(1, weight.shape[:2]).transpose(0, 1)
    product = stream @ weight.transpose(1, 2)
    return product if bias is None else product + bias[:, None]
