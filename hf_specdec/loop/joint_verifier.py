"""Verification of rows of different requests: together where the same is done to their scores, else one by one.

Shapes: R active rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..drafts import DraftTree
from ..kernels.acceptance import Acceptance
from ..logits.captured import CapturedJudge
from ..logits.randomness import RowUniforms
from ..logits.rules import StandardRule
from ..logits.verifier import Verdict, Verifier
from ..transfers import upload, widened


if TYPE_CHECKING:
    from .joint import JointStop, Row


# Judges that are kept for rows to come.
_MOST_JUDGES = 64


class Judge:
    """Judges rows to whose scores the same is done.

    Args:
        verifier (`Verifier`): Of all of them.
        is_alone (`bool`): It is that of one row, which it knows as number 0.
    """

    def __init__(self, verifier: Verifier, is_alone: bool):
        self.verifier: Verifier = verifier
        self._is_alone = is_alone

    def verify(
        self,
        draft: DraftTree,
        logits: torch.Tensor,
        rows: list[int],
        positions: list[int],
        meanwhile: Callable[[Acceptance | None], None] | None = None,
        *known: Any,
    ) -> Verdict:
        return self.verifier.verify(draft, logits, [0] if self._is_alone else rows, positions, meanwhile, *known)


class JointVerifier:
    """Judges the drafts of all rows, each as its request wants it. An error of a request is that row's alone.

    Args:
        table (`list[Row | None]`): The rows by their number.
        stop (`JointStop`): Their stopping rules.
        make_rule (`Callable`): The acceptance rule for some random numbers, or for `None`.
        uniforms (`RowUniforms`): Those of the rows, by their number.
        rule (`StandardRule`): The rule of requests that are as most of them.
    """

    reads_drafts = False

    def __init__(
        self,
        table: list[Row | None],
        stop: JointStop,
        make_rule: Callable[[RowUniforms | None], StandardRule],
        uniforms: RowUniforms,
        rule: StandardRule,
    ):
        self.rule = rule
        self._table, self._stop, self._make_rule, self._uniforms = table, stop, make_rule, uniforms
        self._shared: dict[tuple, Judge] = {}

    def enter(self, row: Row, number: int) -> None:
        """A row gets this number in the table.

        Raises:
            SpecConfigError: The acceptance rule cannot do what the request wants.
        """
        self._uniforms.name(number, row.seed, row.number)
        if row.signature is None:
            uniforms = None
            if row.samples:
                uniforms = RowUniforms(row.seed, self._uniforms.device)
                uniforms.name(0, row.seed, row.number)
            row.judge = Judge(Verifier(row.stack, row.stop, self._make_rule(uniforms)), is_alone=True)
        else:
            key = row.samples, row.signature
            if key not in self._shared:
                if len(self._shared) >= _MOST_JUDGES:
                    self._shared.clear()
                rule = self._make_rule(self._uniforms if row.samples else None)
                self._shared[key] = Judge(Verifier(row.stack, self._stop, rule), is_alone=False)
            row.judge = self._shared[key]
        self._table[number] = row

    def verify(
        self,
        draft: DraftTree,
        logits: torch.Tensor,
        rows: list[int],
        positions: list[int],
        meanwhile: Callable[[Acceptance | None], None] | None = None,
        *known: Any,
    ) -> Verdict:
        """Judges drafts; the arguments are those of [`Verifier.verify`]."""
        groups = self._groups(rows)
        if len(groups) == 1:
            return self._judged(draft, logits, rows, positions, meanwhile, *known)
        if meanwhile is not None:
            meanwhile(None)
        return self._in_parts(groups, draft, logits, rows, positions)

    def in_a_graph(self, draft: DraftTree, rows: list[int], positions: list[int]) -> CapturedJudge | None:
        """As [`Verifier.in_a_graph`], where all rows have one judge."""
        judge = self._table[rows[0]].judge if len(self._groups(rows)) == 1 else None
        return judge and judge.verifier.in_a_graph(draft, rows, positions)

    def _groups(self, rows: list[int]) -> list[list[int]]:
        """Places of the rows that have the same judge."""
        groups: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(id(self._table[row].judge), []).append(index)
        return list(groups.values())

    def _judged(self, draft, logits, rows, positions, meanwhile=None, *known: Any) -> Verdict:
        """Judges rows with one judge, and one by one where that fails."""
        lengths = [self._table[row].length for row in rows]
        try:
            return self._table[rows[0]].judge.verify(draft, logits, rows, positions, meanwhile, *known)
        except Exception as error:  # noqa: BLE001 - of any kind: the user's processors raise what they like
            if len(rows) > 1 and lengths == [self._table[row].length for row in rows]:
                return self._in_parts([[index] for index in range(len(rows))], draft, logits, rows, positions)
            for row in rows:
                # What has failed before is the cause.
                self._table[row].error = self._table[row].error or error
            nodes = torch.zeros((len(rows), 1), dtype=torch.long, device=logits.device)
            return Verdict([[0] for _ in rows], [1] * len(rows), [0] * len(rows), nodes, nodes)

    def _in_parts(self, parts: list[list[int]], draft, logits, rows, positions) -> Verdict:
        verdicts = []
        for part in parts:
            some = logits.index_select(0, upload(part, logits.device))
            chosen = ([values[index] for index in part] for values in (rows, positions))
            verdicts.append(self._judged(draft.of_rows(part), some, *chosen))
        width = max(verdict.path.shape[1] for verdict in verdicts)
        order = [index for part in parts for index in part]
        back = sorted(range(len(order)), key=order.__getitem__)
        lists = ("token_lists", "counts", "num_accepted")
        found = {name: [value for verdict in verdicts for value in getattr(verdict, name)] for name in lists}
        tensors = {
            name: torch.cat([widened(getattr(v, name), width) for v in verdicts]) for name in ("path", "tokens")
        }
        index = upload(back, logits.device)
        return Verdict(
            **{name: [values[place] for place in back] for name, values in found.items()},
            **{name: values.index_select(0, index) for name, values in tensors.items()},
        )
