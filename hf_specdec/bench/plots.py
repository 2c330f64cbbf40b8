"""Charts of a report: speed-up by kind of prompt, acceptance by position, tokens per second by batch size.

Many methods and kinds must stay readable, so there is a panel for each kind, or for each method, and figures grow with
what is in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependencyError, SpecConfigError, counted
from .decoders import PLAIN, STOCK


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SPEEDUP, ACCEPTANCE, THROUGHPUT = "speedup_by_kind.png", "acceptance_by_position.png", "tokens_per_second.png"

_DPI = 150
_MOST_POSITIONS = 16
_PANELS_IN_A_ROW = 4
_OURS, _STOCK, _PLAIN = "#3465a4", "#c4a000", "#888888"
# Background of a number that a line may cross.
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}


def check_can_draw(folder: Path) -> None:
    """Before anything is measured.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        SpecConfigError: The folder cannot be made.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "--plot needs the package matplotlib, which is not installed. Run: pip install 'hf-specdec[plots]'"
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecConfigError(f"The folder '{folder}' for the charts cannot be made: {error}") from error


def draw(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws the charts of a report as PNG files.

    Args:
        report (`Mapping`): What `hf-specdec bench --json` prints.
        folder (`Path`): For the files.

    Returns:
        `list[Path]`: The files. Without methods that draft there is no chart of acceptance.
    """
    charts = {SPEEDUP: _speedups(report), ACCEPTANCE: _acceptance(report), THROUGHPUT: _throughput(report)}
    paths = []
    for name, figure in charts.items():
        if figure is not None:
            paths.append(folder / name)
            figure.savefig(paths[-1], dpi=_DPI)
    return paths


def _new_figure(width: float, height: float, title: str, report: Mapping[str, Any]) -> Figure:
    """An empty figure, no part of pyplot's state, with what its numbers hold for as its last line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.supxlabel(_circumstances(report, width), fontsize=8, color="#555555")
    return figure


def _circumstances(report: Mapping[str, Any], width: float) -> str:
    import textwrap

    settings, environment = report["settings"], report["environment"]
    machine = environment["gpu"] or f"{environment['cpu']}, threads: {environment['threads']}"
    text = (
        f"{settings['target']}, {environment['dtype']}; {counted(len(settings['prompts']), 'prompt')}, at most "
        f"{settings['max_new_tokens']} new tokens, {settings['decoding']}; {machine}"
    )
    if any(row["method"].startswith(STOCK) for row in report["rows"]):
        text += f"; {STOCK}*: transformers' own assisted generation"
    return "\n".join(textwrap.wrap(text, int(width * 17)))


def _rows(report: Mapping[str, Any], batch_size: int) -> list[Mapping[str, Any]]:
    return [row for row in report["rows"] if row["batch_size"] == batch_size]


def _color(method: str) -> str:
    return _PLAIN if method == PLAIN else _STOCK if method.startswith(STOCK) else _OURS


def _panels(figure: Figure, count: int, **shared) -> list[Axes]:
    columns = min(count, _PANELS_IN_A_ROW)
    grid = figure.subplots(math.ceil(count / columns), columns, squeeze=False, **shared)
    panels = list(grid.flat)
    for unused in panels[count:]:
        unused.set_axis_off()
    return panels[:count]


# ----------------------------------------------------------------------------------------------- speed-up by kind


def _speedups(report: Mapping[str, Any]) -> Figure:
    size = report["settings"]["batch_sizes"][0]
    rows = [row for row in _rows(report, size) if row["method"] != PLAIN]
    names = [row["method"] for row in rows]
    prompts = report["settings"]["prompts"].values()
    kinds = list(dict.fromkeys(prompts))
    parts = {"all prompts": (rows, len(prompts))}
    if len(kinds) > 1:
        for kind in kinds:
            items = [{"method": row["method"], **row["kinds"][kind]} for row in rows]
            parts[kind] = (items, list(prompts).count(kind))
    figure = _figure_of_bars(
        len(parts),
        names,
        f"Speed-up over plain generation, batch size {size} (median and range of {_rounds(report)})",
        report,
    )
    highest = _highest([item for items, _ in parts.values() for item in items], "speedup")
    panels = _panels(figure, len(parts), sharex=True, sharey=True)
    for panel, (kind, (items, count)) in zip(panels, parts.items()):
        _draw_bars(panel, names, items, "speedup", "{:.2f}".format, highest)
        panel.axvline(1.0, color="#222222", linewidth=1, linestyle="--")
        panel.set_title(f"{kind} ({counted(count, 'prompt')})", fontsize=10)
    for panel in panels[-_PANELS_IN_A_ROW:]:
        panel.set_xlabel("speed-up (plain generation = 1)", fontsize=9)
        panel.tick_params(labelbottom=True)
    return figure


# ----------------------------------------------------------------------------------------- acceptance by position


def _acceptance(report: Mapping[str, Any]) -> Figure | None:
    size = report["settings"]["batch_sizes"][0]
    rows = [row for row in _rows(report, size) if row["accepted_per_position"]]
    if not rows:
        return None
    columns = min(len(rows), _PANELS_IN_A_ROW)
    lines = math.ceil(len(rows) / columns)
    title = f"Drafts with at least so many tokens accepted, batch size {size}"
    figure = _new_figure(
        max(1.0 + 3.0 * columns, 8.0),
        1.6 + 2.3 * lines,
        f"{title}\n(line: 95 % interval over the prompts)",
        report,
    )
    for panel, row in zip(_panels(figure, len(rows), sharey=True), rows):
        _draw_acceptance(panel, row)
    figure.supylabel("share of drafts", fontsize=10)
    return figure


def _draw_acceptance(panel: Axes, row: Mapping[str, Any]) -> None:
    values = row["accepted_per_position"][:_MOST_POSITIONS]
    spreads = row["accepted_per_position_spread"][:_MOST_POSITIONS]
    positions = range(1, len(values) + 1)
    panel.bar(positions, values, color=_color(row["method"]), width=0.75)
    panel.vlines(
        positions, [spread["low"] for spread in spreads], [spread["high"] for spread in spreads], color="#222222", lw=1
    )
    panel.set_title(
        f"{row['method']}\n{spreads[0]['n']} drafts, {row['mean_acceptance_length']:.2f} tokens per cycle", fontsize=9
    )
    panel.set_ylim(0, 1)
    panel.set_xlim(0.3, max(len(values), 4) + 0.7)
    most = len(row["accepted_per_position"])
    panel.set_xlabel(f"draft position (of {most})" if most > _MOST_POSITIONS else "draft position", fontsize=9)
    panel.xaxis.get_major_locator().set_params(integer=True)
    _plain_frame(panel, "y")


# ----------------------------------------------------------------------------------------- tokens a second by batch


def _throughput(report: Mapping[str, Any]) -> Figure:
    sizes = report["settings"]["batch_sizes"]
    names = list(dict.fromkeys(row["method"] for row in report["rows"]))
    figure = _figure_of_bars(len(sizes), names, f"Tokens per second (median and range of {_rounds(report)})", report)
    for panel, size in zip(_panels(figure, len(sizes), sharey=True), sizes):
        rows = _rows(report, size)
        _draw_bars(panel, names, rows, "tokens_per_second", _speed, _highest(rows, "tokens_per_second"))
        panel.set_title(f"batch size {size}", fontsize=10)
        panel.set_xlabel("tokens per second of all rows", fontsize=9)
    return figure


# ---------------------------------------------------------------------------------------------------------------- bars


def _figure_of_bars(num_panels: int, names: Sequence[str], title: str, report: Mapping[str, Any]) -> Figure:
    columns, lines = min(num_panels, _PANELS_IN_A_ROW), math.ceil(num_panels / _PANELS_IN_A_ROW)
    width = max(2.2 + 2.9 * columns, 8.0)
    return _new_figure(width, 1.4 + lines * (0.8 + 0.3 * max(len(names), 2)), title, report)


def _draw_bars(
    panel: Axes,
    names: Sequence[str],
    items: Sequence[Mapping[str, Any]],
    key: str,
    form: Callable[[float], str],
    highest: float,
) -> None:
    """A bar with its spread and its number for each item; `names` are the lines, some of which may stay empty.

    `highest` is the largest number of all panels that share an axis.
    """
    values = [item[key] for item in items]
    spreads = [item["spread"][key] for item in items]
    lines = [names.index(item["method"]) for item in items]
    panel.barh(
        lines,
        values,
        xerr=[
            [value - spread["low"] for value, spread in zip(values, spreads)],
            [spread["high"] - value for value, spread in zip(values, spreads)],
        ],
        color=[_color(item["method"]) for item in items],
        height=0.65,
        error_kw={"ecolor": "#222222", "capsize": 2, "elinewidth": 1},
    )
    for line, value, spread in zip(lines, values, spreads):
        place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        panel.annotate(form(value), (spread["high"], line), fontsize=8, bbox=_WHITE, **place)
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.4, -0.6)
    # Room for the number after the longest bar.
    panel.set_xlim(0, highest * 1.22)
    panel.locator_params(axis="x", nbins=4)
    _plain_frame(panel, "x")


def _highest(items: Sequence[Mapping[str, Any]], key: str) -> float:
    return max((item["spread"][key]["high"] for item in items), default=1.0)


def _plain_frame(panel: Axes, grid: str) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis=grid, color="#dddddd", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=9)


def _speed(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _rounds(report: Mapping[str, Any]) -> str:
    return counted(report["settings"]["rounds"], "round")
