"""Requests from a file of JSON lines, answered by one process or several, each of which takes its share.

Every process keeps a journal beside the output, `OUTPUT.part-RANK`. When all have ended, the first one merges them.
"""

from __future__ import annotations

import glob
import json
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..errors import SpecConfigError, shown
from ..prompts import json_records
from ..reading import read_text
from .journal import Journal, read_entries


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
