"""Shared by the commands: options, errors, progress, output."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import SpecDecError


EXIT_DIFFERENT = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Look into the local cache only.")]


def with_parameters(function: Callable[..., None], parameters: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """Lets typer see these parameters of a function that takes any keyword arguments."""
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def reporting(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command `--debug`, and prints errors of the package and about paths as one line.

    An interrupt and a closed pipe end the command quietly.
    """
    own = inspect.signature(command, eval_str=True).parameters.values()
    debugging = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=DebugOption)

    @wraps(command)
    def run(*, debug: bool = False, **given: Any) -> None:
        try:
            command(**given)
        except SpecDecError as error:
            if debug:
                raise
            print_error(str(error))
            raise typer.Exit(EXIT_ERROR) from None
        except KeyboardInterrupt:
            typer.echo(err=True)
            print_error("Interrupted.")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            # The reader has gone. Without this, Python would complain when it flushes standard output at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        except OSError as error:
            if debug or error.filename is None:
                raise
            print_error(f"{error}. Name another path, or correct what may be done there.")
            raise typer.Exit(EXIT_ERROR) from None

    return with_parameters(run, [*own, debugging])


# -------------------------------------------------------------------------------------------------------------- output


def show(report: dict[str, Any], as_json: bool, show: Callable[[], None]) -> None:
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
    progress = Progress(*columns, console=console, transient=True)

    def begin(title: str, steps: int) -> Callable[[], None]:
        task = progress.add_task(title, total=steps)
        return lambda: progress.advance(task)

    with progress if console.is_terminal else nullcontext():
        yield begin


def shown_size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:.1f} MB"


def as_length(text: str | None) -> int | str | None:
    """Value of `--num-speculative-tokens`. One that is no number is judged with the other settings."""
    return int(text) if text is not None and text.removeprefix("-").isdecimal() else text
