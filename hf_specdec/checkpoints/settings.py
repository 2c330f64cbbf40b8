"""Kinds of settings in a checkpoint's `config.json`, each as a test and in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers.activations import ACT2FN

from ..validation import is_int, is_number


class Kind(NamedTuple):
    """Kind of a setting.

    Attributes:
        is_valid (`Callable`): Test of a value.
        what (`str`): The same in words, after "must be".
    """

    is_valid: Callable[[Any], bool]
    what: str


# Beyond this no count is one of something in a checkpoint.
MOST = 2**31 - 1

# No scale or base is larger; an integer beyond 64 bits fits into no tensor.
_MOST = 1e12


def count_up_to(most: int) -> Kind:
    """Counts of something of which there cannot be more."""
    return Kind(lambda value: is_int(value) and 0 < value <= most, f"a positive integer of at most {most}")


COUNT = count_up_to(MOST)
INDEX = Kind(lambda value: is_int(value) and 0 <= value <= MOST, f"an integer of at least 0 and at most {MOST}")
INDICES = Kind(
    lambda value: isinstance(value, list) and all(is_int(v) and abs(v) <= MOST for v in value), "a list of integers"
)
POSITIVE = Kind(lambda value: is_number(value) and 0 < value <= _MOST, f"a positive number of at most {_MOST:.0e}")
NUMBER = Kind(lambda value: is_number(value) and abs(value) <= _MOST, f"a number of at most {_MOST:.0e}")
FLAG = Kind(lambda value: isinstance(value, bool), "true or false")
NAME = Kind(lambda value: isinstance(value, str), "a name")
NAMES = Kind(lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value), "a list of names")
MAPPING = Kind(lambda value: isinstance(value, Mapping), "an object")
ACTIVATION = Kind(lambda value: isinstance(value, str) and value in ACT2FN, "the name of an activation function")
