"""`hf-specdec doctor`: examines whether a drafter fits a target, and why few of its drafts are accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from .common import EMBEDDED_SPEC, EXIT_DIFFERENT, JsonOption, show
from .pairs import Place, PromptsOption, SpecOption, on_target, prepare_padding


if TYPE_CHECKING:
    from ..diagnosis import Diagnosis

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@on_target
def doctor_command(
    place: Place,
    spec: SpecOption = EMBEDDED_SPEC,
    prompts: PromptsOption = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=2, help="Tokens per prompt.")] = 64,
    quick: Annotated[bool, typer.Option("--quick", help="Do not try other wirings of the drafter.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check that target and drafter fit; name the cause if few drafts are accepted.

    Looks at checkpoint, tokenizer, chat template, layers, vocabulary and data types, then generates from a few prompts
    and counts what is accepted by position. Exits with 1 if there is an error; warnings leave it at 0.
    """
    from ..diagnosis import diagnose

    chosen = place.prompts(prompts, max_new_tokens)
    with place.loaded() as (model, tokenizer):
        prepare_padding(tokenizer)
        console = Console(stderr=True)
        with console.status("Checking", spinner="dots") as status:
            found = diagnose(
                model,
                place.settings(spec),
                tokenizer,
                prompts=chosen,
                try_variants=not quick,
                on_step=status.update,
            )
    show(found.to_dict(), as_json, lambda: _print(found))
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
