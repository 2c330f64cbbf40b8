"""The pages of figures in the documentation, made from the reports in `benchmarks/results/`.

python -m tools.benchmark_pages           # writes docs/benchmarks/ anew
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple


ROOT = Path(__file__).parents[1]
RESULTS, PAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks"

Row = Mapping[str, Any]


class Section(NamedTuple):
    """The reports of these names (a glob), and what of their rows is shown; the files have all of it."""

    files: str
    title: str = ""
    text: str = ""
    hides: tuple[str, ...] = ()  # columns
    keeps: Callable[[Row], bool] = lambda row: True  # rows


class Page(NamedTuple):
    """A page: what its readers ask, and the reports that answer."""

    title: str
    text: str
    sections: tuple[Section, ...]


DOCUMENTS = {
    "real_models": Page(
        "Real models",
        "How fast are methods on real text, compared with plain `generate()`, transformers' own ways and this "
        "package's loop without drafts (`none`)? Speed-up over plain `generate()` by kind of prompt, with tokens per "
        'cycle in brackets; "all" is the geometric mean. [Choose a method](../choose.md) draws conclusions.',
        (Section("real-*"),),
    ),
    "gpu": Page(
        "On a GPU",
        "How long does a cycle take on a GPU, compared with the read time of the weights, and how fast is every "
        "method? The target has the size of Llama-3.1-8B and random weights, and its text is known beforehand. Draft "
        "networks have public sizes and are untrained: their drafts are accepted at published lengths, so these are "
        "times of cycles, not claims that a drafter is as good. Eager `generate()` launches its kernels one by one "
        "and waits for the host; `none` is the fair baseline of what drafts gain. On 28 November 2026 `--smoke` "
        "passed on the same GPU, also with early launches. See [performance](../performance.md) and "
        "[kernels](../kernels.md).",
        (
            Section(
                "gpu-*",
                hides=(
                    *("attention", "graphs", "to_fastest_of_transformers", "network_ms", "target_work_ms"),
                    *("accept_ms", "commit_ms", "limit_ms", "to_limit", "copy_gb_per_second"),
                ),
                keeps=lambda row: row.get("table") not in ("kernels", "models"),
            ),
        ),
    ),
    "cpu": Page(
        "On a CPU",
        "The loop itself on one core: compared with transformers' assisted generation, in hostile cases, and with "
        "many requests. [Real models](real_models.md) compares the methods.",
        (
            Section(
                "overhead*",
                "Compared with transformers' assisted generation",
                "Decoding alone, without the prefill; greedy; fixed lengths. `demo` is the embedded model, `random` "
                "one of 190 M random parameters with scripted drafts, four of five right. Transformers' loop takes "
                "one row only.",
                ("tokens_per_second", "cycle_ms", "outside_ms", "to_fastest_of_transformers", "same_texts"),
                # Without a baseline of our own, as earlier reports are, the embedded model says little.
                lambda row: (
                    (row["batch_size"] == 1 if row["target"] == "random" else row["to_none"] is not None)
                    and row["batch_size"] != 4
                    and row["dtype"] != "float32-medium"
                ),
            ),
            Section(
                "adaptive-smollm2",
                "Adaptive lengths",
                'Is `num_speculative_tokens="auto"` ever slower than plain `generate()`, and how far is it from the '
                "best fixed length? Medians of the rounds' ratios, with their range. The aims are 0.97 of plain "
                "generation in hostile cases and 0.95 of the best fixed length in friendly ones. "
                "[Control](../control.md) summarises the other targets.",
                ("rounds", "tokens_per_cycle"),
            ),
            Section(
                "many-*",
                "Many requests",
                "What does it gain to keep a batch full ([many requests](../many.md)), compared with batches of fixed "
                "size?",
                ("seconds", "same_texts"),
            ),
            Section(
                "serving",
                "A server",
                "How much more does [`hf-specdec serve`](../server.md) answer with drafts?",
                ("same_texts",),
            ),
        ),
    ),
}


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


def pages() -> dict[str, str]:
    """Texts of all pages by file name."""
    made = {}
    for name, page in DOCUMENTS.items():
        note = "Commands are those of the version that was measured; all figures are in `benchmarks/results/`."
        parts = [f"# {page.title}", f"{page.text} {note}"]
        for section in page.sections:
            parts += [f"## {section.title}", section.text] if section.title else []
            for path in sorted(RESULTS.glob(f"{section.files}.json"), key=lambda path: path.stem):
                parts += [
                    f"### {path.stem}" if section.title else f"## {path.stem}",
                    *_shown(json.loads(path.read_text(encoding="utf-8")), section),
                ]
        made[f"{name}.md"] = "\n\n".join(parts) + "\n"
    return made


def _shown(report: Mapping[str, Any], section: Section) -> tuple[str, str, str]:
    """When and how a report was measured, its command, and its tables."""
    rows = by_kind(report["rows"]) if "kind" in report["rows"][0] else report["rows"]
    kept = [
        {key: value for key, value in row.items() if key not in section.hides} for row in rows if section.keeps(row)
    ]
    return environment(report["environment"]), f"```\n{report['command']}\n```", markdown(kept)


def main() -> None:
    for path in PAGES.glob("*.md"):
        path.unlink()
    for name, text in pages().items():
        (PAGES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
