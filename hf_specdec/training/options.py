"""Options of training, each written once: a dataclass field with its help, limits and flags.

The limits are checked when the dataclass is made. The command line is built from the fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, field, fields
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from ..errors import SpecConfigError


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    flags: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    inclusive: bool = True,
) -> Any:
    """
    Declares a dataclass field that is an option of the command line too.

    Args:
        default (`Any`, *optional*): Its default; without one it has to be given. The help says what `None` stands for.
        help (`str`): One or two sentences.
        flags (`tuple[str, ...]`): Its flags, if they are not those that the name gives.
        least, most (`float`, *optional*): Limits of the value.
        inclusive (`bool`): The limits themselves are allowed.
    """
    limits = {"least": least, "most": most, "inclusive": inclusive}
    return field(default=default, metadata={"help": help, "flags": flags, "limits": limits})


class Options:
    """Base of dataclasses whose options are checked against their limits.

    Raises:
        SpecConfigError: A value is out of range.
    """

    def __post_init__(self):
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and "limits" in item.metadata:
                _check_limits(item.name, value, **item.metadata["limits"])


def _check_limits(name: str, value: Any, least: float | None, most: float | None, inclusive: bool) -> None:
    if least is None:
        return
    top = float("inf") if most is None else most
    if (least <= value <= top) if inclusive else (least < value < top):
        return
    if most is None:
        wanted = f"at least {least}" if inclusive else f"above {least}"
    else:
        wanted = f"from {least} to {most}" if inclusive else f"between {least} and {most}"
    raise SpecConfigError(f"`{name}` must be {wanted}, got {value}.")


def options_of(options: type) -> Iterator[tuple[Field, Any]]:
    """Yields the options of a dataclass and their types, without `None`."""
    hints = get_type_hints(options)
    for item in fields(options):
        if "help" in item.metadata:
            kinds = get_args(hints[item.name])
            yield item, kinds[0] if NoneType in kinds else hints[item.name]


def flags_of(item: Field, kind: Any) -> tuple[str, ...]:
    """Returns the flags of an option, switches with both of theirs: "--muon/--no-muon"."""
    name = item.name.replace("_", "-")
    can_be_off = kind is bool and item.default is not False
    return item.metadata["flags"] or (f"--{name}/--no-{name}" if can_be_off else f"--{name}",)


def parsed(name: str, value: Any, kind: Any) -> Any:
    """
    Reads an option's value as the command line gives it: numbers separated by commas, sizes from JSON or
    `name=number,...`; other values stay as they are.
    """
    flag = f"--{name.replace('_', '-')}"
    if get_origin(kind) is tuple:
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError as error:
            raise SpecConfigError(
                f"{flag} must be numbers separated by commas such as 2,8,13, got '{value}'."
            ) from error
    if get_origin(kind) is Mapping:
        try:
            if value.lstrip().startswith("{"):
                return json.loads(value)
            pairs = (part.partition("=") for part in value.split(","))
            return {size.strip(): json.loads(number) for size, _, number in pairs}
        except ValueError as error:
            raise SpecConfigError(
                f"{flag} must be sizes such as hidden_size=256,num_hidden_layers=4 or JSON, got '{value}'."
            ) from error
    return value
