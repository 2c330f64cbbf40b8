"""The target of a command: the options that name it and its prompts, and what they mean."""

from __future__ import annotations

import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..errors import SpecConfigError
from ..reading import parse_json, read_text
from .common import reporting, with_parameters


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..bench.prompts import Batch, Prompt


EMBEDDED = "demo"

# The drafters of commands that are given none: for the embedded target, and for all others.
EMBEDDED_SPEC, ANY_SPEC = "draft_model", "ngram"


class Dtype(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="Target model: a repo id or a folder; 'demo' is the embedded one.")
]
DtypeOption = Annotated[
    Dtype, typer.Option(help="Data type of the target. auto: the checkpoint's; float32 for the embedded model.")
]
DeviceOption = Annotated[
    str | None, typer.Option(help="Such as cpu or cuda:0. Left out: cuda if there is one, else cpu.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="CPU threads. Left out: torch's choice, one for the embedded target.")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code from the target's repository, if it has any.")
]
PromptsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--prompts",
        "-p",
        help="A file (JSON lines, or text), 'spec-bench', 'demo', or a prompt itself, if it has a space. May be "
        "repeated. Left out: demo for the embedded target, a few general ones for others.",
    ),
]
RawOption = Annotated[
    bool, typer.Option("--raw", help="Take prompts as they are, also where the target has a chat template.")
]
BatchSizeOption = Annotated[int, typer.Option(min=1, help="Prompts generated together.")]
BatchSizesOption = Annotated[str, typer.Option(help="Prompts generated together: numbers separated by commas.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="How often everything is timed.")]
MaxSecondsOption = Annotated[
    float | None, typer.Option(min=0, help="Begin no further round that is likely to end after so many seconds.")
]
SPEC_HELP = (
    "What drafts: a method, a repo id or a folder, also with settings (eagle3,model=user/head,k=4), or JSON. With the "
    "embedded target also a name of `hf-specdec demo`."
)
SpecOption = Annotated[str, typer.Option("--spec", "-s", help=SPEC_HELP)]


@dataclass(frozen=True)
class Place:
    """The target of a command, and where it runs: the options of every command made by [`on_target`]."""

    target: Annotated[
        str, typer.Option("--target", "-t", help="A repo id, a folder, or 'demo' for the embedded target.")
    ] = EMBEDDED
    dtype: DtypeOption = Dtype.auto
    device: DeviceOption = None
    threads: ThreadsOption = None
    trust_remote_code: TrustOption = False

    @property
    def is_embedded(self) -> bool:
        return self.target == EMBEDDED

    @property
    def num_threads(self) -> int | None:
        """CPU threads: one for the embedded target, which is too small for more; `None` for torch's choice."""
        return 1 if self.threads is None and self.is_embedded else self.threads

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Loads the target and its tokenizer.

        Raises:
            SpecConfigError: There is no such device, or the target cannot be loaded.
        """
        import torch

        from .. import demo

        device = checked_device(self.device, allow_auto=not self.is_embedded)
        if self.is_embedded:
            quieten_loading()
            dtype = torch.float32 if self.dtype is Dtype.auto else getattr(torch, self.dtype.value)
            return demo.load_target(dtype).to(device), demo.load_tokenizer()
        from transformers import AutoConfig, AutoTokenizer

        from ..candidate_generators.draft_model.network import auto_model_class
        from ..hub.inspect import is_repo_id

        if not sys.stderr.isatty():
            quieten_loading()
        options = {"trust_remote_code": self.trust_remote_code}
        try:
            if not os.path.isdir(self.target) and not is_repo_id(self.target):
                raise SpecConfigError(
                    f"The model '{self.target}' is neither a local folder nor the id of a repository, such as "
                    "'user/name'. Correct it."
                )
            config = AutoConfig.from_pretrained(_base_of(self.target), **options)
            if config.is_encoder_decoder:
                raise ValueError("it has an encoder, which the commands have no sources for. Call generate() instead.")
            tokenizer = AutoTokenizer.from_pretrained(self.target, **options)
            model = auto_model_class(config).from_pretrained(
                self.target, dtype=self.dtype.value, device_map=device, **options
            )
        except (OSError, ValueError) as error:
            raise SpecConfigError(f"The model '{self.target}' cannot be loaded: {error}") from error
        return model.eval(), tokenizer

    @contextmanager
    def loaded(self) -> Iterator[tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
        """Loads the target for a block in the chosen number of threads, whose report nothing of transformers breaks.

        Prompts of different lengths can be tokenised together.
        """
        from transformers.utils import logging

        from ..machine import num_threads

        quieten_loading()
        before = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            with num_threads(self.num_threads):
                with Console(stderr=True).status(f"Loading {self.target}"):
                    model, tokenizer = self.load()
                tokenizer.padding_side = "left"
                if tokenizer.pad_token is None:
                    tokenizer.pad_token = tokenizer.eos_token
                yield model, tokenizer
        finally:
            logging.set_verbosity(before)

    def settings(self, spec: str) -> Any:
        """Settings that the text of `--spec` means, in a form that `load_speculator` takes."""
        from .. import demo
        from ..bench.decoders import read_spec

        return read_spec(spec, demo.settings() if self.is_embedded else None)

    def prompts(self, sources: list[str] | None, max_new_tokens: int) -> list[Prompt]:
        """Prompts that `--prompts` names."""
        from ..bench.prompts import DEMO, Prompt, read_prompts
        from ..diagnosis import general_prompts

        if not sources and not self.is_embedded:
            return general_prompts(max_new_tokens)
        chosen: list[Prompt] = []
        for source in sources or [DEMO]:
            # No file that anybody would name so.
            if any(character.isspace() for character in source) and not os.path.exists(source):
                chosen.append(Prompt("", source, "prompt", max_new_tokens))
            else:
                chosen += read_prompts(source, max_new_tokens)
        names = Counter(prompt.name for prompt in chosen)
        return [
            prompt if prompt.name and names[prompt.name] == 1 else replace(prompt, name=f"prompt {number}")
            for number, prompt in enumerate(chosen, start=1)
        ]


def _base_of(name: str) -> str:
    """The model that a repository or folder of a PEFT adapter names as its base; the name itself where it is none."""
    from transformers.utils import find_adapter_config_file

    found = find_adapter_config_file(name)
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


def on_target(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of [`Place`] and `--debug`.

    The command takes a `Place` first. `--target` comes before its own options, the others after them, before `--json`.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    hints = inspect.get_annotations(Place, eval_str=True)
    place = [
        inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=hints[item.name])
        for item in fields(Place)
    ]
    at = [parameter.name for parameter in own].index("as_json")

    @wraps(command)
    def run(**given: Any) -> None:
        command(Place(**{item.name: given.pop(item.name) for item in fields(Place)}), **given)

    return reporting(with_parameters(run, [place[0], *own[:at], *place[1:], *own[at:]]))


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


def read_batch_sizes(text: str) -> list[int]:
    """Returns the numbers of `--batch-sizes`, the smallest first."""
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise SpecConfigError(
            f"--batch-sizes must be numbers from 1 separated by commas, such as 1,4,16; got '{text}'."
        )
    return sizes


def checked_device(name: str | None, allow_auto: bool = False) -> str:
    """Returns the device of `--device`, or the best one if it is left out; "auto" is what `device_map` understands."""
    import torch

    if name == "auto" and allow_auto:
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


def quieten_loading() -> None:
    """Hides progress bars for weights that load in no time."""
    from transformers.utils import logging

    logging.disable_progress_bar()
