"""The command line `hf-specdec`: try the methods on the embedded model, generate text with any model, train drafts,
find and publish them on the Hub.

Results go to standard output, everything else (progress, statistics, errors) to standard error. Commands import torch
when they run, so that help and usage errors appear at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .advise import advise_command
from .bench import bench_command
from .demo import demo_command
from .discover import discover_command
from .doctor import doctor_command
from .generate import generate_command
from .generate_many import generate_many_command
from .inspect import inspect_command
from .publish import card_command, export_command
from .serve import serve_command
from .train import train_command
from .verify import verify_command
from .warm_up import warm_up_command


__all__ = ["app", "main"]

app = typer.Typer(
    name="hf-specdec",
    help="Speculative decoding for Hugging Face transformers: the same output, faster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("advise")(advise_command)
app.command("bench")(bench_command)
app.command("card")(card_command)
app.command("demo")(demo_command)
app.command("discover")(discover_command)
app.command("doctor")(doctor_command)
app.command("export-custom-generate")(export_command)
app.command("generate")(generate_command)
app.command("generate-many")(generate_many_command)
app.command("inspect")(inspect_command)
app.command("serve")(serve_command)
app.command("train")(train_command)
app.command("verify")(verify_command)
app.command("warm-up")(warm_up_command)


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
