"""`hf-specdec bench`: drafters beside plain generation, transformers' own ways and our loop without drafts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import SpecConfigError, counted
from . import options
from .drafters import read_drafter
from .output import EXIT_DIFFERENT, EXIT_INTERRUPTED, new_table, print_notes, progress_bars, say, show
from .target import EMBEDDED, Target, has_template, tokenised


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..bench.prompts import Batch
    from ..diagnosis import Advice, Choices


_WIDTH_OF_FILES = 120

# Without a model, what is shown of the embedded one is to end soon.
_SECONDS_OF_EMBEDDED = 60.0


def bench_command(
    *,
    model: options.OptionalModel = None,
    drafters: options.Drafters = None,
    num_speculative_tokens: options.Length = None,
    settings: options.Settings = None,
    recommend: Annotated[
        bool,
        typer.Option(
            "--recommend", help="Also measure drafters that are found for the model, and say which is fastest and why."
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Compare the greedy texts with plain generation, instead of timing; judge each difference."
        ),
    ] = False,
    prompts: options.Prompts = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Prompts of each kind. Default: all.")] = None,
    max_new_tokens: options.MaxNewTokens = 128,
    raw: options.Raw = False,
    batch_sizes: Annotated[
        list[int] | None,
        typer.Option("--batch-size", "-b", min=1, help="Prompts generated together. May be repeated. [default: 1]"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is timed.")] = 3,
    max_seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Time limit in seconds: begin no round that is likely to exceed it."),
    ] = None,
    sampling: options.Sampling,
    place: options.Place,
    output: options.Output = None,
    as_json: options.Json = False,
) -> None:
    """Measure drafters on your model and prompts.

    Beside them plain generation, transformers' own ways and this package's loop without drafts generate every batch,
    one after the other, in every round; greedily unless a sampling option says otherwise. Ctrl-C ends after the rounds
    that are complete. Exit code 1: a text is not that of plain generation, in float32 or as --check judges it.
    """
    # All that can be checked without the model is checked before it is loaded.
    if recommend and check:
        raise SpecConfigError("--recommend times and --check does not. Leave one of them out.")
    sampled = sampling.arguments() or {"do_sample": False}
    if check and sampled["do_sample"]:
        raise SpecConfigError("--check compares greedy texts. Leave out what samples.")
    if output is not None and not output.absolute().parent.is_dir():
        raise SpecConfigError(f"--output '{output}': there is no folder '{output.absolute().parent}'. Make it first.")
    if model is None:
        max_seconds = _SECONDS_OF_EMBEDDED if max_seconds is None else max_seconds
        if not as_json:
            say(f"No MODEL is given: this is the embedded toy model '{EMBEDDED}' of 3.9 M parameters.", "bold")
    target = Target(model or EMBEDDED, place)
    packaged = target.drafters
    specs = {
        text: read_drafter(text, num_speculative_tokens, settings, packaged, place.offline)
        for text in drafters or packaged
    }
    texts = target.prompts(prompts, max_new_tokens, num_prompts)
    sizes = sorted({*(batch_sizes or [1])})
    asked = {
        "target": target.name,
        "prompts_source": ", ".join(prompts or ["default"]),
        "max_new_tokens": max_new_tokens,
        "rounds_asked": rounds,
    }
    from ..bench.decoders import STOCK
    from ..diagnosis import recommend as recommended

    with target.loaded(for_report=True) as (loaded, tokenizer):
        asked["chat_template"] = has_template(tokenizer, raw)
        batches = {size: tokenised(texts, loaded, tokenizer, size, raw, fill=not check) for size in sizes}
        _check_lengths(loaded, [batch for group in batches.values() for batch in group])
        choices = _choices(loaded, specs, packaged if drafters else None, recommend, place.offline)
        if check:
            report = _checked(loaded, tokenizer, choices, batches, asked)
        else:
            run = {"rounds": rounds, "seed": sampling.seed, "max_seconds": max_seconds}
            with progress_bars() as begin:
                report = choices.measured(batches, sampled, asked, **run, stock=True, begin=begin)
    advice = None
    if recommend:
        advice = recommended(report, choices, sizes[0])
        report["recommendation"] = advice.to_dict()
    if output is not None:
        try:
            output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise SpecConfigError(f"--output '{output}' cannot be written: {error}") from error
    show(report, as_json, lambda: _print_check(report) if check else _print_bench(report, advice))
    if report.get("settings", {}).get("interrupted"):
        raise typer.Exit(EXIT_INTERRUPTED)
    if check:
        has_failed = any(row["num_bugs"] for row in report["methods"])
    else:
        # Where no rounding of a narrow type explains a difference, greedy texts are those of plain generation.
        own = [row for row in report["rows"] if not row["method"].startswith(STOCK) and row["is_lossless"]]
        is_exact = report["environment"]["dtype"] in ("float32", "float64")
        has_failed = is_exact and any(row["identical"] is False for row in own)
    if has_failed:
        raise typer.Exit(EXIT_DIFFERENT)


def _choices(
    model: PreTrainedModel,
    specs: Mapping[str, Mapping[str, Any]],
    packaged: Mapping[str, Any] | None,
    recommend: bool,
    offline: bool,
) -> Choices:
    """What is measured: what was named, beside the drafters that are `packaged`; else these, or what is found."""
    from ..diagnosis import Choices

    choices = Choices(model)
    if packaged is not None:
        choices.add_named([*specs.values()], [text if text in packaged else None for text in specs])
    else:
        for name, settings in specs.items():
            choices.add(name, settings, "comes with the model")
    if recommend or not specs:
        choices.search(local_files_only=offline or not recommend)
    return choices


def _checked(
    model: PreTrainedModel,
    tokenizer: Any,
    choices: Choices,
    batches: Mapping[int, list[Batch]],
    asked: Mapping[str, Any],
) -> dict[str, Any]:
    from ..diagnosis import verify

    every = [batch for group in batches.values() for batch in group]
    methods = {decoder.name: decoder.speculator.at_full_length() for decoder in choices.decoders}
    with progress_bars() as begin:
        found = verify(model, methods, every, on_step=begin("Comparing the outputs", len(every) * (len(methods) + 1)))
    rows = [item.to_dict() for item in found]
    for item in (item for row in rows for item in row["differences"]):
        for key in ("plain", "speculative"):
            token = item[f"{key}_token"]
            item[f"{key}_text"] = None if token is None else tokenizer.decode([token])
    about = {"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device), "batch_sizes": [*batches]}
    missing = {item.name: item.reason for item in choices.rejected}
    return {**asked, **about, "methods": rows, "unavailable": missing}


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


def _print_bench(report: Mapping[str, Any], advice: Advice | None) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_FILES)
    settings = report["settings"]
    kinds = list(dict.fromkeys(settings["prompts"].values()))
    for size in settings["batch_sizes"]:
        rows = [row for row in report["rows"] if row["batch_size"] == size]
        refused = [row["method"] for row in report["unavailable"] if row["batch_size"] in (size, None)]
        say(f"\nBatch size {size}", "bold")
        console.print(_table("way of decoding", _COLUMNS, rows, refused))
        if len(kinds) > 1:
            of_kinds = {kind: lambda row, kind=kind: _with_range(row["kinds"][kind], "speedup", 2) for kind in kinds}
            console.print(_table("over plain, by kind", of_kinds, rows[1:]))
    if advice is not None:
        _print_advice(advice)
    print_notes(_notes(report, kinds))


def _print_advice(advice: Advice) -> None:
    best = advice.best
    if best is None:
        say("Use plain generation: nothing that was measured is surely faster.", "bold")
    elif not best.has_drafts:
        say(f"Use this loop without drafts: {best.speedup:.2f}x plain generation. Drafts add nothing sure.", "bold")
    else:
        low, high = best.speedup_range
        say(
            f"Use {best.name}: {best.speedup:.2f}x plain generation ({low:.2f}-{high:.2f} by round), "
            f"{best.over_none:.2f}x this loop without drafts.",
            "bold",
        )
    if best is not None:
        say(f"\n  {advice.snippets['python']}\n")
        say(f"As JSON: {advice.snippets['json']}")
    for option in advice.options:
        say(f"{option.name} ({option.origin}): {option.verdict}")
    print_notes(advice.notes)


def _table(
    first: str,
    columns: Mapping[str, Callable[[Mapping[str, Any]], str]],
    rows: Iterable[Mapping[str, Any]],
    refused: Iterable[str] = (),
) -> Table:
    # Where there is little room, a range goes below its figure, and no name is broken.
    table = new_table(first, numbers=columns, padding=0)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(row["method"], *(shown(row) for shown in columns.values()))
    for method in refused:
        table.add_row(method, *["-"] * len(columns), style="dim")
    return table


def _with_range(row: Mapping[str, Any], key: str, digits: int) -> str:
    if key not in row:
        return "-"
    spread = row["spread"][key]
    if spread["low"] == spread["high"]:
        return f"{row[key]:.{digits}f}"
    return f"{row[key]:.{digits}f} ({spread['low']:.{digits}f}-{spread['high']:.{digits}f})"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _same_texts(row: Mapping[str, Any]) -> str:
    if row["identical"] is None or row["method"] == "plain":
        return "-"
    return f"[{'green' if row['identical'] else 'red'}]{row['same_texts']}/{row['num_texts']}[/]"


# What stands of a row under each heading.
_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "tokens/s": lambda row: _with_range(row, "tokens_per_second", 0),
    "speed-up\nover plain": lambda row: _with_range(row, "speedup", 2),
    "speed-up\nover none": lambda row: _with_range(row, "speedup_over_none", 2),
    "accept.\nlength": lambda row: f"{row['mean_acceptance_length']:.2f}",
    "accept.\nrate": lambda row: _percent(row["acceptance_rate"]),
    "draft\ntime": lambda row: _percent(row["draft_share"]),
    "first token\nms": lambda row: f"{1000 * row['first_token_seconds']:.1f}",
    "same\ntexts": _same_texts,
}


def _notes(report: Mapping[str, Any], kinds: list[str]) -> list[str]:
    from ..bench.decoders import STOCK
    from ..bench.report import described_machine

    settings, rows = report["settings"], report["rows"]
    notes = [
        f"{settings['target']} in {report['environment']['dtype']}; {counted(len(settings['prompts']), 'prompt')} "
        f"({', '.join(kinds)}), at most {settings['max_new_tokens']} new tokens, {settings['decoding']}"
        f"{', chat template' if settings['chat_template'] else ''}; {described_machine(report['environment'])}.",
        f"Speeds: median (smallest-largest) of {counted(settings['rounds'], 'round')}, all ways in turn, as multiples "
        "of plain generation and of none, this package's loop without drafts. The JSON (--json, --output) has more.",
    ]
    if settings["rounds"] < settings["rounds_asked"]:
        reason = "interrupted" if settings["interrupted"] else "the time limit"
        notes.append(f"{settings['rounds']} of {counted(settings['rounds_asked'], 'round')}: {reason}.")
    for size in settings["batch_sizes"]:
        stock = [row for row in rows if row["method"].startswith(STOCK) and row["batch_size"] == size]
        if stock:
            best = max(stock, key=lambda row: row["speedup"])
            notes.append(
                f"{STOCK}*: transformers' own ways; the fastest at batch size {size} is {best['method']}, "
                f"{best['speedup']:.2f} times plain generation."
            )
    repeated = [f"{count} at batch size {size}" for size, count in settings["repeated_prompts"].items() if count]
    if repeated:
        favoured = "That favours methods that remember texts (suffix)."
        notes.append(f"Prompts repeated to fill batches: {', '.join(repeated)}. {favoured}")
    peaks = [
        f"{_where(row)} {row['peak_memory_bytes'] / 1e6:.0f}" for row in rows if row["peak_memory_bytes"] is not None
    ]
    if peaks:
        notes.append(f"Most GPU memory of a call beyond all loaded weights, MB: {', '.join(peaks)}.")
    # How lengths have adapted is in the JSON.
    own = [(row, note) for row in rows for note in row["notes"] if not note.startswith("adaptive length")]
    notes += [f"{_where(row)}: {note}." for row, note in own]
    notes += [_difference(row) for row in rows if row["identical"] is False]
    refused: dict[str, list[str]] = defaultdict(list)
    for row in report["unavailable"]:
        refused[row["reason"].rstrip(".")].append(row["method"] if row["batch_size"] is None else _where(row))
    return [*notes, *(f"Not measured: {', '.join(names)}. {reason}." for reason, names in refused.items())]


def _where(row: Mapping[str, Any]) -> str:
    return f"{row['method']} at batch size {row['batch_size']}"


def _difference(row: Mapping[str, Any]) -> str:
    prompt, index = next(iter(row["first_differences"].items()))
    others = len(row["first_differences"]) - 1
    why = "Its acceptance rule is not lossless."
    if row["is_lossless"]:
        why = "Where two tokens are equally likely up to rounding, either may win; --check tells ties from errors."
    return (
        f"{_where(row)} differs from plain generation on '{prompt}' from new token {index + 1} on"
        f"{f', and on {others} more' if others else ''}. {why}"
    )


def _print_check(report: Mapping[str, Any]) -> None:
    table = new_table("method", numbers=("texts", "equal", "numerical ties", "bugs"))
    for row in report["methods"]:
        bugs = Text(str(row["num_bugs"]), style="bold red" if row["num_bugs"] else "green")
        table.add_row(row["method"], *(str(row[key]) for key in ("num_texts", "num_equal", "num_ties")), bugs)
    Console().print(table)
    for row in report["methods"]:
        for item in row["differences"]:
            say(f"{row['method']}, {_sentence(item)}")
    for name, reason in report["unavailable"].items():
        say(f"Not compared: {name}. {reason}", "dim")
    sizes = " and ".join(map(str, report["batch_sizes"]))
    say(
        f"Greedy, at most {counted(report['max_new_tokens'], 'token')}, batch size {sizes}, {report['dtype']} on "
        f"{report['device']}.",
        "dim",
    )


def _sentence(item: Mapping[str, Any]) -> str:
    where = f"'{item['prompt']}', new token {item['index'] + 1}"
    if item["margin"] is None:
        one, other = ("plain", "speculative") if item["plain_token"] is None else ("speculative", "plain")
        return f"{where}: the {one} text has ended and the {other} one goes on. This is a bug."
    return (
        f"{where}: plain {item['plain_text']!r} with logit {item['plain_logit']:.6g}, speculative "
        f"{item['speculative_text']!r} with {item['speculative_logit']:.6g}. The margin {item['margin']:.3g} is "
        f"{'within' if item['verdict'] == 'numerical tie' else 'beyond'} the tolerance {item['tolerance']:.3g}, twice "
        f"the rounding error: {item['verdict']}."
    )
