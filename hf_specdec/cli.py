"""The command line `hf-specdec`: try the methods on the embedded model, generate text with any model, train drafts.

Results go to standard output, everything else (progress, statistics, errors) to standard error. Commands import torch
when they run, so that help and usage errors appear at once.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import __version__
from .errors import SpecConfigError, SpecDecError


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .benchmarking import Result, Round
    from .speculator import Speculator


EXIT_DIFFERENT = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

_EMBEDDED = "demo"
_OFF = ("off", "none")

app = typer.Typer(
    name="hf-specdec",
    help="Speculative decoding for Hugging Face transformers: the same output, faster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Dtype(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


DtypeOption = Annotated[Dtype, typer.Option(help="Data type of the target model.")]
DeviceOption = Annotated[
    str | None, typer.Option(help="Such as cpu or cuda:0. Left out: cuda if there is one, else cpu.")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")]


def main() -> None:
    """Entry point of `hf-specdec` and `python -m hf_specdec`."""
    app(prog_name="hf-specdec")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-specdec {__version__}")
        raise typer.Exit()


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# --------------------------------------------------------------------------------------------------------------- demo


def demo_methods() -> dict[str, dict[str, Any]]:
    """Settings of the methods that the package has a drafter for, by the name of their row in the demo's table."""
    from . import demo

    return {
        "ngram": {"method": "ngram"},
        "suffix": {"method": "suffix"},
        "draft_model": {"method": "draft_model", "model": demo.draft_path(), "same_tokenizer": True},
        "medusa": {"method": "medusa", "model": demo.medusa_path()},
        "mlp_speculator": {"method": "mlp_speculator", "model": demo.mlp_speculator_path()},
        "eagle": {"method": "eagle", "model": demo.eagle_path()},
        "eagle3": {"method": "eagle3", "model": demo.eagle3_path()},
        "eagle3_tree": {"method": "eagle3", "model": demo.eagle3_path(), "total_tokens": 20},
        "dflash": {"method": "dflash", "model": demo.dflash_path()},
    }


@app.command("demo")
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
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare the methods with plain generation on the embedded model.

    The prompts ask for edits of code and for new code. Every greedy output is first compared with that of plain
    generation, in float32; then all are timed in turn. Exits with 1 if an output differs.
    """
    with _reported_errors(debug):
        report = _run_demo(
            _chosen_methods(methods), max_new_tokens, rounds, max_seconds, batch_size, dtype, device, threads
        )
        if as_json:
            typer.echo(json.dumps(report, indent=2))
        else:
            _print_demo(report)
        different = {row["method"]: row["first_differences"] for row in report["rows"] if not row["identical"]}
        for method, prompts in different.items():
            for prompt, index in prompts.items():
                _print_error(f"{method} differs from plain generation on '{prompt}', from new token {index + 1} on.")
        if different:
            raise typer.Exit(EXIT_DIFFERENT)


def _chosen_methods(names: str | None) -> dict[str, dict[str, Any]]:
    """The demo's methods that the user named; all without a choice."""
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

    from . import benchmarking, demo

    _quieten_loading()
    device = _checked_device(device)
    timed_dtype = benchmarking.suitable_dtype(device) if dtype is Dtype.auto else getattr(torch, dtype.value)
    with benchmarking.num_threads(threads):
        model = demo.load_target(torch.float32).to(device)
        batches = benchmarking.make_batches(demo.load_tokenizer(), demo.prompts(), batch_size, max_new_tokens, device)
        available, missing = benchmarking.find_available(model, methods)
        steps = len(batches) * (len(available) + 1)
        with _progress() as begin:
            exact = benchmarking.run_round(
                model, available, batches, on_step=begin("Comparing the outputs in float32", steps)
            )
            if timed_dtype != torch.float32:
                model = demo.load_target(timed_dtype).to(device)
            measured = benchmarking.measure(
                model,
                available,
                batches,
                rounds,
                max_seconds=max_seconds,
                on_step=begin(f"Timing in {_name(timed_dtype)}", steps * rounds),
            )
        environment = benchmarking.describe_environment(device, timed_dtype)
    differences = {
        name: benchmarking.find_differences(exact[benchmarking.PLAIN], samples, batches)
        for name, samples in exact.items()
    }
    results = benchmarking.summarise(measured, batches)
    return {
        "rows": [_demo_row(result, differences[result.method]) for result in results],
        "unavailable": [{"method": name, "reason": reason} for name, reason in missing.items()],
        "identity_check": {"dtype": "float32", "plain_tokens_per_second": _plain_speed(exact)},
        "settings": {
            "prompts": {batch_name: batch.kind for batch in batches for batch_name in batch.names},
            "max_new_tokens": max_new_tokens,
            "batch_size": batch_size,
            "rounds": len(measured),
            "rounds_asked": rounds,
        },
        "environment": environment,
    }


def _demo_row(result: Result, differences: dict[str, int]) -> dict[str, Any]:
    row = asdict(result)
    return {"method": row.pop("method"), "identical": not differences, "first_differences": differences, **row}


def _plain_speed(samples: Round) -> float:
    plain = samples["plain"]
    return sum(sample.num_tokens for sample in plain) / sum(sample.seconds for sample in plain)


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
    machine = environment["gpu"] or f"{environment['cpu']}, {_counted(environment['threads'], 'thread')}"
    notes = [
        f"{len(settings['prompts'])} prompts ({', '.join(kinds)}), batch size {settings['batch_size']}, at most "
        f"{settings['max_new_tokens']} new tokens, greedy; {machine}; torch {environment['torch']}, "
        f"transformers {environment['transformers']}.",
        f"Speed: {dtype} for plain generation and all methods, timed in turn "
        f"({_counted(settings['rounds'], 'round')}); the fastest round of each prompt counts.",
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
    if row["acceptance_rate"] is None:
        return [row["method"], f"{row['tokens_per_second']:.0f}", "1.00", *["1.00"] * len(kinds), "1.00", "-", "-"]
    low, high = row["speedup_range"]
    return [
        row["method"],
        f"{row['tokens_per_second']:.0f}",
        f"{row['speedup']:.2f} ({low:.1f}-{high:.1f})",
        *[f"{row['kinds'][kind]['speedup']:.2f}" for kind in kinds],
        f"{row['mean_acceptance_length']:.2f}",
        f"{100 * row['acceptance_rate']:.0f} %",
        identical,
    ]


# ----------------------------------------------------------------------------------------------------------- generate


@app.command("generate")
def generate_command(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-' reads it from standard input.", show_default=False)
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Target model: a repo id or a folder; 'demo' is the embedded one.")
    ] = _EMBEDDED,
    method: Annotated[
        str | None,
        typer.Option(
            help="Speculation method, or 'off'. Left out: that of --config or --spec-model; without them the embedded "
            "draft model for the embedded target, and ngram for others."
        ),
    ] = None,
    spec_model: Annotated[str | None, typer.Option(help="Draft model: a repo id or a folder.")] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--num-speculative-tokens", "-k", help="Draft tokens per cycle.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Speculation settings as JSON, or the path of a JSON file or a saved folder.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to generate.")
    ] = 256,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sample at this temperature; 0 is greedy. Left out: greedy.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Sample from the most likely tokens of this total probability."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sample from so many most likely tokens; 0: all.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    dtype: Annotated[
        Dtype,
        typer.Option(help="Data type of the target. auto: the checkpoint's; float32 for the embedded model."),
    ] = Dtype.auto,
    device: DeviceOption = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Left out: torch's choice; 1 for the embedded model.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the tokenizer's chat template.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow code from the target's repository to run.")
    ] = False,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="Print statistics to standard error.")] = True,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Generate text, printed as it comes.

    The prompt is the argument, the content of --file, or standard input, taken as it is. Only the new text is printed.
    """
    with _reported_errors(debug):
        text = _read_prompt(prompt, file)
        embedded = model == _EMBEDDED
        sampling = _sampling_arguments(temperature, top_p, top_k)
        from . import benchmarking

        with benchmarking.num_threads(1 if threads is None and embedded else threads):
            target, tokenizer = _load_target(model, dtype, device, trust_remote_code)
            inputs = {key: value.to(target.device) for key, value in _encode(tokenizer, text, chat, model).items()}
            speculator = _load_speculator(target, embedded, method, spec_model, num_speculative_tokens, config)
            _seed(seed)
            tokens, statistics = _generate(
                target, tokenizer, inputs, speculator, stream=not as_json, max_new_tokens=max_new_tokens, **sampling
            )
        if as_json:
            answer = tokenizer.decode(tokens, skip_special_tokens=True)
            typer.echo(json.dumps({"text": answer, "token_ids": tokens, "stats": statistics}, indent=2))
        elif stats:
            _print_statistics(statistics)


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
    if not text:
        raise SpecConfigError("The prompt is empty. Give at least one character.")
    return text


def _sampling_arguments(temperature: float | None, top_p: float | None, top_k: int | None) -> dict[str, Any]:
    """Greedy unless a sampling option says otherwise."""
    filters = {key: value for key, value in (("top_p", top_p), ("top_k", top_k)) if value is not None}
    if temperature == 0.0 or (temperature is None and not filters):
        if filters:
            raise SpecConfigError(
                f"--temperature 0 is greedy and leaves nothing for {' and '.join(filters)} to choose from. Leave them "
                "out, or raise the temperature."
            )
        return {"do_sample": False}
    given = {} if temperature is None else {"temperature": temperature}
    return {"do_sample": True, **given, **filters}


def _load_target(
    name: str, dtype: Dtype, device: str | None, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch

    from . import demo

    device = _checked_device(device, allow_auto=name != _EMBEDDED)
    if name == _EMBEDDED:
        _quieten_loading()
        weights = torch.float32 if dtype is Dtype.auto else getattr(torch, dtype.value)
        return demo.load_target(weights).to(device), demo.load_tokenizer()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not sys.stderr.isatty():
        _quieten_loading()
    options = {"trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype.value, device_map=device, **options)
    except (OSError, ValueError) as error:
        raise SpecConfigError(f"The model '{name}' cannot be loaded: {error}") from error
    return model.eval(), tokenizer


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool, name: str) -> dict[str, torch.Tensor]:
    if not chat:
        encoded = tokenizer(text, return_tensors="pt")
    elif tokenizer.chat_template is None:
        raise SpecConfigError(
            f"--chat needs a chat template, and the tokenizer of '{name}' has none. Leave out --chat, or choose a "
            "model that was trained on chats."
        )
    else:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    return {key: encoded[key] for key in ("input_ids", "attention_mask")}


def _load_speculator(
    target: PreTrainedModel,
    embedded: bool,
    method: str | None,
    spec_model: str | None,
    num_speculative_tokens: int | None,
    config: str | None,
) -> Speculator | None:
    """The speculator that the options mean; `None` for plain generation."""
    if method in _OFF:
        given = {"--spec-model": spec_model, "--num-speculative-tokens": num_speculative_tokens, "--config": config}
        extra = [option for option, value in given.items() if value is not None]
        if extra:
            raise SpecConfigError(f"--method {method} generates without drafts. Leave out {' and '.join(extra)}.")
        return None
    from .speculator import load_speculator

    if method is None and spec_model is None and config is None:
        method = "draft_model" if embedded else "ngram"
    settings = {"method": method, "model": spec_model, "num_speculative_tokens": num_speculative_tokens}
    if embedded and spec_model is None and config is None:
        settings |= demo_methods().get(method, {})
    return load_speculator(target, config, **settings)


def _seed(seed: int | None) -> None:
    if seed is not None:
        from transformers import set_seed

        set_seed(seed)


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, torch.Tensor],
    speculator: Speculator | None,
    stream: bool,
    **arguments,
) -> tuple[list[int], dict[str, Any]]:
    """New token ids of one prompt, and the statistics of the call."""
    from time import perf_counter

    from transformers import TextStreamer

    from .integration import generate
    from .metrics import record

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    with record() as recorded:
        began = perf_counter()
        sequences = generate(model, **inputs, **arguments, streamer=streamer, assistant=speculator)
        seconds = perf_counter() - began
    num_prompt_tokens = inputs["input_ids"].shape[1]
    tokens = sequences[0, num_prompt_tokens:].tolist()
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
        f"{stats['method']}: {_counted(stats['num_tokens'], 'token')} in {stats['seconds']:.2f} s "
        f"({stats['tokens_per_second']:.1f} tokens/s)"
    ]
    if stats.get("num_draft_tokens"):
        parts.append(
            f"mean acceptance length {stats['mean_acceptance_length']:.2f}, acceptance rate "
            f"{100 * stats['acceptance_rate']:.0f} %, {stats['num_accepted_tokens']} of {stats['num_draft_tokens']} "
            f"draft tokens accepted, {stats['num_target_forwards']} target forwards"
        )
    parts += stats.get("notes", [])
    Console(stderr=True).print(Text("; ".join(parts), style="dim"), soft_wrap=True)


# -------------------------------------------------------------------------------------------------------------- train


_data_option = partial(typer.Option, rich_help_panel="Data")
_training_option = partial(typer.Option, rich_help_panel="Training")


def _method_option(*methods: str, flag: str | None = None, **settings) -> Any:
    names = (flag,) if flag else ()
    panel = f"Options of {' and '.join(methods)}"
    return typer.Option(*names, show_default=False, rich_help_panel=panel, **settings)


_MEDUSA, _MLP, _DRAFT, _EAGLE, _EAGLE3 = "medusa", "mlp_speculator", "draft_model", "eagle", "eagle3"
_DFLASH, _MTP = "dflash", "mtp"


@app.command("train")
def train_command(
    method: Annotated[
        str,
        typer.Argument(help="medusa, mlp_speculator, eagle, eagle3, dflash, mtp or draft_model.", show_default=False),
    ],
    target: Annotated[
        str, typer.Option("--target", "-t", help="Target model: a repo id or a folder; 'demo' is the embedded one.")
    ],
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            "-d",
            help="Text: a file or folder (.txt, .md, .py, .jsonl, .parquet) or the id of a data set. May be repeated.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the draft.")],
    column: Annotated[str | None, _data_option(help="Column of the records that holds text or messages.")] = None,
    max_tokens: Annotated[int | None, _data_option(min=1, help="Read no more tokens of the data.")] = None,
    self_generate: Annotated[
        int,
        _data_option(
            min=0,
            help="Prompts from the data that the target continues; training is then on what the target wrote.",
        ),
    ] = 0,
    max_new_tokens: Annotated[
        int | None, _data_option(min=1, help="Most tokens of a continuation. Left out: it fills its row.")
    ] = None,
    keep_text: Annotated[
        bool, _data_option("--keep-text", help="With --self-generate: train on the data too.")
    ] = False,
    temperature: Annotated[float, _data_option(min=0.0, help="Of the sampled half of --self-generate.")] = 0.8,
    seq_length: Annotated[int, _data_option(min=8, help="Tokens of a row.")] = 1024,
    batch_size: Annotated[int, _training_option(min=1, help="Rows of a step, those of all processes together.")] = 8,
    steps: Annotated[
        int | None,
        _training_option(min=1, help="Training steps. Left out: what --epochs take."),
    ] = None,
    epochs: Annotated[float, _training_option(help="Passes over the rows.")] = 1.0,
    max_minutes: Annotated[float | None, _training_option(help="Time limit; the schedule ends with it.")] = None,
    held_out: Annotated[float, _data_option(help="Share of the rows that acceptance is measured on.")] = 0.05,
    learning_rate: Annotated[
        float, _training_option("--learning-rate", "--lr", help="Peak of the cosine schedule.")
    ] = 1e-3,
    warmup_steps: Annotated[
        int | None,
        _training_option(min=0, help="Left out: a twentieth of the steps, at most 100."),
    ] = None,
    weight_decay: Annotated[
        float | None, _training_option(min=0.0, help="Left out: 0.1 for draft models, else 0.")
    ] = None,
    muon: Annotated[
        bool | None,
        _training_option(
            "--muon/--no-muon",
            help="Muon for hidden matrices. Left out: for draft models, eagle, eagle3, dflash and mtp.",
            show_default=False,
        ),
    ] = None,
    keep_states: Annotated[
        bool,
        _training_option(
            "--keep-states",
            help="Read the rows with the target once and keep its states in memory.",
        ),
    ] = False,
    kl_weight: Annotated[
        float | None,
        _training_option(
            min=0.0,
            max=1.0,
            help="Share of KL(target || draft) in the loss, the rest is cross-entropy. Left out: 0 for medusa, "
            "mlp_speculator and dflash, else 1.",
        ),
    ] = None,
    num_heads: Annotated[int | None, _method_option(_MEDUSA, help="Number of heads (4).", min=1)] = None,
    num_layers: Annotated[
        int | None,
        _method_option(
            _MEDUSA, _EAGLE, _EAGLE3, _DFLASH, help="Blocks of a head, or decoder layers (1; dflash: 5).", min=1
        ),
    ] = None,
    share_lm_head: Annotated[
        bool | None,
        _method_option(
            _MEDUSA,
            flag="--share-lm-head/--own-lm-heads",
            help="The heads use the target's lm_head (so left out), or each trains its own.",
        ),
    ] = None,
    n_predict: Annotated[int | None, _method_option(_MLP, help="Number of stages (3).", min=1)] = None,
    inner_dim: Annotated[int | None, _method_option(_MLP, help="Width (0: the target's).", min=0)] = None,
    tie_weights: Annotated[
        bool | None,
        _method_option(
            _MLP, flag="--tie-weights/--no-tie-weights", help="The stages share their weights (so left out)."
        ),
    ] = None,
    scale_input: Annotated[
        bool | None,
        _method_option(
            _MLP, flag="--scale-input/--no-scale-input", help="The target's state is normalised (so left out)."
        ),
    ] = None,
    head_decay: Annotated[
        float | None,
        _method_option(
            _MEDUSA,
            _MLP,
            _EAGLE,
            _EAGLE3,
            _DFLASH,
            _MTP,
            help="Weight of a draft's loss relative to the one before (0.8; mlp_speculator: 0.9; dflash: 0.87).",
        ),
    ] = None,
    max_positions: Annotated[
        int | None,
        _method_option(
            _MEDUSA,
            _MLP,
            help="Positions of a batch that are drawn for the loss: with many rows and --keep-states.",
            min=1,
        ),
    ] = None,
    ttt_steps: Annotated[
        int | None,
        _method_option(
            _EAGLE,
            _EAGLE3,
            _MTP,
            help="Steps in the draft's own states that it is trained on (6; mtp: 4; eagle: 1, with more it is HASS).",
            min=1,
        ),
    ] = None,
    intermediate_size: Annotated[
        int | None,
        _method_option(_EAGLE, _EAGLE3, _DFLASH, _MTP, help="Width of the MLPs (0: the target's).", min=0),
    ] = None,
    token_weight: Annotated[
        float | None,
        _method_option(_EAGLE, help="Weight of the tokens' loss beside that of the states (0.1).", min=0.0),
    ] = None,
    noise: Annotated[
        float | None,
        _method_option(_EAGLE, help="Width of the range of noise on the target's states (0.2).", min=0.0),
    ] = None,
    hidden_size: Annotated[
        int | None, _method_option(_EAGLE3, help="Hidden size of the head (0: the target's).", min=0)
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        _method_option(
            _EAGLE3, help="Tokens that the draft knows, the most frequent of the training rows (0: all).", min=0
        ),
    ] = None,
    own_head: Annotated[
        bool | None,
        _method_option(
            _EAGLE3,
            flag="--own-lm-head/--target-lm-head",
            help="The head trains an lm_head (so left out), or uses the target's.",
        ),
    ] = None,
    aux_layer_ids: Annotated[
        str | None,
        _method_option(
            _EAGLE3,
            help="Target layers whose inputs the head reads, separated by commas (2, N // 2, N - 3 of N layers).",
        ),
    ] = None,
    block_size: Annotated[
        int | None, _method_option(_DFLASH, help="Tokens of a block, the last committed one included (16).", min=2)
    ] = None,
    target_layer_ids: Annotated[
        str | None,
        _method_option(
            _DFLASH, help="Target layers whose outputs the draft reads, separated by commas (spread over the depth)."
        ),
    ] = None,
    mask_token_id: Annotated[
        int | None,
        _method_option(_DFLASH, help="Token of the masks (the tokenizer's, an unused one, or end of text).", min=0),
    ] = None,
    num_anchors: Annotated[
        int | None, _method_option(_DFLASH, help="Blocks of a row that are drawn for a step (128; 0: all).", min=0)
    ] = None,
    reveal_share: Annotated[
        float | None,
        _method_option(
            _DFLASH,
            help="Share of the blocks with a part of their tokens revealed, for several denoising steps (0).",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    num_denoising_steps: Annotated[
        int | None,
        _method_option(
            _DFLASH, help="Forwards for a block that the draft asks for (1; 3 with --reveal-share).", min=1
        ),
    ] = None,
    draft_model: Annotated[str | None, _method_option(_DRAFT, help="Checkpoint to train on.")] = None,
    from_scratch: Annotated[
        str | None,
        _method_option(
            _DRAFT,
            help="Train a new Llama model of these sizes: hidden_size=256,num_hidden_layers=4,... or JSON.",
        ),
    ] = None,
    seed: Annotated[int, _training_option(help="Seed of weights, data order and sampling.")] = 0,
    resume: Annotated[bool, _training_option("--resume", help="Take up the run in the output folder.")] = False,
    save_every: Annotated[int, _training_option(min=1, help="Steps between two states to resume from.")] = 500,
    dtype: Annotated[
        Dtype,
        typer.Option(help="Data type of the target. auto: the checkpoint's."),
    ] = Dtype.auto,
    bf16: Annotated[
        bool,
        _training_option(
            "--bf16/--no-bf16",
            help="Train in bfloat16 autocast and save bfloat16, or float32.",
        ),
    ] = True,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU although there is a GPU.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Left out: torch's choice.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow code from the target's repository to run.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a draft for a target model.

    Ends with the acceptance measured on held-out rows, and the line that uses the draft. For several GPUs or machines
    start it with `accelerate launch -m hf_specdec train ...` or torchrun.
    """
    options = locals()
    with _reported_errors(debug):
        report, is_main = _run_training(options)
        if is_main and as_json:
            typer.echo(json.dumps(report, indent=2))
        elif is_main:
            _print_training(report)


_RECIPE_OPTIONS = (
    "kl_weight",
    "num_heads",
    "num_layers",
    "share_lm_head",
    "n_predict",
    "inner_dim",
    "tie_weights",
    "scale_input",
    "head_decay",
    "max_positions",
    "ttt_steps",
    "intermediate_size",
    "token_weight",
    "noise",
    "hidden_size",
    "draft_vocab_size",
    "own_head",
    "aux_layer_ids",
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "num_anchors",
    "reveal_share",
    "num_denoising_steps",
    "draft_model",
    "from_scratch",
)


def _run_training(options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Trains as the command's options say; what it returns first is what `--json` prints."""
    given = {name: options[name] for name in _RECIPE_OPTIONS if options[name] is not None}
    if "from_scratch" in given:
        given["from_scratch"] = _sizes(given["from_scratch"])
    for name in ("aux_layer_ids", "target_layer_ids"):
        if name in given:
            given[name] = _layer_numbers(name, given[name])
    from dataclasses import fields

    from . import benchmarking
    from .training.run import RunOptions, TrainingRun, make_recipe

    # All that can be checked without the target is checked before it is loaded.
    recipe = make_recipe(options["method"], given)
    common = RunOptions(**{item.name: options[item.name] for item in fields(RunOptions)})
    run = TrainingRun(recipe, common, options["output"], cpu=options["cpu"])
    with benchmarking.num_threads(options["threads"]):
        name = options["target"]
        target, tokenizer = _load_target(
            name, options["dtype"], str(run.accelerator.device), options["trust_remote_code"]
        )
        result = run.run(target, tokenizer, name)
    return result.to_dict() | {"use": _usage(result.method, result.folder, name)}, run.accelerator.is_main_process


def _sizes(text: str) -> dict[str, Any]:
    """Sizes of a model from JSON, or from `name=number,...`."""
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text)
        pairs = (part.partition("=") for part in text.split(","))
        return {name.strip(): json.loads(value) for name, _, value in pairs}
    except ValueError as error:
        raise SpecConfigError(
            f"--from-scratch must be sizes such as hidden_size=256,num_hidden_layers=4 or JSON, got '{text}'."
        ) from error


def _layer_numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise SpecConfigError(
            f"--{name.replace('_', '-')} must be numbers separated by commas such as 2,8,13, got '{text}'."
        ) from error


def _usage(method: str, folder: str, target: str) -> str:
    return f"hf-specdec generate --model {target} --method {method} --spec-model {folder}"


def _print_training(report: dict[str, Any]) -> None:
    shares = ", ".join(f"{100 * share:.1f} %" for share in report["accuracies"])
    console = Console()
    for line in (
        f"{report['method']}: {report['parameters'] / 1e6:.2f} M parameters, {_counted(report['steps'], 'step')}, "
        f"loss {report['loss']:.3f}.",
        f"Held-out text, teacher-forced: {report['tokens_per_cycle']:.2f} tokens per cycle (untrained "
        f"{report['untrained_tokens_per_cycle']:.2f}); drafts right at depth 1, 2, ...: {shares}.",
        f"Saved in {report['folder']}. To use it:",
        f"  {report['use']}",
        f'  model.generate(**inputs, spec_method="{report["method"]}", spec_model="{report["folder"]}")',
    ):
        console.print(Text(line), soft_wrap=True)


# ------------------------------------------------------------------------------------------------------------- shared


@contextmanager
def _reported_errors(debug: bool) -> Iterator[None]:
    """Errors of the package as one line; an interrupt and a closed pipe end the command quietly."""
    try:
        yield
    except SpecDecError as error:
        if debug:
            raise
        _print_error(str(error))
        raise typer.Exit(EXIT_ERROR) from None
    except KeyboardInterrupt:
        typer.echo(err=True)
        _print_error("Interrupted.")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # The reader has gone. Without this, Python would complain when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_BROKEN_PIPE) from None


def _print_error(message: str) -> None:
    Console(stderr=True).print(Text(" ".join(message.split()), style="red"), soft_wrap=True)


@contextmanager
def _progress() -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """Progress bars, if standard error is a terminal: `begin(title, steps)` gives the function to call a step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True)

    def begin(title: str, steps: int) -> Callable[[], None]:
        task = progress.add_task(title, total=steps)
        return lambda: progress.advance(task)

    with progress if console.is_terminal else nullcontext():
        yield begin


def _checked_device(name: str | None, allow_auto: bool = False) -> str:
    import torch

    if name == "auto" and allow_auto:
        return name
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise SpecConfigError(f"--device '{name}' is no device: {error}") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise SpecConfigError(f"--device '{name}': torch {torch.__version__} finds no CUDA device. Use --device cpu.")
    return name


def _quieten_loading() -> None:
    """No progress bars for weights that load in no time."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
