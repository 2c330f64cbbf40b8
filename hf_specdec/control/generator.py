"""A candidate generator whose drafts have the length that pays: it stands between the loop and a method's own.

The loop and the method know nothing of it. It asks the controller for each row's limit, and hands the limits on as the
room that the rows have. Where nothing is to be drafted the method is not asked and not told: what is committed
meanwhile is kept, and given to it at once when it drafts again. So a cycle without drafts costs what plain decoding in
the loop costs.
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import torch
from transformers.utils import logging

from ..candidate_generators.base import CandidateGenerator, Commit, DraftStep, Prompt
from ..drafts import DraftTree
from .clock import CycleClock
from .controller import ControlProfile, RowOutcome, SpeculationController


logger = logging.get_logger(__name__)

# Commits that are kept at most while nothing is drafted; some hold states of the target.
_MOST_HELD = 256


class AdaptiveCandidateGenerator(CandidateGenerator):
    """Drives a method's candidate generator.

    Args:
        generator (`CandidateGenerator`): The method's, for this call.
        profile (`ControlProfile`): What earlier calls have found; learns from this one.
        usual (`int`): The length to begin with where nothing is known.
    """

    def __init__(self, generator: CandidateGenerator, profile: ControlProfile, usual: int):
        self.generator, self.profile = generator, profile
        self.session, self.config = generator.session, generator.config
        self.num_speculative_tokens = generator.num_speculative_tokens
        self.target_hidden_states = generator.target_hidden_states
        self.needs_prompt_tokens, self.draws = generator.needs_prompt_tokens, generator.draws
        self.controller = SpeculationController(
            generator.num_speculative_tokens, self.session.batch_size, profile, usual
        )
        self._clock = CycleClock(self.session.device)
        self._held: list[Commit] = []
        self._draft: DraftTree | None = None  # of this cycle, if the method was asked for one
        self._limits: list[int] = []
        self._is_catching_up = self._has_begun = False

    @property
    def num_draft_nodes(self) -> int:
        return self.generator.num_draft_nodes

    def prefill(self, prompt: Prompt) -> None:
        self.generator.prefill(prompt)

    def propose(self, step: DraftStep) -> DraftTree:
        self._clock.begin()
        self._has_begun = True
        self._limits = list(map(min, self.controller.limits(step.rows), step.max_draft_tokens))
        if max(self._limits) <= 0:
            self._draft = None
            return DraftTree.empty(len(step.rows), self.session.device)
        self._is_catching_up = bool(self._held)
        self._hand_over()
        self._draft = self.generator.propose(replace(step, max_draft_tokens=self._limits))
        self._clock.drafted()
        return self._draft

    def observe(self, commit: Commit) -> None:
        if not self._has_begun:
            self.generator.observe(commit)
            return
        if self._draft is None:
            self._count(commit, 0.0)
            self._held.append(commit)
            if len(self._held) >= _MOST_HELD:
                self._hand_over()
            return
        began = perf_counter()
        self.generator.observe(commit)
        self._count(commit, perf_counter() - began)

    def _count(self, commit: Commit, observing: float) -> None:
        draft_seconds, verify_seconds = self._clock.end()
        num_nodes, depths = 0, [0] * len(commit.rows)
        if self._draft is not None:
            # Observing is a part of drafting.
            draft_seconds, verify_seconds = draft_seconds + observing, verify_seconds - observing
            num_nodes, depths = self._draft.size, self._draft.max_depths()
        outcomes = list(map(RowOutcome, commit.rows, self._limits, depths, commit.num_accepted, commit.counts))
        self.controller.observe(outcomes, num_nodes, draft_seconds, verify_seconds, self._is_catching_up)

    def _hand_over(self) -> None:
        """Tells the method what was committed without it."""
        if self._held:
            self.generator.observe(_joined(self._held))
            self._held = []

    def keep_rows(self, keep: list[int]) -> None:
        self._held = [commit.of_rows(keep) for commit in self._held]
        self.generator.keep_rows(keep)

    def close(self) -> None:
        self.generator.close()
        self._held = []
        controller = self.controller
        if controller.num_cycles == 0:
            return
        controller.profile_into(self.profile)
        mean = controller.sum_limits / controller.num_cycles
        note = (
            f"adaptive length: at most {mean:.1f} draft tokens a cycle on average, "
            f"{controller.num_plain_cycles} of {controller.num_cycles} cycles without drafts"
        )
        self.session.notes.append(note)
        logger.info(f"{note}.")


def _joined(commits: list[Commit]) -> Commit:
    """Several commits of the same rows as one. Without drafts every row gets one token a cycle, so none is padded."""
    first = commits[0]
    return Commit(
        first.rows,
        torch.cat([commit.tokens for commit in commits], dim=1),
        [sum(lists, []) for lists in zip(*(commit.token_lists for commit in commits))],
        [0] * len(first.rows),
        {key: torch.cat([commit.hidden_states[key] for commit in commits], dim=1) for key in first.hidden_states},
    )
