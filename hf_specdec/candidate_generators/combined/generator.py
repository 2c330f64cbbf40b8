"""Two methods in one, "suffix+eagle3": where the text repeats the first drafts, elsewhere the second.

Retrieval (`ngram`, `suffix`) drafts long where a text repeats and nothing elsewhere, a drafter with weights a few
tokens everywhere. Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975), combine the two by the score of the
retrieved draft: its expected number of accepted tokens. So does this module, for each row and cycle; see
[`~candidate_generators.combined.policy`].

Shapes: B active rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...control import ControlProfile
from ...control.clock import CycleClock
from ...control.rates import RowOutcome
from ...drafting.defer import UnreadText
from ...drafts import DraftTree
from ...protocol import Commit, DraftStep, Lookups, Prompt, Session, VerifiedNodes
from ..base import CandidateGenerator
from .merge import merged
from .policy import DrafterChoice


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
        profile (`ControlProfile`): What earlier calls have found of the second part; learns from this one.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        session: Session,
        retrieval: CandidateGenerator,
        model: CandidateGenerator,
        profile: ControlProfile,
    ):
        self.config = config
        self.options: Any = config.options
        self.session = session
        self.retrieval = retrieval
        self.model = model
        self.num_speculative_tokens: int = max(
            self.retrieval.num_speculative_tokens, self.model.num_speculative_tokens
        )
        self.target_hidden_states: tuple[int | str, ...] = self.model.target_hidden_states
        self.num_best_tokens: int = self.model.num_best_tokens
        self.samples_drafts: bool | None = self.model.samples_drafts
        self.choice: DrafterChoice = DrafterChoice(profile, session.batch_size, model.num_speculative_tokens)
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
        self._bound_unread()

    def _bound_unread(self) -> None:
        """Lets the second drafter read where too many states would be held for it."""
        if self.model.target_hidden_states and self._unread.num_tokens > _MOST_UNREAD_TOKENS:
            self._unread.hand_over()

    def propose(self, step: DraftStep) -> DraftTree:
        retrieved, probs = self.retrieval.propose(step), self.retrieval.acceptance_probs
        lengths, num_unread = self.model.draft_depths(step), self._unread.num_tokens
        asked = self.choice.asks(step.rows, probs, retrieved.size, lengths, num_unread)
        asked = list(map(bool, self.session.agreed(asked)))
        limits = [length if is_asked else 0 for length, is_asked in zip(lengths, asked)]
        cycle = self._cycle = _Cycle(retrieved, probs, asked, limits, retrieved)
        self._clock.begin()
        if any(asked):
            if num_unread:
                self._unread.hand_over()
                self._clock.read()
            drafted = self.model.propose(replace(step, max_draft_tokens=limits))
            self._clock.drafted()
            cycle.num_drafted, cycle.num_read = drafted.size, num_unread
            cycle.draft = drafted if all(asked) else merged(retrieved, drafted, asked)
        cycle.draft.drafters = [self.options.methods[is_asked] for is_asked in asked]
        return cycle.draft

    def learn(self, nodes: VerifiedNodes) -> None:
        self.model.learn(nodes)

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
        self._bound_unread()

    def _learn(self, cycle: _Cycle, commit: Commit) -> None:
        times, num_rows = self._clock.end(), len(commit.rows)
        self.choice.observe_cycle(num_rows, cycle.draft.size, times.rest, sum(commit.counts))
        outcomes = list(map(RowOutcome, commit.rows, cycle.limits, cycle.limits, commit.num_accepted, commit.counts))
        if times.draft is not None:
            reading = None if times.reading is None else (cycle.num_read, times.reading)
            of_asked = [outcome for outcome, is_asked in zip(outcomes, cycle.asked) if is_asked]
            self.choice.observe_draft(of_asked, num_rows, cycle.num_drafted, times.draft, reading)
        for index, (outcome, probs, is_asked) in enumerate(zip(outcomes, cycle.acceptance_probs, cycle.asked)):
            if probs:
                # The tokens that a retrieved draft would have given are known also where it was not verified.
                known = probs[: outcome.num_committed] if is_asked else probs
                num_agreeing = cycle.num_agreeing(index, commit.token_lists[index])
                self.choice.observe_retrieved(outcome.row, known, num_agreeing)
            if is_asked or probs:
                self._num_drafts[is_asked] += 1
                self._num_accepted[is_asked] += outcome.num_accepted

    def keep_rows(self, keep: list[int]) -> None:
        self.retrieval.keep_rows(keep)
        self._unread.keep_rows(keep)

    @property
    def takes_rows(self) -> bool:
        return self.retrieval.takes_rows and self.model.takes_rows

    def join(self, other: CombinedCandidateGenerator, numbers: dict[int, int]) -> None:
        self.choice.join(list(numbers.values()))
        self.retrieval.join(other.retrieval, numbers)
        self._unread.join(other._unread, numbers)
        self._bound_unread()

    def close(self) -> None:
        try:
            self.retrieval.close()
        finally:
            self.model.close()
        self._unread.clear()
        self._cycle = None
        self.choice.close()
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
        asked (`list[bool]`): The rows whose draft is the second drafter's.
        limits (`list[int]`): Largest depth of the second drafter's draft for each row.
        draft (`DraftTree`): The drafts that are verified.
        num_drafted (`int`): Nodes of a row of the second drafter's drafts.
        num_read (`int`): Tokens of all rows that it was told of first.
    """

    retrieved: DraftTree
    acceptance_probs: list[list[float]]
    asked: list[bool]
    limits: list[int]
    draft: DraftTree
    num_drafted: int = 0
    num_read: int = 0

    def num_agreeing(self, index: int, committed: list[int]) -> int:
        """Number of committed tokens that the retrieved draft of a row has on one path."""
        node, count = -1, 0
        nodes = zip(self.retrieved.token_lists()[index], self.retrieved.parent_lists()[index])
        for place, (token, parent) in enumerate(nodes):
            if parent == node and count < len(committed) and token == committed[count]:
                node, count = place, count + 1
        return count
