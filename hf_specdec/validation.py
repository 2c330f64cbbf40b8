"""Checks of values that users give: their type, their bounds, and what an error says about them.

A value is checked against a type annotation ([`as_annotated`]) or against bounds (`check_*`). Messages have the name
of the setting, what it must be, and what was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from .errors import SpecConfigError, did_you_mean, shown
from .reading import parse_json


# Largest number of tokens of a draft, and of nodes of a static tree.
MOST_DRAFT_TOKENS = 1024
MOST_INTEGER = 2**31 - 1

# Of a name or path.
_MOST_CHARACTERS = 4096


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


# --------------------------------------------------------------------------------------------------------- annotations


class _Kind(NamedTuple):
    """One of the types that an annotation may have: its name in messages, its test, and the form that is kept."""

    name: str
    is_valid: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


_KINDS = {
    bool: _Kind("True or False", lambda value: isinstance(value, bool)),
    # -0.0 equals 0.0 and must not be another configuration in a hash.
    float: _Kind("a number", lambda value: is_number(value) and is_finite(value), lambda value: float(value) + 0.0),
    int: _Kind("an integer", is_int, int),
    str: _Kind("a string", lambda value: isinstance(value, str)),
    tuple: _Kind("a list", lambda value: isinstance(value, (list, tuple)), frozen),
    NoneType: _Kind("None", lambda value: value is None),
}
_ANYTHING = _Kind("a list", lambda value: True)


def types_of(hint: Any) -> tuple:
    """The members of a union, or the one type that is no union."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def as_annotated(name: str, value: Any, hint: Any, aliases: Iterable[str] = ()) -> Any:
    """The value in the form of its annotation: unions of plain types, `Literal` and tuples; all else passes.

    Args:
        name (`str`): Name of the setting.
        value (`Any`): What was given.
        hint (`Any`): The annotation.
        aliases (`Iterable[str]`): Short spellings, for the message.

    Raises:
        SpecConfigError: It has another type, or is none of the choices.
    """
    if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
        raise SpecConfigError(f"`{name}` must have at most {_MOST_CHARACTERS} characters, got {len(value)}.")
    types = types_of(hint)
    for kind in types:
        if get_origin(kind) is Literal:
            if any(type(value) is type(choice) and value == choice for choice in get_args(kind)):
                return value
            continue
        known = _KINDS.get(get_origin(kind) or kind, _ANYTHING)
        if known.is_valid(value):
            return known.convert(value)
    raise SpecConfigError(_wrong_type(types, name, value, aliases))


def _wrong_type(types: tuple, name: str, value: Any, aliases: Iterable[str]) -> str:
    choices = [choice for kind in types if get_origin(kind) is Literal for choice in get_args(kind)]
    plain = [_KINDS.get(kind, _ANYTHING).name for kind in types if get_origin(kind) is not Literal]
    *others, last = [*map(repr, choices), *plain]
    expected = f"{', '.join(others)} or {last}" if others else last
    expected += f" (short: {', '.join(map(repr, aliases))})" if aliases else ""
    message = f"`{name}` must be {expected}, got {shown(value)} ({type(value).__name__})."
    if isinstance(value, str):
        if hint := did_you_mean(value, choices):
            return message + hint
        if {int, float, bool} & set(types) and _is_json_number(value):
            return f"{message} Write it without quotes."
    return message


def _is_json_number(text: str) -> bool:
    """`True` for a text of what JSON writes without quotes: a number, true or false."""
    try:
        return isinstance(parse_json(text.lower()), (int, float))
    except ValueError:
        return False


# -------------------------------------------------------------------------------------------------------------- bounds


def check_bounds(options: Any, **bounds: tuple[float, float]) -> None:
    """Checks numbers of an options object, by name: the least and the largest value of each.

    Bounds that are integers mean that only integers are taken. What is `None` by default may be `None`.

    Raises:
        SpecConfigError: One of them is no number between its bounds.
    """
    for name, (least, most) in bounds.items():
        value = getattr(options, name)
        if value is not None or options.__dataclass_fields__[name].default is not None:
            check_number(name, value, least, most)


def check_number(name: str, value: Any, least: float, most: float) -> None:
    """Raises a [`SpecConfigError`] unless it is a number between two bounds, and an integer where these are."""
    if not _is_between(value, least, most):
        limits = (
            f"an integer from {least} to {most}" if isinstance(most, int) else f"a number from {least:g} to {most:g}"
        )
        raise SpecConfigError(f"`{name}` must be {limits}, got {shown(value)}.")


def check_integers(name: str, values: Any, least: int) -> None:
    """Raises a [`SpecConfigError`] unless it is a list of at least one such integer, or left out."""
    if values is None:
        return
    is_list = isinstance(values, (list, tuple)) and 0 < len(values) <= MOST_DRAFT_TOKENS
    if not is_list or not all(_is_between(value, least, MOST_DRAFT_TOKENS) for value in values):
        raise SpecConfigError(
            f"`{name}` must be a list of integers from {least} to {MOST_DRAFT_TOKENS}, got {shown(values)}."
        )


def check_flag(name: str, value: Any) -> None:
    """Raises a [`SpecConfigError`] unless it is `True` or `False`."""
    if not isinstance(value, bool):
        raise SpecConfigError(f"`{name}` must be True or False, got {shown(value)}.")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises a [`SpecConfigError`] unless it is one of several words, or left out."""
    if value is not None and not (isinstance(value, str) and value in choices):
        raise SpecConfigError(f"`{name}` must be {' or '.join(map(repr, choices))}, got {shown(value)}.")


def check_draft_sample_method(value: Any) -> None:
    """Raises a [`SpecConfigError`] unless it is a way to choose draft tokens, or left out."""
    check_choice("draft_sample_method", value, ("greedy", "probabilistic"))


def draft_sample_method_field(default: str) -> Any:
    """The option `draft_sample_method` of a method that can draw its drafts.

    Args:
        default (`str`): "greedy" or "probabilistic": what holds where it is left out.
    """
    text = (
        "How draft tokens are chosen when the target samples: `greedy` takes the best ones, `probabilistic` draws a "
        f"chain from the draft's distribution. Left out, `{default}`. A greedy target gets the best tokens always."
    )
    return field(default=None, metadata={"help": text})


def _is_between(value: Any, least: float, most: float) -> bool:
    is_kind = is_int(value) if isinstance(most, int) else is_number(value)
    return is_kind and least <= value <= most
