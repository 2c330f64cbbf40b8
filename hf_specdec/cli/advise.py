"""`hf-specdec advise`: finds the fastest way of speculating for a target, on the user's own prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..errors import counted
from ..method import NO_DRAFTS
from .common import JsonOption, OfflineOption, new_table, say, show, shown_size
from .target import (
    SPEC_HELP,
    BatchSizeOption,
    MaxSecondsOption,
    Place,
    PromptsOption,
    RawOption,
    RoundsOption,
    on_target,
    tokenised,
)


if TYPE_CHECKING:
    from ..diagnosis import Advice


@on_target
def advise_command(
    place: Place,
    specs: Annotated[
        list[str] | None,
        typer.Option(
            "--spec",
            "-s",
            help=f"Measure this, too. {SPEC_HELP} May be repeated. Left out for the embedded target: all methods of "
            "the demo.",
        ),
    ] = None,
    prompts: PromptsOption = None,
    raw: RawOption = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=2, help="Tokens per prompt.")] = 128,
    batch_size: BatchSizeOption = 1,
    rounds: RoundsOption = 3,
    max_seconds: MaxSecondsOption = None,
    most_drafters: Annotated[int, typer.Option(min=0, help="Measure at most so many of the drafters found.")] = 4,
    search: Annotated[bool, typer.Option("--search/--no-search", help="Look for drafters as 'auto' does.")] = True,
    offline: OfflineOption = False,
    lengths: Annotated[
        bool, typer.Option("--lengths/--no-lengths", help="Also measure other lengths of the fastest one.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Recommend a configuration, by measuring on your prompts.

    Drafters that are found for the target, methods without weights and what --spec names generate the same prompts
    beside plain generation and this loop without drafts. Prints the fastest as Python and JSON, and why the others
    lose.
    """
    from .. import demo
    from ..diagnosis import advise

    chosen = place.prompts(prompts, max_new_tokens)
    if specs is None:
        specs = list(demo.settings()) if place.is_embedded else []
    named = {spec: place.settings(spec) for spec in specs}
    with place.loaded() as (model, tokenizer):
        batches = tokenised(chosen, model, tokenizer, batch_size, raw)
        with Console(stderr=True).status("Looking", spinner="dots") as status:
            found = advise(
                model,
                batches,
                specs=named,
                discover=search,
                local_files_only=offline,
                most_drafters=most_drafters,
                rounds=rounds,
                max_seconds=max_seconds,
                try_lengths=lengths,
                on_step=status.update,
            )
    calls = f"{counted(len(chosen), 'prompt')}, at most {counted(max_new_tokens, 'token')}, batch size {batch_size}"
    show(found.to_dict(), as_json, lambda: _print(found, calls))


def _print(found: Advice, calls: str) -> None:
    best = found.best
    if best is None:
        say("Use plain generation: nothing that was measured is surely faster.")
    elif best.settings["method"] == NO_DRAFTS:
        say(f"Use this loop without drafts: {best.speedup:.2f}x plain generation. Drafts add nothing sure.", "bold")
    else:
        low, high = best.speedup_range
        say(
            f"Use {best.name}: {best.speedup:.2f}x plain generation ({low:.2f}-{high:.2f} by round), "
            f"{best.over_none:.2f}x this loop without drafts.",
            "bold",
        )
    if best is not None:
        say(f"\n  {found.snippets['python']}\n")
        say(f"As JSON: {found.snippets['json']}")
    headings = ("speed-up", "by drafts", "tokens/s", "accept.\nlength", "accept.\nrate", "break\neven", "weights")
    table = new_table("", numbers=headings, padding=0)
    table.columns[0].no_wrap = True
    for option in found.options:
        table.add_row(
            Text(option.name),
            f"{option.speedup:.2f}",
            f"{option.over_none:.2f}",
            f"{option.tokens_per_second:.0f}",
            f"{option.mean_acceptance_length:.2f}",
            f"{option.acceptance_rate:.2f}",
            "-" if option.break_even is None else f"{option.break_even:.2f}",
            shown_size(option.draft_bytes or None),
        )
    Console().print(table)
    for option in found.options:
        say(f"{option.name}: {option.verdict}")
    for item in found.rejected:
        say(f"Not measured: {item.name}, {item.origin}. {item.reason}")
    for note in found.notes:
        say(note, "dim")
    machine = f"{found.environment['dtype']} on {found.environment['gpu'] or found.environment['cpu']}"
    say(
        f"{calls}, greedy, {counted(found.rounds, 'round')}; {machine}; {found.free_bytes / 1e9:.1f} GB were free.",
        "dim",
    )
