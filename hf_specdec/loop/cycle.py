"""One cycle of the loop: what was drafted, what the target made of it, and what is committed.

Shapes: R active rows, N draft nodes, T = N + 1 verified nodes, M most committed tokens of a row, K best tokens after a
node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..drafts import DraftTree
from ..errors import SpecConfigError, SpecDecError
from ..kernels.acceptance import Acceptance
from ..protocol import Commit, DraftStep, VerifiedNodes
from ..target.forward import SlotOutput
from ..transfers import last_of_each, select_rows, take_nodes, upload, widened


@dataclass
class Verdict:
    """Outcome of one verification."""

    token_lists: list[list[int]]  # committed tokens of each row, cut where the row ends
    counts: list[int]  # how many these are
    num_accepted: list[int]  # draft tokens among them
    # Verified nodes `(R, M)` that the tokens were predicted from, the anchor first, and the committed tokens `(R, M)`;
    # from a row's number of tokens on both are padding.
    path: torch.LongTensor
    tokens: torch.LongTensor
    # `(R, T, 1 + K)` of `with_successors`, on the host, if they came with the verdict; nodes of padding may follow.
    successors: torch.LongTensor | None = None

    @property
    def is_whole(self) -> bool:
        """Tells whether every row keeps the target's own token after what it has accepted: none was cut."""
        return all(count > accepted for count, accepted in zip(self.counts, self.num_accepted))

    @classmethod
    def side_by_side(cls, verdicts: list[Verdict], places: list[int]) -> Verdict:
        """Joins verdicts on different rows, which stand at these places of the batch."""
        order = sorted(range(len(places)), key=places.__getitem__)
        width = max(verdict.path.shape[1] for verdict in verdicts)

        def values(name: str) -> list[Any]:
            joined = [value for verdict in verdicts for value in getattr(verdict, name)]
            return [joined[row] for row in order]

        def tensor(name: str) -> torch.LongTensor:
            return select_rows(torch.cat([widened(getattr(verdict, name), width) for verdict in verdicts]), order)

        return cls(values("token_lists"), values("counts"), values("num_accepted"), tensor("path"), tensor("tokens"))


class Pending(Protocol):
    """A verification that is being judged, and of which criteria have seen nothing yet.

    `acceptance` is what is accepted, where the device knows it before the host does. `wait` is called once.
    """

    acceptance: Acceptance | None

    def wait(self) -> Verdict: ...


@dataclass
class Cycle:
    """Drafts of the active rows, their verification, and once it is judged the verdict."""

    rows: list[int]
    positions: list[int]  # of the first tokens to commit, masked ones not counted
    draft: DraftTree
    output: SlotOutput
    rooms: list[int] = field(default_factory=list)  # largest depths of the rows' drafts
    verdict: Verdict | None = None
    is_first: bool = False  # of these rows: it has the tokens after the prompts

    def of_rows(self, places: list[int]) -> Cycle:
        """The drafts at these places of the batch, which are to be judged by themselves."""
        logits = self.output.logits.index_select(0, upload(places, self.output.logits.device))
        rows, positions = ([values[place] for place in places] for values in (self.rows, self.positions))
        return Cycle(rows, positions, self.draft.of_rows(places), SlotOutput(logits))

    def commit(self) -> tuple[torch.LongTensor, Commit]:
        """The last token of each row, `(R,)`, and what the drafter is told."""
        verdict, output = self.verdict, self.output
        if output.outcome is None:
            states = {key: take_nodes(value, verdict.path) for key, value in output.hidden_states.items()}
        else:
            # A graph has taken them along the path.
            states = {key: value[:, : verdict.path.shape[1]] for key, value in output.hidden_states.items()}
        if output.outcome is not None and verdict.is_whole:
            anchors = output.outcome["anchor"][:, 0]
        else:
            anchors = last_of_each(verdict.tokens, verdict.counts)
        return anchors, Commit(self.rows, verdict.tokens, verdict.token_lists, verdict.num_accepted, states)

    def verified_nodes(self) -> VerifiedNodes:
        """The best tokens after all nodes; those of drafts that were judged in parts are read from the device here."""
        successors = self.output.successors.cpu() if self.verdict.successors is None else self.verdict.successors
        tokens = [row[: count + 1] for row, count in zip(successors[..., 0].tolist(), self.draft.counts())]
        return VerifiedNodes(tokens, successors[..., 1:])


def no_draft_error(drafter: Any, step: DraftStep, draft: Any) -> SpecConfigError:
    """The error of a drafter that has not returned a tree for each row of the step."""
    what = f"one of {draft.batch_size}" if isinstance(draft, DraftTree) else f"a {type(draft).__name__}"
    return SpecConfigError(
        f"{type(drafter).__name__}.propose() must return a DraftTree of {len(step.rows)} rows, those of `step.rows`, "
        f"and has returned {what}. Give rows without a draft an empty one."
    )


def no_token_error() -> SpecDecError:
    return SpecDecError(
        "The target's scores have no token to draw: they hold NaN, or processors left no token possible. Check the "
        "logits processors, and the model's dtype for overflow."
    )
