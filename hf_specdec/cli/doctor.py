"""`hf-specdec doctor`: why speculation with a drafter is not faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from . import options
from .drafters import read_drafter
from .output import EXIT_DIFFERENT, say, show
from .target import Target


if TYPE_CHECKING:
    from ..diagnosis import Diagnosis

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor_command(
    model: options.Model,
    drafter: options.Drafter = None,
    num_speculative_tokens: options.Length = None,
    settings: options.Settings = None,
    prompts: options.Prompts = None,
    max_new_tokens: options.MaxNewTokens = 64,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    trust_remote_code: options.Trust = False,
    offline: options.Offline = False,
    yes: options.Yes = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Find out why speculation is not faster, and what the machine has.

    Five checks, each of which names a cause and what to do: does the drafter fit the model; data types; vocabularies;
    the chat template, with and without it; the acceptance by position. Exit code 1: there is an error.
    """
    from ..diagnosis import diagnose

    target = Target(model, dtype, device, trust_remote_code, offline, yes)
    spec = read_drafter(drafter or "auto", num_speculative_tokens, settings, target.drafters, offline)
    chosen = target.prompts(prompts, max_new_tokens)
    with target.loaded() as (loaded, tokenizer):
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
