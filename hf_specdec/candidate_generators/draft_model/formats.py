"""The formats of whole models that draft. Configs of heads often have their class names."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from ...checkpoints.format import Format
from ...checkpoints.header import TargetNeeds
from ...checkpoints.reader import CheckpointReader
from ...checkpoints.settings import COUNT, FLAG, INDEX, INDICES, MOST, NUMBER, Kind, is_int
from ...errors import shown


# Beside the weights of PARD-2 models, for the target's states.
PROJECTION_FILE = "warp_model.bin"

# Names of the factor of the projected states, the first to be asked first, and where none is stated.
_SCALES = ("pard2_scale", "pard_scale", "feat_scale")
_USUAL_SCALE = 0.02


def reads_target(config: Any) -> bool:
    """Tells PARD-2 models, which read states of the target, by their config: one of transformers."""
    return bool(getattr(config, "pard2", False)) or getattr(config, "spd_type", None) == "pard2"


class DraftModelReader(CheckpointReader):
    """A causal language model, or one with an encoder, which transformers loads."""

    noun = "draft model"
    blocks: ClassVar[tuple[str, ...]] = ("", "text_config")
    settings: ClassVar[dict[str, Kind]] = CheckpointReader.settings | {
        "pard2_target_layers": INDICES,
        "pard2_target_dim": COUNT,
        "pard2_proj_bias": FLAG,
        "sliding_window": INDEX,
        **dict.fromkeys(_SCALES, NUMBER),
    }

    def rename(self, stored: str) -> str:
        return stored

    @property
    def needs(self) -> TargetNeeds:
        return TargetNeeds(vocab_size=self.setting("vocab_size"))

    def check(self) -> None:
        # What it computes is for transformers to know; masks are made here.
        self.setting("sliding_window")
        token, size = self.stated("pard_token"), self.setting("vocab_size")
        if token is not None and not (is_int(token) and -1 <= token < (size or MOST)):
            raise self.wrong(
                f"has `pard_token`={shown(token)} in its config.json, and its vocabulary has {size} tokens",
                "Correct it, or remove it to draft token by token.",
            )
        if self.stated("pard2") or self.stated("spd_type") == "pard2":
            _ = self.target_layers

    @property
    def target_layers(self) -> list[int]:
        """States of the target that a PARD-2 model reads, by their indices in transformers' `hidden_states`."""
        layers = self.setting("pard2_target_layers")
        if not layers:
            raise self.wrong(
                "is a PARD-2 model, and its config.json does not say `pard2_target_layers`",
                "Add it, or remove `pard2` and `spd_type` to draft from the tokens alone.",
            )
        return layers

    @property
    def target_scale(self) -> float:
        """Factor of their projection."""
        scale = self.first_setting(*_SCALES)
        return _USUAL_SCALE if scale is None else float(scale)


_format = partial(Format, method="draft_model", reader=DraftModelReader, is_hint=True)

FORMATS = (
    _format(
        "pard2",
        "AMD",
        tuple(f"pard_token=.*&{mark}&architectures=.*ForCausalLM" for mark in ("pard2=True", "spd_type=pard2")),
    ),
    _format("pard", "AMD", ("pard_token=.*&architectures=.*ForCausalLM",)),
    _format(
        "causal-lm",
        "transformers",
        ("architectures=.*(ForCausalLM|LMHeadModel)", "architectures=.*ForConditionalGeneration&text_config=.*"),
    ),
    _format(
        "encoder-decoder",
        "transformers",
        ("architectures=.*(ForConditionalGeneration|MTModel)&is_encoder_decoder=True",),
    ),
)
