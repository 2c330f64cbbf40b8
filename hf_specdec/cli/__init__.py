"""The command line `hf-specdec`: generate text with any model, measure, serve, train drafts, find and publish them.

Results go to standard output, everything else (progress, statistics, errors) to standard error. Commands import torch
when they run, so that help and usage errors appear at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from . import train
from .batch import batch_command
from .bench import bench_command
from .doctor import doctor_command
from .generate import generate_command
from .inspect import inspect_command
from .options import grouped
from .output import Commands
from .publish import publish_command
from .serve import serve_command


__all__ = ["app", "main"]

app: typer.Typer = typer.Typer(
    name="hf-specdec",
    cls=Commands,
    help="Speculative decoding for Hugging Face transformers: the same output, faster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(grouped(generate_command))
app.command("batch")(grouped(batch_command))
app.command("serve")(grouped(serve_command))
app.command("bench")(grouped(bench_command))
app.command("doctor")(grouped(doctor_command))
app.command("inspect")(grouped(inspect_command))
app.command("publish")(grouped(publish_command))
app.add_typer(train.app, name="train")


def main() -> None:
    """Entry point of `hf-specdec` and `python -m hf_specdec`."""
    app(prog_name="hf-specdec")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-specdec {__version__}")
        raise typer.Exit()


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
