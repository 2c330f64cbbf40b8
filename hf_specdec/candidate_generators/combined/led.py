"""Two methods in one draft, "grammar+suffix": the first drafts what is forced, and the second goes on after it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...control import ControlProfile
from ...drafts import DraftTree
from ...protocol import Commit, DraftStep, Lookups, Prompt, Session, VerifiedNodes
from ..base import CandidateGenerator


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig


# Least estimated probability that the first token of a lead is accepted.
_SURE = 0.5


class LedCandidateGenerator(CandidateGenerator):
    """Asks a method that leads, and another one for what comes after the tokens that the first is sure of.

    Args:
        config (`SpeculativeConfig`): The settings of the combination.
        session (`Session`): The call.
        leading, continuing (`CandidateGenerator`): The parts, for this call.
        profile (`ControlProfile`): Of other combinations, whose parts compete for the rows; nothing is learnt here.
    """

    samples_drafts: bool | None = False

    def __init__(
        self,
        config: SpeculativeConfig,
        session: Session,
        leading: CandidateGenerator,
        continuing: CandidateGenerator,
        profile: ControlProfile,
    ):
        self.config: SpeculativeConfig = config
        self.options: Any = config.options
        self.session: Session = session
        self.leading: CandidateGenerator = leading
        self.continuing: CandidateGenerator = continuing
        self.num_speculative_tokens: int = max(leading.num_speculative_tokens, continuing.num_speculative_tokens)
        self._has_led, self._has_continued = 0, 0

    @property
    def longest_row(self) -> tuple[int, str] | None:
        return self.continuing.longest_row

    @property
    def lookups(self) -> Lookups | None:
        return self.continuing.lookups

    @property
    def num_draft_nodes(self) -> int:
        return self.leading.num_draft_nodes + self.continuing.num_draft_nodes

    def prefill(self, prompt: Prompt) -> None:
        self.leading.prefill(prompt)
        self.continuing.prefill(prompt)

    def propose(self, step: DraftStep) -> DraftTree:
        first = self.leading.propose(step)
        runs = map(run_of, first.token_lists(), first.parent_lists())
        # After a mere guess the second method drafts from the text itself, beside the guess.
        is_sure = [probs[:1] > [_SURE] for probs in self.leading.acceptance_probs]
        leads = [run if sure else [] for run, sure in zip(runs, is_sure)]
        rooms = [max(room - len(lead), 0) for room, lead in zip(self.draft_depths(step), leads)]
        second = self.continuing.propose(replace(step, leads=leads, max_draft_tokens=rooms))
        self._has_led += sum(map(bool, first.counts()))
        self._has_continued += sum(map(bool, second.counts()))
        rows = zip(first.token_lists(), first.parent_lists(), leads, second.token_lists(), second.parent_lists())
        tokens, parents = map(list, zip(*(joined(*row) for row in rows)))
        draft = DraftTree.from_lists(tokens, self.session.device, parents)
        names = self.options.methods
        draft.drafters = [names[not ours] for ours in first.counts()]
        return draft

    def learn(self, nodes: VerifiedNodes) -> None:
        self.continuing.learn(nodes)

    def observe(self, commit: Commit) -> None:
        self.leading.observe(commit)
        self.continuing.observe(commit)

    def keep_rows(self, keep: list[int]) -> None:
        self.leading.keep_rows(keep)
        self.continuing.keep_rows(keep)

    @property
    def takes_rows(self) -> bool:
        return self.leading.takes_rows and self.continuing.takes_rows

    def join(self, other: LedCandidateGenerator, numbers: dict[int, int]) -> None:
        self.leading.join(other.leading, numbers)
        self.continuing.join(other.continuing, numbers)

    def close(self) -> None:
        try:
            self.leading.close()
        finally:
            self.continuing.close()
        counts = zip(self.options.methods, (self._has_led, self._has_continued))
        self.session.notes += [f"{method}: a part of {count} drafts" for method, count in counts]


def run_of(tokens: list[int], parents: list[int]) -> list[int]:
    """The tokens of a row's tree before it branches."""
    run: list[int] = []
    for place, (token, parent) in enumerate(zip(tokens, parents)):
        if parent != place - 1 or parents.count(parent) > 1:
            break
        run.append(token)
    return run


def joined(
    tokens: list[int], parents: list[int], lead: list[int], more_tokens: list[int], more_parents: list[int]
) -> tuple[list[int], list[int]]:
    """A row's tree, and another one that goes on after its first tokens `lead`, as one tree.

    Returns:
        `tuple[list[int], list[int]]`: Tokens and parents (-1: the anchor), without equal siblings.
    """
    tokens, parents = list(tokens), list(parents)
    nodes = {key: node for node, key in reversed(list(enumerate(zip(parents, tokens))))}
    places: list[int] = []
    for token, parent in zip(more_tokens, more_parents):
        below = places[parent] if parent >= 0 else len(lead) - 1
        node = nodes.setdefault((below, token), len(tokens))
        if node == len(tokens):
            tokens.append(token)
            parents.append(below)
        places.append(node)
    return tokens, parents
