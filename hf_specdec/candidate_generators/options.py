"""Options of methods without any, and checks of options that several methods have.

Sizes have a largest value, beyond which no memory would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from ..errors import SpecConfigError, shown
from ..token_trees import MAX_NODES


@dataclass(frozen=True)
class NoOptions:
    """Options of a method that has none."""


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


def check_integers(name: str, values: Any, least: int, most: int = MAX_NODES) -> None:
    """Raises a [`SpecConfigError`] unless it is a list of at least one such integer, or left out."""
    if values is None:
        return
    is_list = isinstance(values, (list, tuple)) and 0 < len(values) <= MAX_NODES
    if not is_list or not all(_is_between(value, least, most) for value in values):
        raise SpecConfigError(f"`{name}` must be a list of integers from {least} to {most}, got {shown(values)}.")


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


def _is_between(value: Any, least: float, most: float) -> bool:
    kind = Integral if isinstance(most, int) else Real
    return isinstance(value, kind) and not isinstance(value, bool) and least <= value <= most
