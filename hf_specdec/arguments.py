"""The speculative arguments of `generate()`, given to a call or set as objects on a generation config.

Nothing heavy is imported here: every call of `generate()` comes by, plain ones too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


# Those beyond transformers' own, with their types; [`~call.entry.generate`] says what each means.
ARGUMENTS = {
    "spec_method": "str | None",
    "spec_model": "str | os.PathLike[str] | PreTrainedModel | None",
    "num_speculative_tokens": "int | str | None",
    "speculative": "SpeculativeConfig | dict[str, Any] | str | None",
    "assistant": "Speculator | PreTrainedModel | CandidateGenerator | None",
}

# In place of a method: transformers' own generation.
OFF = "off"

# Functions in the place of GenerationMixin's, by name; each has the original as its `__wrapped__`.
patched: dict[str, Any] = {}

# Values that a file or a client can write.
_WRITTEN = (type(None), str, int, float, list, tuple, dict)


def is_off(value: Any) -> bool:
    """`True` where `spec_method` or `speculative` asks for transformers' own generation."""
    return value is False or (isinstance(value, str) and str.__str__(value) == OFF)


def take_asked(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Takes out of a call's arguments what it asks of speculation: those of ours that are not `None`."""
    values = {name: kwargs.pop(name, None) for name in ARGUMENTS}
    return {name: value for name, value in values.items() if value is not None}


def asks_for_off(asked: Mapping[str, Any]) -> bool:
    return is_off(asked.get("spec_method")) or is_off(asked.get("speculative"))


def names_drafter(asked: Mapping[str, Any]) -> bool:
    """`True` where one argument says who drafts; a length alone leaves that to an object on a generation config."""
    return not asked.keys() <= {"num_speculative_tokens"}


def with_objects(
    asked: dict[str, Any], model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """What a call asks for; where it names no drafter, objects on its generation config or the model's do."""
    if names_drafter(asked):
        return asked
    call_config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    return {**(objects_on(call_config) or objects_on(getattr(model, "generation_config", None))), **asked}


def objects_on(config: Any) -> dict[str, Any]:
    """The speculative arguments that are objects on a generation config: only the running program can set these."""
    values = {name: getattr(config, name, None) for name in ARGUMENTS}
    return {name: value for name, value in values.items() if not isinstance(value, _WRITTEN)}


def original_generate(model_class: type) -> Callable[..., Any]:
    """The `generate` of a model class without the speculative arguments."""
    generate = model_class.generate
    # Asked by identity: functions around ours have copies of its attributes.
    return generate.__wrapped__ if generate is patched.get("generate") else generate
