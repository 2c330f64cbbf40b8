"""`hf-specdec demo`: compares the methods with plain generation, on the embedded model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import SpecConfigError, counted
from .common import (
    EXIT_DIFFERENT,
    EXIT_INTERRUPTED,
    DeviceOption,
    Dtype,
    JsonOption,
    checked_device,
    print_error,
    progress_bars,
    quieten_loading,
    reporting,
    show,
)


def demo_methods() -> dict[str, dict[str, Any]]:
    """Settings of the methods that the package has a drafter for, by the name of their row in the demo's table."""
    from .. import demo
    from ..method import built_in_methods

    rows = {}
    for method in built_in_methods():
        if method.takes_model and method.demo is None:
            continue
        drafter = {} if method.demo is None else {"model": demo.drafter_path(method.demo)}
        for suffix, settings in method.demo_settings.items():
            name = f"{method.name}_{suffix}" if suffix else method.name
            rows[name] = {"method": method.name, **drafter, **settings}
    return rows


@reporting
def demo_command(
    methods: Annotated[
        str | None, typer.Option(help="Methods to compare, separated by commas. Left out: all of them.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens to generate per prompt.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is timed.")] = 3,
    max_seconds: Annotated[
        float, typer.Option(min=0, help="Begin no further round that is likely to end after so many seconds.")
    ] = 60.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts generated together.")] = 1,
    dtype: Annotated[
        Dtype, typer.Option(help="Data type of the timed runs. auto: bfloat16 where the machine computes in it.")
    ] = Dtype.auto,
    device: DeviceOption = None,
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads. For a model as small as the embedded one, one is best.")
    ] = 1,
    auto: Annotated[
        bool, typer.Option("--auto", help="Also each method with num_speculative_tokens='auto', in a row of its own.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the methods with plain generation on the embedded model.

    The prompts ask for edits of code and for new code. Every greedy output is first compared with that of plain
    generation, in float32; then all are timed in turn. Exits with 1 if an output differs.
    """
    report = _run_demo(
        _chosen_methods(methods, auto), max_new_tokens, rounds, max_seconds, batch_size, dtype, device, threads
    )
    show(report, as_json, lambda: _print_demo(report))
    different = {row["method"]: row["first_differences"] for row in report["rows"] if not row["identical"]}
    for method, prompts in different.items():
        for prompt, index in prompts.items():
            print_error(f"{method} differs from plain generation on '{prompt}', from new token {index + 1} on.")
    if different:
        raise typer.Exit(EXIT_DIFFERENT)
    if report["settings"]["interrupted"]:
        raise typer.Exit(EXIT_INTERRUPTED)


def _chosen_methods(names: str | None, auto: bool = False) -> dict[str, dict[str, Any]]:
    """The demo's methods that the user named; all without a choice. With `auto`, each with adaptive length, too."""
    chosen = _named_methods(names)
    if not auto:
        return chosen
    adaptive = {f"{name} auto": {**settings, "num_speculative_tokens": "auto"} for name, settings in chosen.items()}
    return {name: table[name] for own in chosen for table, name in ((chosen, own), (adaptive, f"{own} auto"))}


def _named_methods(names: str | None) -> dict[str, dict[str, Any]]:
    table = demo_methods()
    if names is None:
        return table
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in chosen:
        if name not in table:
            close = difflib.get_close_matches(name, table, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise SpecConfigError(f"The demo has no method '{name}'.{hint} It has: {', '.join(table)}.")
    if not chosen:
        raise SpecConfigError(f"--methods names no method. Choose from: {', '.join(table)}.")
    return {name: table[name] for name in chosen}


def _run_demo(
    methods: Mapping[str, dict[str, Any]],
    max_new_tokens: int,
    rounds: int,
    max_seconds: float,
    batch_size: int,
    dtype: Dtype,
    device: str | None,
    threads: int,
) -> dict[str, Any]:
    """Runs the comparison; what it returns is what `--json` prints."""
    import torch

    from .. import demo
    from ..bench.decoders import load_decoders, plain_decoder
    from ..bench.engine import Measurement, find_differences, measure, run_round
    from ..bench.machine import describe_environment, num_threads, suitable_dtype
    from ..bench.prompts import make_batches
    from ..bench.report import make_rows, unavailable

    quieten_loading()
    device = checked_device(device)
    timed_dtype = suitable_dtype(device) if dtype is Dtype.auto else getattr(torch, dtype.value)
    greedy = {"do_sample": False}
    specs = [{"name": name, **settings} for name, settings in methods.items()]

    def loaded(dtype):
        model = demo.load_target(dtype).to(device)
        found, missing = load_decoders(model, specs, skip_missing=True)
        return model, [plain_decoder(), *found], missing

    with num_threads(threads), progress_bars() as begin:
        model, decoders, missing = loaded(torch.float32)
        batches = make_batches(demo.load_tokenizer(), demo.prompts(), batch_size, max_new_tokens, device)
        sized = {batch_size: batches}
        step = begin("Comparing the outputs in float32", len(batches) * len(decoders))
        exact = run_round(model, decoders, Measurement(sized), greedy, 0, step)[batch_size]
        if timed_dtype != torch.float32:
            model, decoders, _ = loaded(timed_dtype)
        found = measure(model, decoders, sized, rounds, greedy, max_seconds=max_seconds, begin=begin)
        environment = describe_environment(device, timed_dtype)
    rows = make_rows(model, decoders, found, greedy=True)
    for row in rows:
        row["first_differences"] = find_differences(exact["plain"], exact[row["method"]], batches)
        row["identical"] = not row["first_differences"]
        spread = row["spread"]["speedup"]
        row["speedup_range"] = spread["low"], spread["high"]
    plain = exact["plain"]
    return {
        "rows": rows,
        "unavailable": unavailable(found, missing),
        "identity_check": {
            "dtype": "float32",
            "plain_tokens_per_second": sum(call.num_tokens for call in plain) / sum(call.seconds for call in plain),
        },
        "settings": {
            "prompts": {name: batch.kind for batch in batches for name in batch.names},
            "max_new_tokens": max_new_tokens,
            "batch_size": batch_size,
            "rounds": len(found.rounds),
            "rounds_asked": rounds,
            "interrupted": found.interrupted,
        },
        "environment": environment,
    }


def _print_demo(report: dict[str, Any]) -> None:
    settings, environment = report["settings"], report["environment"]
    dtype, kinds = environment["dtype"], list(dict.fromkeys(settings["prompts"].values()))
    # Narrow enough for 80 columns.
    table = Table(box=SIMPLE_HEAD, padding=0)
    table.add_column("method", no_wrap=True)
    for heading in ("tokens/s", "speed-up\n(by round)", *kinds, "accept.\nlength", "accept.\nrate"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("identical\noutput", no_wrap=True)
    for row in report["rows"]:
        table.add_row(*_demo_cells(row, kinds))
    for row in report["unavailable"]:
        table.add_row(row["method"], *["-"] * (len(kinds) + 4), "unavailable", style="dim")
    console = Console()
    console.print(table)
    machine = environment["gpu"] or f"{environment['cpu']}, {counted(environment['threads'], 'thread')}"
    notes = [
        f"{len(settings['prompts'])} prompts ({', '.join(kinds)}), batch size {settings['batch_size']}, at most "
        f"{settings['max_new_tokens']} new tokens, greedy; {machine}; torch {environment['torch']}, "
        f"transformers {environment['transformers']}.",
        f"Speed: {dtype} for plain generation and all methods, timed in turn "
        f"({counted(settings['rounds'], 'round')}); median, with the range of the rounds.",
        f"Identical output: every token compared with plain generation in float32 (which made "
        f"{report['identity_check']['plain_tokens_per_second']:.0f} tokens/s there).",
    ]
    changed = [row for row in report["rows"] if row["same_texts"] < row["num_texts"]]
    if changed and dtype != "float32":
        counts = ", ".join(f"{row['method']} {row['same_texts']} of {row['num_texts']}" for row in changed)
        notes.append(
            f"In {dtype} two tokens can be equally likely up to rounding, and either may win. Texts that are the same "
            f"there too: {counts}."
        )
    notes += [f"{row['method']} is unavailable: {row['reason']}" for row in report["unavailable"]]
    for note in notes:
        console.print(Text(note, style="dim"), soft_wrap=not console.is_terminal)


def _demo_cells(row: dict[str, Any], kinds: list[str]) -> list[Any]:
    identical = Text("yes", style="green") if row["identical"] else Text("NO", style="bold red")
    if row["method"] == "plain":
        return [row["method"], f"{row['tokens_per_second']:.0f}", "1.00", *["1.00"] * len(kinds), "1.00", "-", "-"]
    low, high = row["speedup_range"]
    return [
        row["method"],
        f"{row['tokens_per_second']:.0f}",
        f"{row['speedup']:.2f} ({low:.1f}-{high:.1f})",
        *[f"{row['kinds'][kind]['speedup']:.2f}" for kind in kinds],
        f"{row['mean_acceptance_length']:.2f}",
        "-" if row["acceptance_rate"] is None else f"{100 * row['acceptance_rate']:.0f} %",
        identical,
    ]
