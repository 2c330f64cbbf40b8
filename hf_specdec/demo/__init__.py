"""The embedded demo: a tiny Llama target trained on Python sources, its drafters, and prompts to try them on.

Target and draft model are ordinary transformers folders, heads have the layouts in which such heads are published. All
are made by `python -m tools.build_demo` in the repository.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointFormatError, SpecConfigError
from ..method import built_in_methods, methods
from .packaged import qwen2_5_coder, smollm2
from .shared import FOLDER, Prompt, loaded_model, read_prompts


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = [
    "Prompt",
    "drafter_path",
    "load_target",
    "load_tokenizer",
    "prompts",
    "qwen2_5_coder",
    "settings",
    "smollm2",
    "target_path",
]


def target_path() -> str:
    """Returns the folder of the target model and the tokenizer."""
    return _checkpoint_folder("target")


def drafter_path(method: str) -> str:
    """Returns the folder of the drafter that a method has for the target, such as "eagle3".

    Raises:
        SpecConfigError: It has none.
    """
    known = methods().get(method)
    if known is None or known.demo is None:
        has_one = ", ".join(method.name for method in built_in_methods() if method.demo)
        raise SpecConfigError(f"The demo has no drafter for '{method}'. It has one for: {has_one}.")
    return _checkpoint_folder(known.demo)


def settings() -> dict[str, dict[str, Any]]:
    """Returns settings of all methods that draft any text for the target, by the name of their row in its table."""
    rows = {}
    for method in built_in_methods():
        if method.demo is not None or not (method.takes_model or method.needs_grammar or method.only_if_named):
            named = {} if method.demo is None else {"model": drafter_path(method.name)}
            for suffix, own in method.demo_settings.items():
                rows[f"{method.name}_{suffix}" if suffix else method.name] = {"method": method.name, **named, **own}
    return rows


def load_target(dtype: torch.dtype | str | None = None) -> PreTrainedModel:
    """Loads the target model in evaluation mode.

    Args:
        dtype (`torch.dtype`, *optional*): Type of the weights, `torch.float32` by default.

    Raises:
        CheckpointFormatError: The weights are missing.
    """
    return loaded_model(target_path(), dtype)


def load_tokenizer() -> PreTrainedTokenizerFast:
    """Loads the tokenizer of target and draft model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target_path())


def prompts() -> list[Prompt]:
    """Returns the demo's prompts: "edit", whose answers repeat most of the prompt's code, then "complete", new code.

    Each kind is in the order of its names. Prompt and answer together fit the target's context.
    """
    # A line break and the indentation after it are one token, which is the model's to write.
    return [
        replace(prompt, text=prompt.text.rstrip("\n")) if prompt.kind == "complete" else prompt
        for prompt in read_prompts("prompts", {"edit": 448, "complete": 192})
    ]


def _checkpoint_folder(name: str) -> str:
    folder = FOLDER / name
    wanted = {"config.json": "config.json", "model.safetensors": "*.safetensors"}
    missing = [file for file, pattern in wanted.items() if not any(folder.glob(pattern))]
    if missing:
        raise CheckpointFormatError(
            f"The embedded {name} model is incomplete: {', '.join(missing)} not found in {folder}. "
            "Reinstall hf-specdec."
        )
    return str(folder)
