"""The page of all figures, made from the reports in `benchmarks/results/`.

python -m tools.benchmark_pages           # writes benchmarks/RESULTS.md anew
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any


ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "RESULTS.md"

_HEAD = """# Results

All figures, as the programs of [this folder](README.md) printed them. Commands are those of the version that was
measured. [Performance](../docs/performance.md) says what follows from them."""

Row = Mapping[str, Any]


def tables_of(rows: Sequence[Row]) -> Iterator[tuple[str, list[str], list[Row]]]:
    """Title, keys and rows of each table, of rows with the same "table"; keys without any value are left out."""
    for title in dict.fromkeys(row.get("table", "") for row in rows):
        same = [row for row in rows if row.get("table", "") == title]
        keys = dict.fromkeys(key for row in same for key in row if key != "table")
        yield title, [key for key in keys if any(row.get(key) not in (None, "") for row in same)], same


def cells_of(row: Row, keys: Sequence[str]) -> list[str]:
    return [cell(row.get(key)) for key in keys]


def cell(value: Any) -> str:
    """A value of a row as text; three numbers are a median with its range."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    if isinstance(value, list):
        middle, *limits = map(cell, value)
        return middle if set(limits) <= {middle} else f"{middle} ({'-'.join(limits)})"
    return "" if value is None else str(value)


def by_kind(rows: Sequence[Row]) -> list[Row]:
    """A row for each side: speed-ups over plain generation by kind of prompt, with tokens per cycle in brackets."""
    varied = [key for key in ("dtype", "batch_size", "decoding", "call") if len({row.get(key) for row in rows}) > 1]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    found = []
    for place in dict.fromkeys((*(row.get(key) for key in varied), row["side"]) for row in rows):
        same = [row for row in rows if (*(row.get(key) for key in varied), row["side"]) == place]
        of_kinds = {"all": same, **{kind: [row for row in same if row["kind"] == kind] for kind in kinds}}
        cells = {kind: f"{_mean(own, 'to_plain'):.2f}" for kind, own in of_kinds.items() if own}
        if all(row["tokens_per_cycle"] for row in same):
            cells = {kind: f"{text} ({_mean(of_kinds[kind], 'tokens_per_cycle'):.2f})" for kind, text in cells.items()}
        if all(row.get("to_none") for row in same):
            cells["all, to `none`"] = f"{_mean(same, 'to_none'):.2f}"
        found.append({"table": ", ".join(map(str, place[:-1])), "side": place[-1], **cells})
    return found


def _mean(rows: Sequence[Row], key: str) -> float:
    return geometric_mean(row[key] for row in rows)


def markdown(rows: Sequence[Row]) -> str:
    tables = []
    for title, keys, of_table in tables_of(rows):
        # What is the same in all rows is said once.
        same = {key: cell(of_table[0].get(key)) for key in keys if len({str(row.get(key)) for row in of_table}) == 1}
        constants = same if len(of_table) > 2 else {}
        keys = [key for key in keys if key not in constants]
        title = "; ".join([*filter(None, [title]), *(f"{_head(key)} {value}" for key, value in constants.items())])
        heads = [_head(key) for key in keys]
        lines = [heads, ["---"] * len(heads), *(cells_of(row, keys) for row in of_table)]
        text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        tables.append(f"{title[:1].upper()}{title[1:]}:\n\n{text}" if title else text)
    return "\n\n".join(tables)


def _head(key: str) -> str:
    return key.replace("_", " ")


def environment(found: Mapping[str, Any]) -> str:
    """When, on what and with which versions something was measured."""
    machine = found["gpu"] or f"{found['cpu']}, {found['threads']} of {found['cores']} cores"
    versions = ", ".join(f"{name} {found[name]}" for name in ("hf_specdec", "torch", "transformers"))
    load = "" if found["gpu"] else f", load average {found['load_average']}"
    return f"{found['date'][:10]}; {machine}{load}; {versions}, Python {found['python']}."


def report(name: str) -> dict[str, Any]:
    """What a program has written to `benchmarks/results/`."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def figures(name: str) -> str:
    """When and how a report was measured, and its tables."""
    found = report(name)
    rows = by_kind(found["rows"]) if "kind" in found["rows"][0] else found["rows"]
    return "\n\n".join((environment(found["environment"]), f"```\n{found['command']}\n```", markdown(rows)))


def page() -> str:
    """The text of the page."""
    names = sorted(path.stem for path in RESULTS.glob("*.json"))
    return "\n\n".join([_HEAD, *(f"## {name}\n\n{figures(name)}" for name in names)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
