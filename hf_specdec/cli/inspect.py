"""`hf-specdec inspect`: describes a checkpoint, and tells whether it fits a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import counted
from .common import EXIT_DIFFERENT, JsonOption, OfflineOption, reporting, show, shown_size


if TYPE_CHECKING:
    from ..hub.detect import TargetNeeds
    from ..hub.inspect import Inspection


@reporting
def inspect_command(
    checkpoint: Annotated[str, typer.Argument(help="The drafter: a repo id or a folder.")],
    target: Annotated[
        str | None, typer.Option(help="Does it fit this target? A repo id, a folder, or 'demo' for the embedded one.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the drafter's repository.")] = None,
    subfolder: Annotated[str | None, typer.Option(help="Folder inside of it that holds the drafter.")] = None,
    target_revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the target's.")] = None,
    cache_dir: Annotated[str | None, typer.Option(help="Folder where downloads are kept.")] = None,
    offline: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Tell what a checkpoint is: method, format, size, and the target it was made for.

    Weights are not downloaded. The exit code is 1 if it does not fit the target, or cannot be used with any.
    """
    from ..hub.inspect import inspect_checkpoint

    found = inspect_checkpoint(
        checkpoint,
        target,
        revision=revision,
        subfolder=subfolder,
        target_revision=target_revision,
        cache_dir=cache_dir,
        local_files_only=offline,
    )
    show(found.to_dict(), as_json, lambda: Console().print(_table(found, target)))
    if found.problems:
        raise typer.Exit(EXIT_DIFFERENT)


def _table(inspection: Inspection, target: str | None) -> Table:
    found = inspection.found
    table = Table(box=SIMPLE, show_header=False)
    rows = {
        "checkpoint": inspection.name,
        "method": found.method,
        "format": f"{found.format} ({found.producer})",
        "made for": _described(found.target),
        "draft length": counted(found.num_draft_tokens, "token") if found.num_draft_tokens else "",
        "tensors": "" if found.num_tensors is None else f"{found.num_tensors} in {found.weight_file}",
        "size": shown_size(found.num_bytes),
        "MTP layers": str(found.mtp_layers or ""),
        f"fits '{target}'": {None: "", True: "yes", False: "no"}[inspection.fits],
        "hint": inspection.hint,
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(value))
    for problem in inspection.problems:
        table.add_row("problem", Text(problem, style="red"))
    return table


def _described(needs: TargetNeeds) -> str:
    """Describes the target that a checkpoint was made for, as far as it is known."""
    sizes = {
        "hidden size": needs.hidden_size,
        "vocabulary": needs.vocab_size,
        "layers": needs.num_hidden_layers,
        "layers at least": needs.min_hidden_layers if needs.num_hidden_layers is None else None,
        "model_type": needs.model_type,
    }
    known = [f"{name} {size}" for name, size in sizes.items() if size is not None]
    return ", ".join([needs.name, *known] if needs.name else known)
