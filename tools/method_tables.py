"""The tables in README, docs and navigation, as the package and its tests declare them.

python -m tools.method_tables             # writes them anew, between `<!-- table NAME -->` and `<!-- end -->`
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

from hf_specdec.hub import trust
from hf_specdec.method import Method, built_in_methods, preferred_methods, trainings
from hf_specdec.settings import describe_settings
from hf_specdec.training.arguments import DraftTrainingArguments
from tools import benchmark_pages, support_tables
from tools.command_tables import commands, options_table, shared_options_table


ROOT = Path(__file__).parents[1]
_PAGES = ("choose", "cli", "configuration", "hub", "models", "performance", "training")
# Pages of several methods, by the folders of these.
_SHARED_PAGES = {
    **dict.fromkeys(("ngram", "suffix", "recycling", "none"), "no_weights"),
    **dict.fromkeys(("medusa", "mlp_speculator"), "older_heads"),
    "mtp": "eagle",
    "self_speculation": "draft_model",
}
PAGES = ("README.md", "mkdocs.yml", *(f"docs/{page}.md" for page in _PAGES))

# Reports whose figures a page shows.
FIGURES = ("real-qwen2.5-coder", "real-qwen2.5-coder-bfloat16", "real-smollm2")

# Marks of Markdown, and of the navigation.
_TABLE = re.compile(
    r"(?P<begin><!-- table (?P<name>[\w .-]+) -->\n|(?<= )# table (?P<nav>\w+)\n).*?(?P<end><!-- end -->| +# end)",
    re.DOTALL,
)


def with_tables(page: str) -> str:
    """The page with all its tables made anew."""
    return _TABLE.sub(lambda mark: f"{mark['begin']}{TABLES[mark['name'] or mark['nav']]()}\n{mark['end']}", page)


def page_of(method: Method) -> str:
    """Name of the page that describes a method."""
    return _SHARED_PAGES.get(_folder(method), _folder(method))


def _folder(method: Method) -> str:
    return method.folder.rpartition(".")[2]


def _needs(method: Method) -> str:
    if method.in_target_checkpoint:
        return "a target that has them"
    if method.needs_grammar:
        return "a grammar"
    if method.weights:
        return f"{method.weights}"
    return f"`{method.package}`" if method.package else "nothing"


def methods_table() -> str:
    """The methods, those that need least first, without weights the preferred one."""
    folders: dict[str, list[Method]] = {}
    for method in sorted(
        built_in_methods(), key=lambda one: (one.takes_model, not one.takes_model and one.preference)
    ):
        folders.setdefault(_folder(method), []).append(method)
    rows = ["| method | drafts from | needs | page |", "|---|---|---|---|"]
    for methods in folders.values():
        page = page_of(methods[-1])
        names = _listed(method.name for method in methods)
        rows.append(f"| {names} | {methods[-1].drafts_from} | {_needs(methods[-1])} | [{page}]({page}.md) |")
    combined = "retrieval where the text repeats, the other method elsewhere"
    page = "[no_weights](no_weights.md#combined-with-another-method)"
    rows.append(f"| `suffix+eagle3`, ... | {combined} | what they need | {page} |")
    return "\n".join(rows)


def settings_table() -> str:
    """The settings of all methods."""
    return _settings_table([(item, None) for item in describe_settings()])


def settings_of_methods() -> str:
    """The settings that several methods have alike, then those of each one."""
    owners: dict[tuple[str, ...], list[str]] = {}
    described = {method.name: describe_settings(method.name) for method in built_in_methods()}
    for name, items in described.items():
        for item in items:
            owners.setdefault(_cells(item), []).append(name)
    shared = {}
    for items in described.values():
        shared.update({_cells(item): item for item in items if len(owners[_cells(item)]) > 1})
    parts = ["### Several methods", _settings_table([(item, owners[cells]) for cells, item in shared.items()])]
    for name, items in described.items():
        own = [(item, None) for item in items if len(owners[_cells(item)]) == 1]
        if own:
            parts += [f"### `{name}`", _settings_table(own)]
    return "\n\n".join(parts)


def _settings_table(items) -> str:
    """Settings with the methods that have them, where that is not all there is to the table."""
    with_owners = any(names for _, names in items)
    head = ["setting", *(["methods"] if with_owners else []), "type", "default", "meaning"]
    rows = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for item, names in items:
        key, *cells = _cells(item)
        cells = [key, *([_listed(names)] if with_owners else []), *cells]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _cells(item) -> tuple[str, ...]:
    published = " †" if item.key in trust.may_be_published() else ""
    # Every setting may be left to its default, which its meaning tells where it is no constant.
    default = "" if item.default == "None" else f"`{item.default}`"
    return f"`{item.key}`{published}", f"`{item.type.removesuffix(' | None')}`", default, item.help


def preferred_methods_list() -> str:
    """The methods in the order in which a search prefers them."""
    return _listed(method.name for method in preferred_methods())


def _listed(names) -> str:
    return ", ".join(f"`{name}`" for name in names)


def real_model() -> str:
    """Speed-ups of a real model, which the README shows."""
    return benchmark_pages.markdown(benchmark_pages.by_kind(benchmark_pages.report("real-qwen2.5-coder")["rows"]))


def recipes_table() -> str:
    rows = ["| method | trains |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {training.noun} |" for name, training in trainings().items())])


def training_arguments_table() -> str:
    """Options of the training that are not transformers' own, or have another default."""
    own = set(vars(DraftTrainingArguments)["__annotations__"])
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for item in fields(DraftTrainingArguments):
        if item.name in own and "help" in item.metadata:
            aliases = item.metadata.get("aliases", [])
            flags = [f"--{item.name.replace('_', '-')}", *([aliases] if isinstance(aliases, str) else aliases)]
            shown = {"True": "on", "False": "off", "None": ""}
            default = shown.get(str(item.default), f"`{item.default}`")
            rows.append(f"| {_listed(flags)} | {default} | {item.metadata['help']} |")
    return "\n".join(rows)


TABLES: dict[str, Callable[[], str]] = {
    "methods": methods_table,
    "common settings": settings_table,
    "settings of methods": settings_of_methods,
    "preferred methods": preferred_methods_list,
    "recipes": recipes_table,
    "training arguments": training_arguments_table,
    "real model": real_model,
    **{f"figures of {name}": partial(benchmark_pages.figures, name) for name in FIGURES},
    "targets": support_tables.targets_table,
    "states": support_tables.states_table,
    "refused": support_tables.refused_table,
    "options": shared_options_table,
    **{f"options of {command}": partial(options_table, command) for command in commands()},
}


if __name__ == "__main__":
    for path in PAGES:
        (ROOT / path).write_text(with_tables((ROOT / path).read_text(encoding="utf-8")), encoding="utf-8")
