"""The formats of whole models that draft. Configs of heads often have their class names."""

from __future__ import annotations

from collections.abc import Mapping

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

    @staticmethod
    def rename(stored):
        return stored

    @property
    def needs(self):
        return TargetNeeds(vocab_size=self.setting("vocab_size", COUNT))

    def refusal(self):
        # What it computes is for transformers to know.
        return None


FORMATS = (
    Format(
        "pard",
        "draft_model",
        "AMD",
        DraftModelReader,
        ("pard_token=.*&architectures=.*ForCausalLM",),
        is_hint=True,
    ),
    Format(
        "causal-lm",
        "draft_model",
        "transformers",
        DraftModelReader,
        ("architectures=.*(ForCausalLM|LMHeadModel)", "architectures=.*ForConditionalGeneration&text_config=.*"),
        is_hint=True,
    ),
)
