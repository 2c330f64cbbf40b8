"""`hf-specdec discover`: lists drafters for a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from .common import JsonOption, OfflineOption, new_table, reporting, say, show, shown_size
from .target import EMBEDDED


if TYPE_CHECKING:
    from ..hub.candidate import Candidate


@reporting
def discover_command(
    target: Annotated[str, typer.Argument(help="Target model: a repo id or a folder; 'demo' is the embedded one.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the target's repository.")] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="Repositories of the Hub to look into, the most downloaded first.")
    ] = 8,
    offline: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """List drafters for a target, in the order in which spec_method="auto" would take them.

    Looks into the target's own checkpoint, its generation config and card, the local cache and the Hub. Weights are
    not downloaded. What was found but does not fit is listed last, with the reason.
    """
    from .. import demo
    from ..hub.discover import Search
    from ..hub.target import Access, Target

    access = Access(local_files_only=offline)
    name = demo.target_path() if target == EMBEDDED else target
    search = Search(Target.of_name(name, access, revision), access, limit)
    candidates = search.all()
    report = {"target": name, "candidates": [item.to_dict() for item in candidates], "notes": search.notes}
    show(report, as_json, lambda: _print(candidates, search.notes))


def _print(candidates: list[Candidate], notes: list[str]) -> None:
    table = new_table("method", "model", "why", numbers=("size", "downloads"))
    for item in candidates:
        if not item.problems:
            downloads = str(item.downloads or "")
            table.add_row(item.method, Text(item.model or ""), item.reason, shown_size(item.num_bytes), downloads)
    Console().print(table)
    for item in candidates:
        if item.problems:
            say(f"Not usable: {item}, {item.reason}. {' '.join(item.problems)}")
    for note in notes:
        say(f"Less may have been found {note}.", "dim", stderr=True)
