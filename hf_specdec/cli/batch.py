"""`hf-specdec batch`: a file of prompts to a file of results, in one process or several."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import counted
from . import options
from .drafters import Drafting, load_drafter
from .output import EXIT_DIFFERENT, say, show
from .target import Target, has_template


def batch_command(
    *,
    model: options.Model,
    input: Annotated[Path, typer.Argument(help="Requests: a file of JSON lines.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Results: JSON lines, too.", show_default=False)],
    drafting: Drafting,
    batch_size: options.BatchSize = 8,
    max_tokens_in_flight: options.TokensInFlight = None,
    max_new_tokens: options.MaxNewTokens = 256,
    raw: options.Raw = False,
    sampling: options.Sampling,
    place: options.Place,
    as_json: options.Json = False,
) -> None:
    """Generate for all prompts of a file.

    A line is a text, a list of token ids, a chat, or an object with one of these as `prompt`, `input_ids` or
    `messages` and settings of its own. A text is the user's message where the model has a chat template. Under
    torchrun or accelerate launch each process takes its share. A run that was stopped goes on with the same command.
    Exit code 1: some requests have failed.
    """
    import torch

    from ..many.files import Output, Processes, read_requests
    from ..many.generate import generate_many

    processes, sampled = Processes.of_environment(), sampling.arguments()
    requests, ids = read_requests(input)
    results = Output(output)
    if processes.size > 1 and place.device is None and torch.cuda.is_available():
        place = replace(place, device=f"cuda:{processes.local_rank % torch.cuda.device_count()}")
    target = Target(model, place)
    spec = drafting.read(target)
    # All have looked at what is there before anyone writes.
    processes.wait()
    with target.loaded() as (loaded, tokenizer):
        run = generate_many(
            loaded,
            [*map(_as_chat, requests)] if has_template(tokenizer, raw) else requests,
            batch_size,
            max_tokens_in_flight,
            tokenizer=tokenizer,
            journal=results.journal(processes.rank),
            progress=processes.rank == 0 and sys.stderr.isatty(),
            seed=sampling.seed,
            shard=(processes.rank, processes.size),
            max_new_tokens=max_new_tokens,
            **sampled,
            **load_drafter(loaded, spec),
        )
        for _ in run:
            pass
    processes.wait()
    if processes.rank > 0:
        return
    report = {**results.merge(ids), "num_processes": processes.size}
    show(report, as_json, lambda: _print_report(report, output))
    if report["num_failed"]:
        raise typer.Exit(EXIT_DIFFERENT)


def _as_chat(request: Any) -> Any:
    """A request whose text is the user's message; others as they are."""
    settings = {"prompt": request} if isinstance(request, str) else request
    if not isinstance(settings, dict) or "messages" in settings:
        return request
    key = next((key for key in ("prompt", "text") if isinstance(settings.get(key), str)), None)
    others = {name: value for name, value in settings.items() if name != key}
    return request if key is None else {**others, "messages": [{"role": "user", "content": settings[key]}]}


def _print_report(report: dict[str, Any], output: Path) -> None:
    parts = [f"{counted(report['num_requests'], 'request')}, {counted(report['num_tokens'], 'token')} in {output}"]
    if report["num_processes"] > 1:
        parts.append(f"{report['num_processes']} processes")
    if report["num_draft_tokens"]:
        parts.append(f"{report['num_accepted_tokens']} of {report['num_draft_tokens']} draft tokens accepted")
    if report["num_failed"]:
        parts.append(f"{counted(report['num_failed'], 'request')} failed: see `error`. The same command tries again")
    say("; ".join(parts), "dim", stderr=True)
