"""Reports of gpu.py: aims, tables for the console and for Markdown, files.

A report is the JSON of a run, or of several runs on one machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table


PLAIN, NO_DRAFTS = "plain", "ours: no drafts"

# Figures of one table must have these in common.
SAME_ENVIRONMENT = ("gpu", "cpu", "dtype", "torch", "transformers", "triton", "hf_specdec")

# Aims for a target of 8 B at batch 1 on an H200.
AIMED_NODES, MAX_TO_WEIGHTS = 16, 1.15
MAX_OUTSIDE_MS = 0.3
MIN_TO_PLAIN = 2.5


# --------------------------------------------------------------------------------------------------------------- files


def save(report: dict[str, Any], options: argparse.Namespace) -> None:
    """Writes the files that were asked for."""
    if options.json is not None:
        write_json(options.json, report)
    if options.markdown is not None:
        replace(options.markdown, markdown(report))


def joined(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs on one machine as one."""
    whole = dict(reports[0])
    for report in reports[1:]:
        for name in SAME_ENVIRONMENT:
            one, other = (found["environment"].get(name) for found in (whole, report))
            if one != other:
                raise SystemExit(f"The files are of different machines or versions, {name}: {one!r} and {other!r}.")
        lists = ("checks", "verification", "decoding", "not_run", "failures")
        whole |= {name: whole[name] + report[name] for name in lists}
        whole["seconds"] += report["seconds"]
    whole["aims"] = [asdict(aim) for aim in find_aims(whole)]
    return whole


def write_json(path: Path, report: dict[str, Any]) -> None:
    replace(path, json.dumps(report, indent=1) + "\n")


def replace(path: Path, text: str) -> None:
    """Writes a file so that a run that is cut off leaves the old one or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


# ---------------------------------------------------------------------------------------------------------------- aims


@dataclass
class Aim:
    """An aim, and every figure that is measured by it as (where, text, is met), the worst first."""

    text: str
    found: list[tuple[str, str, bool]]


def aim_lines(aims: list[dict]) -> list[str]:
    """Lines about aims, as dicts: which figures miss them, and of those that are met the nearest."""
    lines = []
    for aim in aims:
        found = [tuple(figure) for figure in aim["found"]]
        missed = [figure for figure in found if not figure[2]]
        counts = f"met by {len(found) - len(missed)} of {len(found)}" if found else "not measured"
        lines.append(f"Aim: {aim['text']}: {counts}.")
        lines += [f"  short of it: {figure} ({where})" for where, figure, _ in missed]
        lines += [f"  nearest to it: {figure} ({where})" for where, figure, _ in found[:1] if not missed]
    return lines


def find_aims(report: dict[str, Any]) -> list[Aim]:
    """Aims for targets of 8 B at batch 1 on a GPU."""
    to_weights, outside, to_plain = [], [], []
    is_gpu = report["environment"]["gpu"] is not None
    for section in ("verification", "decoding"):
        for case in report[section]:
            if not (is_gpu and case["size"].endswith("8b") and case["batch_size"] == 1):
                continue
            where = f"{case['size']}, context {case['context']}"
            for row in case["rows"]:
                name, parts = f"{where}, {row.get('side', row.get('shape'))}", row.get("parts", row)
                if section == "verification" and row["nodes"] == AIMED_NODES:
                    to_weights.append((name, row["to_weights"]))
                if section == "decoding" and "outside" in parts:
                    outside.append((name, parts["outside"]))
                if row.get("side") == NO_DRAFTS and row["to_plain"]:
                    to_plain.append((name, row["to_plain"][0]))
    return [
        _aim(
            f"{AIMED_NODES} nodes verified within {MAX_TO_WEIGHTS} times the time to read the weights",
            to_weights,
            "{:.2f} times",
            lambda value: value <= MAX_TO_WEIGHTS,
        ),
        _aim(
            f"under {MAX_OUTSIDE_MS} ms of a cycle outside of the models' forwards",
            outside,
            "{:.2f} ms",
            lambda value: value < MAX_OUTSIDE_MS,
        ),
        _aim(
            f"decoding without drafts at least {MIN_TO_PLAIN} times as fast as transformers' eager generate",
            [(name, -value) for name, value in to_plain],
            "{:.2f} times",
            lambda value: -value >= MIN_TO_PLAIN,
        ),
    ]


def _aim(text: str, figures: list[tuple[str, float]], form: str, is_met: Callable[[float], bool]) -> Aim:
    worst_first = sorted(figures, key=lambda figure: -figure[1])
    return Aim(text, [(name, form.format(abs(value)), is_met(value)) for name, value in worst_first])


# -------------------------------------------------------------------------------------------------------------- output


@dataclass
class Grid:
    """A table for the console and for Markdown; the first columns of `num_names` are names."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    num_names: int = 1

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            is_name = index < self.num_names
            table.add_column(column, justify="left" if is_name else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return f"{self.title}:\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def check_grid(checks: list[dict]) -> Grid:
    words = {True: "right", False: "WRONG", None: ""}
    rows = [[check["what"], words[check["is_right"]], check["detail"]] for check in checks]
    return Grid("Checks", ["check", "", "found"], rows, num_names=3)


def verification_grid(case: dict) -> Grid:
    """Parts as they run; `alone` is the device's own work, with the host ahead of it."""
    columns = ["draft", "nodes", *_CYCLE_COLUMNS]
    rows = [[row["shape"], str(row["nodes"]), *_cycle_cells(row, row)] for row in case["rows"]]
    weights = _ms(case["rows"][0]["weights"])
    return Grid(f"Verification: {_where(case)}; weights read in {weights} ms", columns, rows)


def speed_grid(case: dict) -> Grid:
    counts = ("tokens / cycle", "published", "nodes", "GiB", "same texts", "source")
    columns = ["side", "tokens/s", "x plain (range)", *counts]
    rows = [
        [
            row["side"],
            f"{row['tokens_per_second']:.1f}",
            "{:.2f} ({:.2f}-{:.2f})".format(*row["to_plain"]) if row["to_plain"] and row["side"] != PLAIN else "",
            _number(row["tokens_per_cycle"], "{:.2f}"),
            _number(row["length"], "{:.2f}"),
            _number(row["nodes"], "{:.1f}"),
            _number(row["peak_bytes"] and row["peak_bytes"] / 2**30, "{:.1f}"),
            "" if row["same_rows"] is None else f"{row['same_rows']}/{case['batch_size']}",
            row["source"] or "",
        ]
        for row in case["rows"]
    ]
    return Grid(f"Decoding: {_where(case)}, {case['new_tokens']} tokens", columns, rows)


def cycle_grid(case: dict) -> Grid:
    rows = [[row["side"], *_cycle_cells(row["parts"], row)] for row in case["rows"] if "parts" in row]
    return Grid(f"Cycles: {_where(case)}, milliseconds", ["side", *_CYCLE_COLUMNS], rows)


_CYCLE_COLUMNS = (
    "cycle",
    "draft",
    "its network",
    "target",
    "target alone",
    "limit",
    "target / limit",
    "accept",
    "wait",
    "commit",
    "outside",
    "host gap",
    "attention",
    "graphs",
)


def _cycle_cells(parts: dict, row: dict) -> list[str]:
    names = ("cycle", "draft", "network", "target", "target_work", "limit")
    rest = ("accept", "wait", "commit", "outside", "gap")
    times = [*(_ms(parts[name]) for name in names), f"{parts['to_limit']:.2f}", *(_ms(parts[name]) for name in rest)]
    return [*times, row["attention"], row["graphs"]]


def _where(case: dict) -> str:
    return f"{case['size']}, context {case['context']}, batch {case['batch_size']}"


def _ms(value: float | None) -> str:
    return _number(value, "{:.2f}" if value is None or value < 10 else "{:.1f}")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def grids(report: dict[str, Any]) -> list[Grid]:
    found = [check_grid(report["checks"])] if report["checks"] else []
    found += [verification_grid(case) for case in report["verification"] if case["rows"]]
    for case in filter(lambda case: case["rows"], report["decoding"]):
        found += [speed_grid(case), cycle_grid(case)]
    return found


def closing_lines(report: dict[str, Any]) -> list[str]:
    """Aims, and what is missing."""
    lines = aim_lines(report["aims"])
    lines += [f"Not run: {what}" for what in report["not_run"]]
    lines += [f"FAILED: {what}" for what in report["failures"]]
    return [*lines, f"{report['seconds']:.0f} seconds in all."]


def heading(report: dict[str, Any]) -> str:
    found = report["environment"]
    names = ("torch", "transformers", "triton", "hf_specdec")
    versions = ", ".join(f"{name} {found[name]}" for name in names if found[name])
    bandwidth = f"; copy bandwidth {report['bandwidth'] / 1e9:.0f} GB/s" if report["bandwidth"] else ""
    machine = f"{found['gpu'] or found['cpu']}, {found['dtype']}, Python {found['python']}"
    return f"{machine}; {versions}; {found['date']}{bandwidth}."


def markdown(report: dict[str, Any]) -> str:
    aims = [line for line in closing_lines(report) if line.startswith(("Aim", "  "))]
    lists = "\n".join(f"- {line}" if line.startswith("Aim") else f"  - {line.strip()}" for line in aims)
    return "\n".join([heading(report), "", *(grid.markdown() for grid in grids(report)), lists, ""])
