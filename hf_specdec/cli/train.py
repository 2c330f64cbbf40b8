"""`hf-specdec train`: a draft for a target model."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..errors import SpecConfigError
from .common import DebugOption, Dtype, JsonOption, counted, load_target, reported_errors


_data_option = partial(typer.Option, rich_help_panel="Data")
_training_option = partial(typer.Option, rich_help_panel="Training")


def _method_option(*methods: str, flag: str | None = None, **settings) -> Any:
    names = (flag,) if flag else ()
    panel = f"Options of {' and '.join(methods)}"
    return typer.Option(*names, show_default=False, rich_help_panel=panel, **settings)


_MEDUSA, _MLP, _DRAFT, _EAGLE, _EAGLE3 = "medusa", "mlp_speculator", "draft_model", "eagle", "eagle3"
_DFLASH, _MTP = "dflash", "mtp"


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
    with reported_errors(debug):
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

    from ..bench.machine import num_threads
    from ..training.run import RunOptions, TrainingRun, make_recipe

    # All that can be checked without the target is checked before it is loaded.
    recipe = make_recipe(options["method"], given)
    common = RunOptions(**{item.name: options[item.name] for item in fields(RunOptions)})
    run = TrainingRun(recipe, common, options["output"], cpu=options["cpu"])
    with num_threads(options["threads"]):
        name = options["target"]
        target, tokenizer = load_target(
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
        f"{report['method']}: {report['parameters'] / 1e6:.2f} M parameters, {counted(report['steps'], 'step')}, "
        f"loss {report['loss']:.3f}.",
        f"Held-out text, teacher-forced: {report['tokens_per_cycle']:.2f} tokens per cycle (untrained "
        f"{report['untrained_tokens_per_cycle']:.2f}); drafts right at depth 1, 2, ...: {shares}.",
        f"Saved in {report['folder']}. To use it:",
        f"  {report['use']}",
        f'  model.generate(**inputs, spec_method="{report["method"]}", spec_model="{report["folder"]}")',
    ):
        console.print(Text(line), soft_wrap=True)
