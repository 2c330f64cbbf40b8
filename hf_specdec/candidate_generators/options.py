"""Options of methods without any, and checks of options that several methods have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import SpecConfigError
from ..models.settings import is_int


@dataclass(frozen=True)
class NoOptions:
    """Options of a method that has none."""


def check_integer(name: str, value: Any, least: int) -> None:
    """Raises a [`SpecConfigError`] unless it is an integer of at least `least`, or left out."""
    if value is not None and not (is_int(value) and value >= least):
        raise SpecConfigError(f"`{name}` must be an integer of at least {least}, got {value!r}.")


def check_draft_sample_method(value: Any) -> None:
    """Raises a [`SpecConfigError`] unless it is a way to choose draft tokens, or left out."""
    if value not in (None, "greedy", "probabilistic"):
        raise SpecConfigError(f"`draft_sample_method` must be 'greedy' or 'probabilistic', got {value!r}.")
