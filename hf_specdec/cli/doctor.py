"""`hf-specdec doctor`: does a drafter fit a target, and why are few of its drafts accepted?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from .common import (
    EMBEDDED,
    EXIT_DIFFERENT,
    DebugOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    JsonOption,
    reported_errors,
)
from .pairs import (
    SPEC_HELP,
    PromptsOption,
    TargetOption,
    ThreadsOption,
    TrustOption,
    chosen_prompts,
    loaded_target,
    prepare_padding,
    spec_settings,
)


if TYPE_CHECKING:
    from ..diagnosis import Diagnosis

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor_command(
    target: TargetOption = EMBEDDED,
    spec: Annotated[str, typer.Option("--spec", "-s", help=SPEC_HELP)] = "draft_model",
    prompts: PromptsOption = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=2, help="Tokens per prompt.")] = 64,
    quick: Annotated[bool, typer.Option("--quick", help="Do not try other wirings of the drafter.")] = False,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check that target and drafter fit; name the cause if few drafts are accepted.

    Looks at checkpoint, tokenizer, chat template, layers, vocabulary and data types, then generates from a few prompts
    and counts what is accepted by position. Exits with 1 if there is an error; warnings leave it at 0.
    """
    with reported_errors(debug):
        from ..diagnosis import diagnose

        chosen = chosen_prompts(prompts, target, max_new_tokens)
        with loaded_target(target, dtype, device, threads, trust_remote_code) as (model, tokenizer):
            prepare_padding(tokenizer)
            console = Console(stderr=True)
            with console.status("Checking", spinner="dots") as status:
                found = diagnose(
                    model,
                    spec_settings(spec, target),
                    tokenizer,
                    prompts=chosen,
                    try_variants=not quick,
                    on_step=status.update,
                )
        if as_json:
            typer.echo(json.dumps(found.to_dict(), indent=2))
        else:
            _print(found)
    if found.status == "error":
        raise typer.Exit(EXIT_DIFFERENT)


def _print(found: Diagnosis) -> None:
    console = Console()
    for item in found.findings:
        line = Text(f"{item.status:8}", style=_STYLES[item.status])
        line.append(f"{item.check}: {item.found}", style="default")
        console.print(line, soft_wrap=True)
        if item.remedy:
            console.print(Text(f"         -> {item.remedy}", style="dim"), soft_wrap=True)
