"""The contract between a drafting method and the decoding loop.

A candidate generator is a method's state for one `generate()` call. The loop calls:

    prefill(prompt)                   once, first, after the target has read the prompt: all rows, in their order
    learn(nodes)                      after every verification, where `num_best_tokens` asks for it
    observe(commit)                   after every cycle, the first token after the prompt included
    propose(step) -> DraftTree        at the start of a cycle, when something has been observed since the prompt
    draft_ahead(commit)               before an observe and a propose that it is about, where `drafts_ahead` says so
    keep_rows(keep)                   when rows of the batch have finished, anywhere but between a draft and its commit
    join(other, numbers)              when other rows take the places of finished ones, between a commit and a draft
    close()                           once, last, also after an error, and also where nothing else was ever called

What a method may not take for granted:

- Not every cycle asks it. Another drafter may have drafted the tokens of a commit, or nobody: the length may be chosen
  from cycle to cycle, or depend on the number of rows. Then `num_accepted` is 0.
- It may be told late. `prefill` may come many cycles after the prompt was read, and commits come joined to one.
- Rows may finish before it has observed anything: `keep_rows` may come between `prefill` and the first `observe`.
- `learn` alone comes at once, after the drafts of any drafter, also before a late `prefill`.
- A step may forbid drafts for some rows (`max_draft_tokens` of 0) and allow them later. Where it forbids them for all
  rows, none of them will have room again, but others may join them.
- The number of a row that has finished may be given to one that joins.
- The target, or the length of the text, may cut a draft; the commit says what has become of it.

What outlives the call (draft weights, caches of past responses) is made once by the class method `load` and kept by
the `Speculator`. A method knows nothing of logits processors or of stopping rules, and of the target's cache only if
it drafts with the target's layers or over its keys and values.

The data that the two hand to each other are in [`~protocol`].
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers.generation.candidate_generator import CandidateGenerator as HfCandidateGenerator
from transformers.utils import logging

from ..drafting.state import RowState
from ..drafts import DraftTree, TokenTree
from ..errors import SpecConfigError
from ..logits.grammar.masks import GrowingMasks
from ..protocol import Commit, DeviceCommit, DraftStep, Lookups, Prompt, Session, VerifiedNodes
from ..settings import SpeculativeConfig
from ..threads import Lock, cached_property


if TYPE_CHECKING:
    from .assisted import AssistedSide


logger = logging.get_logger(__name__)

_LEAST_SHARED_LENGTH = 4

_binding = Lock()


@dataclass(frozen=True)
class NoOptions:
    """Options of a method that has none."""


class CandidateGenerator(HfCandidateGenerator):
    """Base class of the methods.

    Class attributes are the capabilities that the loop reads; it never looks at a method's name.

    Attributes:
        options_class (`type`): Frozen dataclass of the method's own options; without fields by default.
        target_hidden_states (`tuple`): States of the target that the method reads: "last", the one after the final
            norm, or boundaries: i is what enters decoder layer i.
        num_best_tokens (`int`): K, tokens that `learn` is told of each verified node; 0: it is not called.
        default_num_speculative_tokens (`int`): k when the user names none.
        samples_drafts (`bool`, *optional*): Draft tokens are sampled, and their distributions handed over. `None`: not
            known.
        estimates_acceptance (`bool`): `acceptance_probs` says how good the last drafts are, as the first part of a
            combination must.
        leads (`bool`): In a combination its draft comes first, and that of a method which `continues_leads` after it.
        continues_leads (`bool`): Its drafts go on after the tokens of `DraftStep.leads`.

    Args:
        config (`SpeculativeConfig`, *optional*): The settings of the call. `None`: all defaults.
        resources (`Any`, *optional*): What `load` returned.
        session (`Session`, *optional*): The call. `None`: it is not known yet, and comes with [`bind`].
    """

    options_class: ClassVar[type[Any]] = NoOptions
    target_hidden_states: ClassVar[tuple[int | str, ...]] = ()
    num_best_tokens: int = 0
    default_num_speculative_tokens: ClassVar[int] = 5
    # Largest k that num_speculative_tokens="auto" may choose; `None`: as many as are drafted when no k is named.
    most_speculative_tokens: ClassVar[int | None] = None
    # Flat settings that `load` reads: those that agree in them share what was loaded; `None`: in all settings.
    loaded_by: ClassVar[tuple[str, ...] | None] = None
    samples_drafts: bool | None = None
    default_sample_method: ClassVar[str] = "greedy"  # `draft_sample_method` where the options leave it out
    estimates_acceptance: ClassVar[bool] = False
    leads: ClassVar[bool] = False
    continues_leads: ClassVar[bool] = False
    masks_drafts: ClassVar[bool] = True  # what grammars forbid is not drafted; else only processors see to that
    parts: ClassVar[tuple[type[CandidateGenerator], ...]] = ()  # of a combination; the last may have a draft model
    config: SpeculativeConfig | None = None  # without settings it has the standard acceptance rule
    session: Session | None = None
    lookups: Lookups | None = None  # in texts until now; `None` for methods that look nothing up
    late_reading: tuple[int, float] | None = None  # tokens that a part read late in the last draft, and its seconds
    longest_row: tuple[int, str] | None = None  # from how many tokens on rows have no drafts, and by which setting
    state: RowState | None = None  # what is kept of the active rows
    _is_bound = False

    @classmethod
    def load(cls, config: SpeculativeConfig, target_model: torch.nn.Module) -> Any:
        """Loads what outlives a call: weights, caches. All checks of the checkpoint against the target happen here."""
        return None

    @classmethod
    def network(cls, resources: Any) -> torch.nn.Module | None:
        """The draft network among what was loaded; `None` for methods without one."""
        return resources if isinstance(resources, torch.nn.Module) else None

    @classmethod
    def loaded_from(cls, config: SpeculativeConfig, target_model: torch.nn.Module) -> SpeculativeConfig | None:
        """Settings that name the files that `load` reads, also anew when they have changed; `None` for no files."""
        return None if config.model is None else config

    @classmethod
    def text_bytes(cls, resources: Any) -> int:
        """Bytes of memory that remembered texts take, beside the weights of the network."""
        return 0

    @classmethod
    def age_texts(cls, resources: Any, most_age: int) -> int:
        """Makes texts of past calls older by one, forgets those older than `most_age`, and returns how many."""
        return 0

    def __init__(self, config: SpeculativeConfig | None = None, resources: Any = None, session: Session | None = None):
        self.config = config
        self.options: Any = self.options_class() if config is None else config.options
        self.session = session
        length = None if config is None else config.fixed_length
        self.num_speculative_tokens: int = length or self.default_length(self.options)
        limit = None if config is None else config.max_model_len
        # Own methods may have a property in its place.
        vars(self)["longest_row"] = None if limit is None else (limit - 1, "max_model_len")

    def bind(self, session: Session) -> CandidateGenerator:
        """Takes the generator for the one call that it may have; returns what drafts in it, mostly itself."""
        earlier, name = self.session, type(self).__name__
        # Of threads that come at once one is first.
        with _binding:
            if self._is_bound:
                raise SpecConfigError(
                    f"This {name} has been used. A candidate generator belongs to one call: make another one for "
                    "each, or pass the speculator itself, which any number of calls may share."
                )
            if earlier is not None and earlier.batch_size != session.batch_size:
                raise SpecConfigError(
                    f"This {name} was made for {earlier.batch_size} rows, and the batch has {session.batch_size}. "
                    "Make it without a session: the call brings its own."
                )
            self._is_bound = True
        if earlier is None:
            self.session = session
        elif earlier is not session:
            earlier.join(session)
        if not hasattr(self, "num_speculative_tokens"):
            # Of a class whose own `__init__` does without this one's.
            self.num_speculative_tokens = self.default_num_speculative_tokens
        return self

    @property
    def num_draft_nodes(self) -> int:
        """Most nodes of a row's draft; more than `num_speculative_tokens`, its depth, for a tree."""
        return self.num_speculative_tokens

    def note_longest_row(self) -> None:
        """Adds to the call's notes, once, that a row has got too long."""
        if (limit := self.longest_row) is not None:
            self.note(f"no drafts for rows of {limit[0]} tokens and more ({limit[1]})")

    def note(self, text: str) -> None:
        """Adds to the call's notes, once."""
        if text not in self.session.notes:
            self.session.notes.append(text)
            logger.info(f"{text}.")

    @property
    def acceptance_probs(self) -> list[list[float]]:
        """Estimated probabilities, for each row of the last drafts, that 1, 2, ... draft tokens are accepted."""
        raise NotImplementedError(f"{type(self).__name__} does not estimate what is accepted of its drafts.")

    @classmethod
    def draft_cost(cls, resources: Any, target_model: torch.nn.Module) -> float | None:
        """The time of a draft token in plain cycles, as sizes tell it; `None` where tokens do not cost alike."""
        return None

    @classmethod
    def default_length(cls, options: Any) -> int:
        """k when the user names none, for these options of the method."""
        return cls.default_num_speculative_tokens

    @classmethod
    def adaptive_settings(cls, options: Any) -> dict[str, Any]:
        """Flat settings to change where a controller chooses the lengths, for these options of the method."""
        return {}

    def shared_length(self, num_rows: int) -> int:
        """k for a method whose drafts differ much in length from row to row."""
        most = self.num_speculative_tokens
        if self.config is not None and self.config.num_speculative_tokens is not None:
            return most
        # A verification is as wide as its longest draft: one good match must not make all others pay for its length.
        return max(most // max(num_rows, 1), min(_LEAST_SHARED_LENGTH, most))

    def draft_depths(self, step: DraftStep) -> list[int]:
        """Largest depth of each row's draft: k, or less where the loop or `longest_row` leave less room."""
        depths = [min(most, self.num_speculative_tokens) for most in step.max_draft_tokens]
        limit = self.longest_row
        if limit is None:
            return depths
        return [min(depth, max(limit[0] - length, 0)) for depth, length in zip(depths, step.lengths)]

    def growing_masks(self, step: DraftStep, limits: list[int]) -> GrowingMasks | None:
        """Masks of the rows' grammars, for drafts of at most `limits` that are chosen level by level."""
        return self.session.sampler.growing(step.rows, limits) if self.may_mask else None

    @property
    def may_mask(self) -> bool:
        """Tells whether rows have grammars, whose masks are made on the host; others may join."""
        sampler = None if self.session is None or not self.masks_drafts else self.session.sampler
        return sampler is not None and sampler.rows is not None and sampler.rows.has_grammar

    @property
    def asks_to_sample(self) -> bool:
        """The target samples, and the options ask for draft tokens that are sampled from their distributions."""
        sampler = self.session.sampler
        samples = sampler is not None and sampler.uniforms is not None
        asked = getattr(self.options, "draft_sample_method", None) or self.default_sample_method
        return samples and asked == "probabilistic"

    @property
    def chain_only_reason(self) -> str | None:
        """Reason for which the call can only have chains; `None` where it can have trees."""
        if self.samples_drafts:
            return "draft_sample_method='probabilistic' draws chains"
        return None if self.session.supports_trees else "the target tells positions from the order of its cache"

    def fitting(self, shape: Any) -> Any:
        """The shape of drafts, or a chain as deep where the call can only have chains, which its notes then say."""
        if shape.is_chain or not (reason := self.chain_only_reason):
            return shape
        self.note(f"chains instead of trees: {reason}")
        return TokenTree.chain(shape.max_depth)

    def prefill(self, prompt: Prompt) -> None:
        """Takes in the prompts."""

    def propose(self, step: DraftStep) -> DraftTree:
        """Drafts for all active rows, at most `min(k, step.max_draft_tokens[b])` deep."""
        raise NotImplementedError(f"{type(self).__name__} must implement propose().")

    @property
    def drafts_ahead(self) -> bool:
        """Tells whether `draft_ahead` can launch the graph of the next draft, as things stand after a `propose`."""
        return False

    def draft_ahead(self, commit: DeviceCommit) -> DraftTree | None:
        """Launches the graph of the next draft before the host knows what was accepted before it.

        `observe` and `propose` come as ever, and the run that `propose` asks for is this one, see
        [`CallGraphs.ahead`]. Returns what `propose` will return if it asks for no other; `None` where it is not known.
        """

    def learn(self, nodes: VerifiedNodes) -> None:
        """Takes in what the target considered best at every node of a verification."""

    def observe(self, commit: Commit) -> None:
        """Takes in what was committed."""

    def keep_rows(self, keep: list[int]) -> None:
        """Drops finished rows: the active rows at these positions remain, in this order, which may be another."""
        if self.state is not None:
            self.state.select(keep)

    @property
    def takes_rows(self) -> bool:
        """Tells whether rows may join: `state` has what is kept of them, `join` is implemented, or nothing is kept."""
        cls, base = type(self), CandidateGenerator
        if self.state is not None:
            return True
        keeps_rows = any(getattr(cls, name) is not getattr(base, name) for name in ("prefill", "observe", "keep_rows"))
        return cls.join is not base.join or not keeps_rows

    def join(self, other: CandidateGenerator, numbers: dict[int, int]) -> None:
        """Takes over the active rows of another call after its own; the counterpart of `keep_rows`.

        Args:
            other (`CandidateGenerator`): Of the same speculator. It has been told of these rows as ever: of their
                prompts, and of what was committed. It is closed next, so what it has may be taken from it.
            numbers (`dict[int, int]`): By the number of each of its active rows, in their order, its number here.
        """
        if self.state is not None:
            self.state.cat(other.state)

    def close(self) -> None:
        """Releases what belongs to the call. Called exactly once."""
        if self.state is not None:
            self.state.close()

    # The protocol of transformers' own assisted decoding, for batch size 1 and drafts without branches.

    # The host then says which call is the first, and hands over its last output.
    requires_model_outputs = True

    @cached_property
    def assisted_side(self) -> AssistedSide:
        """The interface through which transformers' own assisted decoding drives this generator."""
        from .assisted import AssistedSide

        return AssistedSide(self)

    @property
    def model_kwargs_overrides(self) -> dict[str, Any]:
        """Arguments of the host's next forward, asked for right before it."""
        return self.assisted_side.forward_kwargs()

    def get_candidates(self, input_ids: torch.LongTensor, **given: Any) -> tuple[torch.LongTensor, None]:
        """Prompt plus draft of shape `(1, L + N)`; no logits, so the host verifies the drafts as point masses."""
        return self.assisted_side.candidates(input_ids, **given), None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        self.assisted_side.num_matches = int(num_matches)


class Wrapper(CandidateGenerator):
    """Drives other candidate generators in one call; the last one may read states and have a network."""

    def __init__(
        self,
        config: SpeculativeConfig | None,
        session: Session | None,
        generators: Sequence[CandidateGenerator],
        readers: Sequence[Any],  # told of the text for each: itself, or an [`UnreadText`] that tells it later
    ):
        self.config = config
        self.session = session
        self.options: Any = None if config is None else config.options
        self.generators: Sequence[CandidateGenerator] = generators
        self.readers: Sequence[Any] = readers
        last = generators[-1]
        self.num_speculative_tokens: int = max(generator.num_speculative_tokens for generator in generators)
        self.target_hidden_states: tuple[int | str, ...] = last.target_hidden_states
        self.num_best_tokens: int = last.num_best_tokens
        self.samples_drafts: bool | None = last.samples_drafts
        longest_rows = [generator.longest_row for generator in generators]
        self.longest_row = None if None in longest_rows else max(longest_rows)
        lookups = (generator.lookups for generator in reversed(generators))
        self.lookups: Lookups | None = next((one for one in lookups if one is not None), None)

    @property
    def num_draft_nodes(self) -> int:
        return max(generator.num_draft_nodes for generator in self.generators)

    def prefill(self, prompt: Prompt) -> None:
        for reader in self.readers:
            reader.prefill(prompt)

    def learn(self, nodes: VerifiedNodes) -> None:
        self.generators[-1].learn(nodes)

    def observe(self, commit: Commit) -> None:
        for reader in self.readers:
            reader.observe(commit)

    def keep_rows(self, keep: list[int]) -> None:
        for reader in self.readers:
            reader.keep_rows(keep)

    @property
    def takes_rows(self) -> bool:
        return all(generator.takes_rows for generator in self.generators)

    def join(self, other: Wrapper, numbers: dict[int, int]) -> None:
        for mine, theirs in zip(self.readers, other.readers):
            mine.join(theirs, numbers)

    def close(self) -> None:
        with ExitStack() as closing:
            for reader in self.readers:
                closing.callback(reader.close)
