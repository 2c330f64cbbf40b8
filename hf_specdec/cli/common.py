"""Shared by the commands: options, loading, errors, progress, output."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..errors import SpecConfigError, SpecDecError


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


EXIT_DIFFERENT = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

EMBEDDED = "demo"


class Dtype(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


# The drafters of commands that are given none: for the embedded target, and for all others.
EMBEDDED_SPEC, ANY_SPEC = "draft_model", "ngram"

DtypeOption = Annotated[
    Dtype, typer.Option(help="Data type of the target. auto: the checkpoint's; float32 for the embedded model.")
]
DeviceOption = Annotated[
    str | None, typer.Option(help="Such as cpu or cuda:0. Left out: cuda if there is one, else cpu.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")]


DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def with_parameters(function: Callable[..., None], parameters: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """Lets typer see these parameters of a function that takes any keyword arguments."""
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def reporting(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command `--debug`, and prints errors of the package as one line."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    debugging = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=DebugOption)

    @wraps(command)
    def run(*, debug: bool = False, **given: Any) -> None:
        with reported_errors(debug):
            command(**given)

    return with_parameters(run, [*own, debugging])


def show(report: dict[str, Any], as_json: bool, show: Callable[[], None]) -> None:
    """Prints a report as JSON, or for people."""
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        show()


def load_target(
    name: str, dtype: Dtype, device: str | None, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch

    from .. import demo

    device = checked_device(device, allow_auto=name != EMBEDDED)
    if name == EMBEDDED:
        quieten_loading()
        weights = torch.float32 if dtype is Dtype.auto else getattr(torch, dtype.value)
        return demo.load_target(weights).to(device), demo.load_tokenizer()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not sys.stderr.isatty():
        quieten_loading()
    options = {"trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype.value, device_map=device, **options)
    except (OSError, ValueError) as error:
        raise SpecConfigError(f"The model '{name}' cannot be loaded: {error}") from error
    return model.eval(), tokenizer


@contextmanager
def reported_errors(debug: bool) -> Iterator[None]:
    """Errors of the package as one line; an interrupt and a closed pipe end the command quietly."""
    try:
        yield
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


def print_error(message: str) -> None:
    Console(stderr=True).print(Text(" ".join(message.split()), style="red"), soft_wrap=True)


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


def checked_device(name: str | None, allow_auto: bool = False) -> str:
    import torch

    if name == "auto" and allow_auto:
        return name
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise SpecConfigError(f"--device '{name}' is no device: {error}") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise SpecConfigError(f"--device '{name}': torch {torch.__version__} finds no CUDA device. Use --device cpu.")
    return name


def quieten_loading() -> None:
    """No progress bars for weights that load in no time."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shown_size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:.1f} MB"
