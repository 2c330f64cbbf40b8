"""Files and JSON that a user names or that were written long ago: of limited size, and without surprises."""

from __future__ import annotations

import json
import os
import stat
from typing import Any


MAX_SETTINGS_BYTES = 4 * 2**20


def read_text(path: str | os.PathLike, max_bytes: int = MAX_SETTINGS_BYTES) -> str:
    """The text of a regular file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is a folder, pipe or device, has more than `max_bytes`, or is no UTF-8.
    """
    _check_is_regular(os.stat(path))
    with open(path, "rb", opener=_open_without_waiting) as file:
        # The path may have been given to another file meanwhile.
        _check_is_regular(os.fstat(file.fileno()))
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return content.decode("utf-8")


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: It is no JSON (NaN and Infinity are none), has a key twice in one object, is nested too deeply, or
            has a number of thousands of digits.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check_is_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:100]!r} stands twice in one object")
        found[key] = value
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
