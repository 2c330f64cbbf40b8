"""Probes how many drafts a target would accept, by position.

A drafter that reads the wrong states or feeds itself the wrong ones raises no error: it drafts, and little of it is
accepted. Here it drafts at every token of a text that the target writes one by one, and the drafts are compared with
what the target writes next. So drafts are judged at the same places, whatever was accepted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from ..bench.engine import greedy_texts
from ..bench.prompts import Batch
from ..candidate_generators.base import CandidateGenerator, Wrapper
from ..drafts import DraftTree
from ..protocol import DraftStep, Session
from ..settings import FIXED
from ..speculator import Speculator


# Drafts below which no share of them is worth a word, and the difference of two shares that is no chance.
FEWEST_DRAFTS = 20
_CLEAR = 0.1


# The drafts of one text by the length of the text before them: their tokens and parents.
Drafts = dict[int, tuple[list[int], list[int]]]


@dataclass
class Acceptance:
    """Acceptance of drafts at every token of a target's texts."""

    # How often a token at each position of a draft is judged: those before it are accepted.
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # how many of these are accepted
    tokens: list[int] = field(default_factory=list)  # what the target wrote
    num_places: int = 0  # tokens that a draft could begin with

    @property
    def num_drafts(self) -> int:
        return self.reached[0] if self.reached else 0

    @property
    def rates(self) -> list[float]:
        """Share of the tokens judged at each position that is accepted."""
        return [accepted / reached for accepted, reached in zip(self.accepted, self.reached) if reached]

    @property
    def first_rate(self) -> float:
        """Share accepted at the first position; 0 without drafts."""
        return self.rates[0] if self.rates else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens committed by a cycle that begins at any token: those accepted and one more."""
        return 1 + sum(self.accepted) / self.num_places if self.num_places else 1.0

    def count(self, text: Sequence[int], drafts: Drafts) -> None:
        """Judges the drafts of a text, each by the path in it that the text follows."""
        for length, (tokens, parents) in drafts.items():
            self.num_places += length < len(text)
            node: int | None = -1
            for position, token in enumerate(text[length:]):
                children = [index for index, parent in enumerate(parents) if parent == node]
                if not children:
                    break
                if position == len(self.reached):
                    self.reached.append(0)
                    self.accepted.append(0)
                self.reached[position] += 1
                node = next((child for child in children if tokens[child] == token), None)
                if node is None:
                    break
                self.accepted[position] += 1

    def is_above(self, other: Acceptance) -> bool:
        """Tells if clearly more first tokens are accepted than in other texts."""
        is_known = min(self.num_drafts, other.num_drafts) >= FEWEST_DRAFTS
        return is_known and self.first_rate > other.first_rate + _CLEAR

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain JSON types."""
        return {
            "acceptance_length": self.acceptance_length,
            "rates": self.rates,
            "reached": self.reached,
            "num_places": self.num_places,
        }


def measure_acceptance(
    model: PreTrainedModel, speculator: Speculator, batches: Sequence[Batch], **sampling: Any
) -> Acceptance:
    """Lets the target write, and the drafter draft its best tokens at every one of them."""
    watching = _Watching.of(speculator)
    found = Acceptance()
    for batch in batches:
        watching.drafts.clear()
        for row, new in enumerate(greedy_texts(model, batch, **sampling, assistant=watching)):
            prompt = batch.inputs["input_ids"][row][batch.inputs["attention_mask"][row].bool()].tolist()
            found.tokens += new
            found.count(prompt + new, watching.drafts[row])
    return found


class _WatchedGenerator(Wrapper):
    """Keeps what a method drafts, and hands nothing of it on: the target writes token by token."""

    def __init__(self, generator: CandidateGenerator, drafts: dict[int, Drafts]):
        super().__init__(generator.config, generator.session, (generator,), (generator,))
        self.drafts = drafts
        self.samples_drafts: bool | None = False

    def propose(self, step: DraftStep) -> DraftTree:
        draft = self.generators[0].propose(step)
        for row, length, *drafted in zip(step.rows, step.lengths, draft.token_lists(), draft.parent_lists()):
            self.drafts[row][length] = tuple(drafted)
        return DraftTree.empty(len(step.rows), self.session.device)


class _Watching(Speculator):
    """A speculator whose generators are watched."""

    drafts: dict[int, Drafts]

    @classmethod
    def of(cls, speculator: Speculator) -> _Watching:
        # A length that adapts would learn that nothing is ever accepted.
        length = speculator.config.fixed_length or FIXED
        config = speculator.config.replace(num_speculative_tokens=length, num_speculative_tokens_per_batch_size=None)
        if hasattr(config.options, "draft_sample_method"):
            # Sampled tokens are accepted by their probabilities, not by being the target's.
            config = config.replace(draft_sample_method="greedy")
        found = cls(config, speculator.generator_class, speculator.resources)
        found.drafts = defaultdict(dict)
        return found

    def candidate_generator(self, session: Session) -> CandidateGenerator:
        return _WatchedGenerator(super().candidate_generator(session), self.drafts)
