"""MLP speculator: a small multi-stage network that drafts from one hidden state of the target.

Wertheimer et al. 2024 (arXiv:2404.19124). Stage i takes the state of the stage before it and the token chosen there,
and gives a new state and logits; stage 0 takes the hidden state that the target's head has read, and the token that
was chosen from it. With N(v) = v / sqrt(mean(v^2) + 1e-6) and two constants a, b that depend on n and D alone:

    s_{i+1} = GELU(weight_i * N(proj_i s_i + b/a * emb_i[token_i]) + bias_i),    logits_i = head_i s_{i+1}

Shapes: n stages, H hidden size of the target, D inner size, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ...checkpoints.header import TargetNeeds
from ...checkpoints.loading import LoadedNetwork, save_checkpoint
from ...checkpoints.reader import CheckpointReader
from ...settings import SpeculativeConfig
from ...target_facts import vocabulary_size
from .formats import MLPSpeculatorConfig, MLPSpeculatorReader


_PREFIX = "speculator."

_EPSILON = 1e-6


class MLPSpeculator(LoadedNetwork):
    """The network. Its state dict is the published layout without the prefix, every tied tensor once."""

    spec_method = "mlp_speculator"
    reader_class: ClassVar[type[MLPSpeculatorReader]] = MLPSpeculatorReader
    config: MLPSpeculatorConfig

    def __init__(self, config: MLPSpeculatorConfig):
        super().__init__()
        self.config = config
        self.needs: TargetNeeds = config.needs
        size, vocab_size = config.width, config.vocab_size
        stages = 1 if config.tie_weights else config.n_predict
        # Stage 0 reads the target's width, so that tied projections are two.
        projections = min(2, config.n_predict) if config.tie_weights else config.n_predict
        inputs = [config.emb_dim] + [size] * (projections - 1)
        self.emb: nn.ModuleList = nn.ModuleList(nn.Embedding(vocab_size, size) for _ in range(stages))
        self.proj: nn.ModuleList = nn.ModuleList(nn.Linear(width, size, bias=False) for width in inputs)
        self.head: nn.ModuleList = nn.ModuleList(nn.Linear(size, vocab_size, bias=False) for _ in range(stages))
        # Only their scale and shift: the norm is N.
        self.ln: nn.ModuleList = nn.ModuleList(nn.LayerNorm(size) for _ in range(stages))
        self.target_size: int = config.vocab_size  # tokens of the target
        for module in (*self.emb, *self.proj, *self.head):
            nn.init.normal_(module.weight, std=size**-0.5)

    def fitted(
        self, config: SpeculativeConfig, target_model: nn.Module, reader: CheckpointReader | None = None
    ) -> MLPSpeculator:
        size = vocabulary_size(target_model)
        speculator = self if size == self.target_size else copy.copy(self)
        speculator.target_size = size
        return speculator

    @property
    def num_tokens(self) -> int:
        """Tokens that can be drafted."""
        return min(self.config.vocab_size, self.target_size)

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        """The state that stage 0 takes, from the target's hidden states `(..., H)`."""
        return _normed(hidden) / math.sqrt(2) if self.config.scale_input else hidden

    def stage(self, index: int) -> MLPStage:
        """Stage `index`, from 0, with the logits of tokens that the target has."""
        # Tied stages use the last weights there are.
        emb, proj, head, ln = (
            modules[min(index, len(modules) - 1)] for modules in (self.emb, self.proj, self.head, self.ln)
        )
        rows = head.weight[: self.num_tokens]
        return MLPStage(emb.weight, proj.weight, ln.weight, ln.bias, rows, self.config.token_weight)

    def forward(self, hidden: torch.Tensor, tokens: torch.LongTensor) -> torch.Tensor:
        """Logits `(m, ..., V)` of the first m stages after states `(..., H)` and the text's tokens `(..., m)`."""
        state, logits = self.start(hidden), []
        for index in range(tokens.shape[-1]):
            state, of_stage = self.stage(index)(state, tokens[..., index])
            logits.append(of_stage)
        return torch.stack(logits)

    def save(self, folder: str | Path) -> None:
        """Writes `config.json` and `model.safetensors` in the published layout; the folder is made if needed."""
        tensors = {_PREFIX + name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        config = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"]}
        save_checkpoint(folder, config | asdict(self.config), tensors)


class MLPStage(NamedTuple):
    """A stage as a function over its weights, without module calls, which cost more than its arithmetic."""

    embedding: torch.Tensor
    projection: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor
    head: torch.Tensor
    token_weight: float

    def __call__(self, state: torch.Tensor, tokens: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """New states `(..., D)` and logits `(..., V)`, from the states before and tokens `(...)`."""
        embedded = F.embedding(tokens, self.embedding)
        mixed = torch.add(F.linear(state, self.projection), embedded, alpha=self.token_weight)
        state = F.gelu(torch.addcmul(self.shift, _normed(mixed), self.scale))
        return state, F.linear(state, self.head)


def _normed(values: torch.Tensor) -> torch.Tensor:
    """N over the last dimension; rounding to half precision in between costs acceptance."""
    wide = values.float()
    return F.rms_norm(wide, wide.shape[-1:], None, _EPSILON).to(values.dtype)
