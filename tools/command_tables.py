"""The tables of the command line's options, as the program declares them."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, Literal, get_args, get_origin

import typer

from hf_specdec.cli import app
from hf_specdec.cli.train import flags_of, options_of
from hf_specdec.method import trainings
from hf_specdec.training.arguments import DraftTrainingArguments
from hf_specdec.training.options import TextOptions


# Options of every command, which the page names once.
EVERYWHERE = ("debug", "help")

_HEAD = ["| option | default | meaning |", "|---|---|---|"]


def commands() -> dict[str, Any]:
    """The commands of the program by name; one of training stands for those of all recipes, which take the same."""
    every = dict(typer.main.get_command(app).commands)
    return {**every, "train": next(iter(every["train"].commands.values()))}


def flags(command: str) -> set[str]:
    """All options that a command takes, those of training with what its own parser reads."""
    known = {name for item in commands()[command].params for name in (*item.opts, *item.secondary_opts)}
    if command == "train":
        for options in (TextOptions, *(training.options for training in trainings().values())):
            known.update(name for each in options_of(options) for flag in flags_of(*each) for name in flag.split("/"))
        for item in fields(DraftTrainingArguments):
            aliases = item.metadata.get("aliases") or ()
            known.update((f"--{item.name}", f"--{item.name.replace('_', '-')}"))
            known.update([aliases] if isinstance(aliases, str) else aliases)
    return known


def options_table(command: str) -> str:
    """The arguments and options that this command alone has, in the groups of its help."""
    groups: dict[str, list[str]] = {}
    for item in commands()[command].params:
        if item.name not in EVERYWHERE and len(_commands_with()[_named(item)]) == 1:
            group = getattr(item, "rich_help_panel", None) or ""
            groups.setdefault(group, []).append(_row(_name(item), _default(item), _meaning(item)))
    # As in the help, options of no group come first.
    tables = [(name, rows) for name, rows in sorted(groups.items(), key=lambda group: bool(group[0]))]
    return "\n\n".join("\n".join([*([f"{name}:\n"] if name else []), *_HEAD, *rows]) for name, rows in tables)


def shared_options_table() -> str:
    """The options that several commands have alike; where their defaults differ, each with its commands."""
    lines = ["| option | commands | default | meaning |", "|---|---|---|---|"]
    for (name, meaning), defaults in _commands_with().items():
        if len(defaults) > 1:
            by_default: dict[str, list[str]] = {}
            for command, default in defaults.items():
                by_default.setdefault(default, []).append(command)
            differ = len(by_default) > 1
            texts = [f"{default} ({', '.join(names)})" if differ else default for default, names in by_default.items()]
            lines.append(_row(name, ", ".join(defaults), ", ".join(texts), meaning))
    return "\n".join(lines)


@cache
def _commands_with() -> dict[tuple[str, str], dict[str, str]]:
    """By name and meaning of an option, the commands that have it, with its default in each."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for command, program in commands().items():
        for item in program.params:
            if item.name not in EVERYWHERE:
                found.setdefault(_named(item), {})[command] = _default(item)
    return found


def _named(item: Any) -> tuple[str, str]:
    return _name(item), _meaning(item)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _name(item: Any) -> str:
    if item.param_type_name == "argument":
        return f"`{item.name.upper()}`"
    names = [f"{name}/{item.secondary_opts[0]}" if item.secondary_opts else name for name in item.opts]
    return ", ".join(f"`{name}`" for name in names)


def _default(item: Any) -> str:
    if item.required:
        return "required"
    value = item.default
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        value = f"{value:g}"
    return "" if value is None else f"`{value}`"


def _meaning(item: Any) -> str:
    kind = item.type_descriptor.annotation
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if all(choice in item.help for choice in choices):
        return item.help
    return f"{item.help} ({', '.join(f'`{choice}`' for choice in choices)})"
