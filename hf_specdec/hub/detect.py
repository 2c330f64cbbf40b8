"""Which method a checkpoint is for, read from its `config.json`.

Where the config does not tell a head from a whole model, the names of the tensors do; no weights are read for that.
Repository names are never looked at: they do not tell.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils.hub import cached_file

from ..errors import CheckpointFormatError


if TYPE_CHECKING:
    from ..config import SpeculativeConfig


def detect_method(config: SpeculativeConfig, target_config: Any = None) -> str:
    """The method of the checkpoint `config.model`.

    Raises:
        CheckpointFormatError: There is no readable `config.json`, or it names no known format.
    """
    checkpoint = read_config(config)
    for belongs, method in _FORMATS:
        if belongs(checkpoint):
            return _by_tensors(config, checkpoint, method)
    raise CheckpointFormatError(
        f"The method of '{config.model}' cannot be read from its config.json (architectures: "
        f"{checkpoint.get('architectures')}, model_type: {checkpoint.get('model_type')}). Name it with `spec_method`."
    )


def read_config(config: SpeculativeConfig) -> dict:
    """`config.json` of `config.model` as a dict."""
    try:
        path = cached_file(config.model, "config.json", revision=config.revision, subfolder=config.subfolder or "")
        if path is None:
            raise FileNotFoundError(f"There is no config.json in '{config.model}'.")
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"It must hold an object, and holds a {type(found).__name__}.")
        return found
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointFormatError(
            f"'{config.model}' has no readable config.json: {error} Pass the folder or the repo id of a draft "
            "checkpoint, or name a `spec_method` that needs none, such as 'ngram'."
        ) from error


def _by_tensors(config: SpeculativeConfig, checkpoint: dict, method: str) -> str:
    """The method by the tensors of the checkpoint, where its config may have the name of something else.

    Most EAGLE heads call themselves LlamaForCausalLM, and not all heads of the third kind say so.
    """
    layers = checkpoint.get("num_hidden_layers")
    is_short = layers is None or (isinstance(layers, int) and layers <= _MOST_HEAD_LAYERS)
    if not (method == "eagle" or (method == "draft_model" and (is_short or not _HEAD_KEYS.isdisjoint(checkpoint)))):
        return method
    from ..models.checkpoint import Checkpoint
    from ..models.eagle_formats import method_of

    try:
        return method_of(Checkpoint(config).shapes) or method
    except CheckpointFormatError:
        # Whoever loads it says what is wrong with its weights.
        return method


def reads_target_cache(draft_model: Any) -> bool:
    """Whether a draft model of transformers works on the keys and values of its target."""
    return getattr(getattr(draft_model, "config", None), "model_type", None) in _CACHE_READERS


def is_cache_reader(config: SpeculativeConfig) -> bool:
    """The same of the checkpoint `config.model`."""
    return read_config(config).get("model_type") in _CACHE_READERS


def _architecture(checkpoint: dict) -> str:
    names = checkpoint.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


# Parts of the names of classes that draft blocks. Those that are not supported are refused by name in loading.
_BLOCK_DRAFTERS = ("DFlash", "DSpark", "MuseGlimmerAssistant", "Domino", "XPress", "LiLiCorr")

# Model types of transformers whose only keys and values are their target's.
_CACHE_READERS = ("gemma4_assistant", "gemma4_unified_assistant")

# In this order: what marks a format, and its method. Draft heads come first, they may call themselves causal LMs.
_FORMATS = (
    (lambda c: c.get("model_type") in ("mtp", *_CACHE_READERS) or c.get("speculators_model_type") == "mtp", "mtp"),
    (lambda c: "medusa_num_heads" in c or c.get("model_type") == "medusa", "medusa"),
    (lambda c: c.get("model_type") == "mlp_speculator", "mlp_speculator"),
    (lambda c: c.get("speculators_model_type") in ("dflash", "dspark") or "dflash_config" in c, "dflash"),
    (lambda c: any(name in _architecture(c) for name in _BLOCK_DRAFTERS), "dflash"),
    (lambda c: c.get("speculators_model_type") in ("eagle3", "peagle") or "Eagle3" in _architecture(c), "eagle3"),
    (lambda c: c.get("speculators_model_type") == "eagle" or c.get("model_type") == "eagle", "eagle"),
    (lambda c: "Eagle" in _architecture(c), "eagle"),
    (lambda c: "draft_vocab_size" in c, "eagle3"),
    (lambda c: _architecture(c).endswith(("ForCausalLM", "LMHeadModel")), "draft_model"),
)

# Whole models are deeper than heads, but for tiny ones.
_MOST_HEAD_LAYERS = 4

# What no config of a whole model has.
_HEAD_KEYS = {"bias", "qkv_bias", "eagle_config", "target_hidden_size", "target_model_type"}
