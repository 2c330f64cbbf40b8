"""Model cards: that of a drafter, with the settings to use it with, and the entry in a target's card that names one.

A card is Markdown after metadata in YAML. Under `speculative` the metadata have the flat settings of
[`SpeculativeConfig`]:

    of a drafter   `target` and how to draft; where the drafter is goes without saying
    of a target    which drafter to use, and how

Cards are data from strangers: their YAML is read without tags, in limits, and their text is not read at all.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ..checkpoints.files import RepoFiles
from ..errors import SpecConfigError
from ..method import NO_DRAFTS, is_language_model, methods, parts_of, takes_model
from ..settings import AUTO, SpeculativeConfig
from ..settings.checks import is_number
from ..version import INSTALLATION
from .engines import sglang_command, vllm_command
from .inspect import is_repo_id
from .published import CARD_KEY, CARD_NAME, published_config, settings_to_publish, target_entry
from .trust import texts_in


# Name of a card's settings in messages.
_SOURCE = "`speculative` in the card of '{}'"


# ----------------------------------------------------------------------------------------------------------- reading


def read_card(name: str | os.PathLike[str], **location: Any) -> SpeculativeConfig | None:
    """The settings in a drafter's card, with the drafter as `model`.

    Args:
        name (`str` or `os.PathLike`): Folder or repo id.
        location: `revision`, `subfolder` and what else [`RepoFiles`] takes.

    Returns:
        `SpeculativeConfig`, or `None` where there is no card or it has no settings.

    Raises:
        CheckpointAccessError: The repository cannot be reached.
        SpecConfigError: The settings are wrong, or ask for remote code. Those that a card may not say, or that this
            version does not know, are left out with a warning.
    """
    files = RepoFiles(name, **location)
    settings = files.card.get(CARD_KEY)
    if settings is None:
        return None
    if isinstance(settings, Mapping):
        settings = {key: value for key, value in settings.items() if key != "target"}
    place = {"model": files.name, "revision": files.revision, "subfolder": files.subfolder or None}
    return published_config(settings, _SOURCE.format(files.name), **place)


def read_target_card(name: str | os.PathLike[str], **location: Any) -> SpeculativeConfig | None:
    """The settings that a target's card names for it; arguments, result and errors as of `read_card`."""
    files = RepoFiles(name, **location)
    entry = target_entry(files.card)
    return None if entry is None else published_config(entry, _SOURCE.format(files.name), with_place=True)


# ----------------------------------------------------------------------------------------------------------- writing


def make_card(
    config: SpeculativeConfig,
    *,
    name: str,
    target: str | None = None,
    target_revision: str | None = None,
    base_model_relation: str = "default",
    license: str | None = None,
    tags: Iterable[str] = (),
    num_draft_tokens: int | None = None,
    report: Mapping[str, Any] | None = None,
    existing: ModelCard | None = None,
    source: tuple[str, str | None] | None = None,
) -> ModelCard:
    """The card of a drafter.

    Args:
        config (`SpeculativeConfig`): The settings, with a method. What concerns a machine or an account is left out,
            and so is where the drafter is.
        name (`str`): Repo id of the drafter, as its users will write it.
        target (`str`, *optional*): Repo id of the target. The path of a folder is left out: it says nothing to others.
        target_revision (`str`, *optional*): The commit that it was made for.
        base_model_relation (`str`, defaults to "default"):
            What the Hub should list the drafter as below the target. "default" is "adapter" for what runs on the
            target's states, for which the Hub would otherwise guess "finetune", and nothing for whole models. "none"
            leaves it out.
        license (`str`, *optional*): Identifier of the license. None is invented.
        tags (`Iterable[str]`): Beside those that say what it is.
        num_draft_tokens (`int`, *optional*): Draft tokens that it was made for, where the settings name none.
        report (`Mapping`, *optional*): What `hf-specdec bench --json` has printed.
        existing (`ModelCard`, *optional*): Its text, but for the figures, and its other metadata are kept.
        source (`tuple[str, str]`, *optional*): Repository and revision that the weights come from.

    Raises:
        SpecConfigError: The settings have no method, or the report has no figures of it.
    """
    if config.method is None or config.method == AUTO:
        raise SpecConfigError(
            "A card needs settings with a method. Name it, or call SpeculativeConfig.resolve() first."
        )
    target = target if target is not None and is_public(target) else None
    data = {} if existing is None else existing.data.to_dict()
    # What is not published is not shown, in no engine's notation either.
    settings = settings_to_publish(config, with_place=False)
    config = SpeculativeConfig.from_dict(settings)
    engines = config
    if not config.speculative_token_tree and config.fixed_length is None:
        engines = config.replace(num_speculative_tokens=num_draft_tokens)
    commands = {"vLLM": vllm_command(engines, name, target), "SGLang": sglang_command(engines, name, target)}
    is_whole_model = is_language_model(config.method)
    # A whole model has a base of its own.
    bases = texts_in(data.get("base_model")) if is_whole_model else []
    bases += [] if target is None else [target]
    if bases:
        data["base_model"] = list(dict.fromkeys(bases))
    if base_model_relation == "default":
        base_model_relation = "none" if is_whole_model else "adapter"
    if target is not None and base_model_relation != "none":
        data["base_model_relation"] = base_model_relation
    data["library_name"] = "transformers" if is_whole_model else "hf_specdec"
    data["pipeline_tag"] = "text-generation"
    kind = ["draft-model"] if takes_model(config.method) else []
    served_by = [engine.lower() for engine, command in commands.items() if command]
    own_tags = ["speculative-decoding", *kind, *parts_of(config.method), *served_by]
    data["tags"] = list(dict.fromkeys([*texts_in(data.get("tags")), *own_tags, *tags]))
    if license is not None:
        data["license"] = license
    # At the end, where it is found.
    data.pop(CARD_KEY, None)
    data[CARD_KEY] = settings if target is None else {"target": target, **settings}
    text = "" if existing is None else existing.text
    if not text.strip():
        rows = {} if target is None else {"target": _at(target, target_revision)}
        rows |= {} if source is None else {"weights of": _at(*source)}
        for key, value in settings.items():
            rows[key] = f"`{_cell(value if isinstance(value, str) else json.dumps(value))}`"
        text = _text(config.method, rows, commands, name, target)
    if report is not None:
        text = _with_measurements(text, _measurements(report, config.method))
    return ModelCard(f"---\n{ModelCardData(**data).to_yaml(original_order=list(data))}\n---\n{text}")


def add_to_target_card(card: ModelCard, settings: Any) -> None:
    """Lets the card of a target name its drafter.

    Args:
        card (`ModelCard`): The target's card; changed in place.
        settings: What [`SpeculativeConfig.resolve`] takes, but for a path; `None` takes the entry out.

    Raises:
        SpecConfigError: The settings are wrong, or name a folder of this machine.
    """
    if settings is None:
        card.data.pop(CARD_KEY)
        return
    config = settings if isinstance(settings, SpeculativeConfig) else SpeculativeConfig.resolve(settings)
    if config.model is not None and not is_public(config.model):
        raise SpecConfigError(
            f"A card names drafters by their repo id, and '{config.model}' is a path. Push the drafter, and name its "
            "repository."
        )
    card.data[CARD_KEY] = settings_to_publish(config, with_place=True)


def repository_name(name: str | None, folder: Path) -> str:
    """The repo id to write into the files of a folder: the one that was named, else the name of the folder."""
    if name is None:
        name = folder.resolve().name
        return name if is_repo_id(name) else "user/drafter"
    if not is_repo_id(name):
        raise SpecConfigError(f"'{name}' cannot be the id of a repository. Name it as in 'user/drafter'.")
    return name


def is_public(name: str) -> bool:
    """Tells a name that others can use: of a repository, and of no folder here."""
    return is_repo_id(name) and not os.path.exists(name)


def load_card(folder: str | os.PathLike[str]) -> ModelCard | None:
    """The card in a folder, `None` where there is none; metadata that cannot be read are a `SpecConfigError`."""
    path = os.path.join(folder, CARD_NAME)
    if not os.path.isfile(path):
        return None
    try:
        return ModelCard.load(path)
    except Exception as error:
        # Whatever a parser makes of a text.
        raise SpecConfigError(
            f"The metadata of '{path}' cannot be read: {error} Correct them, or remove the card."
        ) from error


# -------------------------------------------------------------------------------------------------- the card's text


def _text(
    method: str, rows: Mapping[str, str], commands: Mapping[str, str | None], name: str, target: str | None
) -> str:
    title = " and ".join(methods()[part].noun for part in parts_of(method))
    of = f" for `{target}`" if target else ""
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    model = json.dumps(target or "path/to/target")
    text = f"""
# {name.rpartition("/")[2]}

{title[0].upper()}{title[1:]}{of}, for speculative decoding: the drafter proposes several tokens, and the \
target checks all of them in one forward pass. The text is the target's: the same tokens if it is greedy, \
the same distribution if it samples.

| setting | value |
|---|---|
{table}

## Usage

With [transformers](https://github.com/huggingface/transformers) and hf_specdec ({INSTALLATION}):

```python
import hf_specdec, transformers
pipe = transformers.pipeline("text-generation", model={model}, speculative={json.dumps(name)})
print(pipe("Speculative decoding is")[0]["generated_text"])
```
"""
    for engine, command in commands.items():
        if command:
            text += f"\nWith {engine}:\n\n```bash\n{command}\n```\n"
    return text


def _at(repository: str, revision: str | None) -> str:
    return f"`{_cell(repository)}`" + (f" at revision `{_cell(revision)}`" if revision else "")


# ------------------------------------------------------------------------------------------------- measured figures

_MEASURED = "## Measured"

_COLUMNS = {
    "batch size": ("batch_size", "{}"),
    "tokens/s": ("tokens_per_second", "{:.1f}"),
    "speed-up": ("speedup", "{:.2f}"),
    "acceptance length": ("mean_acceptance_length", "{:.2f}"),
    "acceptance rate": ("acceptance_rate", "{:.0%}"),
}


def _measurements(report: Mapping[str, Any], method: str) -> str:
    """The figures of the baselines and of the method, and the circumstances as far as the report has them."""
    rows = report.get("rows") if isinstance(report, Mapping) else None
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) and "method" in row for row in rows):
        raise SpecConfigError(
            "The report has no `rows` with a `method`. Pass what `hf-specdec bench --json` has printed."
        )
    names = [str(row["method"]) for row in rows]
    # Variants of a method are named `method_variant`.
    own = [row for row, name in zip(rows, names) if name == method or name.startswith(f"{method}_")]
    if not own:
        raise SpecConfigError(f"The report has no figures of '{method}', but of: {', '.join(names) or 'nothing'}.")
    shown = [row for row, name in zip(rows, names) if name in ("plain", NO_DRAFTS) or row in own]
    has_batches = len({str(row.get("batch_size")) for row in shown}) > 1
    columns = {name: column for name, column in _COLUMNS.items() if has_batches or name != "batch size"}
    lines = [_MEASURED, "", f"| decoding | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for row in shown:
        figures = [(row.get(key), form) for key, form in columns.values()]
        cells = [form.format(figure) if is_number(figure) else "" for figure, form in figures]
        lines.append(f"| {_cell(row['method'])} | {' | '.join(cells)} |")
    environment, settings = (
        found if isinstance(found := report.get(key), Mapping) else {} for key in ("environment", "settings")
    )
    known = {
        "": environment.get("gpu") or environment.get("cpu"),
        "data type": environment.get("dtype"),
        "batch size": settings.get("batch_size"),
        "most new tokens": settings.get("max_new_tokens"),
        "torch": environment.get("torch"),
        "transformers": environment.get("transformers"),
        "date": environment.get("date"),
    }
    parts = [f"{key} {_cell(value)}".strip() for key, value in known.items() if value is not None]
    return "\n".join([*lines, "", *([f"{', '.join(parts)}.", ""] if parts else [])])


def _with_measurements(text: str, section: str) -> str:
    """The text with the section in the place of an older one, or at its end."""
    older = re.compile(rf"^{_MEASURED}\n.*?(?=^#|\Z)", re.DOTALL | re.MULTILINE)
    if older.search(text):
        return older.sub(lambda _: section + "\n", text, count=1)
    return text.rstrip("\n") + "\n\n" + section + "\n"


def _cell(value: Any) -> str:
    """Text that cannot end a cell of a table, or begin something new in it."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
