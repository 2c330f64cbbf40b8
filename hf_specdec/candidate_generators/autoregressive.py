"""Candidate generators whose network drafts one token after the other, from a state that it hands on."""

from __future__ import annotations

from ..drafting.autoregressive import AutoregressiveDrafter
from ..drafting.growth import DynamicTree
from ..drafts import DraftTree, TokenTree
from ..protocol import Commit, DraftStep, Prompt
from .base import CandidateGenerator


class AutoregressiveCandidateGenerator(CandidateGenerator):
    """Drafts with `drafter`, in the shape of `plan`.

    Attributes:
        plan (`TokenTree` or `DynamicTree`): Shape of the drafts.
        drafter (`AutoregressiveDrafter`): Holds the state of the network in the call.
    """

    plan: TokenTree | DynamicTree
    drafter: AutoregressiveDrafter

    @property
    def num_draft_nodes(self) -> int:
        return len(self.plan)

    def prefill(self, prompt: Prompt) -> None:
        self.drafter.prefill(prompt)

    def observe(self, commit: Commit) -> None:
        self.drafter.observe(commit)

    def propose(self, step: DraftStep) -> DraftTree:
        return self.drafter.propose(step, self.draft_depths(step))

    def keep_rows(self, keep: list[int]) -> None:
        self.drafter.keep_rows(keep)

    def close(self) -> None:
        self.drafter.close()
