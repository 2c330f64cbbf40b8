"""`hf-specdec card` and `hf-specdec export-custom-generate`: make a folder a repository for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import SpecConfigError
from .common import as_length, reporting


@reporting
def card_command(
    folder: Annotated[Path, typer.Argument(help="A drafter: a saved folder or a checkpoint.")],
    target: Annotated[
        str | None, typer.Option(help="Repo id of the target. Left out: as the checkpoint or the card says.")
    ] = None,
    target_revision: Annotated[str | None, typer.Option(help="Commit of the target that it was made for.")] = None,
    name: Annotated[str | None, typer.Option(help="Repo id of the drafter. Left out: the name of the folder.")] = None,
    bench: Annotated[
        Path | None, typer.Option(help="Figures for the card: what a command has printed with --json.")
    ] = None,
    license: Annotated[str | None, typer.Option(help="Identifier of the license, such as apache-2.0.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="A further tag; may be given several times.")] = None,
    base_model_relation: Annotated[
        str, typer.Option(help="adapter, finetune, quantized, merge or none. default: adapter for heads.")
    ] = "default",
    drafter: Annotated[
        str | None,
        typer.Option(help="The folder is a target: let its card name this drafter (repo id, method or JSON)."),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write README.md instead of printing it.")] = False,
) -> None:
    """Make the model card of a drafter: metadata, settings, usage, and measured figures.

    A card that is there keeps its text and its other metadata.
    """
    if not folder.is_dir():
        raise SpecConfigError(
            f"'{folder}' is no folder. Pass the folder of a drafter, such as one of save_pretrained()."
        )
    from huggingface_hub import ModelCard

    from ..hub.card import add_to_target_card, load_card
    from ..hub.publish import card_of_folder
    from ..settings import SpeculativeConfig

    if drafter is None:
        config = SpeculativeConfig.resolve(folder)
        made = card_of_folder(
            folder,
            config,
            target=_known_target(folder, config.method) if target is None else target,
            target_revision=target_revision,
            name=name,
            report=None if bench is None else _read_report(bench),
            license=license,
            tags=tag or [],
            base_model_relation=base_model_relation,
        )
    else:
        of_drafters = {"--target": target, "--target-revision": target_revision, "--name": name, "--bench": bench}
        given = [option for option, value in (of_drafters | {"--license": license, "--tag": tag}).items() if value]
        if given:
            raise SpecConfigError(
                f"{', '.join(given)}: for the card of a drafter, and --drafter is for that of a target."
            )
        made = load_card(folder) or ModelCard(f"---\n{{}}\n---\n\n# {folder.resolve().name}\n")
        add_to_target_card(made, None if drafter in ("", "none") else drafter)
    if write:
        made.save(folder / "README.md")
    typer.echo(folder / "README.md" if write else str(made))


def _known_target(folder: Path, method: str) -> str | None:
    """Target that a folder's card or checkpoint names; the base of a whole language model is not its target."""
    from ..hub.card import load_card
    from ..hub.detect import detect_checkpoint
    from ..method import is_language_model

    card = load_card(folder)
    metadata = {} if card is None else card.data.to_dict()
    settings, bases = metadata.get("speculative"), metadata.get("base_model")
    named = settings.get("target") if isinstance(settings, dict) else None
    if named is None and not is_language_model(method):
        named = bases[0] if isinstance(bases, list) and bases else bases
    if isinstance(named, str):
        return named
    return detect_checkpoint(folder).target.name if (folder / "config.json").is_file() else None


def _read_report(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecConfigError(f"--bench '{path}' cannot be read as JSON: {error}") from error


@reporting
def export_command(
    folder: Annotated[Path, typer.Argument(help="Where to; it may hold a drafter. Made if needed.")],
    name: Annotated[str | None, typer.Option(help="Repo id that the folder will have.")] = None,
    method: Annotated[str | None, typer.Option(help="Speculation method of calls that name none.")] = None,
    spec_model: Annotated[str | None, typer.Option(help="Their draft model: a repo id.")] = None,
    num_speculative_tokens: Annotated[
        str | None,
        typer.Option("--num-speculative-tokens", "-k", help="Their draft tokens per cycle; fixed: the method's own."),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Their settings as JSON, or the path of a JSON file or a saved folder.")
    ] = None,
) -> None:
    """Write a repository for generate(custom_generate="user/repo", trust_remote_code=True).

    Without settings, calls use the drafter in the folder; without one, the drafter that is found for their model.
    """
    from ..hub.custom_generate import export_custom_generate
    from ..settings import SpeculativeConfig

    given = {"method": method, "model": spec_model, "num_speculative_tokens": as_length(num_speculative_tokens)}
    settings = None
    if config is not None:
        settings = SpeculativeConfig.resolve(config, **given)
    elif any(value is not None for value in given.values()):
        # The method of a model is read by the calls.
        settings = SpeculativeConfig(**given)
    for file in export_custom_generate(folder, settings, name=name):
        typer.echo(file)
