"""What is launched before the host knows a cycle's verdict, and what is done while the device works on it.

On a GPU a cycle waits once, for the verdict. Before it waits, the next draft is launched, where that needs nothing but
tensors of the device, and for a single row the verification of that draft, too. The host reads a cycle late then; a
launch that turns out to be for nothing, as at the end of a text, is dropped.

Shapes: R active rows, M most committed tokens of a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from ..drafts import DraftTree
from ..metrics import SpecDecodingStats
from ..protocol import DeviceCommit, DraftStep, Session
from ..target.forward import SlotOutput
from ..target.model import SlotModel
from ..transfers import last_of_each, take_nodes
from .judging import Judging
from .observers import Observer
from .rows import Rows
from .verdict import Pending, Verdict


if TYPE_CHECKING:
    from ..candidate_generators.base import CandidateGenerator


class Ahead:
    """Launches of a loop that are ahead of its host, and work of the host that is put off until the device is busy."""

    def __init__(
        self,
        rows: Rows,
        drafter: CandidateGenerator,
        target: SlotModel,
        judging: Judging,
        session: Session,
        stats: SpecDecodingStats,
        observers: list[Observer],
    ):
        self._rows, self._drafter, self._target, self._judging = rows, drafter, target, judging
        self._session, self._stats, self._observers = session, stats, observers
        self._is_async: bool = is_async(session.device)
        self._waiting: deque[Callable[[], None]] = deque()
        # Whether the rows are those that the launches were made for.
        self._is_valid: bool = True
        # The draft whose verification was launched, and how many graphs of drafts had run by then.
        self._verified: tuple[DraftTree, int] | None = None

    # Work of the host

    def later(self, work: Callable[[], None]) -> None:
        """Puts work off until the device is busy; on a CPU, which has nothing to overlap with, it is done at once."""
        if self._is_async:
            self._waiting.append(work)
        else:
            work()

    def flush(self) -> None:
        """Does what has been put off, in the order in which it came."""
        while self._waiting:
            self._waiting.popleft()()

    # Launches of the device

    def launch(self, step: DraftStep, draft: DraftTree, output: SlotOutput, pending: Pending) -> None:
        """Launches the next draft and its verification where they need no host, and does what was put off."""
        if not (self._is_async or self._session.draft_graphs or self._target.graphs is not None):
            return
        if pending.acceptance is not None and self._drafter.drafts_ahead:
            began = perf_counter()
            following = self._draft(step, draft, output, pending)
            seconds = perf_counter() - began
            self._stats.draft_seconds += seconds
            self._stats.verify_seconds -= seconds
            if following is not None:
                self._verify(output, following)
        self.flush()

    def _draft(self, step: DraftStep, draft: DraftTree, output: SlotOutput, pending: Pending) -> DraftTree | None:
        rows, most, depth = self._rows, self._target.most_committed, self._drafter.num_speculative_tokens
        limit = self._drafter.longest_row
        # Near the end of a row, the depth of its draft depends on how much is accepted.
        if min(self._target.depths(rows.depths(depth, most), most)) < depth:
            return None
        if limit and max(step.lengths) + most + depth > limit[0]:
            return None
        may_judge_again = output.may_fail and len(step.rows) > 1 and rows.group(step.rows[0]).fails_alone
        if may_judge_again or any(observer.reads_drafts for observer in self._observers):
            # The draft's own memory is written again.
            draft.tokens, draft.parents = draft.tokens.clone(), draft.parents.clone()
            draft.num_nodes = draft.num_nodes.clone()
            draft.probs = None if draft.probs is None else draft.probs.clone()
        if output.outcome is None:
            assert pending.acceptance is not None, "a draft that the device has not judged"
            path, tokens = pending.acceptance.path[:, :most], pending.acceptance.tokens[:, :most]
            # Where nothing could be drawn, the verdict will be an error, and no token may be read that there is not.
            counts, tokens = pending.acceptance.num_accepted + 1, tokens.clamp(min=0)
            anchors = last_of_each(tokens, counts)
            states = {key: take_nodes(value, path) for key, value in output.hidden_states.items()}
        else:
            tokens, states = output.outcome["readable"], output.hidden_states
            counts, anchors = (output.outcome[name][:, 0] for name in ("counts", "anchor"))
        is_free = self._is_done_with(output) and not may_judge_again
        commit = DeviceCommit(step.rows, tokens, counts, anchors, states, [depth] * len(step.rows), is_free)
        with ExitStack() as running_ahead:
            for graphs in self._session.draft_graphs:
                running_ahead.enter_context(graphs.ahead())
            return self._drafter.draft_ahead(commit)

    def _verify(self, output: SlotOutput, following: DraftTree) -> None:
        """Launches the verification of the draft that follows the one which is being judged."""
        outcome, rows = output.outcome, self._rows
        if outcome is None or not self._is_done_with(output):
            return
        # Of several rows one ends often, and the forward of all would be for nothing.
        if len(rows.active) > 1 or rows.may_end_within(self._target.most_committed):
            return
        judge = self._judging.for_graph(following, rows.active, rows.positions)
        if judge is not None:
            self._target.verify_ahead(outcome["anchor"][:, 0], following, judge, outcome["counts"][:, 0])
            self._verified = following, self._num_draft_runs

    def _is_done_with(self, output: SlotOutput) -> bool:
        """Tells whether nothing is read of a verification, once it is launched, that the next forward overwrites."""
        return output.outcome is not None and not any(observer.reads_logits for observer in self._observers)

    @property
    def _num_draft_runs(self) -> int:
        return sum(graphs.num_replays for graphs in self._session.draft_graphs)

    # What has become of them

    def propose(self, step: DraftStep) -> DraftTree:
        """The draft of a cycle: the one that was launched ahead, if it is of these rows."""
        if not self._is_valid:
            self._forget_drafts()
        draft = self._drafter.propose(step)
        self._forget_drafts()
        if self._verified is not None:
            following, num_runs = self._verified
            # A graph that has run ahead does not run again where its output is found.
            is_same = self._num_draft_runs == num_runs and draft.node_counts == following.node_counts
            if self._is_valid and is_same:
                self._verified = None
            else:
                self.forget_verification()
        self._is_valid = True
        return draft

    def check(self, output: SlotOutput, verdict: Verdict) -> None:
        """Drops what was launched for a row that has lost tokens of the verdict, to its stopping rules."""
        if (self._session.draft_graphs or output.outcome is not None) and not verdict.is_whole:
            self.drop()

    def drop(self) -> None:
        """Rows have joined or left: what was launched for those before is not used."""
        self._is_valid = False

    def forget_verification(self) -> None:
        """Lets the next verification be one of its own; one that has run for nothing is counted."""
        if self._verified is not None:
            self._verified = None
            self._stats.num_target_forwards += int(self._target.graphs.forget_ahead())

    def _forget_drafts(self) -> None:
        for graphs in self._session.draft_graphs:
            graphs.forget_ahead()


def is_async(device: torch.device) -> bool:
    """Tells whether a forward goes on after its call has returned."""
    return device.type != "cpu"
