"""MLP speculator: a small multi-stage network that drafts from one hidden state of the target.

Wertheimer et al. 2024 (arXiv:2404.19124). Stage i takes the state of the stage before it and the token chosen there,
and gives a new state and logits; stage 0 takes the hidden state that the target's head has read, and the token that
was chosen from it. With N(v) = v / sqrt(mean(v^2) + 1e-6) and two constants a, b that depend on n and D alone:

    s_{i+1} = GELU(weight_i * N(proj_i s_i + b/a * emb_i[token_i]) + bias_i),    logits_i = head_i s_{i+1}

Checkpoint: `config.json` with `model_type: mlp_speculator`; tensors `speculator.{emb,proj,head,ln}.<stage>.weight` and
`speculator.ln.<stage>.bias`. Tied stages share one set of weights, of which a safetensors file holds the first names
only: stage 0 of emb, head and ln, stages 0 and 1 of proj (stage 0 reads another width).

Shapes: n stages, H hidden size of the target, D inner size, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ...checkpoints.checkpoint import Checkpoint, check_target, head_placement, save_checkpoint, tensor_shapes
from ...checkpoints.config_keys import refused_key
from ...checkpoints.loading import loads_checkpoint
from ...checkpoints.settings import MOST, is_int
from ...errors import CheckpointFormatError, SpecConfigError, shown


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig


_PREFIX = "speculator."

# Stages, and candidates that are kept: published ones have at most 5.
_MOST_DRAFTED = 1024
_EPSILON = 1e-6


@dataclass(frozen=True)
class MLPSpeculatorConfig:
    """The published keys of `config.json`.

    Args:
        emb_dim (`int`): H, width of the target's hidden states.
        inner_dim (`int`): D, width of the speculator; 0 for H.
        vocab_size (`int`): V.
        n_predict (`int`): n, number of stages and most drafted tokens of a chain.
        top_k_tokens_per_head (`tuple[int, ...]` of length n): Continuations that each stage gives every candidate.
        n_candidates (`int`): Candidate sequences that are kept.
        tie_weights (`bool`): The stages share their weights.
        scale_input (`bool`): The target's state is normalised first.

    Raises:
        CheckpointFormatError: A value has the wrong type or is out of range.
    """

    emb_dim: int = 4096
    inner_dim: int = 0
    vocab_size: int = 32000
    n_predict: int = 3
    top_k_tokens_per_head: tuple[int, ...] = (5, 4, 3)
    n_candidates: int = 5
    tie_weights: bool = False
    scale_input: bool = False

    def __post_init__(self):
        least = {"emb_dim": 1, "inner_dim": 0, "vocab_size": 1, "n_predict": 1, "n_candidates": 1}
        for name, minimum in least.items():
            most = _MOST_DRAFTED if name in ("n_predict", "n_candidates") else MOST
            if not is_int(getattr(self, name)) or not minimum <= getattr(self, name) <= most:
                raise CheckpointFormatError(
                    f"`{name}` of an MLP speculator must be an integer of at least {minimum} and at most {most}, got "
                    f"{shown(getattr(self, name))}."
                )
        for name in ("tie_weights", "scale_input"):
            if not isinstance(getattr(self, name), bool):
                raise CheckpointFormatError(
                    f"`{name}` of an MLP speculator must be true or false, got {shown(getattr(self, name))}."
                )
        widths = self.top_k_tokens_per_head
        is_list = isinstance(widths, (list, tuple)) and all(is_int(width) and 1 <= width <= MOST for width in widths)
        if not is_list or len(widths) != self.n_predict:
            raise CheckpointFormatError(
                f"`top_k_tokens_per_head` of an MLP speculator must have one positive integer for each of its "
                f"n_predict={self.n_predict} stages, got {shown(widths)}."
            )
        object.__setattr__(self, "top_k_tokens_per_head", tuple(widths))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MLPSpeculatorConfig:
        """From `config.json`; other keys are ignored, `hidden_size` is another name of `emb_dim`."""
        values = {"emb_dim": values["hidden_size"], **values} if "hidden_size" in values else values
        return cls(**{item.name: values[item.name] for item in fields(cls) if item.name in values})

    def to_dict(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], **asdict(self)}

    @property
    def width(self) -> int:
        """D."""
        return self.inner_dim or self.emb_dim

    @property
    def state_weight(self) -> float:
        """a: the share of the target's state in the variance halves over the stages."""
        return 0.5 ** (0.5 / self.n_predict)

    @property
    def embedding_weight(self) -> float:
        """b: what the embedding of a token is multiplied by."""
        return math.sqrt((1 - self.state_weight**2) * self.width / 2)


class MLPSpeculator(nn.Module):
    """The network. Its state dict is the published layout without the prefix, every tied tensor once.

    Args:
        config (`MLPSpeculatorConfig`): Sizes. The weights are drawn for training.
    """

    spec_method = "mlp_speculator"

    def __init__(self, config: MLPSpeculatorConfig):
        super().__init__()
        self.config = config
        size, vocab_size = config.width, config.vocab_size
        stages = 1 if config.tie_weights else config.n_predict
        # Stage 0 reads the target's width, so that tied projections are two.
        projections = min(2, config.n_predict) if config.tie_weights else config.n_predict
        inputs = [config.emb_dim] + [size] * (projections - 1)
        self.emb = nn.ModuleList(nn.Embedding(vocab_size, size) for _ in range(stages))
        self.proj = nn.ModuleList(nn.Linear(width, size, bias=False) for width in inputs)
        self.head = nn.ModuleList(nn.Linear(size, vocab_size, bias=False) for _ in range(stages))
        self.ln = nn.ModuleList(_ScaleAndShift(size) for _ in range(stages))
        self._token_weight = config.embedding_weight / config.state_weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in (*self.emb, *self.proj, *self.head):
            nn.init.normal_(module.weight, std=self.config.width**-0.5)

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        """The state that stage 0 takes, from the target's hidden states `(..., H)`."""
        return _normed(hidden) / math.sqrt(2) if self.config.scale_input else hidden

    def stage(self, index: int, vocab_size: int | None = None) -> MLPStage:
        """Stage `index`, from 0; for a target of fewer tokens than V with the logits of those below `vocab_size`."""
        # Tied stages use the last weights there are.
        emb, proj, head, ln = (
            modules[min(index, len(modules) - 1)] for modules in (self.emb, self.proj, self.head, self.ln)
        )
        rows = head.weight[:vocab_size]
        return MLPStage(emb.weight, proj.weight, ln.weight, ln.bias, rows, self._token_weight)

    def step(self, index: int, state: torch.Tensor, tokens: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One stage.

        Args:
            index (`int`): Which, from 0.
            state (`torch.Tensor` of shape `(..., H)` for stage 0, else `(..., D)`): From `start`, or the stage before.
            tokens (`torch.LongTensor` of shape `(...)`): The token behind each state.

        Returns:
            The new states `(..., D)` and the logits `(..., V)` of the tokens behind `tokens`.
        """
        return self.stage(index)(state, tokens)

    def forward(self, hidden: torch.Tensor, tokens: torch.LongTensor) -> torch.Tensor:
        """Logits of all stages, teacher-forced.

        Args:
            hidden (`torch.Tensor` of shape `(..., H)`): States behind the final norm of the target.
            tokens (`torch.LongTensor` of shape `(..., m)`, m at most n): The tokens behind each state. Entry 0 is the
                one that the target predicted from it.

        Returns:
            `torch.Tensor` of shape `(m, ..., V)`: `[i]` predicts the token behind `tokens[..., i]`.
        """
        state, logits = self.start(hidden), []
        for index in range(tokens.shape[-1]):
            state, of_stage = self.step(index, state, tokens[..., index])
            logits.append(of_stage)
        return torch.stack(logits)

    def save(self, folder: str | Path) -> None:
        """Writes `config.json` and `model.safetensors` in the published layout; the folder is made if needed."""
        tensors = {_PREFIX + name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_checkpoint(folder, self.config.to_dict(), tensors)


class MLPStage(NamedTuple):
    """A stage as a function over its weights, without module calls, which cost more than a small stage's arithmetic.

    A stage with another recurrence is another such function; whatever it carries on is its state.
    """

    embedding: torch.Tensor
    projection: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor
    head: torch.Tensor
    token_weight: float

    def __call__(self, state: torch.Tensor, tokens: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `MLPSpeculator.step`."""
        embedded = F.embedding(tokens, self.embedding)
        mixed = torch.add(F.linear(state, self.projection), embedded, alpha=self.token_weight)
        state = F.gelu(torch.addcmul(self.shift, _normed(mixed), self.scale))
        return state, F.linear(state, self.head)


class _ScaleAndShift(nn.Module):
    """What follows the norm of a stage."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))


def _normed(values: torch.Tensor) -> torch.Tensor:
    """N over the last dimension; rounding to half precision in between costs acceptance."""
    wide = values.float()
    return F.rms_norm(wide, wide.shape[-1:], None, _EPSILON).to(values.dtype)


@loads_checkpoint
def load_mlp_speculator(config: SpeculativeConfig, target_model: nn.Module) -> MLPSpeculator:
    """Loads `config.model` in the target's dtype and on its device, unless the settings say otherwise.

    The weights stay as they are stored, also where the target's vocabulary is padded otherwise.

    Args:
        config (`SpeculativeConfig`): `model`, `revision`, `subfolder`, `dtype`, `device`.
        target_model (`PreTrainedModel`): The target.

    Raises:
        SpecConfigError: No checkpoint was named, or quantisation was asked for.
        CheckpointFormatError: The checkpoint is incomplete, contradicts itself, or was made for another target.
    """
    if config.model is None:
        raise SpecConfigError(
            "spec_method='mlp_speculator' needs a speculator. Pass its folder or repo id as `spec_model`."
        )
    dtype, device = head_placement(config, target_model)
    checkpoint = Checkpoint(config, unwrap=True)
    if reason := refusal(checkpoint.shapes, checkpoint.config):
        raise CheckpointFormatError(f"'{checkpoint.name}' {reason}")
    sizes = MLPSpeculatorConfig.from_dict(checkpoint.config)
    check_target(f"'{checkpoint.name}': the stages", sizes.emb_dim, sizes.vocab_size, target_model)
    _check_stages(checkpoint, sizes)
    with torch.device("meta"):
        speculator = MLPSpeculator(sizes)
    shapes = tensor_shapes(speculator)
    checkpoint.require(shapes, "the MLP speculator")
    for name, shape in shapes.items():
        _check_shape(checkpoint, name, shape)
    speculator.load_state_dict(checkpoint.read_weights(shapes, dtype, device), assign=True)
    return speculator.eval().requires_grad_(False)


def refusal(names: Iterable[str], config: Mapping[str, Any]) -> str | None:
    """Why stages with this config are not supported, whatever their tensors are called; `None` where they are."""
    try:
        MLPSpeculatorConfig.from_dict(config)
    except CheckpointFormatError as error:
        return f"cannot be used, for its config.json is not usable. {error}"
    return refused_key(config, "mlp_speculator", {item.name for item in fields(MLPSpeculatorConfig)})


def fitting_speculator(speculator: nn.Module, target_model: nn.Module) -> MLPSpeculator:
    """A speculator that was not loaded here, such as one in training, checked against the target.

    Raises:
        SpecConfigError: It is no MLP speculator, or for a target of another width or vocabulary.
    """
    if not isinstance(speculator, MLPSpeculator):
        raise SpecConfigError(
            f"spec_method='mlp_speculator' drafts with an MLPSpeculator, got a {type(speculator).__name__}. Pass one, "
            "or the folder or repo id of its checkpoint as `spec_model`."
        )
    sizes = speculator.config
    check_target("The stages of the MLP speculator", sizes.emb_dim, sizes.vocab_size, target_model, SpecConfigError)
    return speculator


def _check_stages(checkpoint: Checkpoint, sizes: MLPSpeculatorConfig) -> None:
    """Number and width of the stages that the weights have, against the config: no network is made for wrong ones."""
    for part in ("emb", "head"):
        found = re.compile(rf"{part}\.([0-9]{{1,9}})\.")
        stages = 1 + max((int(match[1]) for match in map(found.match, checkpoint.shapes) if match), default=-1)
        allowed = {1, sizes.n_predict} if sizes.tie_weights else {sizes.n_predict}
        if stages and stages not in allowed:
            tied = "true" if sizes.tie_weights else "false"
            raise CheckpointFormatError(
                f"'{checkpoint.name}' has {stages} stages in {checkpoint.file} (`{part}`), and its config.json "
                f"says n_predict={sizes.n_predict} with tie_weights={tied}. Pass a checkpoint whose config fits its "
                "weights."
            )
    first = "emb.0.weight"
    checkpoint.require([first], "the MLP speculator")
    _check_shape(checkpoint, first, (sizes.vocab_size, sizes.width))
    if not sizes.tie_weights:
        checkpoint.check_count(sizes.n_predict, f"{sizes.n_predict} stages")


def _check_shape(checkpoint: Checkpoint, name: str, expected: tuple[int, ...]) -> None:
    found = checkpoint.shapes[name]
    if found != expected:
        raise CheckpointFormatError(
            f"'{checkpoint.name}': {name} has the shape {list(found)}, and by config.json it would be "
            f"{list(expected)}. Pass a checkpoint whose config fits its weights."
        )
