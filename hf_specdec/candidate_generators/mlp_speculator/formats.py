"""The published formats of MLP speculators: `config.json`, and tensors `{emb,proj,head,ln}.<stage>.{weight,bias}`.

Tied stages share one set of weights, of which a safetensors file holds the first names only: stage 0 of emb, head and
ln, stages 0 and 1 of proj (stage 0 reads another width).

Shapes: n stages, H hidden size of the target, D inner size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar

from ...checkpoints.format import Format, Unsupported
from ...checkpoints.header import TargetNeeds, TargetSizes
from ...checkpoints.reader import CheckpointReader
from ...checkpoints.schema import COUNT, FLAG, INDEX, Key, Tensor, count_up_to, keys, list_of
from ...threads import cached_property


# Stages, and candidates that are kept: published ones have at most 5.
MOST_DRAFTED = count_up_to(1024)


@dataclass(frozen=True)
class MLPSpeculatorConfig:
    """The published keys of `config.json`."""

    emb_dim: int = 4096  # H, width of the target's hidden states
    inner_dim: int = 0  # D, width of the speculator; 0 for H
    vocab_size: int = 32000  # V
    n_predict: int = 3  # n, number of stages and most drafted tokens of a chain
    top_k_tokens_per_head: tuple[int, ...] = (5, 4, 3)  # continuations that each stage gives every candidate
    n_candidates: int = 5  # sequences that are kept
    tie_weights: bool = False  # the stages share their weights
    scale_input: bool = False  # the target's state is normalised first

    @property
    def needs(self) -> TargetNeeds:
        """The target that it was made for."""
        return TargetNeeds(hidden_size=self.emb_dim, vocab_size=self.vocab_size)

    @property
    def width(self) -> int:
        """D."""
        return self.inner_dim or self.emb_dim

    @property
    def token_weight(self) -> float:
        """b/a; by a the share of the target's state in the variance halves over the stages."""
        state_weight = 0.5 ** (0.5 / self.n_predict)
        return math.sqrt((1 - state_weight**2) * self.width / 2) / state_weight


_LSTM, _FORGET = ("method=sum_lstm", "architectures=ArcticLSTM.*"), ("forget_emb.0.weight",)
_RNN = ("method=sum_rnn", "architectures=ArcticMLP.*")


class MLPSpeculatorReader(CheckpointReader):
    """A checkpoint with the stages of an MLP speculator."""

    noun = "MLP speculator"
    keys: ClassVar[tuple[Key, ...]] = (
        *CheckpointReader.keys,
        Key("emb_dim hidden_size", COUNT, MLPSpeculatorConfig.emb_dim),
        Key("vocab_size", COUNT, MLPSpeculatorConfig.vocab_size),
        Key("inner_dim", INDEX, MLPSpeculatorConfig.inner_dim),
        Key("n_predict", MOST_DRAFTED, MLPSpeculatorConfig.n_predict, size="stage"),
        Key("n_candidates", MOST_DRAFTED, MLPSpeculatorConfig.n_candidates),
        *keys("tie_weights scale_input", FLAG, False),
    )
    notes = "top_k_tokens_per_head"
    unsupported: ClassVar[tuple[Unsupported, ...]] = (
        Unsupported("is an LSTM speculator (Arctic)", _LSTM, _FORGET),
        Unsupported("is an Arctic MLP speculator, whose stages may be deeper than the published ones", _RNN),
    )
    instead = "Pass an MLP speculator of the original format."
    sizes_by = "its config.json asks"
    fitting = "Pass a checkpoint whose config fits its weights."

    @property
    def table(self) -> tuple[Tensor, ...]:
        # Of tied stages only the first ones count.
        stage, others = ("0", "1") if self.config.tie_weights else ("{stage}", "{stage}")
        return (
            Tensor(f"(emb|head).{stage}.weight", "V D"),
            Tensor("proj.0.weight", "D H"),
            Tensor(f"proj.{others}.weight", "D D", needed=self.config.n_predict > 1),
            Tensor(f"ln.{stage}.(weight|bias)", "D"),
        )

    @property
    def stated_sizes(self) -> dict[str, int]:
        return {"H": self.config.emb_dim, "D": self.config.width, "V": self.config.vocab_size}

    @cached_property
    def config(self) -> MLPSpeculatorConfig:
        """The record."""
        names = [item.name for item in fields(MLPSpeculatorConfig) if item.name != "top_k_tokens_per_head"]
        settings = {name: self.setting(name) for name in names}
        stages = settings["n_predict"]
        what = f"one positive integer for each of its n_predict={stages} stages"
        widths = self.setting("top_k_tokens_per_head", list_of(COUNT, what, stages))
        if widths is None and stages != MLPSpeculatorConfig.n_predict:
            raise self.wrong(
                f"has no `top_k_tokens_per_head` in its config.json, which must be {what}", "Add it there."
            )
        return MLPSpeculatorConfig(**settings, **({} if widths is None else {"top_k_tokens_per_head": tuple(widths)}))

    @property
    def needs(self) -> TargetNeeds:
        return self.config.needs

    @property
    def num_draft_tokens(self) -> int:
        return self.config.n_predict

    def record(self, target: TargetSizes) -> MLPSpeculatorConfig:
        self.check_target(target)
        return self.config


_STAGE = tuple(f"{part}.0.weight" for part in ("emb", "proj", "head", "ln"))

_format = partial(Format, method="mlp_speculator", reader=MLPSpeculatorReader)

# The special before the usual.
FORMATS = (
    _format("lstm-speculator", "Snowflake", _LSTM, _FORGET),
    _format("rnn-speculator", "Snowflake", _RNN),
    _format("mlp-speculator", "IBM, PyTorch, Nebius", ("model_type=mlp_speculator",), _STAGE),
)
