"""Settings that users give: how one is declared, and how its value is checked.

A setting is a dataclass field made by [`setting`]; its annotation says the type and the choices, its metadata all the
rest. [`checked`] checks a value. Messages have the name of the setting, what it must be, and what was found.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import MISSING, field, fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from ..errors import SpecConfigError, did_you_mean, shown
from ..method import MOST_DRAFT_TOKENS
from ..reading import parse_json


MOST_INTEGER = 2**31 - 1

# Of a name or path.
_MOST_CHARACTERS = 4096

# Types that an annotation may have, as messages name them.
_NOUNS = {
    bool: "True or False",
    float: "a number",
    int: "an integer",
    str: "a string",
    tuple: "a list",
    NoneType: "None",
}


def is_int(value: Any) -> bool:
    """`True` for integers of any type; `True` and `False` are none here."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """`True` for integers and real numbers, NaN and the infinities among them."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_finite(value: Real) -> bool:
    """`True` for what a float can hold, except NaN and the infinities."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_json_value(value: Any) -> bool:
    """`True` for texts, finite numbers, `None`, and lists of them."""
    if isinstance(value, (list, tuple)):
        return all(map(is_json_value, value))
    if isinstance(value, str):
        return len(value) <= _MOST_CHARACTERS
    return value is None or (isinstance(value, (int, float)) and is_finite(value))


def frozen(value: Any) -> Any:
    """A value with tuples in place of lists, also inside."""
    return tuple(map(frozen, value)) if isinstance(value, (list, tuple)) else value


def thawed(value: Any) -> Any:
    """A value with lists in place of tuples, also inside."""
    return list(map(thawed, value)) if isinstance(value, tuple) else value


class Bounds(NamedTuple):
    """Limits of a number, or of the numbers of a list. Integers have `MOST_INTEGER` where `most` is not set."""

    least: float | None = None
    most: float | None = None
    inclusive: bool = True

    def allows(self, value: float, unlimited: float = math.inf) -> bool:
        least = -math.inf if self.least is None else self.least
        most = unlimited if self.most is None else self.most
        return least <= value <= most if self.inclusive else least < value < most

    def phrase(self, noun: str) -> str:
        """The noun with the limits: "an integer from 1 to 8", "a number above 0"."""
        least, most, inclusive = self
        if least is None and most is None:
            return noun
        if least is None or most is None:
            below, above = ("of at most", "of at least") if inclusive else ("below", "above")
            return f"{noun} {below} {most}" if least is None else f"{noun} {above} {least}"
        return f"{noun} from {least} to {most}" if inclusive else f"{noun} between {least} and {most}"


_UNBOUNDED = Bounds()


def setting(
    default: Any = MISSING,
    help: str = "",  # one or two sentences, which say what `None` stands for
    *,
    least: float | None = None,
    most: float | None = None,
    inclusive: bool = True,
    **further: Any,
) -> Any:
    """Declares a dataclass field that is a setting; without a default it has to be given.

    Further metadata: `key`, `published` and `engine_names` of a method's option, `flags` of the command line,
    `normalize`, `aliases`, `describes_model` and `is_secret` of a field of `SpeculativeConfig`.
    """
    metadata = {"help": help, "bounds": Bounds(least, most, inclusive), **further}
    return field(default=default, metadata=metadata, compare=not further.get("is_secret"))


class Options:
    """Base of dataclasses of settings: values are checked and converted by their annotations, or `SpecConfigError`."""

    def __post_init__(self) -> None:
        hints = hints_of(type(self))
        for item in fields(self):
            bounds = item.metadata.get("bounds", _UNBOUNDED)
            value = checked(item.name, getattr(self, item.name), hints[item.name], bounds)
            object.__setattr__(self, item.name, value)


@cache
def hints_of(options: type) -> dict[str, Any]:
    """The annotations of a dataclass, by field."""
    return get_type_hints(options)


def draft_sample_method_field(default: Literal["greedy", "probabilistic"]) -> Any:
    """The option `draft_sample_method` of a method that can draw its drafts, with what holds for fixed lengths."""
    left_out = "`greedy`"
    if default == "probabilistic":
        left_out = "`probabilistic` where the length is fixed, and `greedy` where it adapts"
    return setting(
        None,
        "How draft tokens are chosen when the target samples: `greedy` takes the best ones, `probabilistic` samples a "
        f"chain from the draft's distribution. Default: {left_out}. For a greedy target drafts are always greedy.",
    )


def parallel_drafting_field() -> Any:
    """The option `parallel_drafting` of a method some of whose checkpoints draft with mask tokens."""
    return setting(
        None,
        "All tokens of a draft come from one forward with mask tokens (PARD, P-EAGLE). Default: what the checkpoint "
        "was trained for.",
    )


def types_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type that is no union."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def checked(name: str, value: Any, hint: Any, bounds: Bounds = _UNBOUNDED, aliases: Collection[str] = ()) -> Any:
    """The value of a setting in the form of its annotation (unions of plain types, `Literal`, tuples), or an error."""
    if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
        raise SpecConfigError(f"`{name}` must have at most {_MOST_CHARACTERS} characters, got {len(value)}.")
    types = types_of(hint)
    fitting = next((item for item in types if _has_type(value, item)), None)
    if fitting is None:
        raise SpecConfigError(_wrong_type(types, name, value, bounds, aliases))
    kind = get_origin(fitting) or fitting
    is_list = kind is tuple and bounds != _UNBOUNDED
    number = kind if not is_list else int if get_args(fitting)[:1] == (int,) else float
    numbers = value if is_list else (value,) if is_number(value) and kind is not Literal else ()
    is_within = not is_list or 0 < len(value) <= MOST_DRAFT_TOKENS
    for item in numbers:
        unlimited = MOST_INTEGER if number is not float and is_int(item) else math.inf
        is_within = is_within and _has_type(item, number) and bounds.allows(item, unlimited)
    if not is_within:
        # Of what may be anything, only integers are limited.
        expected = fitting if kind in _NOUNS else int
        if expected is int and bounds.most is None and int(value) > MOST_INTEGER:
            bounds = bounds._replace(most=MOST_INTEGER)
        limit = f", at most {MOST_DRAFT_TOKENS} of them" if is_list and len(value) > MOST_DRAFT_TOKENS else ""
        raise SpecConfigError(f"`{name}` must be {_noun(expected, bounds)}{limit}, got {shown(value)}.")
    if is_list:
        return tuple(_plain_number(item, number) for item in value)
    if kind is tuple:
        return frozen(value)
    return _plain_number(value, kind) if kind in (int, float) else value


def _plain_number(value: Any, kind: type) -> int | float:
    # -0.0 equals 0.0 and must not be another configuration in a hash.
    return int(value) if kind is int else float(value) + 0.0


def _has_type(value: Any, hint: Any) -> bool:
    kind = get_origin(hint) or hint
    if kind is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(hint))
    if kind is int:
        return is_int(value)
    if kind is float:
        return is_number(value) and is_finite(value)
    if kind is tuple:
        return isinstance(value, (list, tuple))
    return kind not in _NOUNS or isinstance(value, kind)


def _noun(hint: Any, bounds: Bounds) -> str:
    kind = get_origin(hint) or hint
    if kind is tuple and bounds != _UNBOUNDED:
        return bounds.phrase(f"a list of {'integers' if get_args(hint)[:1] == (int,) else 'numbers'}")
    return bounds.phrase(_NOUNS[kind]) if kind in (int, float) else _NOUNS[kind]


def _wrong_type(types: tuple, name: str, value: Any, bounds: Bounds, aliases: Collection[str]) -> str:
    choices = [choice for kind in types if get_origin(kind) is Literal for choice in get_args(kind)]
    nouns = [_noun(kind, bounds) for kind in types if get_origin(kind) is not Literal]
    *others, last = [*map(repr, choices), *nouns]
    expected = f"{', '.join(others)} or {last}" if others else last
    expected += f" (short: {', '.join(map(repr, aliases))})" if aliases else ""
    message = f"`{name}` must be {expected}, got {shown(value)} ({type(value).__name__})."
    if isinstance(value, str):
        if hint := did_you_mean(value, choices):
            return message + hint
        if {int, float, bool} & set(types):
            # A number, true or false, as JSON writes them.
            with suppress(ValueError):
                message += " Write it without quotes." if isinstance(parse_json(value.lower()), (int, float)) else ""
    return message
