"""Judging of rows that came with requests of their own, where an error ends one of them and not all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..kernels.acceptance import Acceptance
from .cycle import Cycle, Pending, Verdict
from .rows import Rows


if TYPE_CHECKING:
    from .judging import Verifier


def by_verifier(rows: Rows, numbers: list[int]) -> dict[Verifier, list[int]]:
    """The verifiers of rows, by number, each with the places of its rows in the batch."""
    parts: dict[Verifier, list[int]] = {}
    for place, number in enumerate(numbers):
        parts.setdefault(rows.group(number).verifier, []).append(place)
    return parts


class PendingRequests:
    """Rows of groups that fail alone: judged together where one verifier can, and one by one after an error."""

    def __init__(self, rows: Rows, cycle: Cycle):
        self._rows, self._cycle = rows, cycle
        self._lengths: list[int] = self._text_lengths()
        self._parts = by_verifier(rows, cycle.rows)
        self._pending: Pending | None = None
        self._error: Exception | None = None
        self.acceptance: Acceptance | None = None
        if len(self._parts) == 1:
            try:
                (verifier,) = self._parts
                self._pending = verifier.begin(cycle)
                self.acceptance = self._pending.acceptance
            except Exception as error:  # noqa: BLE001 - of any kind: the user's processors raise what they like
                self._error = error

    def wait(self) -> Verdict:
        if len(self._parts) > 1:
            return self._in_parts(list(self._parts.values()))
        try:
            if self._pending is not None:
                return self._pending.wait()
        except Exception as error:  # noqa: BLE001 - as above
            self._error = error
        count = len(self._cycle.rows)
        if count > 1 and self._lengths == self._text_lengths():
            return self._in_parts([[place] for place in range(count)])
        # Of a single row the error is its own.
        for row in self._cycle.rows:
            self._rows.group(row).fail(self._error)
        nodes = torch.zeros((count, 1), dtype=torch.long, device=self._cycle.output.logits.device)
        return Verdict([[0] for _ in range(count)], [1] * count, [0] * count, nodes, nodes)

    def _text_lengths(self) -> list[int]:
        return [group.texts.lengths[index] for group, index in map(self._rows.at, self._cycle.rows)]

    def _in_parts(self, parts: list[list[int]]) -> Verdict:
        """Judges these places of the batch one part after the other."""
        verdicts = [PendingRequests(self._rows, self._cycle.of_rows(part)).wait() for part in parts]
        return Verdict.side_by_side(verdicts, [place for part in parts for place in part])
