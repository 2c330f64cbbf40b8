"""`hf-specdec train`: a draft for a target model.

The flags come from the dataclasses of options: those of the run, and those of the methods, grouped by the methods that
take them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from ..errors import counted
from ..method import trainings
from ..training.options import TextOptions, TrainingOptions, flags_of, options_of, parsed
from .common import JsonOption, reporting, say, show, with_parameters
from .target import Dtype, DtypeOption, Place, TrustOption


def _with_training_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command a parameter for each option."""
    known = _options_of_methods()
    method, *others, _ = inspect.signature(command, eval_str=True).parameters.values()
    names = typer.Argument(help=f"{', '.join(known)}.", show_default=False)
    method = method.replace(annotation=Annotated[str, names])
    return reporting(with_parameters(command, [method, *others, *_run_parameters(), *_recipe_parameters(known)]))


def _run_parameters() -> Iterator[inspect.Parameter]:
    """Yields the options of every run. Those that have to be given stand in the first panel."""
    for panel, options in (("Data", TextOptions), ("Training", TrainingOptions)):
        for item, kind in options_of(options):
            if item.default is MISSING:
                yield _parameter(item, kind, inspect.Parameter.empty, item.metadata["help"], None)
            else:
                yield _parameter(item, kind, item.default, item.metadata["help"], panel)


def _options_of_methods() -> dict[str, type]:
    return {name: training.options for name, training in trainings().items()}


def _recipe_parameters(known: Mapping[str, type]) -> Iterator[inspect.Parameter]:
    """Yields the options of the recipes, each once; `None` stands for those that were not given."""
    owners: dict[str, dict[str, tuple[Field, Any]]] = {}
    for method, options in known.items():
        for item, kind in options_of(options):
            owners.setdefault(item.name, {})[method] = item, kind
    for of in owners.values():
        item, kind = next(iter(of.values()))
        methods = "every method" if len(of) == len(known) else " and ".join(", ".join(of).rsplit(", ", 1))
        help = _joined_help({method: item for method, (item, _) in of.items()})
        yield _parameter(item, kind, None, help, f"Options of {methods}")


def _parameter(item: Field, kind: Any, default: Any, help: str, panel: str | None) -> inspect.Parameter:
    bounds = item.metadata["bounds"]
    limits = {"min": bounds.least, "max": bounds.most} if bounds.inclusive and bounds.least is not None else {}
    settings = {"help": help, "rich_help_panel": panel, "show_default": default is not None} | limits
    info = typer.Option(*flags_of(item, kind), **settings)
    kind = list[str] if get_origin(kind) is Sequence else kind if kind in (bool, int, float) else str
    annotation = Annotated[kind if default is not None else kind | None, info]
    return inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _joined_help(items: Mapping[str, Field]) -> str:
    """Joins the helps and defaults of an option in several methods: "Decoder layers. (1; dflash: 5)"."""
    helps = _methods_by_text({method: item.metadata["help"] for method, item in items.items()})
    defaults = _methods_by_text({method: _shown_default(item) for method, item in items.items()})
    if len(helps) == 1:
        help = next(iter(helps))
    else:
        help = " ".join(f"{methods}: {text}" for text, methods in helps.items())
    usual, *others = defaults
    if not usual:
        return help
    return f"{help} ({'; '.join((usual, *(f'{defaults[text]}: {text}' for text in others)))})"


def _methods_by_text(texts: Mapping[str, str]) -> dict[str, str]:
    """Groups methods by their texts, the most frequent text first: "0.8" to "medusa, eagle"."""
    groups: dict[str, list[str]] = {}
    for method, text in texts.items():
        groups.setdefault(text, []).append(method)
    return {text: ", ".join(methods) for text, methods in sorted(groups.items(), key=lambda group: -len(group[1]))}


def _shown_default(item: Field) -> str:
    """Returns a default as the help shows it; that of a switch is the name of its flag."""
    if item.default is None:
        return ""
    if isinstance(item.default, bool):
        return flags_of(item, bool)[0].split("/")[not item.default]
    return f"{item.default:g}"


@_with_training_options
def train_command(
    *,
    method: str,
    target: Annotated[
        str, typer.Option("--target", "-t", help="Target model: a repo id or a folder; 'demo' is the embedded one.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the draft.")],
    dtype: DtypeOption = Dtype.auto,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU although there is a GPU.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Left out: torch's choice.")] = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Train a draft for a target model.

    Ends with the acceptance measured on held-out rows, and the line that uses the draft. For several GPUs or machines
    start it with `accelerate launch -m hf_specdec train ...` or torchrun.
    """
    from ..machine import num_threads
    from ..training.run import RunOptions, TrainingRun, make_recipe

    kinds = {item.name: kind for options in _options_of_methods().values() for item, kind in options_of(options)}
    given = {name: options.pop(name) for name in kinds if name in options}
    given = {name: parsed(name, value, kinds[name]) for name, value in given.items() if value is not None}
    # All that can be checked without the target is checked before it is loaded.
    run = TrainingRun(make_recipe(method, given), RunOptions(**options), output, cpu=cpu)
    with num_threads(threads):
        place = Place(target, dtype, str(run.accelerator.device), threads, trust_remote_code)
        model, tokenizer = place.load()
        result = run.run(model, tokenizer, target)
    if run.accelerator.is_main_process:
        use = f"hf-specdec generate --model {target} --method {result.method} --spec-model {result.folder}"
        report = result.to_dict() | {"use": use}
        show(report, as_json, lambda: _print_report(report))


def _print_report(report: dict[str, Any]) -> None:
    shares = ", ".join(f"{100 * share:.1f} %" for share in report["accuracies"])
    say(
        f"{report['method']}: {report['parameters'] / 1e6:.2f} M parameters, {counted(report['steps'], 'step')}, "
        f"loss {report['loss']:.3f}."
    )
    say(
        f"Held-out text, teacher-forced: {report['tokens_per_cycle']:.2f} tokens per cycle (untrained "
        f"{report['untrained_tokens_per_cycle']:.2f}); drafts right at depth 1, 2, ...: {shares}."
    )
    say(f"Saved in {report['folder']}. To use it:")
    say(f"  {report['use']}")
    say(f'  model.generate(**inputs, spec_method="{report["method"]}", spec_model="{report["folder"]}")')
