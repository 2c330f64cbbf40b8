"""What is launched before the host knows a cycle's verdict.

On a GPU a cycle waits once, for the verdict. Before it waits, the next draft is launched, where that needs nothing but
tensors of the device, and for a single row the verification of that draft, too. The host reads a cycle late then; a
launch that turns out to be for nothing, as at the end of a text, is dropped.

Shapes: R active rows, M most committed tokens of a row.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from ..drafts import DraftTree
from ..metrics import SpecDecodingStats
from ..protocol import DeviceCommit, DraftStep, Session
from ..target.forward import SlotOutput
from ..target.graphed import verify_ahead
from ..target.model import SlotModel
from ..transfers import last_of_each, take_nodes
from .cycle import Cycle, Pending
from .judging import Judging
from .observers import Observers
from .rows import Rows


if TYPE_CHECKING:
    from ..candidate_generators.base import CandidateGenerator


@dataclass(eq=False)
class Ahead:
    """Launches of a loop that are ahead of its host."""

    rows: Rows
    drafter: CandidateGenerator
    target: SlotModel
    judging: Judging
    session: Session
    stats: SpecDecodingStats
    observers: Observers
    # The cycle during which launches were made, for its rows.
    _cycle: Cycle | None = None
    # The draft whose verification was launched, and how many graphs of drafts had run by then.
    _verified: tuple[DraftTree, int] | None = None

    def __post_init__(self) -> None:
        self.observers.wait = True

    def launch(self, cycle: Cycle, pending: Pending) -> None:
        """Launches the next draft and its verification, where they need no host."""
        self._cycle = cycle
        if pending.acceptance is None or not self.drafter.drafts_ahead:
            return
        began = perf_counter()
        following = self._draft(cycle, pending)
        seconds = perf_counter() - began
        self.stats.draft_seconds += seconds
        self.stats.verify_seconds -= seconds
        if following is not None:
            self._verify(cycle.output, following)

    def _draft(self, cycle: Cycle, pending: Pending) -> DraftTree | None:
        draft, output = cycle.draft, cycle.output
        rows, most, depth = self.rows, self.target.most_committed, self.drafter.num_speculative_tokens
        limit = self.drafter.longest_row
        # Near the end of a row, the depth of its draft depends on how much is accepted.
        if min(self.target.depths(rows.depths(depth, most), most)) < depth:
            return None
        if limit and max(cycle.positions) + most + depth > limit[0]:
            return None
        may_judge_again = output.may_fail and len(cycle.rows) > 1 and rows.members[0][0].fails_alone
        if may_judge_again or any(observer.reads_drafts for observer in self.observers):
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
        commit = DeviceCommit(cycle.rows, tokens, counts, anchors, states, [depth] * len(cycle.rows), is_free)
        with ExitStack() as running_ahead:
            for graphs in self.session.draft_graphs:
                running_ahead.enter_context(graphs.ahead())
            return self.drafter.draft_ahead(commit)

    def _verify(self, output: SlotOutput, following: DraftTree) -> None:
        """Launches the verification of the draft that follows the one which is being judged."""
        outcome, rows = output.outcome, self.rows
        if outcome is None or not self._is_done_with(output):
            return
        # Of several rows one ends often, and the forward of all would be for nothing.
        if len(rows.active) > 1:
            return
        ((group, index),) = rows.members
        if group.texts.lengths[index] + self.target.most_committed >= group.texts.max_length:
            return
        judge = self.judging.for_graph(following, rows.active, rows.positions)
        if judge is not None:
            anchors, counts = (outcome[name][:, 0] for name in ("anchor", "counts"))
            verify_ahead(self.target, anchors, following, judge, counts)
            self._verified = following, self._num_draft_runs

    def _is_done_with(self, output: SlotOutput) -> bool:
        """Tells whether nothing is read of a verification, once it is launched, that the next forward overwrites."""
        return output.outcome is not None and not any(observer.reads_logits for observer in self.observers)

    @property
    def _num_draft_runs(self) -> int:
        return sum(graphs.num_replays for graphs in self.session.draft_graphs)

    # What has become of them

    def propose(self, step: DraftStep) -> DraftTree:
        """The draft of a cycle: the one that was launched ahead, if it is of these rows.

        It is for nothing where rows have come or gone, or one has lost tokens of the verdict to its stopping rules.
        """
        cycle, self._cycle = self._cycle, None
        is_valid = cycle is not None and cycle.rows is self.rows.active and cycle.verdict.is_whole
        if not is_valid:
            self._forget_drafts()
        draft = self.drafter.propose(step)
        self._forget_drafts()
        if self._verified is not None:
            following, num_runs = self._verified
            # A graph that has run ahead does not run again where its output is found.
            is_same = self._num_draft_runs == num_runs and draft.node_counts == following.node_counts
            if is_valid and is_same:
                self._verified = None
            else:
                self.forget_verification()
        return draft

    def forget_verification(self) -> None:
        """Lets the next verification be one of its own; one that has run for nothing is counted."""
        if self._verified is not None:
            self._verified = None
            self.stats.num_target_forwards += int(self.target.graphs.forget_ahead())

    def _forget_drafts(self) -> None:
        for graphs in self.session.draft_graphs:
            graphs.forget_ahead()
