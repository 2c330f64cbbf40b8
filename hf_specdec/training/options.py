"""Options of training, each written once: a dataclass field with its help, limits and flags.

The limits are checked when the dataclass is made. The command line is built from the fields.
"""

from __future__ import annotations

from dataclasses import MISSING, field, fields
from typing import Any

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
        inclusive (`bool`): Whether the limits themselves are allowed.
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
