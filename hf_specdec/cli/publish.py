"""`hf-specdec publish`: the card of a drafter's folder, and the folder on the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import SpecConfigError


def publish_command(
    *,
    folder: Annotated[Path, typer.Argument(help="A drafter: a saved folder or a checkpoint.", show_default=False)],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Repository, made if needed.", show_default=False)],
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="MODEL", help="The target's. Default: as the checkpoint or the card says."),
    ] = None,
    bench: Annotated[
        Path | None, typer.Option(help="Figures for the card: a file that `bench --output` has written.")
    ] = None,
    license: Annotated[str | None, typer.Option(help="Identifier of the license, such as apache-2.0.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="A further tag; may be repeated.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the card, README.md, and upload nothing.")] = False,
) -> None:
    """Publish a drafter on the Hub: metadata, settings, usage and measured figures in its card, and all its files.

    A card that is there keeps its text and its other metadata. Needs a login (`hf auth login`).
    """
    from huggingface_hub.errors import HfHubHTTPError

    from ..hub.publish import push_folder, write_card

    card: dict[str, Any] = {"target": target, "license": license, "tags": tag or []}
    try:
        card["report"] = None if bench is None else json.loads(bench.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecConfigError(f"--bench '{bench}' cannot be read as JSON: {error}") from error
    if dry_run:
        typer.echo(write_card(folder, name=repo, **card))
        return
    try:
        typer.echo(push_folder(folder, repo, private=private or None, **card))
    except HfHubHTTPError as error:
        raise SpecConfigError(f"The Hub refuses '{repo}': {error}") from error
