"""What the commands share that try drafters on a target: their options, and what these mean."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import EMBEDDED, Dtype, load_target, quieten_loading


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..bench.prompts import Batch, Prompt


TargetOption = Annotated[
    str, typer.Option("--target", "-t", help="A repo id, a folder, or 'demo' for the embedded target.")
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
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="CPU threads. Left out: torch's choice, one for the embedded target.")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code from the target's repository, if it has any.")
]

SPEC_HELP = (
    "What drafts: a method, a repo id or a folder, also with settings (eagle3,model=user/head,k=4), or JSON. With the "
    "embedded target also a name of `hf-specdec demo`."
)


def spec_settings(spec: str, target: str) -> Any:
    """What `load_speculator` takes for the text of `--spec`."""
    from ..bench.decoders import read_spec
    from .demo import demo_methods

    settings = read_spec(spec, demo_methods() if target == EMBEDDED else None)
    settings.pop("name", None)
    return settings.get("config", settings)


def named_specs(specs: list[str], target: str) -> dict[str, Any]:
    """The same of several, by names for a table."""
    names: dict[str, Any] = {}
    for spec in specs:
        name, number = spec, 1
        while name in names:
            number += 1
            name = f"{spec} ({number})"
        names[name] = spec_settings(spec, target)
    return names


@contextmanager
def loaded_target(
    target: str, dtype: Dtype, device: str | None, threads: int | None, trust_remote_code: bool
) -> Iterator[tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
    """The target and its tokenizer, for a block that reports quietly and computes in the chosen number of threads."""
    from ..bench.machine import num_threads

    with quiet(), num_threads(chosen_threads(threads, target)):
        yield load_target(target, dtype, device, trust_remote_code)


def chosen_threads(threads: int | None, target: str) -> int | None:
    """One for the embedded target, which is too small for more."""
    return 1 if threads is None and target == EMBEDDED else threads


def chosen_prompts(sources: list[str] | None, target: str, max_new_tokens: int) -> list[Prompt]:
    """The prompts that the options mean."""
    from ..bench.prompts import DEMO, Prompt, read_prompts
    from ..diagnosis import general_prompts

    if not sources and target != EMBEDDED:
        return general_prompts(max_new_tokens)
    chosen: list[Prompt] = []
    for source in sources or [DEMO]:
        # No file that anybody would name so.
        is_text = any(character.isspace() for character in source) and not os.path.exists(source)
        chosen += [Prompt("", source, "prompt", max_new_tokens)] if is_text else read_prompts(source, max_new_tokens)
    names = Counter(prompt.name for prompt in chosen)
    return [
        prompt if prompt.name and names[prompt.name] == 1 else replace(prompt, name=f"prompt {number}")
        for number, prompt in enumerate(chosen, start=1)
    ]


def tokenised(
    prompts: list[Prompt], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int, raw: bool
) -> list[Batch]:
    """Batches of them on the model's device, in the chat template where there is one and not `raw`."""
    from ..bench.prompts import as_chat, make_batches

    prepare_padding(tokenizer)
    chat = tokenizer.chat_template is not None and not raw
    prompts = as_chat(prompts, tokenizer) if chat else prompts
    return make_batches(tokenizer, prompts, batch_size, device=model.device, add_special_tokens=not chat)


def prepare_padding(tokenizer: PreTrainedTokenizerBase) -> None:
    """Prompts of different lengths can be generated together."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


@contextmanager
def quiet() -> Iterator[None]:
    """Neither progress bars nor advice of transformers between the lines of a report."""
    from transformers.utils import logging

    quieten_loading()
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
