"""The speculative arguments of `generate()`, given to a call or set as objects on a generation config.

Nothing heavy is imported here: every call of `generate()` comes by, plain ones too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.candidate_generator import CandidateGenerator

    from .settings import SpeculativeConfig
    from .speculator import Speculator

# In place of a method: transformers' own generation.
OFF = "off"

# Values that a file or a client can write.
_WRITTEN = (type(None), str, int, float, list, tuple, dict)


def is_off(value: Any) -> bool:
    """`True` where `spec_method` or `speculative` asks for transformers' own generation."""
    return value is False or (isinstance(value, str) and str.__str__(value) == OFF)


@dataclass(frozen=True, eq=False)
class SpeculativeArguments:
    """The arguments of `generate()` beyond transformers' own; [`~call.entry.generate`] says what each means."""

    spec_method: str | None = None
    spec_model: str | os.PathLike[str] | PreTrainedModel | None = None
    num_speculative_tokens: int | str | None = None
    speculative: SpeculativeConfig | dict[str, Any] | str | None = None
    assistant: Speculator | PreTrainedModel | CandidateGenerator | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Arguments that are not `None`, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def choose_drafter(self) -> bool:
        """`True` where one of them says who drafts; a length alone leaves that to an object on the config."""
        return not self.given.keys() <= {"num_speculative_tokens"}

    @property
    def is_off(self) -> bool:
        return is_off(self.spec_method) or is_off(self.speculative)


ARGUMENTS = {item.name: item.type for item in fields(SpeculativeArguments)}


def objects_on(config: Any) -> dict[str, Any]:
    """The speculative arguments that are objects on a generation config.

    Only the program that runs can have set these. What is written there may come from a file or a client.
    """
    values = {name: getattr(config, name, None) for name in ARGUMENTS}
    return {name: value for name, value in values.items() if not isinstance(value, _WRITTEN)}


def asked_for(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked: SpeculativeArguments
) -> SpeculativeArguments:
    """What a call asks for; where it names no drafter, objects on its generation config or the model's do."""
    if asked.choose_drafter:
        return asked
    call_config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    objects = objects_on(call_config) or objects_on(getattr(model, "generation_config", None))
    return SpeculativeArguments(**{**objects, **asked.given}) if objects else asked
