"""`hf-specdec verify`: tells whether outputs are those of plain generation, and numerical ties from bugs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..errors import counted
from .common import EXIT_DIFFERENT, JsonOption, new_table, progress_bars, say, show
from .target import (
    ANY_SPEC,
    EMBEDDED_SPEC,
    SPEC_HELP,
    BatchSizeOption,
    Place,
    PromptsOption,
    RawOption,
    on_target,
    tokenised,
)


@on_target
def verify_command(
    place: Place,
    specs: Annotated[
        list[str] | None,
        typer.Option(
            "--spec",
            "-s",
            help=f"{SPEC_HELP} May be repeated. Left out: ngram; for the embedded target its draft model.",
        ),
    ] = None,
    prompts: PromptsOption = None,
    raw: RawOption = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens per prompt.")] = 128,
    batch_size: BatchSizeOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Compare greedy output with plain generation; judge each difference.

    The first token that differs is looked up in the target's own logits. If both tokens are equally likely up to the
    rounding error of the data type, as measured on this text, it is a numerical tie, else a bug. Exits with 1 if there
    is a bug.
    """
    from ..diagnosis import verify

    chosen = place.prompts(prompts, max_new_tokens)
    methods = {spec: place.settings(spec) for spec in specs or [EMBEDDED_SPEC if place.is_embedded else ANY_SPEC]}
    with place.loaded() as (model, tokenizer):
        batches = tokenised(chosen, model, tokenizer, batch_size, raw)
        with progress_bars() as begin:
            steps = len(batches) * (len(methods) + 1)
            found = verify(model, methods, batches, on_step=begin("Comparing the outputs", steps))
    rows = [item.to_dict() for item in found]
    for item in (item for row in rows for item in row["differences"]):
        for key in ("plain", "speculative"):
            token = item[f"{key}_token"]
            item[f"{key}_text"] = None if token is None else tokenizer.decode([token])
    report = {
        "target": place.target,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "methods": rows,
    }
    show(report, as_json, lambda: _print(report))
    if any(item.bugs for item in found):
        raise typer.Exit(EXIT_DIFFERENT)


def _print(report: dict[str, Any]) -> None:
    table = new_table("method", numbers=("texts", "equal", "numerical ties", "bugs"))
    for row in report["methods"]:
        bugs = Text(str(row["num_bugs"]), style="bold red" if row["num_bugs"] else "green")
        table.add_row(row["method"], *(str(row[key]) for key in ("num_texts", "num_equal", "num_ties")), bugs)
    Console().print(table)
    for row in report["methods"]:
        for item in row["differences"]:
            say(f"{row['method']}, {_sentence(item)}")
    say(
        f"Greedy, at most {counted(report['max_new_tokens'], 'token')}, batch size {report['batch_size']}, "
        f"{report['dtype']} on {report['device']}.",
        "dim",
    )


def _sentence(item: dict[str, Any]) -> str:
    where = f"'{item['prompt']}', new token {item['index'] + 1}"
    if item["margin"] is None:
        one, other = ("plain", "speculative") if item["plain_token"] is None else ("speculative", "plain")
        return f"{where}: the {one} text has ended and the {other} one goes on. This is a bug."
    return (
        f"{where}: plain {item['plain_text']!r} with logit {item['plain_logit']:.6g}, speculative "
        f"{item['speculative_text']!r} with {item['speculative_logit']:.6g} (reference in {item['reference_dtype']}). "
        f"The margin {item['margin']:.3g} is {'within' if item['verdict'] == 'numerical tie' else 'beyond'} the "
        f"tolerance {item['tolerance']:.3g}, twice the rounding error of this text: {item['verdict']}."
    )
