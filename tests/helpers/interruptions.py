"""Exceptions that come between any two lines of the package, as that of Ctrl-C may."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from linecache import getline
from pathlib import Path

import hf_specdec


PACKAGE = str(Path(hf_specdec.__file__).parent)


class Interruption(BaseException):
    """Nobody catches it."""


def _traced(call: Callable, files: tuple[str, ...], on_line: Callable[[tuple[str, int]], None]) -> None:
    def trace(frame, event, argument):
        file = frame.f_code.co_filename
        if event == "line" and file.startswith(PACKAGE) and file.endswith(files):
            on_line((file[len(PACKAGE) + 1 :], frame.f_lineno))
        return trace if file.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


def interrupted_everywhere(call: Callable, *files: str) -> Iterator[tuple[str, int, int]]:
    """Interrupts a call in front of each line that it comes to, when it comes there for the first and the last time.

    Args:
        call (`Callable`): Does the same each time.
        files (`str`): Ends of the names of files of the package; all without one.

    Yields:
        `tuple`: File, line and number of the visit, after the call has ended.
    """
    visits: Counter[tuple[str, int]] = Counter()
    _traced(call, files or ("",), lambda line: visits.update([line]))
    for line, count in visits.items():
        # A line with a block is visited again when the block has ended. Nothing real comes between that and the exit.
        has_block = getline(f"{PACKAGE}/{line[0]}", line[1]).lstrip().startswith("with ")
        for number in {1, 1 if has_block else count}:
            left = number

            def interrupt(here, line=line):
                nonlocal left
                left -= here == line
                if here == line and left == 0:
                    sys.settrace(None)
                    raise Interruption

            try:
                _traced(call, files or ("",), interrupt)
            except Interruption:
                pass
            yield *line, number
