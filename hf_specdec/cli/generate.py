"""`hf-specdec generate`: prints text of any model as it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..arguments import is_off
from ..errors import SpecConfigError, counted
from .common import JsonOption, reporting, say, show
from .drafter import ConfigOption, LengthOption, MethodOption, SpecModelOption, load_drafter
from .target import (
    EMBEDDED,
    DeviceOption,
    Dtype,
    DtypeOption,
    ModelOption,
    Place,
    RawOption,
    ThreadsOption,
    TrustOption,
    tokenised,
)


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..metrics import CallRecord
    from ..speculator import Speculator


MaxNewTokensOption = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to generate.")]
_PANEL = "Sampling"
SampleOption = Annotated[
    bool,
    typer.Option(
        "--sample", rich_help_panel=_PANEL, help="Sample instead of greedy decoding, as the target's config says."
    ),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(min=0.0, rich_help_panel=_PANEL, help="Sample at this temperature; 0 is greedy."),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1.0, rich_help_panel=_PANEL, help="Sample from the most likely tokens of this total probability."
    ),
]
TopKOption = Annotated[
    int | None,
    typer.Option(min=0, rich_help_panel=_PANEL, help="Sample from so many most likely tokens; 0: all."),
]


def sampling_arguments(
    temperature: float | None, top_p: float | None, top_k: int | None, sample: bool = False
) -> dict[str, Any]:
    """Arguments of `generate()`: greedy unless `sample` or a sampling option says otherwise."""
    filters = {key: value for key, value in (("top_p", top_p), ("top_k", top_k)) if value is not None}
    if sample and temperature == 0.0:
        raise SpecConfigError("--sample and --temperature 0, which is greedy, exclude each other. Leave one out.")
    if temperature == 0.0 and filters:
        raise SpecConfigError(
            f"--temperature 0 is greedy and leaves nothing for {' and '.join(filters)} to choose from. Leave them "
            "out, or raise the temperature."
        )
    if not temperature and not filters and not sample:
        return {"do_sample": False}
    return {"do_sample": True, **({} if temperature is None else {"temperature": temperature}), **filters}


@reporting
def generate_command(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-' reads it from standard input.", show_default=False)
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    model: ModelOption = EMBEDDED,
    method: MethodOption = None,
    spec_model: SpecModelOption = None,
    num_speculative_tokens: LengthOption = None,
    config: ConfigOption = None,
    max_new_tokens: MaxNewTokensOption = 256,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: Annotated[int | None, typer.Option(rich_help_panel=_PANEL, help="Seed of the sampling.")] = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    raw: RawOption = False,
    trust_remote_code: TrustOption = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Also write a page that shows the call: who wrote each token, every draft, every second."),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="Print statistics to standard error.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Generate text, printed as it comes.

    The prompt is the argument, the content of --file, or standard input: the user's message where the target has a
    chat template, else taken as it is. Tokens are chosen as the target's generation config says. Only the new text is
    printed.
    """
    text = _read_prompt(prompt, file)
    if html is not None:
        _check_page(html, method)
    place = Place(model, dtype, device, threads, trust_remote_code)
    is_configured = temperature is top_p is top_k is None
    sampling = {} if is_configured else sampling_arguments(temperature, top_p, top_k)
    import torch

    from ..demo import Prompt
    from ..machine import num_threads

    with num_threads(place.num_threads):
        target, tokenizer = place.load()
        (batch,) = tokenised([Prompt("prompt", text)], target, tokenizer, 1, raw)
        speculator = load_drafter(target, place.is_embedded, method, spec_model, num_speculative_tokens, config)
        if seed is not None:
            torch.manual_seed(seed)
        tokens, statistics = _generate(
            target,
            tokenizer,
            batch.inputs,
            speculator,
            stream=not as_json,
            html=html,
            max_new_tokens=max_new_tokens,
            **sampling,
        )
    answer = tokenizer.decode(tokens, skip_special_tokens=True)
    report = {"text": answer, "token_ids": tokens, "stats": statistics}
    # The text has been printed as it came.
    show(report, as_json, lambda: _print_statistics(statistics) if stats else None)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise SpecConfigError("The prompt is given twice, as an argument and with --file. Keep one.")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SpecConfigError(f"The prompt in '{file}' cannot be read: {error}") from error
    elif prompt is not None and prompt != "-":
        text = prompt
    elif prompt is None and sys.stdin.isatty():
        raise SpecConfigError("There is no prompt. Give it as an argument, with --file, or on standard input.")
    else:
        text = sys.stdin.read()
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise SpecConfigError("The prompt is no text of UTF-8. Convert it, or give it with --file.")
    if not text:
        raise SpecConfigError("The prompt is empty. Give at least one character.")
    return text


def _check_page(path: Path, method: str | None) -> None:
    """Refuses a page that could not be drawn or written, before anything is loaded."""
    if is_off(method):
        raise SpecConfigError(f"--html draws drafts, and --spec-method {method} makes none. Leave one of them out.")
    if path.is_dir() or not path.parent.is_dir():
        raise SpecConfigError(f"The page '{path}' cannot be written. Give --html a file in a folder that exists.")


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, torch.Tensor],
    speculator: Speculator | None,
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
        sequences = generate(model, **inputs, **arguments, streamer=streamer, assistant=speculator)
        seconds = perf_counter() - began
    num_prompt_tokens = inputs["input_ids"].shape[1]
    tokens = sequences[0, num_prompt_tokens:].tolist()
    if html is not None:
        _draw(recorded.calls, html, tokenizer)
    statistics = recorded.calls[0].stats.to_dict() if recorded.calls else {"method": "off"}
    return tokens, {
        **statistics,
        "num_prompt_tokens": num_prompt_tokens,
        "num_tokens": len(tokens),
        "seconds": seconds,
        "tokens_per_second": len(tokens) / seconds,
    }


def _draw(calls: list[CallRecord], path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    if not calls:
        raise SpecConfigError("The page was not written: transformers' own loop has generated, which keeps no trace.")
    try:
        calls[0].to_html(path, tokenizer)
    except OSError as error:
        raise SpecConfigError(f"The page '{path}' cannot be written: {error}") from error


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
