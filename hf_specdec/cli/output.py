"""What commands print: errors as one line, tables, notes, progress."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from ..errors import SpecDecError
from .spellings import check_spelling


EXIT_DIFFERENT = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


class Commands(TyperGroup):
    """Commands whose errors are one line (`--debug`: the traceback), and which an interrupt ends quietly."""

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo(err=True)
            print_error("Interrupted.")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            # The reader has gone. Without this, Python would complain when it flushes standard output at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        except (SpecDecError, OSError) as error:
            of_file = not isinstance(error, SpecDecError)
            if ctx.meta.get("debug") or (of_file and error.filename is None):
                raise
            print_error(f"{error}. Name another path, or correct what may be done there." if of_file else str(error))
            raise typer.Exit(EXIT_ERROR) from None

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:
        check_spelling(args, self.commands)
        return super().resolve_command(ctx, args)


def show(report: Any, as_json: bool, show: Callable[[], None]) -> None:
    """Prints a report as JSON, or for people."""
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        show()


def say(text: str | Text, style: str = "", *, stderr: bool = False) -> None:
    """Prints a line as it is: where it is copied or piped, it has no further line breaks."""
    Console(stderr=stderr).print(Text(text, style=style) if isinstance(text, str) else text, soft_wrap=True)


def print_notes(notes: Iterable[str]) -> None:
    """Prints the remarks below a table; a terminal breaks them between words."""
    console = Console()
    for note in notes:
        console.print(Text(note, style="dim"), soft_wrap=not console.is_terminal)


def print_error(message: str) -> None:
    say(" ".join(message.split()), "red", stderr=True)


def new_table(*texts: str, numbers: Iterable[str] = (), **options: Any) -> Table:
    """A table with columns of texts, then columns of numbers."""
    table = Table(*texts, box=SIMPLE_HEAD, **options)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """Progress bars, if standard error is a terminal: `begin(title, steps)` gives the function to call a step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def begin(title: str, steps: int) -> Callable[[], None]:
            return partial(progress.advance, progress.add_task(title, total=steps))

        yield begin
