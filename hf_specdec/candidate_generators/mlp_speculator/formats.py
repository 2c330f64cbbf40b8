"""The published formats of MLP speculators: `config.json`, and tensors `{emb,proj,head,ln}.<stage>.{weight,bias}`.

Tied stages share one set of weights, of which a safetensors file holds the first names only: stage 0 of emb, head and
ln, stages 0 and 1 of proj (stage 0 reads another width).

Shapes: n stages, H hidden size of the target, D inner size, V vocabulary.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, ClassVar

from ...checkpoints.format import Format, Unsupported
from ...checkpoints.header import TargetNeeds
from ...checkpoints.reader import CheckpointReader
from ...checkpoints.settings import COUNT, FLAG, INDEX, Kind, count_up_to
from ...threads import cached_property


# Stages, and candidates that are kept: published ones have at most 5.
MOST_DRAFTED = count_up_to(1024)


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
    """

    emb_dim: int = 4096
    inner_dim: int = 0
    vocab_size: int = 32000
    n_predict: int = 3
    top_k_tokens_per_head: tuple[int, ...] = (5, 4, 3)
    n_candidates: int = 5
    tie_weights: bool = False
    scale_input: bool = False

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


_LSTM, _FORGET = ("method=sum_lstm", "architectures=ArcticLSTM.*"), ("forget_emb.0.weight",)
_RNN = ("method=sum_rnn", "architectures=ArcticMLP.*")


class MLPSpeculatorReader(CheckpointReader):
    """A checkpoint with the stages of an MLP speculator."""

    noun = "MLP speculator"
    settings: ClassVar[dict[str, Kind]] = CheckpointReader.settings | {
        **dict.fromkeys(("emb_dim", "vocab_size"), COUNT),
        **dict.fromkeys(("n_predict", "n_candidates"), MOST_DRAFTED),
        **dict.fromkeys(("tie_weights", "scale_input"), FLAG),
        "inner_dim": INDEX,
    }
    notes = "top_k_tokens_per_head"
    unsupported: ClassVar[tuple[Unsupported, ...]] = (
        Unsupported("is an LSTM speculator (Arctic)", _LSTM, _FORGET),
        Unsupported("is an Arctic MLP speculator, whose stages may be deeper than the published ones", _RNN),
    )
    instead = "Pass an MLP speculator of the original format."
    sizes_by, fitting = "its config.json asks", "Pass a checkpoint whose config fits its weights."

    @cached_property
    def config(self) -> MLPSpeculatorConfig:
        """The record; `hidden_size` is another name of `emb_dim`.

        Raises:
            CheckpointFormatError: A setting is of the wrong type or out of range.
        """
        names = (item.name for item in fields(MLPSpeculatorConfig) if item.name in self.settings)
        found = {name: self.setting(name) for name in names} | {
            "emb_dim": self.first_setting("emb_dim", "hidden_size")
        }
        found = {name: value for name, value in found.items() if value is not None}
        stages = found.get("n_predict", MLPSpeculatorConfig.n_predict)
        what = f"one positive integer for each of its n_predict={stages} stages"
        widths = self.setting("top_k_tokens_per_head", Kind(lambda value: _are_widths(value, stages), what))
        if widths is None and stages != MLPSpeculatorConfig.n_predict:
            raise self.wrong(
                f"has no `top_k_tokens_per_head` in its config.json, which must be {what}", "Add it there."
            )
        return MLPSpeculatorConfig(**found, **({} if widths is None else {"top_k_tokens_per_head": tuple(widths)}))

    @property
    def needs(self) -> TargetNeeds:
        return TargetNeeds(hidden_size=self.config.emb_dim, vocab_size=self.config.vocab_size)

    @property
    def num_draft_tokens(self) -> int:
        return self.config.n_predict

    def check(self) -> None:
        super().check()
        config = self.config
        if self.header.shapes is None:
            return
        # Number and width of the stages, before a network is made by the config.
        for part in ("emb", "head"):
            found = re.compile(rf"{part}\.([0-9]{{1,9}})\.")
            stages = 1 + max((int(match[1]) for match in map(found.match, self.stored) if match), default=-1)
            if stages and stages not in ({1, config.n_predict} if config.tie_weights else {config.n_predict}):
                tied = "true" if config.tie_weights else "false"
                raise self.wrong(
                    f"has {stages} stages in {self.header.file} (`{part}`), and its config.json says "
                    f"n_predict={config.n_predict} with tie_weights={tied}",
                    self.fitting,
                )
        if self.matrix("emb.0.weight") != (config.vocab_size, config.width):
            raise self.wrong_shape("emb.0.weight", (config.vocab_size, config.width))
        if not config.tie_weights:
            self.check_count(config.n_predict, f"{config.n_predict} stages")


def _are_widths(value: Any, stages: int) -> bool:
    return isinstance(value, list) and len(value) == stages and all(map(COUNT.is_valid, value))


_STAGE = tuple(f"{part}.0.weight" for part in ("emb", "proj", "head", "ln"))

_format = partial(Format, method="mlp_speculator", reader=MLPSpeculatorReader)

# The special before the usual.
FORMATS = (
    _format("lstm-speculator", "Snowflake", _LSTM, _FORGET),
    _format("rnn-speculator", "Snowflake", _RNN),
    _format("mlp-speculator", "IBM, PyTorch, Nebius", ("model_type=mlp_speculator",), _STAGE),
)
