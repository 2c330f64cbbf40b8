"""Drafts of a smaller language model (Leviathan et al. 2022, arXiv:2211.17192)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...method import Method
from ...settings.checks import Options, setting
from ...training.options import shared_option


@dataclass(frozen=True)
class DraftModelTraining(Options):
    """Options of training a draft model."""

    draft_model: str | None = setting(None, "Checkpoint to train on: a repo id or a folder.")
    from_scratch: Mapping[str, Any] | None = setting(
        None, "Sizes of a new Llama model instead: hidden_size=256,num_hidden_layers=4,... or JSON."
    )
    kl_weight: float = shared_option("kl_weight", 1.0)


METHODS = (
    Method(
        name="draft_model",
        noun="draft model",
        drafts_from="a small model, best with the same tokenizer",
        generator="generator:DraftModelCandidateGenerator",
        formats="network",
        weights="a draft model",
        is_language_model=True,
        aliases=("assistant_model",),
        preference=70,
        tags=("draft-model",),
        recipe="recipe:DraftModelRecipe",
        training=DraftModelTraining,
        vllm="draft_model",
        sglang="STANDALONE",
        sglang_counts_steps=True,
        transformers="assistant_model",
        healthy_first_rate=0.3,
        demo="draft",
    ),
)
