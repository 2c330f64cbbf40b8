"""`hf-specdec calibrate`: measures and stores what calls with adaptive lengths begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .common import JsonOption, new_table, say, show
from .target import EMBEDDED_SPEC, Place, PromptsOption, SpecOption, on_target, tokenised


@on_target
def calibrate_command(
    place: Place,
    spec: SpecOption = EMBEDDED_SPEC,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File. Left out: in the cache folder, where calls look for it.")
    ] = None,
    prompts: PromptsOption = None,
    batch_size: Annotated[
        list[int] | None, typer.Option("--batch-size", "-b", min=1, help="Prompts at once; may be repeated.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=2, help="Tokens per prompt.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Calls with each batch of prompts.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Measure what drafts of each length cost and how many are accepted, and store it for later calls.

    Calls with adaptive lengths, the same target, drafter, settings, device and data type begin with it.
    They learn without it, too.
    """
    from ..control.store import profile_identity, save_profile
    from ..diagnosis.calibration import calibrate
    from ..loader import load_speculator
    from ..settings import AUTO

    chosen = place.prompts(prompts, max_new_tokens)
    with place.loaded() as (model, tokenizer):
        speculator = load_speculator(model, place.settings(spec), num_speculative_tokens=AUTO)
        batches = [
            batch.inputs for size in batch_size or [1] for batch in tokenised(chosen, model, tokenizer, size, raw=True)
        ]
        profile = calibrate(model, speculator, batches, max_new_tokens, rounds)
        network = speculator.generator_class.network(speculator.resources)
        file = save_profile(profile, profile_identity(model, speculator.config, network), out)
    report = {"file": str(file), **profile.to_dict()}
    show(report, as_json, lambda: _print(report))


def _print(report: dict[str, Any]) -> None:
    table = new_table("rows", "length", "draft ms", "verify ms")
    for rows, verify in report["verify_seconds"].items():
        drafts = report["draft_seconds"].get(rows, {})
        for nodes, seconds in verify.items():
            length = str(int(nodes) - 1)
            draft = f"{1000 * drafts[length]:.2f}" if length in drafts and length != "0" else ""
            table.add_row(rows, length, draft, f"{1000 * seconds:.2f}")
    Console().print(table)
    say(f"Accepted, by position: {', '.join(f'{rate:.2f}' for rate in report['accepted'])}")
    say(f"Written to {report['file']}")
