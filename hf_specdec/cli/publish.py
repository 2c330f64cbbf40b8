"""`hf-specdec card` and `hf-specdec export-custom-generate`: make a folder a repository for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SpecConfigError
from .common import reporting


if TYPE_CHECKING:
    from huggingface_hub import ModelCard

    from ..settings import SpeculativeConfig


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
    _check_is_folder(folder)
    if drafter is None:
        options = {"target_revision": target_revision, "license": license, "tags": tag or []}
        options |= {"name": name, "base_model_relation": base_model_relation}
        made = _drafter_card(folder, target, bench, options)
    else:
        of_drafters = {"--target": target, "--target-revision": target_revision, "--name": name, "--bench": bench}
        _check_left_out(of_drafters | {"--license": license, "--tag": tag})
        made = _target_card(folder, drafter)
    if not write:
        typer.echo(str(made))
        return
    made.save(folder / "README.md")
    typer.echo(folder / "README.md")


@reporting
def export_command(
    folder: Annotated[Path, typer.Argument(help="Where to; it may hold a drafter. Made if needed.")],
    name: Annotated[str | None, typer.Option(help="Repo id that the folder will have.")] = None,
    method: Annotated[str | None, typer.Option(help="Speculation method of calls that name none.")] = None,
    spec_model: Annotated[str | None, typer.Option(help="Their draft model: a repo id.")] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--num-speculative-tokens", "-k", help="Their draft tokens per cycle.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Their settings as JSON, or the path of a JSON file or a saved folder.")
    ] = None,
) -> None:
    """Write a repository for generate(custom_generate="user/repo", trust_remote_code=True).

    Without settings, calls use the drafter in the folder; without one, the drafter that is found for their model.
    """
    from ..hub.custom_generate import export_custom_generate

    given = {"method": method, "model": spec_model, "num_speculative_tokens": num_speculative_tokens}
    for file in export_custom_generate(folder, _settings(config, given), name=name):
        typer.echo(file)


def _drafter_card(folder: Path, target: str | None, bench: Path | None, options: dict[str, Any]) -> ModelCard:
    from ..hub.publish import card_of_folder
    from ..settings import SpeculativeConfig

    config = SpeculativeConfig.resolve(folder)
    target = _known_target(folder, config.method) if target is None else target
    return card_of_folder(folder, config, target=target, report=_report(bench), **options)


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


def _target_card(folder: Path, drafter: str) -> ModelCard:
    from huggingface_hub import ModelCard

    from ..hub.card import add_to_target_card, load_card

    card = load_card(folder) or ModelCard(f"---\n{{}}\n---\n\n# {folder.resolve().name}\n")
    add_to_target_card(card, None if drafter in ("", "none") else drafter)
    return card


def _settings(config: str | None, given: dict[str, Any]) -> SpeculativeConfig | None:
    from ..settings import SpeculativeConfig

    if config is not None:
        return SpeculativeConfig.resolve(config, **given)
    if all(value is None for value in given.values()):
        return None
    # The method of a model is read by the calls.
    return SpeculativeConfig(**given)


def _report(path: Path | None) -> Any:
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecConfigError(f"--bench '{path}' cannot be read as JSON: {error}") from error


def _check_is_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise SpecConfigError(
            f"'{folder}' is no folder. Pass the folder of a drafter, such as one of save_pretrained()."
        )


def _check_left_out(options: dict[str, Any]) -> None:
    given = [name for name, value in options.items() if value]
    if given:
        raise SpecConfigError(f"{', '.join(given)}: for the card of a drafter, and --drafter is for that of a target.")
