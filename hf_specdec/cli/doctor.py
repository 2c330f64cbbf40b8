"""`hf-specdec doctor`: why speculation with a drafter is not faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from . import options
from .drafters import Drafting
from .output import EXIT_DIFFERENT, say, show
from .target import Target


if TYPE_CHECKING:
    from ..diagnosis import Diagnosis

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor_command(
    *,
    model: options.Model,
    drafting: Drafting,
    prompts: options.Prompts = None,
    max_new_tokens: options.MaxNewTokens = 64,
    place: options.Place,
    as_json: options.Json = False,
) -> None:
    """Find out why speculation is not faster, and what the machine has.

    Five checks, each of which names a cause and what to do: does the drafter fit the model; data types; vocabularies;
    the chat template, with and without it; the acceptance by position. Exit code 1: there is an error.
    """
    from ..diagnosis import diagnose

    target = Target(model, place)
    spec = drafting.read(target)
    chosen = target.prompts(prompts, max_new_tokens)
    with target.loaded(for_report=True) as (loaded, tokenizer):
        with Console(stderr=True).status("Checking", spinner="dots") as status:
            found = diagnose(loaded, spec, tokenizer, prompts=chosen, on_step=status.update)
    show(found.to_dict(), as_json, lambda: _print(found))
    if found.status == "error":
        raise typer.Exit(EXIT_DIFFERENT)


def _print(found: Diagnosis) -> None:
    for item in found.findings:
        say(Text.assemble((f"{item.status:8}", _STYLES[item.status]), f"{item.check}: {item.found}"))
        if item.remedy:
            say(f"         -> {item.remedy}", "dim")
