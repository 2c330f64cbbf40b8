"""What all models of the demo share: prompts, and how models and tokenizers are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

FOLDER = Path(str(resources.files(__package__)))


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        name (`str`): Unique among those it is used with.
        text (`str`): What the model reads.
        kind (`str`): Kind of text it asks for; figures are also given by kind.
        max_new_tokens (`int`): How many tokens to generate at most.
    """

    name: str
    text: str
    kind: str = "prompt"
    max_new_tokens: int = 256


def read_prompts(folder: str, kinds: Mapping[str, int]) -> list[Prompt]:
    """The prompts `<kind>_<name>.txt` of a folder here, in the order of kinds, each with its tokens to generate."""
    return [
        Prompt(path.stem.removeprefix(f"{kind}_"), path.read_text(encoding="utf-8"), kind, max_new_tokens)
        for kind, max_new_tokens in kinds.items()
        for path in sorted((FOLDER / folder).glob(f"{kind}_*.txt"))
    ]


def loaded_model(folder: str, dtype: torch.dtype | str | None) -> PreTrainedModel:
    """Loads a model in evaluation mode, by default in `torch.float32`."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32 if dtype is None else dtype).eval()
