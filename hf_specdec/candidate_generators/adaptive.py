"""A candidate generator whose drafts have lengths chosen from cycle to cycle: between the loop and a method's own.

The loop and the method know nothing of it. It asks for each row's limit whatever chooses, a controller that learns or
a rule by the number of rows, and hands the limits on as the room that the rows have. Where nothing is to be drafted
the method is not asked and not told: the prompt and what is committed meanwhile are kept, and handed over when it
drafts. So a cycle without drafts costs what plain decoding in the loop costs, and a drafter that is known to be
useless does not even read the prompt.
"""

from __future__ import annotations

from dataclasses import replace

from transformers.utils import logging

from ..control.clock import CycleClock
from ..control.controller import SpeculationController
from ..control.outcome import RowOutcome
from ..control.schedule import ScheduledLength
from ..drafting.defer import UnreadText
from ..drafts import DraftTree
from ..protocol import Commit, DraftStep, Lookups, Prompt
from .base import CandidateGenerator


logger = logging.get_logger(__name__)

# Commits that are kept at most while nothing is drafted; some hold states of the target.
_MOST_HELD = 256


class AdaptiveCandidateGenerator(CandidateGenerator):
    """Drives a method's candidate generator.

    Args:
        generator (`CandidateGenerator`): The method's, for this call.
        controller (`SpeculationController` or `ScheduledLength`): Chooses the lengths.
    """

    def __init__(self, generator: CandidateGenerator, controller: SpeculationController | ScheduledLength):
        self.generator, self.controller = generator, controller
        self.session, self.config = generator.session, generator.config
        self.num_speculative_tokens = generator.num_speculative_tokens
        self.target_hidden_states = generator.target_hidden_states
        self.samples_drafts = generator.samples_drafts
        self._clock, self._reading_clock = CycleClock(self.session.device), CycleClock(self.session.device)
        self._unread = UnreadText(generator)
        self._num_read = 0
        self._left = [self.session.max_length] * self.session.batch_size  # tokens that each row may still get
        self._draft: DraftTree | None = None  # of this cycle, if the method was asked for one
        self._drafted: DraftTree | None = None  # the same before it was cut
        self._limits: list[int] = []

    @property
    def longest_row(self) -> tuple[int, str] | None:
        return self.generator.longest_row

    @property
    def lookups(self) -> Lookups | None:
        return self.generator.lookups

    @property
    def num_draft_nodes(self) -> int:
        return self.generator.num_draft_nodes

    def prefill(self, prompt: Prompt) -> None:
        self._unread.begin(prompt)
        self._left = [left - prompt.input_ids.shape[1] for left in self._left]

    def propose(self, step: DraftStep) -> DraftTree:
        self._clock.begin()
        left = [max(self._left[row], 1) for row in step.rows]
        limits = self.controller.limits(step.rows, self._unread.num_tokens, left)
        self._limits = self.session.agreed(list(map(min, limits, step.max_draft_tokens)))
        if max(self._limits) <= 0:
            self._draft = None
            return DraftTree.empty(len(step.rows), self.session.device, why=self.controller.why_none)
        self._num_read = self._unread.num_tokens
        if self._num_read:
            self._reading_clock.begin()
            self._unread.hand_over()
            self._reading_clock.drafted()
            self._clock.begin()
        self._drafted = self._draft = self.generator.propose(replace(step, max_draft_tokens=self._limits))
        if self.controller.tree_size is not None:
            self._draft = self.controller.tree_size.cut(self._drafted, max(self._limits), self.session.agreed)
        self._clock.drafted()
        return self._draft

    def observe(self, commit: Commit) -> None:
        for row, count in zip(commit.rows, commit.counts):
            self._left[row] -= count
        if self._draft is None:
            if self.controller.num_cycles:
                self._count(commit, 0.0)
            self._unread.add(commit)
            if self._unread.num_commits >= _MOST_HELD:
                self._unread.hand_over()
            return
        began = self._clock.now()
        self.generator.observe(commit)
        self._count(commit, self._clock.now() - began)

    def _count(self, commit: Commit, observing: float) -> None:
        draft_seconds, verify_seconds = self._clock.end()
        num_nodes, depths = 0, [0] * len(commit.rows)
        if self._draft is not None:
            assert draft_seconds is not None, "the draft was not timed"
            # Observing is a part of drafting.
            draft_seconds, verify_seconds = draft_seconds + observing, verify_seconds - observing
            num_nodes, depths = self._draft.size, self._drafted_depths()
            if self.controller.tree_size is not None:
                self.controller.tree_size.observe(self._draft, commit.num_accepted)
        outcomes = list(map(RowOutcome, commit.rows, self._limits, depths, commit.num_accepted, commit.counts))
        reading = (self._num_read, self._reading_clock.end()[0]) if self._num_read else None
        self._num_read = 0
        num_drafted = 0 if self._draft is None else self._drafted.size
        self.controller.observe(outcomes, num_nodes, draft_seconds, verify_seconds, reading, num_drafted)

    def _drafted_depths(self) -> list[int]:
        """Depth to which the drafter went in each row, which is what it took, however few of the nodes are left."""
        if self._drafted is self._draft or self.session.device.type == "cpu":
            return self._drafted.max_depths()
        # Asking a GPU would be a wait of its own.
        return self._limits

    def keep_rows(self, keep: list[int]) -> None:
        self._unread.keep_rows(keep)

    def close(self) -> None:
        self.generator.close()
        self._unread.clear()
        if self.controller.num_cycles:
            note = self.controller.close()
            self.session.notes.append(note)
            logger.info(f"{note}.")
