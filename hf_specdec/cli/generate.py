"""`hf-specdec generate`: prints text of any model as it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..arguments import is_off
from ..errors import SpecConfigError, counted
from . import options
from .drafters import load_drafter, read_drafter
from .output import say, show
from .target import Target, tokenised


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def generate_command(
    model: options.Model,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-' or none reads it from standard input.", show_default=False)
    ] = None,
    drafter: options.Drafter = None,
    num_speculative_tokens: options.Length = None,
    settings: options.Settings = None,
    max_new_tokens: options.MaxNewTokens = 256,
    raw: options.Raw = False,
    sample: options.Sample = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = 0,
    html: Annotated[
        Path | None,
        typer.Option(help="Also write a page that shows the call: who wrote each token, every draft, every second."),
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    trust_remote_code: options.Trust = False,
    offline: options.Offline = False,
    yes: options.Yes = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Generate text, printed as it comes, and statistics on standard error.

    The prompt is the user's message where the model has a chat template, else taken as it is. Without sampling options
    tokens are chosen as the model's generation config says. Only the new text is printed.
    """
    text, sampling = _read_prompt(prompt), options.sampling(sample, temperature, top_p, top_k)
    target = Target(model, dtype, device, trust_remote_code, offline, yes)
    spec = read_drafter(drafter or "auto", num_speculative_tokens, settings, target.drafters, offline)
    if html is not None:
        _check_page(html, spec.get("method"))
    import torch

    from ..demo import Prompt
    from ..machine import num_threads

    with num_threads(target.num_threads):
        loaded, tokenizer = target.load()
        (batch,) = tokenised([Prompt("prompt", text)], loaded, tokenizer, 1, raw)
        drafting = load_drafter(loaded, spec)
        torch.manual_seed(seed)
        tokens, statistics = _generate(
            loaded,
            tokenizer,
            batch.inputs,
            stream=not as_json,
            html=html,
            max_new_tokens=max_new_tokens,
            **drafting,
            **sampling,
        )
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


def _check_page(path: Path, method: str | None) -> None:
    """Refuses a page that could not be drawn or written, before anything is loaded."""
    if is_off(method):
        raise SpecConfigError(f"--html draws drafts, and the drafter '{method}' makes none. Leave one of them out.")
    if path.is_dir() or not path.parent.is_dir():
        raise SpecConfigError(f"The page '{path}' cannot be written. Give --html a file in a folder that exists.")


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, torch.Tensor],
    stream: bool,
    html: Path | None,
    **arguments: Any,
) -> tuple[list[int], dict[str, Any]]:
    """New token ids of one prompt, and the statistics of the call, which is drawn where `html` says."""
    from time import perf_counter

    from transformers import TextStreamer

    from ..call.entry import generate
    from ..metrics import record

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    with record(trace=html is not None) as recorded:
        began = perf_counter()
        sequences = generate(model, **inputs, **arguments, streamer=streamer)
        seconds = perf_counter() - began
    num_prompt_tokens = inputs["input_ids"].shape[1]
    tokens = sequences[0, num_prompt_tokens:].tolist()
    if html is not None and not recorded.calls:
        raise SpecConfigError("The page was not written: transformers' own loop has generated, which keeps no trace.")
    if html is not None:
        try:
            recorded.calls[0].to_html(html, tokenizer)
        except OSError as error:
            raise SpecConfigError(f"The page '{html}' cannot be written: {error}") from error
    statistics = recorded.calls[0].stats.to_dict() if recorded.calls else {"method": "off"}
    return tokens, {
        **statistics,
        "num_prompt_tokens": num_prompt_tokens,
        "num_tokens": len(tokens),
        "seconds": seconds,
        "tokens_per_second": len(tokens) / seconds,
    }


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
