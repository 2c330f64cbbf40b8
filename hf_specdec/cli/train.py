"""`hf-specdec train METHOD`: a draft for a target model, one sub-command for each recipe.

Options of the recipe, of the text and of the training come from their dataclasses, and transformers' parser reads
them: its import, and that of `TrainingArguments`, would make the help wait.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import MISSING, Field, asdict, fields, replace
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args, get_origin

import typer

from ..errors import SpecConfigError, counted, did_you_mean
from ..method import Training, trainings
from ..settings.checks import hints_of
from ..training.options import TextOptions
from . import options
from .output import say, show
from .target import Target


if TYPE_CHECKING:
    from ..training.arguments import DraftTrainingArguments


def options_of(options: type) -> Iterator[tuple[Field[Any], Any]]:
    """Yields the options of a dataclass and their types, without `None`; what has to be given is no option."""
    hints = hints_of(options)
    for item in fields(options):
        if "help" in item.metadata and item.default is not MISSING:
            kinds = get_args(hints[item.name])
            yield item, kinds[0] if NoneType in kinds else hints[item.name]


def flags_of(item: Field[Any], kind: Any) -> tuple[str, ...]:
    """Returns the flags of an option, those of switches that are on with both: "--muon/--no-muon"."""
    name = item.name.replace("_", "-")
    can_be_off = kind is bool and item.default is not False
    return item.metadata.get("flags") or (f"--{name}/--no-{name}" if can_be_off else f"--{name}",)


def train_command(
    *,
    context: typer.Context,
    model: options.Model,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA...",
            help="Text: files or folders (.txt, .md, .py, .jsonl, .json, .parquet, .csv) or ids of data sets.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the draft.", show_default=False)],
    place: options.Place,
    as_json: options.Json = False,
) -> None:
    """Trains a draft; the help of each sub-command is [`_help`]."""
    from ..training.run import TrainingRun

    method = context.info_name
    if model.startswith("-") or data.startswith("-"):
        raise SpecConfigError("MODEL and DATA come first, and then the options of the training.")
    if place.device not in (None, "cpu", "cuda"):
        raise SpecConfigError(
            f"--device '{place.device}': training takes cpu, or the GPU of its process. Leave it out."
        )
    more = [*takewhile(lambda argument: not argument.startswith("-"), context.args)]
    use_cpu = [] if place.device is None else ["--use_cpu", str(place.device == "cpu")]
    arguments, given = _parsed(method, [*context.args[len(more) :], "--output_dir", str(output), *use_cpu])
    # All that can be checked without the target is checked before it is loaded.
    names = [item.name for item, _ in options_of(TextOptions) if item.name in given]
    text = TextOptions((data, *more), **{name: given.pop(name) for name in names})
    run = TrainingRun(trainings()[method].recipe_class(**given), text, arguments)
    # Trainer prints its logs to standard output.
    target = Target(model, replace(place, device=str(arguments.device)))
    with redirect_stdout(sys.stderr), target.loaded() as (loaded, tokenizer):
        result = run.run(loaded, tokenizer, model)
    if run.processes.is_main_process:
        report = asdict(result) | {"use": f"hf-specdec generate {model} --drafter {result.method}:{result.folder}"}
        show(report, as_json, lambda: _print_report(report))


def _help(training: Training) -> str:
    """The help of a sub-command; the parser of the training shows none of its own."""
    return "\n\n".join(
        [
            f"{training.noun[0].upper()}{training.noun[1:]}, trained for a target model.",
            "Ends with the acceptance measured on held-out rows, and the line that uses the draft. For several GPUs "
            "or machines start it with `accelerate launch -m hf_specdec train ...` or torchrun.",
            f"\b\nOptions of the recipe:\n{_listed(training.options)}",
            f"\b\nOptions of the text:\n{_listed(TextOptions)}",
            "Options of the training are those of transformers.TrainingArguments, after MODEL and DATA: --lr, --steps "
            "or --epochs, --batch-size, --report-to, --eval-strategy, --save-steps, --resume, --muon, ...",
        ]
    )


def _listed(options: type) -> str:
    lines = []
    for item, kind in options_of(options):
        is_shown = item.default is not None and kind is not bool
        default = f" ({item.default:g})" if is_shown and kind in (int, float) else ""
        lines.append(f"  {', '.join(flags_of(item, kind))}: {item.metadata['help']}{default}")
    return "\n".join(lines)


def _parsed(method: str, options: Sequence[str]) -> tuple[DraftTrainingArguments, dict[str, Any]]:
    """Reads options: transformers' `TrainingArguments`, and by name those of recipe and text that are given."""
    from transformers import HfArgumentParser

    from ..training.arguments import DraftTrainingArguments

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise SpecConfigError(f"{message[:1].upper()}{message[1:]}.")

    parser = Parser(DraftTrainingArguments, allow_abbrev=False, add_help=False)
    kinds: dict[str, Any] = {}
    for item, kind in (*options_of(trainings()[method].options), *options_of(TextOptions)):
        kinds[item.name] = kind
        for flag in flags_of(item, kind):
            on, _, off = flag.partition("/")
            how = {"action": "store_true"} if kind is bool else {"type": kind if kind in (int, float) else str}
            parser.add_argument(on, dest=item.name, default=argparse.SUPPRESS, **how)
            if off:
                parser.add_argument(off, dest=item.name, default=argparse.SUPPRESS, action="store_false")
    arguments, *given, unknown = parser.parse_args_into_dataclasses(
        list(options), return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        raise SpecConfigError(f"There is no option '{unknown[0]}'.{did_you_mean(unknown[0], known)}")
    found = vars(given[0]) if given else {}
    return arguments, {name: _value(name, value, kinds[name]) for name, value in found.items()}


def _value(name: str, value: Any, kind: Any) -> Any:
    """Reads numbers separated by commas, and sizes from JSON or `name=number,...`; other values stay as they are."""
    if get_origin(kind) not in (tuple, Mapping):
        return value
    form = "numbers separated by commas such as 2,8,13"
    try:
        if get_origin(kind) is tuple:
            return tuple(int(part) for part in value.split(","))
        form = "sizes such as hidden_size=256,num_hidden_layers=4 or JSON"
        if value.lstrip().startswith("{"):
            return json.loads(value)
        pairs = (part.partition("=") for part in value.split(","))
        return {size.strip(): json.loads(number) for size, _, number in pairs}
    except ValueError as error:
        raise SpecConfigError(f"--{name.replace('_', '-')} must be {form}, got '{value}'.") from error


def _print_report(report: dict[str, Any]) -> None:
    shares = ", ".join(f"{100 * share:.1f} %" for share in report["accuracies"])
    say(
        f"{report['method']}: {report['parameters'] / 1e6:.2f} M parameters, {counted(report['steps'], 'step')}, "
        f"loss {report['losses'][-1]:.3f}."
    )
    say(
        f"Held-out text, teacher-forced: {report['tokens_per_cycle']:.2f} tokens per cycle (untrained "
        f"{report['untrained_tokens_per_cycle']:.2f}); drafts right at depth 1, 2, ...: {shares}."
    )
    say(f"Saved in {report['folder']}. To use it:")
    say(f"  {report['use']}")
    say(f'  model.generate(**inputs, spec_method="{report["method"]}", spec_model="{report["folder"]}")')


app: typer.Typer = typer.Typer(help="Train a draft for a target model.", no_args_is_help=True)
# What a sub-command does not know itself, the parser of the training reads.
_PASSING_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
_command = options.grouped(train_command)
for _name, _training in trainings().items():
    app.command(_name, help=_help(_training), context_settings=_PASSING_ON)(_command)
