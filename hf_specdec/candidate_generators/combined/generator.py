"""Two methods in one, "suffix+eagle3": where the text repeats the first drafts, elsewhere the second.

Retrieval (`ngram`, `suffix`) drafts long where a text repeats and nothing elsewhere, a drafter with weights a few
tokens everywhere. Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975), combine the two by the score of the
retrieved draft: its expected number of accepted tokens. So does this module, for each row and cycle; see
[`~candidate_generators.combined.policy`].

Shapes: B active rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...control.clock import CycleClock
from ...drafting.defer import UnreadText
from ...drafts import DraftTree
from ...drafts.static import MAX_NODES
from ...errors import SpecConfigError
from ...protocol import Commit, DraftStep, Lookups, Prompt, Session
from ...validation import check_bounds
from ..base import CandidateGenerator
from .merge import merged
from .policy import DrafterChoice, Experience


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig


# Tokens of all rows together that are held at most, with their states, until the second drafter is asked.
_MOST_UNREAD_TOKENS = 4096


@dataclass(frozen=True)
class CombinedOptions:
    """Options of a combination beside those of its parts.

    Raises:
        SpecConfigError: A value is out of range.
    """

    methods: ClassVar[tuple[str, str]]

    retrieval_num_speculative_tokens: int | None = field(
        default=None,
        metadata={
            "published": True,
            "help": "Most tokens of a retrieved draft; `num_speculative_tokens` is that of the other method. Left "
            "out, the default of the retrieving method.",
        },
    )

    def __post_init__(self):
        check_bounds(self, retrieval_num_speculative_tokens=(1, MAX_NODES))

    def __reduce__(self):
        return _restored_options, (self.methods, {item.name: getattr(self, item.name) for item in fields(self)})


@dataclass
class CombinedResources:
    """Outlives a call: what the parts have loaded, and what calls have found."""

    retrieval: Any
    model: Any
    experience: Experience = field(default_factory=Experience)


def _load_part(generator_class, config, target_model, draft_model):
    given = {} if draft_model is None else {"draft_model": draft_model}
    return generator_class.load(config, target_model, **given)


class CombinedCandidateGenerator(CandidateGenerator):
    """Asks two candidate generators; [`combined_generator`] makes the class of a pair.

    Attributes:
        methods (`tuple[str, str]`): Names of the parts.
    """

    methods: ClassVar[tuple[str, str]]

    @classmethod
    def default_length(cls, options: Any) -> int:
        """The longest draft of the two."""
        retrieval, model = cls.parts
        own = options.retrieval_num_speculative_tokens or retrieval.default_length(options)
        return max(own, model.default_length(options))

    @classmethod
    def load(
        cls, config, target_model, draft_model: torch.nn.Module | None = None, load_part: Callable = _load_part
    ) -> CombinedResources:
        """Loads both parts. Retrieval searches the responses of calls with this combination alone.

        Args:
            config, target_model, draft_model: As for the second part.
            load_part (`Callable`): Loads that one; takes its class and settings, the target and the draft model.

        Raises:
            SpecConfigError: The draft model is one that only transformers' own assisted decoding can drive.
        """
        retrieval, model = cls.parts
        own = part_configs(config)
        resources = CombinedResources(
            retrieval.load(own[0], target_model), load_part(model, own[1], target_model, draft_model)
        )
        if cls.stock_assistant(resources) is not None:
            raise SpecConfigError(
                f"method='{config.method}' cannot be combined with a {type(resources.model).__name__}, which only "
                f"transformers' own assisted decoding drives. Use method='{cls.methods[1]}'."
            )
        return resources

    @classmethod
    def network(cls, resources: CombinedResources) -> torch.nn.Module | None:
        return cls.parts[1].network(resources.model)

    @classmethod
    def loaded_from(cls, config, target_model):
        return cls.parts[1].loaded_from(part_configs(config)[1], target_model)

    @classmethod
    def text_bytes(cls, resources: CombinedResources) -> int:
        return cls.parts[0].text_bytes(resources.retrieval) + cls.parts[1].text_bytes(resources.model)

    @classmethod
    def stock_assistant(cls, resources: CombinedResources) -> torch.nn.Module | None:
        return cls.parts[1].stock_assistant(resources.model)

    def __init__(self, config, resources: CombinedResources, session: Session):
        self.config, self.options, self.session = config, config.options, session
        own = _call_configs(config)
        self.retrieval = self.parts[0](own[0], resources.retrieval, session)
        self.model = self.parts[1](own[1], resources.model, session)
        self.num_speculative_tokens = max(self.retrieval.num_speculative_tokens, self.model.num_speculative_tokens)
        self.target_hidden_states = self.model.target_hidden_states
        self.samples_drafts = self.model.samples_drafts
        self.experience = resources.experience
        self.choice = DrafterChoice(
            resources.experience, session.batch_size, self.model.num_speculative_tokens, self.model.num_draft_nodes
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
            for method, num_drafts, num_accepted in zip(self.methods, self._num_drafts, self._num_accepted)
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


# ------------------------------------------------------------------------------------------------ classes and settings


def combined_generator(methods: tuple[str, ...]) -> type[CombinedCandidateGenerator]:
    """The candidate generator of two methods.

    Raises:
        SpecConfigError: They cannot be combined, or one is unknown.
    """
    from ...method import resolve_candidate_generator

    return _combined_class(methods, tuple(map(resolve_candidate_generator, methods)))


@lru_cache
def _combined_class(methods: tuple[str, ...], parts: tuple[type, ...]) -> type[CombinedCandidateGenerator]:
    _check_parts(methods, parts)
    name = "".join(method.title().replace("_", "") for method in methods)
    model = parts[1]
    loaded_by = [part.loaded_by for part in parts]
    attributes = {
        "__doc__": f"`{'+'.join(methods)}`.",
        "methods": methods,
        "parts": parts,
        "options_class": _options_class(methods, parts),
        "default_num_speculative_tokens": model.default_num_speculative_tokens,
        "most_speculative_tokens": model.most_speculative_tokens,
        "loaded_by": None if None in loaded_by else tuple(dict.fromkeys(sum(loaded_by, ()))),
    }
    return type(f"{name}CandidateGenerator", (CombinedCandidateGenerator,), attributes)


def _check_parts(methods: tuple[str, ...], parts: tuple[type, ...]) -> None:
    rates = [part.estimates_acceptance for part in parts]
    if rates == [True, False]:
        return
    name = "+".join(methods)
    if rates == [False, True]:
        problem = f"names the retrieving one last. Write '{methods[1]}+{methods[0]}'"
    elif len(parts) == 2:
        kind = "retrieve" if rates[0] else "draft with weights"
        problem = f"names {'one method twice' if methods[0] == methods[1] else f'two that {kind}'}"
    else:
        problem = f"names {len(parts)}"
    raise SpecConfigError(
        f"method='{name}': a combination has two methods, one that retrieves (ngram, suffix) and one that drafts with "
        f"weights, in this order, and this one {problem}. An example is 'suffix+eagle3'."
    )


def _options_class(methods: tuple[str, ...], parts: tuple[type, ...]) -> type[CombinedOptions]:
    """The options of both parts in one: an instance is one of each part's options class too."""
    # Both may be without options.
    bases = tuple(dict.fromkeys((CombinedOptions, *(part.options_class for part in parts))))
    names = [{name for item in fields(base) for name in (item.name, item.metadata.get("key"))} for base in bases]
    for index, own in enumerate(names):
        twice = (own & set().union(*names[:index])) - {None}
        if twice:
            raise SpecConfigError(
                f"method='{'+'.join(methods)}': both methods have an option `{sorted(twice)[0]}`, and whose is meant "
                "could not be said. Rename the option of one, or use one of the methods alone."
            )

    def check_all(self) -> None:
        for base in bases:
            if hasattr(base, "__post_init__"):
                base.__post_init__(self)

    attributes = {"__doc__": f'Options of `spec_method="{"+".join(methods)}"`.', "__post_init__": check_all}
    attributes |= {"methods": methods, "__module__": __name__}
    return dataclass(frozen=True)(type("CombinedOptions", bases, attributes))


def _restored_options(methods: tuple[str, ...], values: dict[str, Any]) -> CombinedOptions:
    return combined_generator(methods).options_class(**values)


def part_configs(config: SpeculativeConfig) -> tuple[SpeculativeConfig, SpeculativeConfig]:
    """The settings of each part of a combination."""
    retrieval, model = config.options.methods
    length = config.options.retrieval_num_speculative_tokens
    # What is asked of whom depends on measured times, and the text of drawn drafts on who is asked.
    return (
        config.for_method(retrieval).replace(num_speculative_tokens=length),
        config.for_method(model).with_greedy_drafts(),
    )


# Not for loading: equal configurations may have different access tokens.
_call_configs = lru_cache(part_configs)
