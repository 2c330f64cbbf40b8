"""Draft models: any causal language model that speaks the target's tokens, loaded and checked against the target."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import logging
from transformers.utils.import_utils import is_bitsandbytes_available

from ..errors import CheckpointFormatError, MissingDependencyError, SpecConfigError


logger = logging.get_logger(__name__)

_QUANTIZATION = {
    "bitsandbytes_4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes_fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "bitsandbytes_8bit": {"load_in_8bit": True},
}


def load_draft_model(config: Any, target_model: torch.nn.Module) -> torch.nn.Module:
    """Loads `config.model` in the target's dtype, on its device, unless the settings say otherwise.

    Args:
        config (`SpeculativeConfig`): `model`, `revision`, `code_revision`, `subfolder`, `trust_remote_code`, `dtype`,
            `device`, `quantization`.
        target_model (`PreTrainedModel`): The target.

    Raises:
        SpecConfigError: No draft model was named.
        CheckpointFormatError: The checkpoint cannot be loaded as a causal language model.
        MissingDependencyError: Quantisation was asked for and bitsandbytes is not installed.
    """
    if config.model is None:
        raise SpecConfigError(
            "spec_method='draft_model' needs a draft model. Pass its folder, repo id or the loaded model as "
            "`spec_model`."
        )
    dtype = target_model.dtype if config.dtype is None else config.dtype
    device = torch.device(target_model.device if config.device is None else config.device)
    arguments = {"dtype": dtype, "revision": config.revision, "trust_remote_code": config.trust_remote_code}
    if config.subfolder:
        arguments["subfolder"] = config.subfolder
    if config.code_revision:
        arguments["code_revision"] = config.code_revision
    if config.quantization:
        arguments["quantization_config"] = _quantization_config(config.quantization, dtype)
        arguments["device_map"] = {"": device}
    try:
        model = AutoModelForCausalLM.from_pretrained(config.model, **arguments)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointFormatError(f"The draft model '{config.model}' cannot be loaded: {error}") from error
    if not config.quantization:
        model = model.to(device)
    return model.eval()


def _quantization_config(name: str, dtype: Any) -> BitsAndBytesConfig:
    if not is_bitsandbytes_available():
        raise MissingDependencyError(
            f"quantization='{name}' needs bitsandbytes. Install it with: pip install \"hf-specdec[quant]\""
        )
    settings = dict(_QUANTIZATION[name])
    if settings.get("load_in_4bit"):
        settings["bnb_4bit_compute_dtype"] = dtype
    return BitsAndBytesConfig(**settings)


@dataclass(frozen=True)
class Vocabularies:
    """How two vocabularies of the same tokenizer relate.

    Attributes:
        target_size (`int`): Width of the target's logits.
        draft_size (`int`): Width of the draft's logits, and rows of its embedding.
    """

    target_size: int
    draft_size: int


def match_vocabularies(draft_model, target_model, assume_same: bool = False) -> Vocabularies:
    """Checks that draft and target speak the same tokens; their logits may be padded to different widths.

    The tokenizers of both checkpoints are compared where they can be found. The sizes alone prove nothing: padded
    vocabularies of one tokenizer differ in size, and different tokenizers may agree in it.

    Raises:
        CheckpointFormatError: The tokenizers differ, or nothing shows that they agree.
    """
    sizes = Vocabularies(_vocab_size(target_model), _vocab_size(draft_model))
    if assume_same:
        return sizes
    names = [model.config.name_or_path for model in (target_model, draft_model)]
    target_tokens, draft_tokens = (_token_table(name) for name in names)
    if target_tokens and draft_tokens:
        _compare_tables(target_tokens, draft_tokens, names)
    elif sizes.target_size != sizes.draft_size:
        raise CheckpointFormatError(
            f"Target and draft model have vocabularies of {sizes.target_size} and {sizes.draft_size} tokens, and no "
            "tokenizer was found beside them to tell whether these are the same tokens, padded. If they are, pass "
            "speculative={'method': 'draft_model', 'same_tokenizer': True, ...}."
        )
    else:
        logger.warning_once(
            "Target and draft model have vocabularies of the same size; their tokenizers could not be compared. If "
            "they differ, drafts will rarely be accepted (the output stays right)."
        )
    return sizes


def _vocab_size(model) -> int:
    head = model.get_output_embeddings()
    features = getattr(head, "out_features", None)
    return features or model.config.get_text_config(decoder=True).vocab_size


@functools.lru_cache(maxsize=32)
def _token_table(name: str) -> dict[str, int] | None:
    """The token strings and ids of a checkpoint's tokenizer, `None` where it has none that can be loaded."""
    if not name:
        return None
    try:
        return AutoTokenizer.from_pretrained(name).get_vocab()
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        logger.debug(f"No tokenizer for '{name}': {error}")
        return None


def _compare_tables(target: dict[str, int], draft: dict[str, int], names: list[str]) -> None:
    common = target.keys() & draft.keys()
    moved = sorted(token for token in common if target[token] != draft[token])
    # Tokens that one of them lacks may be special tokens added later; a different vocabulary lacks most.
    missing = max(len(target), len(draft)) - len(common)
    if not moved and missing <= 0.05 * len(target):
        return
    examples = [f"{token!r} is {target[token]} and {draft[token]}" for token in moved[:3]]
    if not examples:
        lacking = sorted(target.keys() - draft.keys())[:3] or sorted(draft.keys() - target.keys())[:3]
        examples = [f"{token!r} is in one of them only" for token in lacking]
    raise CheckpointFormatError(
        f"The target '{names[0]}' ({len(target)} tokens) and the draft model '{names[1]}' ({len(draft)} tokens) have "
        f"different tokenizers: {len(moved)} common tokens have other ids, {missing} are in one of them only "
        f"({'; '.join(examples)}). Choose a draft model with the target's tokenizer."
    )
