"""The drafter of a command: the options that name it, and the speculator that they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..arguments import is_off
from ..errors import SpecConfigError
from .common import as_length
from .target import ANY_SPEC, EMBEDDED_SPEC


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..speculator import Speculator


MethodOption = Annotated[
    str | None,
    typer.Option(
        "--spec-method",
        "--method",
        help="Speculation method, 'auto' for one that is found, 'none' for the loop without drafts, or 'off' for that "
        "of transformers. Left out: that of --config or --spec-model; without them the embedded draft model for the "
        "embedded target, and ngram for others.",
    ),
]
SpecModelOption = Annotated[str | None, typer.Option(help="Draft model: a repo id or a folder.")]
LengthOption = Annotated[
    str | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        help="Draft tokens per cycle; fixed: the method's own. Left out: what pays.",
    ),
]
ConfigOption = Annotated[
    str | None, typer.Option(help="Speculation settings as JSON, or the path of a JSON file or a saved folder.")
]


def load_drafter(
    target: PreTrainedModel,
    embedded: bool,
    method: str | None,
    spec_model: str | None,
    length: str | None,
    config: str | None,
) -> Speculator | None:
    """The speculator that the options mean; `None` for plain generation."""
    if is_off(method):
        given = {"--spec-model": spec_model, "--num-speculative-tokens": length, "--config": config}
        extra = [option for option, value in given.items() if value is not None]
        if extra:
            raise SpecConfigError(f"--spec-method {method} generates without drafts. Leave out {' and '.join(extra)}.")
        return None
    from .. import demo
    from ..loader import load_speculator
    from ..method import parts_of

    if method is None and spec_model is None and config is None:
        method = EMBEDDED_SPEC if embedded else ANY_SPEC
    settings = {"method": method, "model": spec_model, "num_speculative_tokens": as_length(length)}
    if embedded and spec_model is None and config is None:
        *_, drafting = parts_of(method)
        settings |= demo.settings().get(drafting, {})
        if drafting != method:
            settings["method"] = method
    return load_speculator(target, config, **settings)
