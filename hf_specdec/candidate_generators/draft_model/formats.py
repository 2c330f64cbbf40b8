"""The formats of whole models that draft. Configs of heads often have their class names."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from ...checkpoints.format import Format
from ...checkpoints.header import TargetNeeds
from ...checkpoints.reader import CheckpointReader
from ...checkpoints.settings import MOST, is_int
from ...errors import shown


class DraftModelReader(CheckpointReader):
    """A causal language model, or one with an encoder, which transformers loads."""

    noun = "draft model"
    blocks: ClassVar[tuple[str, ...]] = ("", "text_config")

    def rename(self, stored: str) -> str:
        return stored

    @property
    def needs(self) -> TargetNeeds:
        return TargetNeeds(vocab_size=self.setting("vocab_size"))

    def check(self) -> None:
        # What it computes is for transformers to know.
        token, size = self.stated("pard_token"), self.setting("vocab_size")
        if token is not None and not (is_int(token) and -1 <= token < (size or MOST)):
            raise self.wrong(
                f"has `pard_token`={shown(token)} in its config.json, and its vocabulary has {size} tokens",
                "Correct it, or remove it to draft token by token.",
            )


_format = partial(Format, method="draft_model", reader=DraftModelReader, is_hint=True)

FORMATS = (
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
