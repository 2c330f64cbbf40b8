"""The embedded demo: a tiny Llama target trained on Python sources, its drafts, and prompts to try them on.

Target and draft model are ordinary transformers folders, heads have the layouts in which such heads are published. All
are made by `python -m tools.build_demo` in the repository.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import CheckpointFormatError


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


__all__ = [
    "DemoPrompt",
    "dflash_path",
    "draft_path",
    "eagle3_path",
    "eagle_path",
    "load_target",
    "load_tokenizer",
    "medusa_path",
    "mlp_speculator_path",
    "mtp_path",
    "prompts",
    "target_path",
]


@dataclass(frozen=True)
class DemoPrompt:
    """
    A prompt for the demo target.

    Args:
        name (`str`): Short name, unique among the prompts.
        kind (`str`): `"edit"`: the answer repeats most of the prompt's code; `"complete"`: the answer is new code.
        text (`str`): The prompt.
        max_new_tokens (`int`): How many tokens to generate; prompt and answer together fit the target's context.
    """

    name: str
    kind: Literal["edit", "complete"]
    text: str
    max_new_tokens: int


def target_path() -> str:
    """Returns the folder of the target model and the tokenizer."""
    return _checkpoint_folder("target")


def draft_path() -> str:
    """Returns the folder of the draft model, which has the target's tokenizer."""
    return _checkpoint_folder("draft")


def medusa_path() -> str:
    """Returns the folder of the target's Medusa heads."""
    return _checkpoint_folder("medusa", "medusa_lm_head.safetensors")


def mlp_speculator_path() -> str:
    """Returns the folder of the target's MLP speculator."""
    return _checkpoint_folder("mlp_speculator")


def eagle_path() -> str:
    """Returns the folder of the target's EAGLE-1 head."""
    return _checkpoint_folder("eagle")


def eagle3_path() -> str:
    """Returns the folder of the target's EAGLE-3 head."""
    return _checkpoint_folder("eagle3")


def dflash_path() -> str:
    """Returns the folder of the target's DFlash draft."""
    return _checkpoint_folder("dflash")


def mtp_path() -> str:
    """Returns the folder of the target's multi-token-prediction layer."""
    return _checkpoint_folder("mtp")


def drafter_path(name: str) -> str:
    """Returns the folder of a drafter for the target, by the name of the folder, such as "eagle3"."""
    return _checkpoint_folder(name, "medusa_lm_head.safetensors" if name == "medusa" else "model.safetensors")


def load_target(dtype: torch.dtype | str | None = None) -> PreTrainedModel:
    """
    Loads the target model in evaluation mode.

    Args:
        dtype (`torch.dtype`, *optional*): Type of the weights, `torch.float32` by default.

    Raises:
        `CheckpointFormatError`: If the weights are missing.
    """
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target_path(), dtype=torch.float32 if dtype is None else dtype).eval()


def load_tokenizer() -> PreTrainedTokenizerFast:
    """Loads the tokenizer of both models."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target_path())


def prompts() -> list[DemoPrompt]:
    """Returns the demo's prompts, those to edit first, each kind in the order of its names."""
    files = _folder() / "prompts"
    found = []
    for kind, max_new_tokens in (("edit", 448), ("complete", 192)):
        for path in sorted(files.glob(f"{kind}_*.txt")):
            text = path.read_text(encoding="utf-8")
            if kind == "complete":
                # A line break and the indentation after it are one token, which is the model's to write.
                text = text.rstrip("\n")
            found.append(DemoPrompt(path.stem.removeprefix(f"{kind}_"), kind, text, max_new_tokens))
    return found


def _folder() -> Path:
    return Path(str(resources.files(__name__)))


def _checkpoint_folder(name: str, weights: str = "model.safetensors") -> str:
    folder = _folder() / name
    missing = [file for file in ("config.json", weights) if not (folder / file).is_file()]
    if missing:
        raise CheckpointFormatError(
            f"The embedded {name} model is incomplete: {', '.join(missing)} not found in {folder}. "
            "Reinstall hf-specdec."
        )
    return str(folder)
