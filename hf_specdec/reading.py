"""Files, JSON and values that users give or that were written long ago: of limited size, and without surprises."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any

from .errors import HIDDEN, SpecConfigError, SpecDecError, is_secret_key, shown


MAX_SETTINGS_BYTES = 4 * 2**20

# Values inside of one setting, and how deep they may lie; a chain as paths has half a million.
_MOST_VALUES = 1_000_000
_MOST_LEVELS = 8


def read_text(path: str | os.PathLike[str], max_bytes: int | None = MAX_SETTINGS_BYTES) -> str:
    """The text of a regular file; raises `OSError`, or `ValueError` as [`read_bytes`] or if it is no UTF-8."""
    return read_bytes(path, max_bytes).decode("utf-8")


def read_bytes(path: str | os.PathLike[str], max_bytes: int | None = None) -> bytes:
    """The content of a regular file; raises `OSError`, or `ValueError` if it is none or has more than `max_bytes`."""
    _check_is_regular(os.stat(path))
    with open(path, "rb", opener=_open_without_waiting) as file:
        # The path may have been given to another file meanwhile.
        _check_is_regular(os.fstat(file.fileno()))
        content = file.read(-1 if max_bytes is None else max_bytes + 1)
    if max_bytes is not None and len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return content


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check_is_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")


def parse_json(text: str) -> Any:
    """The value of a JSON text; raises `ValueError` also for NaN, Infinity, repeated keys and too deep nesting."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key[:100]!r} stands twice in one object")
        values[key] = value
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


@contextmanager
def reading_settings(*settings: Any) -> Iterator[None]:
    """Turns every failure to read what a user has given into an error of this package, without secrets."""
    try:
        yield
    except SpecDecError as error:
        for secret in _secrets_in(settings):
            error.args = tuple(item.replace(secret, HIDDEN) if isinstance(item, str) else item for item in error.args)
        raise
    except Exception as error:
        what = " and ".join(
            shown(item) for item in settings if item is not None and not (type(item) is dict and not item)
        )
        raise SpecConfigError(
            f"These settings cannot be read: {what} ({shown(error)}). Give a dict of plain texts, numbers, lists and "
            "dicts, JSON text, or the name of a method or of a draft model."
        ) from error


def _secrets_in(value: Any, levels: int = 4) -> Iterator[str]:
    if isinstance(value, (list, tuple)) and levels:
        for item in value:
            yield from _secrets_in(item, levels - 1)
    elif isinstance(value, dict) and levels:
        for key, item in dict.items(value):
            if is_secret_key(key) and isinstance(item, str) and len(item) > 3:
                yield str.__str__(item)
            else:
                yield from _secrets_in(item, levels - 1)


def plain_value(key: str, value: Any, most_values: int = _MOST_VALUES) -> Any:
    """A value in Python's own types: arrays, tensors, mappings and subclasses are converted, other objects stay."""
    num_left = most_values

    def convert(value: Any, level: int) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left < 0 or level > _MOST_LEVELS:
            what = f"more than {most_values} values" if num_left < 0 else f"more than {_MOST_LEVELS} levels of lists"
            raise SpecConfigError(f"{key} has {what}. It is not read.")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, Integral):
            return int(value)
        if hasattr(value, "tolist") and hasattr(value, "shape"):
            num_left -= math.prod(value.shape)
            return convert(value.tolist() if num_left >= 0 else None, level)
        if isinstance(value, Mapping):
            return {convert(name, level + 1): convert(item, level + 1) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            items = [convert(item, level + 1) for item in value]
            return items if isinstance(value, list) else tuple(items)
        return value

    try:
        return convert(value, 0)
    except SpecDecError:
        raise
    except Exception as error:
        raise SpecConfigError(
            f"{key} cannot be read from {shown(value)} ({type(value).__name__}): {shown(error)}. Give a plain text, "
            "number, list or dict."
        ) from error
