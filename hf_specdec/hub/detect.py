"""Which method a checkpoint is for, read from its `config.json`.

Nothing but the config is read. Repository names are never looked at: they do not tell.
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
            return method
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
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointFormatError(
            f"'{config.model}' has no readable config.json: {error} Pass the folder or the repo id of a draft "
            "checkpoint, or name a `spec_method` that needs none, such as 'ngram'."
        ) from error


def _architecture(checkpoint: dict) -> str:
    return (checkpoint.get("architectures") or [""])[0]


# In this order: what marks a format, and its method. Draft heads come first, they may call themselves causal LMs.
_FORMATS = (
    (lambda c: "medusa_num_heads" in c or c.get("model_type") == "medusa", "medusa"),
    (lambda c: c.get("model_type") == "mlp_speculator", "mlp_speculator"),
    (lambda c: "dflash" in str(c.get("speculators_model_type", "")) or "DFlash" in _architecture(c), "dflash"),
    (lambda c: c.get("speculators_model_type") == "eagle3" or "Eagle3" in _architecture(c), "eagle3"),
    (lambda c: c.get("speculators_model_type") == "eagle" or "Eagle" in _architecture(c), "eagle"),
    (lambda c: _architecture(c).endswith(("ForCausalLM", "LMHeadModel")), "draft_model"),
)
