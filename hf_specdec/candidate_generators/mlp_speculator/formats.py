"""The published formats of MLP speculators: `config.json`, and tensors `{emb,proj,head,ln}.<stage>.{weight,bias}`.

Tied stages share one set of weights, of which a safetensors file holds the first names only: stage 0 of emb, head and
ln, stages 0 and 1 of proj (stage 0 reads another width).

Shapes: n stages, H hidden size of the target, D inner size, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

from ...checkpoints.format import Format, Unsupported
from ...checkpoints.header import TargetNeeds
from ...checkpoints.reader import CheckpointReader
from ...checkpoints.settings import MOST, is_int
from ...errors import CheckpointFormatError, shown
from ...threads import cached_property


# Stages, and candidates that are kept: published ones have at most 5.
_MOST_DRAFTED = 1024


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


_LSTM = Unsupported(
    "is an LSTM speculator (Arctic), which is not supported. Pass an MLP speculator.",
    ("method=sum_lstm", "architectures=ArcticLSTM.*"),
    ("forget_emb.0.weight",),
)
_RNN = Unsupported(
    "is an Arctic MLP speculator, whose stages may be deeper than the published ones, which is not supported. Pass an "
    "MLP speculator of the original format.",
    ("method=sum_rnn", "architectures=ArcticMLP.*"),
)


class MLPSpeculatorReader(CheckpointReader):
    """A checkpoint with the stages of an MLP speculator."""

    noun = "MLP speculator"
    keys = " ".join(item.name for item in fields(MLPSpeculatorConfig))
    unsupported = (_LSTM, _RNN)

    @cached_property
    def config(self) -> MLPSpeculatorConfig:
        return MLPSpeculatorConfig.from_dict(self.header.config)

    @property
    def needs(self) -> TargetNeeds:
        return TargetNeeds(hidden_size=self.config.emb_dim, vocab_size=self.config.vocab_size)

    @property
    def num_draft_tokens(self) -> int:
        return self.config.n_predict

    def refusal(self) -> str | None:
        if reason := super().refusal():
            return reason
        try:
            config = self.config
        except CheckpointFormatError as error:
            return f"cannot be used, for its config.json is not usable. {error}"
        if self.header.shapes is not None:
            self._check_stages(config)
        return None

    def _check_stages(self, config: MLPSpeculatorConfig) -> None:
        """Checks number and width of the stages that the weights have, before a network is made by the config."""
        for part in ("emb", "head"):
            found = re.compile(rf"{part}\.([0-9]{{1,9}})\.")
            stages = 1 + max((int(match[1]) for match in map(found.match, self.stored) if match), default=-1)
            if stages and stages not in ({1, config.n_predict} if config.tie_weights else {config.n_predict}):
                tied = "true" if config.tie_weights else "false"
                raise self.wrong(
                    f"has {stages} stages in {self.header.file} (`{part}`), and its config.json says "
                    f"n_predict={config.n_predict} with tie_weights={tied}",
                    "Pass a checkpoint whose config fits its weights.",
                )
        self.check_shapes({"emb.0.weight": (config.vocab_size, config.width)})
        if not config.tie_weights:
            self.check_count(config.n_predict, f"{config.n_predict} stages")

    def check_shapes(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Checks that these tensors are there and have these shapes."""
        self.require(expected, "the MLP speculator")
        for name, shape in expected.items():
            if self.shape(name) != shape:
                raise CheckpointFormatError(
                    f"'{self.name}': {name} has the shape {list(self.shape(name))}, and by config.json it would be "
                    f"{list(shape)}. Pass a checkpoint whose config fits its weights."
                )


_STAGE = tuple(f"{part}.0.weight" for part in ("emb", "proj", "head", "ln"))

_format = partial(Format, method="mlp_speculator", reader=MLPSpeculatorReader)

# The special before the usual.
FORMATS = (
    _format("lstm-speculator", "Snowflake", _LSTM.config, _LSTM.tensors),
    _format("rnn-speculator", "Snowflake", _RNN.config),
    _format("mlp-speculator", "IBM, PyTorch, Nebius", ("model_type=mlp_speculator",), _STAGE),
)
