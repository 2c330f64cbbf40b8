"""Which cases of a test are in the default run, where it has many: the others are `slow`."""

from __future__ import annotations

from zlib import crc32


def has_turn(test: str, place: int, every: int) -> bool:
    """Tells whether the case in this place has its turn. Tests begin at different cases, so that each is in some."""
    return (place + crc32(test.encode())) % every == 0
