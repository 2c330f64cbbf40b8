"""`hf-specdec doctor`: examines whether a drafter fits a target, and why few of its drafts are accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from .common import EXIT_DIFFERENT, JsonOption, say, show
from .target import EMBEDDED_SPEC, Place, PromptsOption, SpecOption, on_target


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

    chosen, settings = place.prompts(prompts, max_new_tokens), place.settings(spec)
    with place.loaded() as (model, tokenizer):
        with Console(stderr=True).status("Checking", spinner="dots") as status:
            found = diagnose(model, settings, tokenizer, prompts=chosen, try_variants=not quick, on_step=status.update)
    show(found.to_dict(), as_json, lambda: _print(found))
    if found.status == "error":
        raise typer.Exit(EXIT_DIFFERENT)


def _print(found: Diagnosis) -> None:
    for item in found.findings:
        say(Text.assemble((f"{item.status:8}", _STYLES[item.status]), f"{item.check}: {item.found}"))
        if item.remedy:
            say(f"         -> {item.remedy}", "dim")
