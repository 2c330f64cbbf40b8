"""A file of results, one JSON object a line, from which a run that was stopped goes on."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ..errors import SpecConfigError
from ..metrics import SpecDecodingStats
from .results import RequestResult


# What is kept of a result's statistics.
_COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_committed_tokens", "num_row_cycles")
_ENTRY = ("key", "tokens", "finish_reason", "text", "stats")


class Journal:
    """Results of earlier runs of the same requests, and of this one.

    Requests that have failed are not done: they are tried again.

    Args:
        path (`str` or `os.PathLike`): The file, made if needed. A last line that was cut off is taken out.

    Raises:
        SpecConfigError: The file is something else.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path: Path = Path(path)
        self._known: dict[int, dict[str, Any]] = {}
        end = self._read() if self.path.exists() else 0
        self._file = self.path.open("r+b" if self.path.exists() else "w+b")
        self._file.truncate(end)
        self._file.seek(end)

    def _read(self) -> int:
        """Reads the whole lines; where they end."""
        end = 0
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                break
            try:
                entry = json.loads(line)
                self._known[entry["index"]] = {name: entry[name] for name in _ENTRY}
            except (ValueError, KeyError, TypeError) as error:
                raise SpecConfigError(
                    f"Line {number} of {self.path} is no result of a request. Pass the journal of an earlier run, or "
                    "a file that does not exist."
                ) from error
            end += len(line)
        return end

    def find(self, index: int, key: str) -> RequestResult | None:
        """The result of a request, if it is there.

        Raises:
            SpecConfigError: That of another request is.
        """
        entry = self._known.get(index)
        if entry is None:
            return None
        if entry["key"] != key:
            raise SpecConfigError(
                f"{self.path} has the result of another prompt, or of other settings, for request {index}. Pass the "
                "requests and settings of the run that wrote it, or another file."
            )
        stats = SpecDecodingStats(batch_size=1, **entry["stats"])
        return RequestResult(index, entry["tokens"], entry["text"], entry["finish_reason"], None, stats)

    def add(self, result: RequestResult, key: str) -> None:
        """Writes a result, unless the request has failed."""
        if result.error is not None:
            return
        entry = {
            "index": result.index,
            "key": key,
            "tokens": result.tokens,
            "text": result.text,
            "finish_reason": result.finish_reason,
            "stats": {name: getattr(result.stats, name) for name in _COUNTS},
        }
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def key_of(tokens: list[int], settings: dict[str, Any]) -> str:
    """Tells requests apart: by the prompt, and by the settings that can be written down."""
    text = json.dumps([tokens, settings], sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
