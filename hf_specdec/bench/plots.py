"""Charts of a report: speed-up by kind of prompt, acceptance by position, tokens per second by batch size.

Many methods and kinds must stay readable, so there is a panel for each kind, or for each method, and figures grow with
what is in them.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
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
    """Checks for matplotlib and the folder before anything is measured.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        SpecConfigError: The folder cannot be made.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "--plot needs the package matplotlib, which is not installed. Run: pip install matplotlib"
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
    settings, environment = report["settings"], report["environment"]
    machine = environment["gpu"] or f"{environment['cpu']}, threads: {environment['threads']}"
    text = (
        f"{settings['target']}, {environment['dtype']}; {counted(len(settings['prompts']), 'prompt')}, at most "
        f"{settings['max_new_tokens']} new tokens, {settings['decoding']}; {machine}"
    )
    if any(row["method"].startswith(STOCK) for row in report["rows"]):
        text += f"; {STOCK}*: transformers' own assisted generation"
    figure.supxlabel("\n".join(textwrap.wrap(text, int(width * 17))), fontsize=8, color="#555555")
    return figure


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


def _plain_frame(panel: Axes, grid: str) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis=grid, color="#dddddd", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=9)


def _acceptance(report: Mapping[str, Any]) -> Figure | None:
    """Acceptance by position, a panel for each method that drafts."""
    size = report["settings"]["batch_sizes"][0]
    rows = [row for row in _rows(report, size) if row["accepted_per_position"]]
    if not rows:
        return None
    columns, lines = min(len(rows), _PANELS_IN_A_ROW), math.ceil(len(rows) / _PANELS_IN_A_ROW)
    title = f"Drafts with at least so many tokens accepted, batch size {size}\n(line: 95 % interval over the prompts)"
    figure = _new_figure(max(1.0 + 3.0 * columns, 8.0), 1.6 + 2.3 * lines, title, report)
    for panel, row in zip(_panels(figure, len(rows), sharey=True), rows):
        most = len(row["accepted_per_position"])
        values = row["accepted_per_position"][:_MOST_POSITIONS]
        spreads = row["accepted_per_position_spread"][:_MOST_POSITIONS]
        positions = range(1, len(values) + 1)
        panel.bar(positions, values, color=_color(row["method"]), width=0.75)
        low, high = [spread["low"] for spread in spreads], [spread["high"] for spread in spreads]
        panel.vlines(positions, low, high, color="#222222", lw=1)
        counts = f"{spreads[0]['n']} drafts, {row['mean_acceptance_length']:.2f} tokens per cycle"
        panel.set_title(f"{row['method']}\n{counts}", fontsize=9)
        panel.set_ylim(0, 1)
        panel.set_xlim(0.3, max(len(values), 4) + 0.7)
        panel.set_xlabel(f"draft position (of {most})" if most > _MOST_POSITIONS else "draft position", fontsize=9)
        panel.xaxis.get_major_locator().set_params(integer=True)
        _plain_frame(panel, "y")
    figure.supylabel("share of drafts", fontsize=10)
    return figure


def _speedups(report: Mapping[str, Any]) -> Figure:
    """Speed-ups at the first batch size, a panel for all prompts and for each kind of them."""
    size, prompts = report["settings"]["batch_sizes"][0], report["settings"]["prompts"].values()
    rows = [row for row in _rows(report, size) if row["method"] != PLAIN]
    panels = {f"all prompts ({counted(len(prompts), 'prompt')})": rows}
    kinds = Counter(prompts)
    if len(kinds) > 1:
        for kind, count in kinds.items():
            items = [{"method": row["method"], **row["kinds"][kind]} for row in rows]
            panels[f"{kind} ({counted(count, 'prompt')})"] = items
    title = f"Speed-up over plain generation, batch size {size}"
    label = "speed-up (plain generation = 1)"
    return _bars(report, title, panels, "speedup", label, "{:.2f}".format, one_scale=True)


def _throughput(report: Mapping[str, Any]) -> Figure:
    """Tokens per second, a panel for each batch size."""
    panels = {f"batch size {size}": _rows(report, size) for size in report["settings"]["batch_sizes"]}

    def form(value: float) -> str:
        return f"{value:.0f}" if value >= 100 else f"{value:.1f}"

    return _bars(
        report,
        "Tokens per second",
        panels,
        "tokens_per_second",
        "tokens per second of all rows",
        form,
        one_scale=False,
    )


def _bars(
    report: Mapping[str, Any],
    title: str,
    panels: Mapping[str, Sequence[Mapping[str, Any]]],
    key: str,
    label: str,
    form: Callable[[float], str],
    *,
    one_scale: bool,
) -> Figure:
    """Panels of bars by method, each bar with its spread and its number.

    Args:
        report (`Mapping`): What the figures come from.
        title (`str`): Of the chart.
        panels (`Mapping`): Rows of each panel, by its title. Methods without a row leave their line empty.
        key (`str`): The figure of a row.
        label (`str`): Of the axis.
        form (`Callable`): Writes a number.
        one_scale (`bool`): One scale for all panels, with a line at 1.
    """
    names = list(dict.fromkeys(row["method"] for rows in panels.values() for row in rows))
    columns, lines = min(len(panels), _PANELS_IN_A_ROW), math.ceil(len(panels) / _PANELS_IN_A_ROW)
    title = f"{title} (median and range of {counted(report['settings']['rounds'], 'round')})"
    height = 1.4 + lines * (0.8 + 0.3 * max(len(names), 2))
    figure = _new_figure(max(2.2 + 2.9 * columns, 8.0), height, title, report)
    everything = [row for rows in panels.values() for row in rows]
    for panel, (heading, rows) in zip(_panels(figure, len(panels), sharey=True), panels.items()):
        places = [names.index(row["method"]) for row in rows]
        values, spreads = [row[key] for row in rows], [row["spread"][key] for row in rows]
        below = [value - spread["low"] for value, spread in zip(values, spreads)]
        above = [spread["high"] - value for value, spread in zip(values, spreads)]
        colors = [_color(row["method"]) for row in rows]
        bars = {"ecolor": "#222222", "capsize": 2, "elinewidth": 1}
        panel.barh(places, values, xerr=[below, above], color=colors, height=0.65, error_kw=bars)
        for place, value, spread in zip(places, values, spreads):
            at = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
            panel.annotate(form(value), (spread["high"], place), fontsize=8, bbox=_WHITE, **at)
        panel.set_yticks(range(len(names)), names)
        panel.set_ylim(len(names) - 0.4, -0.6)
        highest = max((row["spread"][key]["high"] for row in (everything if one_scale else rows)), default=1.0)
        # Room for the number after the longest bar.
        panel.set_xlim(0, highest * 1.22)
        panel.locator_params(axis="x", nbins=4)
        if one_scale:
            panel.axvline(1.0, color="#222222", linewidth=1, linestyle="--")
        panel.set_title(heading, fontsize=10)
        panel.set_xlabel(label, fontsize=9)
        _plain_frame(panel, "x")
    return figure
