"""Two methods in one, "suffix+eagle3": where the text repeats the first drafts, elsewhere the second.

Retrieval (`ngram`, `suffix`) drafts long where a text repeats and nothing elsewhere, a drafter with weights a few
tokens everywhere. Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975), combine the two by the score of the
retrieved draft: its expected number of accepted tokens. So does this module, for each row and cycle; see
[`~candidate_generators.combined.policy`].

Shapes: B active rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...control.clock import CycleClock
from ...drafting.defer import UnreadText
from ...drafts import DraftTree
from ...protocol import Commit, DraftStep, Lookups, Prompt, Session
from ..base import CandidateGenerator
from .merge import merged
from .policy import DrafterChoice, Experience


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig


# Tokens of all rows together that are held at most, with their states, until the second drafter is asked.
_MOST_UNREAD_TOKENS = 4096


class CombinedCandidateGenerator(CandidateGenerator):
    """Asks two candidate generators.

    Args:
        config (`SpeculativeConfig`): The settings of the combination.
        session (`Session`): The call.
        retrieval, model (`CandidateGenerator`): The parts, for this call.
        experience (`Experience`): Of earlier calls; it gets that of this one when it is closed.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        session: Session,
        retrieval: CandidateGenerator,
        model: CandidateGenerator,
        experience: Experience,
    ):
        self.config, self.options, self.session = config, config.options, session
        self.retrieval, self.model = retrieval, model
        self.num_speculative_tokens = max(self.retrieval.num_speculative_tokens, self.model.num_speculative_tokens)
        self.target_hidden_states = self.model.target_hidden_states
        self.samples_drafts = self.model.samples_drafts
        self.experience = experience
        self.choice = DrafterChoice(
            experience, session.batch_size, model.num_speculative_tokens, model.num_draft_nodes
        )
        self._clock = CycleClock(session.device)
        self._unread = UnreadText(self.model)
        self._cycle: _Cycle | None = None
        self._num_drafts, self._num_accepted = [0, 0], [0, 0]  # of the parts

    @property
    def longest_row(self) -> tuple[int, str] | None:
        limits = [part.longest_row for part in (self.retrieval, self.model)]
        return None if None in limits else max(limits)

    @property
    def lookups(self) -> Lookups | None:
        return self.retrieval.lookups

    @property
    def num_draft_nodes(self) -> int:
        return max(self.retrieval.num_draft_nodes, self.model.num_draft_nodes)

    def prefill(self, prompt: Prompt) -> None:
        self.retrieval.prefill(prompt)
        self._unread.begin(prompt)
        self._bound_unread(len(prompt.starts))

    def _bound_unread(self, num_rows: int) -> None:
        """Lets the second drafter read where too many states would be held for it."""
        if self.model.target_hidden_states and self._unread.num_columns * num_rows > _MOST_UNREAD_TOKENS:
            self._unread.hand_over()

    def propose(self, step: DraftStep) -> DraftTree:
        retrieved = self.retrieval.propose(step)
        cycle = self._cycle = _Cycle(retrieved, self.retrieval.acceptance_probs, step.max_draft_tokens)
        lengths = self.model.draft_depths(step)
        cycle.num_unread = self._unread.num_columns
        asked = self.choice.asks(step.rows, cycle.acceptance_probs, retrieved.size, lengths, cycle.num_unread)
        cycle.asked = list(map(bool, self.session.agreed(asked)))
        cycle.draft = retrieved
        self._clock.begin()
        if any(cycle.asked):
            self._unread.hand_over()
            limits = [length if is_asked else 0 for length, is_asked in zip(lengths, cycle.asked)]
            drafted = self.model.propose(replace(step, max_draft_tokens=limits))
            self._clock.drafted()
            cycle.draft = drafted if all(cycle.asked) else merged(retrieved, drafted, cycle.asked)
        return cycle.draft

    def observe(self, commit: Commit) -> None:
        self.retrieval.observe(commit)
        cycle, self._cycle = self._cycle, None
        if cycle is not None:
            self._learn(cycle, commit)
        if cycle is not None and any(cycle.asked):
            # Of a row that has verified the other draft nothing of the own one was accepted.
            accepted = [count if is_asked else 0 for count, is_asked in zip(commit.num_accepted, cycle.asked)]
            self.model.observe(replace(commit, num_accepted=accepted))
            return
        self._unread.add(commit)
        self._bound_unread(len(commit.rows))

    def _learn(self, cycle: _Cycle, commit: Commit) -> None:
        draft_seconds, verify_seconds = self._clock.end()
        self.choice.observe_cycle(
            len(commit.rows),
            cycle.draft.size + 1,
            draft_seconds,
            verify_seconds,
            cycle.num_unread,
            sum(commit.counts),
        )
        for index, (row, is_asked) in enumerate(zip(commit.rows, cycle.asked)):
            accepted, committed = commit.num_accepted[index], commit.token_lists[index]
            acceptance_probs = cycle.acceptance_probs[index]
            if acceptance_probs:
                # The tokens that a retrieved draft would have given are known also where it was not verified.
                known = acceptance_probs[: len(committed)] if is_asked else acceptance_probs
                self.choice.observe_retrieved(row, known, cycle.num_agreeing(index, committed))
            if is_asked:
                self.choice.observe_drafted(
                    accepted, accepted == cycle.rooms[index] < self.model.num_speculative_tokens
                )
            if is_asked or acceptance_probs:
                self._num_drafts[is_asked] += 1
                self._num_accepted[is_asked] += accepted

    def keep_rows(self, keep: list[int]) -> None:
        self.retrieval.keep_rows(keep)
        self._unread.keep_rows(keep)

    def close(self) -> None:
        try:
            self.retrieval.close()
        finally:
            self.model.close()
        self._unread.clear()
        self._cycle = None
        self.choice.leave_to(self.experience)
        self.session.notes += [
            f"{method}: {num_accepted} tokens accepted from {num_drafts} drafts"
            for method, num_drafts, num_accepted in zip(self.options.methods, self._num_drafts, self._num_accepted)
        ]


@dataclass
class _Cycle:
    """The drafts of one cycle.

    Attributes:
        retrieved (`DraftTree`): Drafts of the first drafter.
        acceptance_probs (`list[list[float]]`): Its estimates for them.
        rooms (`list[int]`): Largest depth of each row's draft.
        asked (`list[bool]`): The rows whose draft is the second drafter's.
        draft (`DraftTree`): The drafts that are verified.
        num_unread (`int`): Tokens of a row that the second drafter had not been told of.
    """

    retrieved: DraftTree
    acceptance_probs: list[list[float]]
    rooms: list[int]
    asked: list[bool] = field(default_factory=list)
    draft: DraftTree | None = None
    num_unread: int = 0

    def num_agreeing(self, index: int, committed: list[int]) -> int:
        """Number of committed tokens that the retrieved draft of a row has on one path."""
        drafted = self.retrieved.token_lists()[index]
        if self.retrieved.is_chain:
            most = min(len(drafted), len(committed))
            return next((count for count in range(most) if drafted[count] != committed[count]), most)
        node, count = -1, 0
        for place, (token, parent) in enumerate(zip(drafted, self.retrieved.parent_lists()[index])):
            if parent == node and count < len(committed) and token == committed[count]:
                node, count = place, count + 1
        return count
