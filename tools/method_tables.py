"""The tables in README, docs and navigation, as the package and its tests declare them.

python -m tools.method_tables             # writes them anew, between `<!-- table NAME -->` and `<!-- end -->`
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hf_specdec.hub import trust
from hf_specdec.method import Method, built_in_methods, preferred_methods, trainings
from hf_specdec.settings import describe_settings, option_fields
from hf_specdec.training.options import flags_of, options_of
from hf_specdec.training.run import recipes
from tools import benchmark_pages, support_tables
from tools.benchmark_tables import compared, markdown
from tools.command_tables import commands, options_table


ROOT = Path(__file__).parents[1]
_PAGES = ("cli", "configuration", "hub", "security", "support", "training")
PAGES = ("README.md", "mkdocs.yml", *(f"docs/{page}.md" for page in _PAGES))

# Marks of Markdown, and of the navigation.
_TABLE = re.compile(
    r"(?P<begin><!-- table (?P<name>[\w -]+) -->\n|(?<= )# table (?P<nav>\w+)\n).*?(?P<end><!-- end -->| +# end)",
    re.DOTALL,
)


def with_tables(page: str) -> str:
    """The page with all its tables made anew."""
    return _TABLE.sub(lambda mark: f"{mark['begin']}{TABLES[mark['name'] or mark['nav']]()}\n{mark['end']}", page)


def page_of(method: Method) -> str:
    """Name of the page that describes a method: that of its folder."""
    return method.folder.rpartition(".")[2]


def methods_by_page() -> dict[str, list[Method]]:
    """The methods that share a page, those that need least first, without weights the preferred one."""
    pages: dict[str, list[Method]] = {}
    for method in sorted(
        built_in_methods(), key=lambda one: (one.takes_model, not one.takes_model and one.preference)
    ):
        pages.setdefault(page_of(method), []).append(method)
    return pages


def _names(methods: list[Method]) -> str:
    return ", ".join(f"`{method.name}`" for method in methods)


def _needs(method: Method) -> str:
    if method.in_target_checkpoint:
        return "a target that has them"
    if method.needs_grammar:
        return "a grammar"
    if method.weights:
        return f"{method.weights}"
    return f"`{method.package}`" if method.package else "nothing"


def methods_table() -> str:
    rows = ["| method | drafts from | needs | page |", "|---|---|---|---|"]
    for page, methods in methods_by_page().items():
        method = methods[-1]
        rows.append(f"| {_names(methods)} | {method.drafts_from} | {_needs(method)} | [{page}](docs/{page}.md) |")
    combined = "retrieval where the text repeats, the other method elsewhere"
    rows.append(f"| `suffix+eagle3`, ... | {combined} | what they need | [combined](docs/combined.md) |")
    return "\n".join(rows)


def navigation() -> str:
    pages = methods_by_page().items()
    return "\n".join(f"      - {_names(methods).replace('`', '')}: {page}.md" for page, methods in pages)


def settings_table(method: str | None = None) -> str:
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for item in describe_settings(method):
        cells = [f"`{item.key}`", f"`{item.type}`", f"`{item.default}`", item.help]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def settings_of_methods() -> str:
    return "\n\n".join(f"### `{method.name}`\n\n{settings_table(method.name)}" for method in built_in_methods())


def preference_table() -> str:
    rows = ["| method | reason for its rank |", "|---|---|"]
    return "\n".join(rows + [f"| `{method.name}` | {method.preferred_because} |" for method in preferred_methods()])


def published_settings() -> str:
    rows = ["| method | settings |", "|---|---|", f"| all | {_listed(trust.PUBLISHED_SETTINGS)} |"]
    for method in built_in_methods():
        published = [item for item in option_fields(method.name) if item.metadata.get("published")]
        keys = [item.metadata.get("key", item.name) for item in published]
        rows.append(f"| `{method.name}` | {_listed(keys)} |")
    rows.append("| combinations | those of both, `retrieval_num_speculative_tokens` |")
    rows.append(f"| of a target's entry also | {_listed(trust.PLACE_SETTINGS)} |")
    return "\n".join(rows)


def _listed(names) -> str:
    return ", ".join(f"`{name}`" for name in names)


def real_model() -> str:
    file = benchmark_pages.RESULTS / "cpu-epyc-smollm2-float32.json"
    (table,) = compared(json.loads(file.read_text(encoding="utf-8")))
    return markdown(table._replace(caption=""))


def recipes_table() -> str:
    rows = ["| method | trains | options |", "|---|---|---|"]
    for name, recipe in recipes().items():
        # Every method has that one.
        options = [each for each in options_of(recipe) if each[0].name != "kl_weight"]
        flags = [f"`{'/'.join(flags_of(item, kind))}`" for item, kind in options]
        rows.append(f"| `{name}` | {trainings()[name].noun} | {', '.join(flags)} |")
    return "\n".join(rows)


TABLES: dict[str, Callable[[], str]] = {
    "methods": methods_table,
    "navigation": navigation,
    "benchmarks": benchmark_pages.navigation,
    "common settings": settings_table,
    "settings of methods": settings_of_methods,
    "preferred methods": preference_table,
    "published settings": published_settings,
    "recipes": recipes_table,
    "real model": real_model,
    "features": support_tables.features_table,
    "forms": support_tables.forms_table,
    "targets": support_tables.targets_table,
    "states": support_tables.states_table,
    "refused": support_tables.refused_table,
    **{f"options of {command}": partial(options_table, command) for command in commands()},
}


if __name__ == "__main__":
    for path in PAGES:
        (ROOT / path).write_text(with_tables((ROOT / path).read_text(encoding="utf-8")), encoding="utf-8")
