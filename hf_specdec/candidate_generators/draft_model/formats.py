"""The formats of whole models that draft. Configs of heads often have their class names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ...checkpoints.format import Format
from ...checkpoints.header import TargetNeeds
from ...checkpoints.reader import CheckpointReader
from ...checkpoints.settings import COUNT


class DraftModelReader(CheckpointReader):
    """A causal language model, which transformers loads."""

    noun = "draft model"

    @staticmethod
    def places_in(config):
        nested = config.get("text_config")
        return (config, nested) if isinstance(nested, Mapping) else (config,)

    def rename(self, stored):
        return stored

    @property
    def needs(self):
        return TargetNeeds(vocab_size=self.setting("vocab_size", COUNT))

    def refusal(self):
        # What it computes is for transformers to know.
        return None


_format = partial(Format, method="draft_model", reader=DraftModelReader, is_hint=True)

FORMATS = (
    _format("pard", "AMD", ("pard_token=.*&architectures=.*ForCausalLM",)),
    _format(
        "causal-lm",
        "transformers",
        ("architectures=.*(ForCausalLM|LMHeadModel)", "architectures=.*ForConditionalGeneration&text_config=.*"),
    ),
)
