"""Options shared by the commands that try drafters on a target, and what they mean."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import (
    EMBEDDED,
    DeviceOption,
    Dtype,
    DtypeOption,
    load_target,
    quieten_loading,
    reporting,
    with_parameters,
)


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..bench.prompts import Batch, Prompt


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
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="CPU threads. Left out: torch's choice, one for the embedded target.")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code from the target's repository, if it has any.")
]
BatchSizeOption = Annotated[int, typer.Option(min=1, help="Prompts generated together.")]
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
        return load_target(self.target, self.dtype, self.device, self.trust_remote_code)

    @contextmanager
    def loaded(self) -> Iterator[tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
        """Loads the target for a block that reports quietly and computes in the chosen number of threads."""
        from ..bench.machine import num_threads

        with quiet(), num_threads(self.num_threads):
            yield self.load()

    def settings(self, spec: str) -> Any:
        """Settings that the text of `--spec` means, in a form that `load_speculator` takes."""
        from ..bench.decoders import read_spec
        from .demo import demo_methods

        settings = read_spec(spec, demo_methods() if self.is_embedded else None)
        settings.pop("name", None)
        return settings.get("config", settings)

    def named_settings(self, specs: list[str]) -> dict[str, Any]:
        """Settings of several `--spec`s, by names for a table."""
        names: dict[str, Any] = {}
        for spec in specs:
            name, number = spec, 1
            while name in names:
                number += 1
                name = f"{spec} ({number})"
            names[name] = self.settings(spec)
        return names

    def prompts(self, sources: list[str] | None, max_new_tokens: int) -> list[Prompt]:
        """Prompts that `--prompts` names."""
        from ..bench.prompts import DEMO, Prompt, read_prompts
        from ..diagnosis import general_prompts

        if not sources and not self.is_embedded:
            return general_prompts(max_new_tokens)
        chosen: list[Prompt] = []
        for source in sources or [DEMO]:
            # No file that anybody would name so.
            is_text = any(character.isspace() for character in source) and not os.path.exists(source)
            chosen += (
                [Prompt("", source, "prompt", max_new_tokens)] if is_text else read_prompts(source, max_new_tokens)
            )
        names = Counter(prompt.name for prompt in chosen)
        return [
            prompt if prompt.name and names[prompt.name] == 1 else replace(prompt, name=f"prompt {number}")
            for number, prompt in enumerate(chosen, start=1)
        ]


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

    prepare_padding(tokenizer)
    chat = has_template(tokenizer, raw)
    prompts = as_chat(prompts, tokenizer) if chat else prompts
    return make_batches(tokenizer, prompts, batch_size, device=model.device, fill=fill, add_special_tokens=not chat)


def has_template(tokenizer: PreTrainedTokenizerBase, raw: bool) -> bool:
    """Tells if prompts are to be put into a chat template."""
    return tokenizer.chat_template is not None and not raw


def prepare_padding(tokenizer: PreTrainedTokenizerBase) -> None:
    """Lets prompts of different lengths be generated together."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps progress bars and advice of transformers from between the lines of a report."""
    from transformers.utils import logging

    quieten_loading()
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
