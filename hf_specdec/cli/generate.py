"""`hf-specdec generate`: prints text of any model as it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..arguments import is_off
from ..errors import SpecConfigError, counted
from . import options
from .drafters import Drafting, load_drafter
from .output import say, show
from .target import Target, tokenised


def generate_command(
    *,
    model: options.Model,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-' or none reads it from standard input.", show_default=False)
    ] = None,
    drafting: Drafting,
    max_new_tokens: options.MaxNewTokens = 256,
    raw: options.Raw = False,
    sampling: options.Sampling,
    html: Annotated[
        Path | None,
        typer.Option(help="Also write a page that shows the call: who wrote each token, every draft, every second."),
    ] = None,
    place: options.Place,
    as_json: options.Json = False,
) -> None:
    """Generate text, printed as it comes, and statistics on standard error.

    The prompt is the user's message where the model has a chat template, else taken as it is. Without sampling options
    tokens are chosen as the model's generation config says. Only the new text is printed.
    """
    text, sampled = _read_prompt(prompt), sampling.arguments()
    target = Target(model, place)
    spec = drafting.read(target)
    # A page that could not be drawn or written is refused before anything is loaded.
    if html is not None and is_off(spec.get("method")):
        raise SpecConfigError(
            f"--html draws drafts, and the drafter '{spec['method']}' makes none. Leave one of them out."
        )
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise SpecConfigError(f"The page '{html}' cannot be written. Give --html a file in a folder that exists.")
    from time import perf_counter

    import torch
    from transformers import TextStreamer

    from ..call.entry import generate
    from ..demo import Prompt
    from ..metrics import record

    with target.loaded() as (loaded, tokenizer):
        (batch,) = tokenised([Prompt("prompt", text)], loaded, tokenizer, 1, raw)
        arguments = {**load_drafter(loaded, spec), **sampled, "max_new_tokens": max_new_tokens}
        streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        torch.manual_seed(sampling.seed)
        with record(trace=html is not None) as recorded:
            began = perf_counter()
            sequences = generate(loaded, **batch.inputs, **arguments, streamer=streamer)
            seconds = perf_counter() - began
    if html is not None and not recorded.calls:
        raise SpecConfigError("The page was not written: transformers' own loop has generated, which keeps no trace.")
    if html is not None:
        try:
            recorded.calls[0].to_html(html, tokenizer)
        except OSError as error:
            raise SpecConfigError(f"The page '{html}' cannot be written: {error}") from error
    num_prompt_tokens = batch.inputs["input_ids"].shape[1]
    tokens = sequences[0, num_prompt_tokens:].tolist()
    statistics = recorded.calls[0].stats.to_dict() if recorded.calls else {"method": "off"}
    statistics |= {
        "num_prompt_tokens": num_prompt_tokens,
        "num_tokens": len(tokens),
        "seconds": seconds,
        "tokens_per_second": len(tokens) / seconds,
    }
    answer = tokenizer.decode(tokens, skip_special_tokens=True)
    report = {"text": answer, "token_ids": tokens, "stats": statistics}
    # The text has been printed as it came.
    show(report, as_json, lambda: _print_statistics(statistics))


def _read_prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise SpecConfigError("There is no prompt. Give it as an argument or on standard input.")
    text = sys.stdin.read() if prompt in (None, "-") else prompt
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise SpecConfigError("The prompt is no text of UTF-8. Convert it first.")
    if not text:
        raise SpecConfigError("The prompt is empty. Give at least one character.")
    return text


def _print_statistics(stats: dict[str, Any]) -> None:
    parts = [
        f"{stats['method']}: {counted(stats['num_tokens'], 'token')} in {stats['seconds']:.2f} s "
        f"({stats['tokens_per_second']:.1f} tokens/s)"
    ]
    if stats.get("num_draft_tokens"):
        parts.append(
            f"mean acceptance length {stats['mean_acceptance_length']:.2f}, acceptance rate "
            f"{100 * stats['acceptance_rate']:.0f} %, {stats['num_accepted_tokens']} of {stats['num_draft_tokens']} "
            f"draft tokens accepted, {stats['num_target_forwards']} target forwards"
        )
    say("; ".join([*parts, *stats.get("notes", [])]), "dim", stderr=True)
