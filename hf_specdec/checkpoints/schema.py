"""Formats as tables: rows of settings in `config.json`, and rows of tensors.

    Key("rms_norm_eps", POSITIVE, 1e-6)                         a key, what it may be, and what stands for none
    Key("rank", COUNT, size="r")                                one that must not contradict the tensors
    Tensor("layers.{layer}.mlp.(gate|up)_proj.weight", "m h")   two tensors of each layer, m rows and h columns
    Tensor("norm.weight", "h", needed=False)                    one that may be missing

A reader, [`~checkpoints.reader`], takes from such rows what a checkpoint must hold, what its sizes are, and what is
wrong with it; the same when it is detected, inspected and loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from transformers.activations import ACT2FN

from ..settings.checks import is_int, is_number


class Kind(NamedTuple):
    """Kind of a setting."""

    is_valid: Callable[[Any], bool]
    what: str  # the same in words, after "must be"


# Beyond this no count is one of something in a checkpoint.
MOST = 2**31 - 1

# No scale or base is larger; an integer beyond 64 bits fits into no tensor.
_MOST = 1e12


def count_up_to(most: int) -> Kind:
    """Counts of something of which there cannot be more."""
    return Kind(lambda value: is_int(value) and 0 < value <= most, f"a positive integer of at most {most}")


def list_of(kind: Kind, what: str, count: int | None = None) -> Kind:
    """Lists of values of a kind, of so many if a number is given."""

    def is_valid(value: Any) -> bool:
        return isinstance(value, list) and count in (None, len(value)) and all(map(kind.is_valid, value))

    return Kind(is_valid, what)


COUNT = count_up_to(MOST)
INDEX = Kind(lambda value: is_int(value) and 0 <= value <= MOST, f"an integer of at least 0 and at most {MOST}")
INTEGER = Kind(lambda value: is_int(value) and abs(value) <= MOST, "an integer")
INDICES = list_of(INTEGER, "a list of integers")
POSITIVE = Kind(lambda value: is_number(value) and 0 < value <= _MOST, f"a positive number of at most {_MOST:.0e}")
NUMBER = Kind(lambda value: is_number(value) and abs(value) <= _MOST, f"a number of at most {_MOST:.0e}")
FLAG = Kind(lambda value: isinstance(value, bool), "true or false")
NAME = Kind(lambda value: isinstance(value, str), "a name")
NAMES = list_of(NAME, "a list of names")
MAPPING = Kind(lambda value: isinstance(value, Mapping), "an object")
ACTIVATION = Kind(lambda value: isinstance(value, str) and value in ACT2FN, "the name of an activation function")


class Key(NamedTuple):
    """Row of a table of settings."""

    names: str  # spellings of its key with spaces between, the first to be asked first; the first is its name
    kind: Kind
    default: Any = None  # what it is where a config leaves it out
    size: str | None = None  # symbol of the size of the tensors that it tells


def keys(names: str, kind: Kind, default: Any = None) -> tuple[Key, ...]:
    """Rows of settings of one kind, by their names with spaces between."""
    return tuple(Key(name, kind, default) for name in names.split())


class Tensor(NamedTuple):
    """Row of a table of tensors; of several rows that fit a name the first counts."""

    name: str  # `{layer}` stands for each number of a layer, from 0 on, `(q|k)` for each of the two
    # Sizes with spaces between: symbols (`h`), multiples of them (`2h`), or `*` for any. The first tensor with a
    # symbol says how large it is, and the others must agree. Empty: of any shape.
    shape: str = ""
    needed: bool | str = True  # it must be there; a text says whose it is


@cache
def spellings(name: str) -> tuple[str, ...]:
    """The names that one of a row stands for, but for numbers."""
    start, bracket, rest = name.partition("(")
    if not bracket:
        return (name,)
    choices, _, end = rest.partition(")")
    return tuple(start + choice + tail for choice in choices.split("|") for tail in spellings(end))


@cache
def pattern_of(spelling: str) -> re.Pattern[str]:
    """Pattern of the names that a spelling stands for, with its numbers as groups."""
    literals = re.split(r"\{(\w+)\}", spelling)
    return re.compile("".join(f"(?P<{x}>[0-9]{{1,9}})" if i % 2 else re.escape(x) for i, x in enumerate(literals)))


def numbered(spelling: str, counts: Mapping[str, int]) -> Iterator[str]:
    """The names that a spelling stands for, with numbers below the counts."""
    symbols = re.findall(r"\{(\w+)\}", spelling)
    for numbers in product(*(range(counts[symbol]) for symbol in symbols)):
        yield spelling.format(**dict(zip(symbols, numbers)))


def renamed(name: str, names: Mapping[str, str]) -> str | None:
    """A name with another beginning, by the first of `names` that fits, and with its numbers; `None`: none fits."""
    for old, new in names.items():
        if match := pattern_of(old).match(name):
            return new.format(**match.groupdict()) + name[match.end() :]
    return None


@cache
def dimensions(shape: str) -> tuple[tuple[int, str], ...]:
    """The factor and the symbol of each size in a row's shape."""
    return tuple((int(factor or 1), symbol) for factor, symbol in re.findall(r"(\d*)([^\s\d]+)", shape))
