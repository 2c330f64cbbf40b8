"""Requests from a file of JSON lines, and files of results, from which a run that was stopped goes on.

A run may have several processes, each of which takes its share. Every process keeps a journal beside the output,
`OUTPUT.part-RANK`; when all have ended, the first one merges them.

An entry of a journal is one JSON object a line. It has `index`, `key` (of prompt and settings), `num_prompt_tokens`,
`tokens`, `text`, `finish_reason`, `error` (a message, or null) and `stats` (counts). Where log-probabilities are asked
for, `logprobs` has a pair for each token: its own, and a list of `[token, log-probability]` of the most probable ones.
Where an index stands twice, the later entry is valid.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import SpecConfigError, shown
from ..metrics import SpecDecodingStats
from ..prompts import json_records
from ..reading import read_bytes, read_text
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


# Shares of a run may take longer or shorter by hours, in which nobody is stuck.
_MOST_WAITING = timedelta(days=30)


def read_requests(path: Path) -> tuple[list[Any], list[Any]]:
    """The requests of a file, one a line as [`~many.generate.generate_many`] takes them, and their `id`s."""
    try:
        content = read_text(path, max_bytes=None)
    except (OSError, ValueError) as error:
        raise SpecConfigError(f"The requests in '{path}' cannot be read: {error}") from error
    requests, ids = [], []
    for place, request in json_records(content, path, "Write one request a line."):
        if not isinstance(request, (str, list, dict)):
            raise SpecConfigError(
                f"{place} is no request but {shown(request)}. Write a text, a list of token ids, a "
                'list of messages, or an object such as {"prompt": "...", "max_new_tokens": 64}.'
            )
        ids.append(request.pop("id", None) if isinstance(request, dict) else None)
        requests.append(request)
    if not requests:
        raise SpecConfigError(f"There is no request in '{path}'. Write one a line, as JSON.")
    return requests, ids


@dataclass(frozen=True)
class Processes:
    """The processes of a run: those that torchrun, `accelerate launch` or mpirun have started, or this one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine; names the GPU

    @classmethod
    def of_environment(cls) -> Processes:
        # Knows the names of all launchers, those of MPI among them.
        from accelerate.utils.environment import get_cpu_distributed_information

        information = get_cpu_distributed_information()
        return cls(information.rank, information.world_size, information.local_rank)

    def wait(self) -> None:
        """Returns when all processes have come here."""
        if self.size == 1:
            return
        from torch import distributed

        if not distributed.is_initialized():
            distributed.init_process_group("gloo", rank=self.rank, world_size=self.size, timeout=_MOST_WAITING)
        distributed.barrier()


class Output:
    """The file of results, which appears when all requests have ended, and the journals beside it."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.parts: list[Path] = self._written()
            has_place, exists = path.parent.is_dir() and not path.is_dir(), os.path.lexists(path)
        except OSError as error:
            raise SpecConfigError(f"The results cannot be written to '{path}': {error}. Name another file.") from error
        if not has_place:
            raise SpecConfigError(f"The results cannot be written to '{path}'. Name a file in a folder that exists.")
        if exists and not self.parts:
            raise SpecConfigError(f"There are results in '{path}' already. Remove the file, or name another one.")
        if links := [part for part in self.parts if part.is_symlink()]:
            raise SpecConfigError(
                f"'{links[0]}' is a link, and journals are files. Remove it, or name another output."
            )

    def _written(self) -> list[Path]:
        """The journals that are there."""
        return sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.part-*"))

    def journal(self, rank: int) -> Journal:
        """The journal of a process, which knows what all processes of an earlier run have done."""
        path = self.path.with_name(f"{self.path.name}.part-{rank}")
        return Journal(path, [part for part in self.parts if part != path])

    def merge(self, ids: list[Any]) -> dict[str, int]:
        """Writes the file from the journals, in the order of the requests, with their `ids`; returns counts.

        The journals are removed, unless a request has failed: then another run tries those again.
        """
        entries: dict[int, dict[str, Any]] = {}
        parts = self._written()
        for part in parts:
            for index, entry in read_entries(part)[0].items():
                # One process may have failed where another one of an earlier run had not, and the file of requests
                # may have become shorter.
                if index < len(ids) and (index not in entries or entry["error"] is None):
                    entries[index] = entry
        missing = next((index for index in range(len(ids)) if index not in entries), None)
        if missing is not None:
            raise SpecConfigError(
                f"No journal of '{self.path}' has the result of request {missing}: one of them was removed while the "
                "requests were answered. Run the same command again; it goes on from those that are there."
            )
        temporary = self.path.with_name(f"{self.path.name}.unfinished")
        try:
            # Made anew: what is there under this name may be a link to another file.
            temporary.unlink(missing_ok=True)
            # What UTF-8 cannot write, halves of characters, is written as JSON does.
            with temporary.open("x", encoding="utf-8", errors="backslashreplace") as file:
                for index, request_id in enumerate(ids):
                    entry = {} if request_id is None else {"id": request_id}
                    entry |= {name: value for name, value in entries[index].items() if name != "key"}
                    file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            os.replace(temporary, self.path)
        except OSError as error:
            raise SpecConfigError(
                f"The results cannot be written to '{self.path}': {error}. They are in the journals beside it. Mend "
                "that, and run the same command again."
            ) from error
        report = {
            "num_requests": len(ids),
            "num_failed": sum(entry["error"] is not None for entry in entries.values()),
            "num_tokens": sum(len(entry["tokens"]) for entry in entries.values()),
        }
        for name in ("num_draft_tokens", "num_accepted_tokens"):
            report[name] = sum(entry["stats"][name] for entry in entries.values())
        if not report["num_failed"]:
            for part in parts:
                part.unlink()
        return report
