"""`hf-specdec bench`: measures methods beside plain generation and transformers' own, on any model and prompts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import SpecConfigError, counted
from .common import EXIT_INTERRUPTED, JsonOption, new_table, print_notes, progress_bars, say, show
from .generate import SampleOption, TemperatureOption, TopKOption, TopPOption, sampling_arguments
from .target import (
    EMBEDDED,
    BatchSizesOption,
    MaxSecondsOption,
    Place,
    RawOption,
    RoundsOption,
    has_template,
    on_target,
    read_batch_sizes,
    tokenised,
)


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..bench.prompts import Batch, Prompt


_prompt_option = partial(typer.Option, rich_help_panel="Prompts")
_sampling_option = partial(typer.Option, rich_help_panel="Sampling")
_output_option = partial(typer.Option, rich_help_panel="Output")

_MOST_POSITIONS = 8
_WIDTH_OF_FILES = 120


@on_target
def bench_command(
    place: Place,
    specs: Annotated[
        list[str] | None,
        typer.Option(
            "--spec",
            "-s",
            help="A method or a drafter (repo id, folder), also with settings (eagle3,model=user/head,k=4), or JSON. "
            "May be repeated. Left out: the methods without weights; for the embedded target all methods of the demo.",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        _prompt_option(
            "--prompts",
            "-p",
            help="A file (JSON lines, or text), 'spec-bench', or 'demo'. Left out: demo for the embedded target.",
        ),
    ] = None,
    num_prompts: Annotated[
        int | None, _prompt_option(min=1, help="Take so many prompts of each kind. Left out: all.")
    ] = None,
    max_new_tokens: Annotated[
        int, _prompt_option("--max-new-tokens", "-n", min=2, help="Most tokens to generate per prompt.")
    ] = 256,
    raw: RawOption = False,
    batch_sizes: BatchSizesOption = "1",
    rounds: RoundsOption = 3,
    max_seconds: MaxSecondsOption = None,
    stock: Annotated[
        bool, typer.Option("--stock/--no-stock", help="Also time transformers' own assisted generation.")
    ] = True,
    sample: SampleOption = False,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: Annotated[int, _sampling_option(help="Seed of the first round; each round has its own.")] = 0,
    plot: Annotated[Path | None, _output_option(help="Folder for charts (PNG). Needs matplotlib.")] = None,
    output: Annotated[Path | None, _output_option("--output", "-o", help="Also write the JSON to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare methods with plain generation, this loop without drafts and transformers' assisted generation.

    All on your model and prompts. In every round each batch is generated in all ways, one after the other. Ctrl-C
    ends after the rounds that are complete.
    """
    # All that can be checked without the target is checked before it is loaded.
    sizes, sampling = read_batch_sizes(batch_sizes), sampling_arguments(temperature, top_p, top_k, sample)
    chosen, names = _read_specs(place, specs)
    texts = _read_prompts(place, prompts, max_new_tokens, num_prompts)
    if plot is not None:
        from ..bench.plots import check_can_draw

        check_can_draw(plot)
    if output is not None and not output.absolute().parent.is_dir():
        raise SpecConfigError(f"--output '{output}': there is no folder '{output.absolute().parent}'. Make it first.")
    from ..bench.decoders import load_decoders, with_baselines
    from ..bench.engine import measure
    from ..bench.report import make_report

    with place.loaded() as (model, tokenizer):
        batches = {size: tokenised(texts, model, tokenizer, size, raw, fill=True) for size in sizes}
        _check_lengths(model, [batch for group in batches.values() for batch in group])
        # Methods that were not asked for by name may be missing.
        methods, missing = load_decoders(model, chosen, names=names, skip_missing=not specs)
        decoders = with_baselines(model, methods, stock)
        with progress_bars() as begin:
            found = measure(
                model, decoders, batches, rounds, sampling, seed=seed, max_seconds=max_seconds, begin=begin
            )
        asked = {
            "target": place.target,
            "prompts_source": prompts or EMBEDDED,
            "chat_template": has_template(tokenizer, raw),
            "max_new_tokens": max_new_tokens,
            "rounds_asked": rounds,
        }
        report = make_report(model, decoders, found, missing, asked, sampling=sampling, seed=seed)
    if output is not None:
        try:
            output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise SpecConfigError(f"--output '{output}' cannot be written: {error}") from error
    show(report, as_json, lambda: _print_bench(report))
    if plot is not None:
        from ..bench.plots import draw

        for path in draw(report, plot):
            say(f"Wrote {path}.", "dim", stderr=True)
    if found.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


# ------------------------------------------------------------------------------------------------------------ options


def _read_specs(place: Place, specs: list[str] | None) -> tuple[list[Any], list[str | None]]:
    """Settings of every `--spec`, and the names of those that are rows of the demo."""
    from .. import demo
    from ..bench.decoders import read_spec
    from ..method import names_without_weights

    named = demo.settings() if place.is_embedded else {}
    specs = specs or list(named) or names_without_weights()
    return [read_spec(text, named) for text in specs], [text if text in named else None for text in specs]


def _read_prompts(place: Place, source: str | None, max_new_tokens: int, num_prompts: int | None) -> list[Prompt]:
    from ..bench.prompts import DEMO, SPEC_BENCH, read_prompts

    if source is None and not place.is_embedded:
        raise SpecConfigError(
            f"--prompts is missing. Pass a file with prompts such as those you will generate from, or '{SPEC_BENCH}'."
        )
    return read_prompts(source or DEMO, max_new_tokens, num_prompts)


def _check_lengths(model: PreTrainedModel, batches: Iterable[Batch]) -> None:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for batch in batches:
        lengths = batch.inputs["attention_mask"].sum(dim=1).tolist()
        for name, length in zip(batch.names, lengths):
            if longest is not None and length + batch.max_new_tokens > longest:
                raise SpecConfigError(
                    f"Prompt '{name}' has {length} tokens, and with {batch.max_new_tokens} new ones is longer than "
                    f"the target's context of {longest}. Lower --max-new-tokens, or take it out."
                )


# ------------------------------------------------------------------------------------------------------------ printing


def _print_bench(report: Mapping[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_FILES)
    settings = report["settings"]
    for size in settings["batch_sizes"]:
        rows, refused = rows_at(report, size)
        say(f"\nBatch size {size}", "bold")
        console.print(_speed_table(rows, refused))
        if len({*settings["prompts"].values()}) > 1:
            console.print(_kind_table(rows))
        if any(row["accepted_per_position"] for row in rows):
            console.print(_draft_table(rows))
    print_notes(_notes(report))


def rows_at(report: Mapping[str, Any], size: int) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Rows of a batch size: what was measured, and what could not run."""
    measured = [row for row in report["rows"] if row["batch_size"] == size]
    return measured, [row for row in report["unavailable"] if row["batch_size"] in (size, None)]


def _speed_table(rows: list[Mapping[str, Any]], refused: list[Mapping[str, Any]]) -> Table:
    headings = ("tokens/s\n(range)", "speed-up\n(range)", "first token\nms", "cycle ms\np50 p95 p99", "same\ntexts")
    table = _table("way of decoding", headings)
    for row in rows:
        is_plain, cycles = row["method"] == "plain", row["cycle_seconds"]
        same: Text | str = "-"
        if row["identical"] is not None and not is_plain:
            same = Text(f"{row['same_texts']}/{row['num_texts']}", style="green" if row["identical"] else "red")
        table.add_row(
            row["method"],
            _with_range(row, "tokens_per_second", 0),
            "1" if is_plain else _with_range(row, "speedup", 2),
            f"{1000 * row['first_token_seconds']:.1f}",
            " ".join(f"{1000 * cycles[key]:.1f}" for key in ("p50", "p95", "p99")) if cycles else "-",
            same,
        )
    for row in refused:
        table.add_row(row["method"], *["-"] * len(headings), style="dim")
    return table


def _kind_table(rows: list[Mapping[str, Any]]) -> Table:
    kinds = list(rows[0]["kinds"])
    table = _table("speed-up by kind", kinds)
    for row in rows[1:]:
        table.add_row(row["method"], *(_with_range(row["kinds"][kind], "speedup", 2) for kind in kinds))
    return table


def _draft_table(rows: list[Mapping[str, Any]]) -> Table:
    positions = max(min(len(row["accepted_per_position"]), _MOST_POSITIONS) for row in rows)
    accepted = f"drafts (%) with\n1 to {positions} accepted"
    table = _table("drafts", ("accept.\nlength", "accept.\nrate", accepted, "draft\ntime", "weights\nMB"))
    for row in rows[1:]:
        shares = row["accepted_per_position"][:_MOST_POSITIONS]
        table.add_row(
            row["method"],
            f"{row['mean_acceptance_length']:.2f}",
            _percent(row["acceptance_rate"]),
            " ".join(f"{100 * share:.0f}" for share in shares) or "-",
            _percent(row["draft_share"]),
            "-" if row["draft_bytes"] is None else f"{row['draft_bytes'] / 1e6:.1f}",
        )
    return table


def _table(first: str, headings: Iterable[str]) -> Table:
    # Where there is little room, a range goes below its figure, and no name is broken.
    table = new_table(first, numbers=headings, padding=0)
    table.columns[0].no_wrap = True
    return table


def _with_range(row: Mapping[str, Any], key: str, digits: int) -> str:
    spread = row["spread"][key]
    if spread["n"] == 1:
        return f"{row[key]:.{digits}f}"
    return f"{row[key]:.{digits}f} ({spread['low']:.{digits}f}-{spread['high']:.{digits}f})"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _notes(report: Mapping[str, Any]) -> list[str]:
    from ..bench.decoders import STOCK
    from ..bench.report import described_machine

    settings, rows = report["settings"], report["rows"]
    kinds = list(dict.fromkeys(settings["prompts"].values()))
    notes = [
        f"{settings['target']} in {report['environment']['dtype']}; {counted(len(settings['prompts']), 'prompt')} "
        f"({', '.join(kinds)}), at most {settings['max_new_tokens']} new tokens, {settings['decoding']}"
        f"{', chat template' if settings['chat_template'] else ''}; {described_machine(report['environment'])}.",
        f"Speeds: median (smallest-largest) of {counted(settings['rounds'], 'round')}, all ways in turn. First token: "
        "median of all calls. Cycle: draft and verification; for plain generation a token. n and the spread of every "
        "figure are in the JSON (--json, --output).",
    ]
    if settings["rounds"] < settings["rounds_asked"]:
        reason = "interrupted" if settings["interrupted"] else "--max-seconds"
        notes.append(f"{settings['rounds']} of {counted(settings['rounds_asked'], 'round')}: {reason}.")
    if any(row["method"].startswith(STOCK) for row in (*rows, *report["unavailable"])):
        notes.append(f"{STOCK}*: transformers' own assisted generation.")
    notes += repetitions(settings)
    peaks = [
        f"{row['method']} {row['peak_memory_bytes'] / 1e6:.0f} (batch {row['batch_size']})"
        for row in rows
        if row["peak_memory_bytes"] is not None
    ]
    if peaks:
        notes.append(f"Most GPU memory of a call beyond all loaded weights, MB: {', '.join(peaks)}.")
    notes += [f"{where(row)}: {note}." for row in rows for note in row["notes"]]
    notes += [_difference(row) for row in rows if row["identical"] is False]
    return notes + refusals(report["unavailable"])


def repetitions(settings: Mapping[str, Any]) -> list[str]:
    """A line about prompts that are in their batches twice, if there are any."""
    repeated = {size: count for size, count in settings["repeated_prompts"].items() if count}
    shown = ", ".join(f"{count} at batch size {size}" for size, count in repeated.items())
    favoured = "That favours methods that remember texts (suffix)."
    return [f"Prompts repeated to fill batches: {shown}. {favoured}"] if repeated else []


def refusals(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each reason and the methods that have it at the same batch sizes."""
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in rows:
        sizes[row["method"], row["reason"].rstrip(".")] += [row["batch_size"]] if row["batch_size"] else []
    methods: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for (method, reason), at in sizes.items():
        methods[reason, tuple(at)].append(method)
    return [
        f"{', '.join(names)} cannot run{' at batch size ' if at else ''}{' and '.join(map(str, at))}: {reason}."
        for (reason, at), names in methods.items()
    ]


def where(row: Mapping[str, Any]) -> str:
    return f"{row['method']} at batch size {row['batch_size']}"


def _difference(row: Mapping[str, Any]) -> str:
    prompt, index = next(iter(row["first_differences"].items()))
    others = len(row["first_differences"]) - 1
    why = "Its acceptance rule is not lossless."
    if row["is_lossless"]:
        why = (
            "Where two tokens are equally likely up to rounding, either may win; `hf-specdec verify` tells such ties "
            "from errors."
        )
    return (
        f"{where(row)} differs from plain generation on '{prompt}' from new token {index + 1} on"
        f"{f', and on {others} more' if others else ''}. {why}"
    )
