"""`hf-specdec generate-many`: a file of prompts to a file of results, in one process or several."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import counted
from .common import EXIT_DIFFERENT, JsonOption, reporting, say, show
from .drafter import ConfigOption, LengthOption, MethodOption, SpecModelOption, load_drafter
from .generate import MaxNewTokensOption, TemperatureOption, TopKOption, TopPOption, sampling_arguments
from .target import (
    EMBEDDED,
    DeviceOption,
    Dtype,
    DtypeOption,
    ModelOption,
    Place,
    ThreadsOption,
    TrustOption,
)


RowsOption = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Requests that are decoded at a time.")]
TokensInFlightOption = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens that these may come to together, which bounds the memory of the cache."),
]


@reporting
def generate_many_command(
    input: Annotated[Path, typer.Option("--input", "-i", help="Requests: a file of JSON lines.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Results: JSON lines, too.", show_default=False)],
    model: ModelOption = EMBEDDED,
    method: MethodOption = None,
    spec_model: SpecModelOption = None,
    num_speculative_tokens: LengthOption = None,
    config: ConfigOption = None,
    batch_size: RowsOption = 8,
    max_tokens_in_flight: TokensInFlightOption = None,
    max_new_tokens: MaxNewTokensOption = 256,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: Annotated[int, typer.Option(rich_help_panel="Sampling", help="Seed of the requests that name none.")] = 0,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Generate for all prompts of a file.

    A line is a text, a list of token ids, a chat, or an object with one of these as `prompt`, `input_ids` or
    `messages` and settings of its own. Under torchrun or accelerate launch each process takes its share. A run that
    was stopped goes on with the same command. Exit code 1: some requests have failed.
    """
    from ..many.files import Output, Processes, read_requests

    processes, place = Processes.of_environment(), Place(model, dtype, device, threads, trust_remote_code)
    sampling = sampling_arguments(temperature, top_p, top_k)
    requests, ids = read_requests(input)
    results = Output(output)
    if processes.size > 1 and device is None:
        place = replace(place, device=_own_device(processes.local_rank))
    # All have looked at what is there before anyone writes.
    processes.wait()
    from ..machine import num_threads
    from ..many.generate import generate_many

    with num_threads(place.num_threads):
        target, tokenizer = place.load()
        speculator = load_drafter(target, place.is_embedded, method, spec_model, num_speculative_tokens, config)
        run = generate_many(
            target,
            requests,
            batch_size,
            max_tokens_in_flight,
            tokenizer=tokenizer,
            journal=results.journal(processes.rank),
            progress=processes.rank == 0 and sys.stderr.isatty(),
            seed=seed,
            shard=(processes.rank, processes.size),
            max_new_tokens=max_new_tokens,
            **sampling,
            **({"spec_method": "off"} if speculator is None else {"assistant": speculator}),
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


def _own_device(local_rank: int) -> str | None:
    import torch

    return f"cuda:{local_rank % torch.cuda.device_count()}" if torch.cuda.is_available() else None


def _print_report(report: dict[str, Any], output: Path) -> None:
    parts = [f"{counted(report['num_requests'], 'request')}, {counted(report['num_tokens'], 'token')} in {output}"]
    if report["num_processes"] > 1:
        parts.append(f"{report['num_processes']} processes")
    if report["num_draft_tokens"]:
        parts.append(f"{report['num_accepted_tokens']} of {report['num_draft_tokens']} draft tokens accepted")
    if report["num_failed"]:
        parts.append(f"{counted(report['num_failed'], 'request')} failed: see `error`. The same command tries again")
    say("; ".join(parts), "dim", stderr=True)
