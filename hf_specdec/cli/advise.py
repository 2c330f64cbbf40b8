"""`hf-specdec advise`: finds the fastest way of speculating for a target, on the user's own prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import counted
from .common import JsonOption, show, shown_size
from .pairs import (
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
    offline: Annotated[bool, typer.Option("--offline", help="Look into the local cache only.")] = False,
    lengths: Annotated[
        bool, typer.Option("--lengths/--no-lengths", help="Also measure other lengths of the fastest one.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Recommend a configuration, by measuring on your prompts.

    Drafters that are found for the target, methods without weights and what --spec names generate the same prompts
    beside plain generation. Prints the fastest as Python and JSON, and why the others lose.
    """
    from ..diagnosis import advise
    from .demo import demo_methods

    chosen = place.prompts(prompts, max_new_tokens)
    named = list(demo_methods()) if place.is_embedded and specs is None else specs or []
    with place.loaded() as (model, tokenizer):
        batches = tokenised(chosen, model, tokenizer, batch_size, raw)
        with Console(stderr=True).status("Looking", spinner="dots") as status:
            found = advise(
                model,
                batches,
                specs=place.named_settings(named),
                discover=search,
                local_files_only=offline,
                most_drafters=most_drafters,
                rounds=rounds,
                max_seconds=max_seconds,
                try_lengths=lengths,
                on_step=status.update,
            )
    show(found.to_dict(), as_json, lambda: _print(found, len(chosen), max_new_tokens, batch_size))


def _print(found: Advice, num_prompts: int, max_new_tokens: int, batch_size: int) -> None:
    console = Console()
    if found.best is None:
        console.print(Text("Use plain generation: nothing that was measured is surely faster."), soft_wrap=True)
    else:
        best = found.best
        low, high = best.speedup_range
        title = f"Use {best.name}: {best.speedup:.2f}x plain generation ({low:.2f}-{high:.2f} by round)."
        console.print(Text(title, style="bold"), soft_wrap=True)
        snippets = found.snippets
        console.print(Text(f"\n  {snippets['python']}\n"), soft_wrap=True)
        console.print(Text(f"As JSON: {snippets['json']}"), soft_wrap=True)
        console.print(Text(f"In generation_config.json: {snippets['generation_config']}"), soft_wrap=True)
    table = Table("", box=SIMPLE_HEAD)
    for heading in ("speed-up", "tokens/s", "accept. length", "accept. rate", "break even", "weights"):
        table.add_column(heading, justify="right")
    for option in found.options:
        table.add_row(
            Text(option.name),
            f"{option.speedup:.2f}",
            f"{option.tokens_per_second:.0f}",
            f"{option.mean_acceptance_length:.2f}",
            f"{option.acceptance_rate:.2f}",
            "-" if option.break_even is None else f"{option.break_even:.2f}",
            shown_size(option.draft_bytes or None),
        )
    console.print(table)
    for option in found.options:
        console.print(Text(f"{option.name}: {option.verdict}"), soft_wrap=True)
    for item in found.rejected:
        console.print(Text(f"Not measured: {item.name}, {item.origin}. {item.reason}"), soft_wrap=True)
    environment = found.environment
    notes = [
        *found.notes,
        f"{counted(num_prompts, 'prompt')}, at most {counted(max_new_tokens, 'token')}, batch size {batch_size}, "
        f"greedy, {counted(found.rounds, 'round')}; {environment['dtype']} on "
        f"{environment['gpu'] or environment['cpu']}; {found.free_bytes / 1e9:.1f} GB were free.",
    ]
    for note in notes:
        console.print(Text(note, style="dim"), soft_wrap=True)
