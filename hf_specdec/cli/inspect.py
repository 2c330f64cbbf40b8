"""`hf-specdec inspect`: what a drafter is and whether it fits a model, or which drafters there are for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import SpecConfigError, counted
from . import options
from .output import EXIT_DIFFERENT, new_table, say, show
from .target import Target


if TYPE_CHECKING:
    from ..hub.candidate import Candidate
    from ..hub.inspect import Inspection


def inspect_command(
    *,
    checkpoint: Annotated[
        str | None, typer.Argument(help="The drafter: a repository or a folder.", show_default=False)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="MODEL", help="Does it fit this model? Alone: which drafters are there?"),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of the drafter's repository, or alone the model's.")
    ] = None,
    subfolder: Annotated[str | None, typer.Option(help="Folder inside of it that holds the drafter.")] = None,
    offline: options.Offline = False,
    yes: options.Yes = False,
    as_json: options.Json = False,
) -> None:
    """Tell what a drafter is (method, format, size, the model it was made for), and whether it fits.

    With --target alone: list the drafters for that model, in the order in which 'auto' would take them: those of its
    own checkpoint, generation config and card, and of the Hub, offline of its local cache. Weights are not downloaded.
    Exit code 1: it does not fit the model, or cannot be used with any.
    """
    path = None if target is None else Target(target, options.Place(yes=yes)).path()
    if checkpoint is None:
        if path is None:
            raise SpecConfigError("There is nothing to inspect. Name a drafter, a model with --target, or both.")
        if subfolder is not None:
            raise SpecConfigError("--subfolder is of a drafter, and none is named.")
        from ..hub.discover import search_for

        search = search_for(path, revision, local_files_only=offline)
        candidates = search.all()
        report = {"target": path, "candidates": [item.to_dict() for item in candidates], "notes": search.notes}
        show(report, as_json, lambda: _print_drafters(candidates, search.notes))
        return
    from ..hub.inspect import inspect_checkpoint

    found = inspect_checkpoint(checkpoint, path, revision=revision, subfolder=subfolder, local_files_only=offline)
    show(found.to_dict(), as_json, lambda: _print_drafter(found, target))
    if found.problems:
        raise typer.Exit(EXIT_DIFFERENT)


def _print_drafters(candidates: list[Candidate], notes: list[str]) -> None:
    table = new_table("method", "model", "why", numbers=("size", "downloads"))
    for item in candidates:
        if not item.problems:
            downloads = str(item.downloads or "")
            table.add_row(item.method, Text(item.model or ""), item.reason, _size(item.num_bytes), downloads)
    Console().print(table)
    for item in candidates:
        if item.problems:
            say(f"Not usable: {item}, {item.reason}. {' '.join(item.problems)}")
    for note in notes:
        say(f"Less may have been found {note}.", "dim", stderr=True)


def _print_drafter(inspection: Inspection, target: str | None) -> None:
    found, needs = inspection.found, inspection.found.target
    sizes = {
        "hidden size": needs.hidden_size,
        "vocabulary": needs.vocab_size,
        "layers": needs.num_hidden_layers,
        "layers at least": needs.min_hidden_layers if needs.num_hidden_layers is None else None,
        "model_type": needs.model_type,
    }
    made_for = [needs.name, *(f"{name} {size}" for name, size in sizes.items() if size is not None)]
    rows = {
        "checkpoint": inspection.name,
        "method": found.method,
        "format": f"{found.format} ({found.producer})",
        "made for": ", ".join(filter(None, made_for)),
        "draft length": counted(found.num_draft_tokens, "token") if found.num_draft_tokens else "",
        "tensors": "" if found.num_tensors is None else f"{found.num_tensors} in {found.weight_file}",
        "size": _size(found.num_bytes),
        "MTP layers": str(found.mtp_layers or ""),
        f"fits '{target}'": {None: "", True: "yes", False: "no"}[inspection.fits],
        "hint": inspection.hint,
    }
    table = Table(box=SIMPLE, show_header=False)
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(value))
    for problem in inspection.problems:
        table.add_row("problem", Text(problem, style="red"))
    Console().print(table)


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:.1f} MB"
