"""A candidate generator whose drafts have lengths chosen from cycle to cycle: between the loop and a method's own.

The loop and the method know nothing of it. It asks for each row's limit whatever chooses, a controller that learns or
a rule by the number of rows, and hands the limits on as the room that the rows have. Where nothing is to be drafted
the method is not asked and not told: the prompt and what is committed meanwhile are kept, and handed over when it
drafts. So a cycle without drafts costs what plain decoding in the loop costs, and a drafter that is known to be
useless does not even read the prompt.

Where the next draft is launched before the verdict on the one before is read, its limits are chosen before it, too.
"""

from __future__ import annotations

from dataclasses import replace

from ..control.clock import CycleClock
from ..control.controller import ScheduledLength, SpeculationController
from ..control.rates import RowOutcome
from ..drafting.defer import UnreadText
from ..drafts import DraftTree
from ..protocol import Commit, DeviceCommit, DraftStep, Prompt
from .base import CandidateGenerator, Wrapper


# Commits that are kept at most while nothing is drafted; some hold states of the target.
_MOST_HELD = 256


class AdaptiveCandidateGenerator(Wrapper):
    """Drives a method's candidate generator in one call, with lengths that a controller or a schedule chooses."""

    def __init__(self, generator: CandidateGenerator, controller: SpeculationController | ScheduledLength):
        self.generator = generator
        self.controller = controller
        self._unread = UnreadText(generator)
        super().__init__(generator.config, generator.session, (generator,), (self._unread,))
        self._clock = CycleClock(self.session.device)
        self._num_read = 0
        self._left = [self.session.max_length] * self.session.batch_size  # tokens that each row may still get
        self._draft: DraftTree | None = None  # of this cycle, if the method was asked for one
        self._drafted: DraftTree | None = None  # the same before it was cut
        self._limits: list[int] = []
        self._is_resting = False
        self._cuts_drafts: bool = controller.sizes is not None  # to what pays
        self._is_rated = False  # the draft of this cycle is cut by what its drafter says of it
        self._ahead: tuple[list[int], list[int]] = [], []  # rows of the next cycle, and their limits
        self._longest: list[int] = []  # the largest limit of each cycle

    def prefill(self, prompt: Prompt) -> None:
        super().prefill(prompt)
        self._left = [left - prompt.input_ids.shape[1] for left in self._left]
        target = self.session.target
        if target is not None and target.graphs is not None and target.graphs.pads_drafts:
            # Graphs take the same time for any number of nodes.
            self._cuts_drafts = False

    def propose(self, step: DraftStep) -> DraftTree:
        self._clock.begin()
        (rows, limits), self._ahead = self._ahead, ([], [])
        if rows != step.rows:
            if rows:
                self.controller.take_back()
            left = [max(self._left[row], 1) for row in step.rows]
            limits = self.controller.limits(step.rows, self._unread.num_tokens, left)
            limits = limits if self.session.group is None else self.session.agreed(limits)
        self._is_resting = self.controller.is_resting
        self._longest.append(max(limits))
        self._limits = list(map(min, limits, step.max_draft_tokens))
        if max(self._limits) <= 0:
            self._draft = None
            return DraftTree.empty(len(step.rows), self.session.device, why=self.controller.why_none)
        self._num_read = self._unread.num_tokens
        if self._num_read:
            self._unread.hand_over()
            self._clock.mark()
        limited = replace(step, max_draft_tokens=self._limits, depth=max(limits))
        self._drafted = self._draft = self.generator.propose(limited)
        # Other chains have no ratings to be cut by.
        self._is_rated = self._cuts_drafts and (self._draft.path_log_probs is not None or not self._draft.is_chain)
        if self._is_rated:
            self._draft = self.controller.sizes.cut(self._drafted, max(self._limits), self.session.agreed)
            if self._drafted.is_chain:
                # As if the drafter had ended it.
                self._drafted = self._draft
        self._clock.mark()
        return self._draft

    @property
    def drafts_ahead(self) -> bool:
        if self.session.group is not None:
            # Processes that decide together wait for each other.
            return False
        return self.session.target.graphs is not None if self._draft is None else self.generator.drafts_ahead

    def draft_ahead(self, commit: DeviceCommit) -> DraftTree | None:
        left = [max(self._left[row], 1) for row in commit.rows]
        limits = self.controller.limits(commit.rows, self._unread.num_tokens, left)
        self._ahead = list(commit.rows), limits
        if max(limits) <= 0:
            return DraftTree.empty(len(commit.rows), self.session.device)
        if self._draft is None:
            # The method is told first of what it has missed.
            return None
        with self._clock.ahead():
            draft = self.generator.draft_ahead(replace(commit, max_draft_tokens=limits))
        return None if self._cuts_drafts else draft

    def observe(self, commit: Commit) -> None:
        for row, count in zip(commit.rows, commit.counts):
            self._left[row] -= count
        observing = 0.0
        if self._draft is not None:
            began = self._clock.now()
            self.generator.observe(commit)
            observing = self._clock.now() - began
        # The first commit comes in front of all cycles.
        if self._longest and not self._is_resting:
            times = self._clock.end()
            num_nodes, num_drafted, depths = 0, 0, [0] * len(commit.rows)
            if self._draft is not None:
                assert times.draft is not None, "the draft was not timed"
                # Observing is a part of drafting.
                times.draft, times.rest = times.draft + observing, times.rest - observing
                num_nodes, num_drafted = self._draft.size, self._drafted.size
                # It took as long as the drafter went deep, however few nodes are left. Asking a GPU would be a wait.
                is_known = self._drafted is self._draft or self.session.device.type == "cpu"
                depths = self._drafted.max_depths() if is_known else self._limits
                if self._is_rated:
                    self.controller.sizes.observe(self._draft, commit.num_accepted)
            outcomes = list(map(RowOutcome, commit.rows, self._limits, depths, commit.num_accepted, commit.counts))
            reading = None if times.reading is None else (self._num_read, times.reading)
            if times.draft is not None and self.generator.late_reading is not None:
                num_late, seconds = self.generator.late_reading
                times.draft -= seconds
                reading = (self._num_read + num_late, (times.reading or 0.0) + seconds)
            self.controller.observe(outcomes, num_nodes, times.draft, times.rest, reading, num_drafted)
        if self._draft is None:
            self._unread.observe(commit)
            if len(self._unread.commits) >= _MOST_HELD:
                self._unread.hand_over()

    def join(self, other: AdaptiveCandidateGenerator, numbers: dict[int, int]) -> None:
        self.controller.join(list(numbers.values()))
        for theirs, number in numbers.items():
            self._left[number] = other._left[theirs]
        super().join(other, numbers)

    def close(self) -> None:
        super().close()
        if self._longest:
            self.controller.close()
            self.note(
                f"{self.controller.kind}: at most {sum(self._longest) / len(self._longest):.1f} draft tokens a cycle "
                f"on average, {self._longest.count(0)} of {len(self._longest)} cycles without drafts"
            )
