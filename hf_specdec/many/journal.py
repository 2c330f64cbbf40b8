"""A file of results, one JSON object a line, from which a run that was stopped goes on.

An entry has `index`, `key` (of prompt and settings), `num_prompt_tokens`, `tokens`, `text`, `finish_reason`, `error`
(a message, or null) and `stats` (counts). Where log-probabilities are asked for, `logprobs` has a pair for each token:
its own, and a list of `[token, log-probability]` of the most probable ones. Where an index stands twice, the later
entry is valid.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import SpecConfigError, shown
from ..metrics import SpecDecodingStats
from ..reading import read_bytes
from .row import RequestResult, TokenLogprobs, error_text


# What is kept of a result, beside its error and its log-probabilities, and of its statistics.
_FIELDS = ("index", "num_prompt_tokens", "tokens", "text", "finish_reason")
_COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_committed_tokens", "num_row_cycles")


class Journal:
    """Results of earlier runs of the same requests, and of this one; `others` are further files, which are only read.

    The file is made if needed. A last line that was cut off is taken out. Requests that have failed are tried again.
    """

    def __init__(self, path: str | os.PathLike[str], others: Iterable[str | os.PathLike[str]] = ()):
        if not isinstance(path, (str, os.PathLike)):
            raise SpecConfigError(f"`journal` takes the name of a file, got {shown(path)}.")
        self.path: Path = Path(path)
        self._known: dict[int, dict[str, Any]] = {}
        for other in others:
            self._known |= read_entries(other)[0]
        entries, end = read_entries(self.path) if os.path.lexists(self.path) else ({}, 0)
        self._known |= entries
        try:
            # Appending keeps every line whole, even where a run is started twice.
            self._file = self.path.open("ab")
        except (OSError, ValueError) as error:
            raise SpecConfigError(
                f"The journal '{self.path}' cannot be written: {error}. Name another file."
            ) from error
        if self._file.tell() > end:
            self._file.truncate(end)

    def find(self, index: int, key: str) -> RequestResult | None:
        """The result of a request, if it is there; that of another one in its place is an error."""
        entry = self._known.get(index)
        if entry is None or entry["error"] is not None:
            return None
        if entry["key"] != key:
            raise SpecConfigError(
                f"{self.path} has the result of another prompt, or of other settings, for request {index}. Pass the "
                "requests and settings of the run that wrote it, or another file."
            )
        return _result_of(entry)

    def add(self, result: RequestResult, key: str | None) -> None:
        """Writes a result; `key` is that of its prompt and settings, if it could be read."""
        entry = {name: getattr(result, name) for name in _FIELDS} | {"key": key, "error": error_text(result.error)}
        entry["stats"] = {name: getattr(result.stats, name) for name in _COUNTS}
        if result.logprobs is not None:
            entry["logprobs"] = result.logprobs
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_entries(path: str | os.PathLike[str]) -> tuple[dict[int, dict[str, Any]], int]:
    """The whole lines of a journal by index, and the number of bytes that they take."""
    try:
        content = read_bytes(path)
    except (OSError, ValueError) as error:
        raise SpecConfigError(f"The journal '{path}' cannot be read: {error}. Name another file.") from error
    entries, end = {}, content.rfind(b"\n") + 1  # of a line that was cut off there is no end
    for number, line in enumerate(content[:end].splitlines(), start=1):
        try:
            entry = json.loads(line)
            # What could not be returned is no result.
            entries[_result_of(entry).index] = entry
        except (ValueError, ArithmeticError, KeyError, TypeError, RecursionError) as error:
            raise SpecConfigError(
                f"Line {number} of {path} is no result of a request ({type(error).__name__}: {error}). Pass the "
                "journal of an earlier run, or a file that does not exist."
            ) from error
    return entries, end


def _result_of(entry: dict[str, Any]) -> RequestResult:
    """The result that an entry holds, without its error; errors of Python's own tell that it holds none."""
    texts = [(name, str | None) for name in ("key", "text", "error")]
    for name, kinds in (("tokens", list), ("finish_reason", str), *texts):
        if not isinstance(entry[name], kinds):
            raise ValueError(f"`{name}` is {shown(entry[name])}")
    tokens, counts = entry["tokens"], {name: entry["stats"][name] for name in _COUNTS}
    numbers = [entry["index"], entry["num_prompt_tokens"], *tokens, *counts.values()]
    logprobs = None
    if entry.get("logprobs") is not None:
        logprobs = [
            TokenLogprobs(float(value), [(t, float(other)) for t, other in top]) for value, top in entry["logprobs"]
        ]
        numbers += [token for one in logprobs for token, _ in one.top]
        # Of a request that has failed some may be missing.
        if entry["error"] is None and len(logprobs) != len(tokens):
            raise ValueError(f"{len(logprobs)} log-probabilities of {len(tokens)} tokens")
    if wrong := [number for number in numbers if type(number) is not int]:
        raise ValueError(f"{shown(wrong[0])} is no whole number")
    stats = SpecDecodingStats(batch_size=1, **counts)
    return RequestResult(**{name: entry[name] for name in _FIELDS}, stats=stats, logprobs=logprobs)


def key_of(tokens: list[int], settings: dict[str, Any]) -> str:
    """Tells requests apart: by the prompt, and by the settings that can be written down."""
    text = json.dumps([tokens, _written(settings)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _written(value: Any) -> Any:
    """A setting as JSON writes and sorts it; of other kinds the content of tensors and arrays, or the type alone."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): _written(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_written, value))
    if value is None or isinstance(value, (str, int, float)):
        return value
    if torch.is_tensor(value) or isinstance(value, np.ndarray):
        return f"{value.dtype} {value.tolist()}"
    return type(value).__name__
