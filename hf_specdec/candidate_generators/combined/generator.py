"""Two methods in one, "suffix+eagle3": where the text repeats the first drafts, elsewhere the second.

Retrieval (`ngram`, `suffix`) drafts long where a text repeats and nothing elsewhere, a drafter with weights a few
tokens everywhere. Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975), combine the two by the score of the
retrieved draft: its expected number of accepted tokens. So does this module, for each row and cycle; see
[`~candidate_generators.combined.policy`]. After one that leads, "grammar+suffix", the second goes on in one draft.

Shapes: B active rows, N draft nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache, lru_cache
from operator import mul
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from ...control import ControlProfile
from ...control.clock import CycleClock
from ...control.rates import RowOutcome
from ...drafting.defer import UnreadText
from ...drafts import DraftTree
from ...drafts.static import MAX_NODES
from ...errors import SpecConfigError
from ...method import COMBINING, NO_DRAFTS, resolve_candidate_generator
from ...protocol import Commit, DeviceCommit, DraftStep, Prompt, Session
from ...settings import SpeculativeConfig
from ...settings.checks import hints_of, setting
from ...threads import cached_property
from ...transfers import upload
from ..base import CandidateGenerator, Wrapper
from ..row_trees import first_path, grafted
from .policy import DrafterChoice


# Tokens of all rows together that are held at most, with their states, until the second drafter is asked.
_MOST_UNREAD_TOKENS = 4096


@dataclass
class CombinedResources:
    """Outlives a call: what the parts have loaded, and what calls have found of the second one."""

    retrieval: Any
    model: Any
    profile: ControlProfile = field(default_factory=ControlProfile)


def part_configs(config: SpeculativeConfig) -> tuple[SpeculativeConfig, SpeculativeConfig]:
    """The settings of each part of a combination."""
    retrieval, model = config.options.methods
    length = config.options.retrieval_num_speculative_tokens
    # Measured times decide who is asked, so with sampled drafts they would decide the text.
    return (
        config.for_method(retrieval).replace(num_speculative_tokens=length),
        config.for_method(model).with_greedy_drafts(),
    )


# Not for loading: equal configurations may have different access tokens.
_call_configs = lru_cache(part_configs)


class Combination(Wrapper):
    """Two methods as one, the `parts`; [`combination`] makes a class of each pair."""

    @classmethod
    def default_length(cls, options: Any) -> int:
        """The longest draft of the two."""
        retrieved, drafted = (part.default_length(own) for part, own in zip(cls.parts, options.parts))
        return max(options.retrieval_num_speculative_tokens or retrieved, drafted)

    @classmethod
    def load(
        cls,
        config: SpeculativeConfig,
        target_model: torch.nn.Module,
        draft_model: torch.nn.Module | None = None,
        *,
        load_part: Callable[..., Any],
    ) -> CombinedResources:
        """Loads both parts, the second one by `load_part(part, config, target_model, draft_model)`."""
        (first, second), (first_config, second_config) = cls.parts, part_configs(config)
        drafts = load_part(second, second_config, target_model, draft_model)
        profile = ControlProfile(draft_cost=second.draft_cost(drafts, target_model))
        return CombinedResources(first.load(first_config, target_model), drafts, profile)

    @classmethod
    def network(cls, resources: CombinedResources) -> torch.nn.Module | None:
        return cls.parts[1].network(resources.model)

    @classmethod
    def loaded_from(cls, config: SpeculativeConfig, target_model: torch.nn.Module) -> SpeculativeConfig | None:
        return cls.parts[1].loaded_from(part_configs(config)[1], target_model)

    @classmethod
    def text_bytes(cls, resources: CombinedResources) -> int:
        return cls.parts[0].text_bytes(resources.retrieval) + cls.parts[1].text_bytes(resources.model)

    @classmethod
    def age_texts(cls, resources: CombinedResources, most_age: int) -> int:
        # Texts of the second part are kept for calls with it alone, too.
        return cls.parts[0].age_texts(resources.retrieval, most_age)

    def __init__(self, config: SpeculativeConfig, resources: CombinedResources, session: Session):
        (first, second), (first_config, second_config) = self.parts, _call_configs(config)
        generators = first(first_config, resources.retrieval, session), second(second_config, resources.model, session)
        super().__init__(config, session, generators, generators)


class CombinedCandidateGenerator(Combination):
    """Asks one candidate generator that retrieves, and where that pays, a second one."""

    def __init__(self, config: SpeculativeConfig, resources: CombinedResources, session: Session):
        super().__init__(config, resources, session)
        self.retrieval: CandidateGenerator = self.generators[0]
        self.model: CandidateGenerator = self.generators[1]
        self._unread = UnreadText(self.model)
        self.readers = (self.retrieval, self._unread)
        self.choice: DrafterChoice = DrafterChoice(
            resources.profile, session.batch_size, self.model.num_speculative_tokens, session.adapts
        )
        self._clock = CycleClock(session.device)
        self._cycle: _Cycle | None = None
        self._num_drafts, self._num_accepted = [0, 0], [0, 0]  # of the parts

    def prefill(self, prompt: Prompt) -> None:
        super().prefill(prompt)
        self._bound_unread()

    def _bound_unread(self) -> None:
        """Lets the second drafter read where too many states would be held for it."""
        if self.model.target_hidden_states and self._unread.num_tokens > _MOST_UNREAD_TOKENS:
            self._unread.hand_over()

    def propose(self, step: DraftStep) -> DraftTree:
        retrieved, probs = self.retrieval.propose(step), self.retrieval.acceptance_probs
        depth, num_unread = self.choice.choose_depth(len(step.rows)), self._unread.num_tokens
        lengths = [min(length, depth) for length in self.model.draft_depths(step)]
        asked = self.choice.asks(step.rows, probs, retrieved.size, lengths, num_unread)
        # The other rows draft along, so that a draft that was launched before this was known is the same one.
        deepest, *asked = self.session.agreed([max(map(mul, asked, lengths)), *asked])
        limits, asked = [min(length, deepest) for length in lengths], list(map(bool, asked))
        self.choice.note_asked(any(asked))
        cycle = self._cycle = _Cycle(retrieved, probs, asked, limits, retrieved)
        self._clock.begin()
        if any(asked):
            if num_unread:
                self._unread.hand_over()
                self._clock.mark()
            chosen = None if step.depth is None else min(step.depth, depth)
            drafted = self.model.propose(replace(step, max_draft_tokens=limits, depth=chosen))
            self._clock.mark()
            cycle.num_drafted, cycle.num_read = drafted.size, num_unread
            cycle.draft = drafted if all(asked) else merged(retrieved, drafted, asked)
        cycle.draft.drafters = [self.options.methods[is_asked] for is_asked in asked]
        return cycle.draft

    @property
    def drafts_ahead(self) -> bool:
        return self.choice.may_ask_again and self.model.drafts_ahead

    def draft_ahead(self, commit: DeviceCommit) -> None:
        """Launches the second drafter's graph. Whether its draft is verified depends on what is retrieved."""
        lengths = [min(most, self.choice.depth) for most in commit.max_draft_tokens]
        with self._clock.ahead():
            self.model.draft_ahead(replace(commit, max_draft_tokens=lengths))

    def observe(self, commit: Commit) -> None:
        self.retrieval.observe(commit)
        cycle, self._cycle = self._cycle, None
        if cycle is not None:
            self._learn(cycle, commit)
        if cycle is not None and any(cycle.asked):
            # Of a row that has verified the other draft nothing of the own one was accepted.
            accepted = [count if is_asked else 0 for count, is_asked in zip(commit.num_accepted, cycle.asked)]
            self.model.observe(replace(commit, num_accepted=accepted))
        else:
            self._unread.observe(commit)
            self._bound_unread()

    def _learn(self, cycle: _Cycle, commit: Commit) -> None:
        times, num_rows = self._clock.end(), len(commit.rows)
        self.choice.observe_cycle(num_rows, cycle.draft.size, times.rest, sum(commit.counts))
        self.late_reading = None if times.reading is None else (cycle.num_read, times.reading)
        outcomes = list(map(RowOutcome, commit.rows, cycle.limits, cycle.limits, commit.num_accepted, commit.counts))
        if times.draft is not None:
            of_asked = [outcome for outcome, is_asked in zip(outcomes, cycle.asked) if is_asked]
            self.choice.observe_draft(of_asked, num_rows, cycle.num_drafted, times.draft, self.late_reading)
        for index, (outcome, probs, is_asked) in enumerate(zip(outcomes, cycle.acceptance_probs, cycle.asked)):
            if probs:
                # The tokens that a retrieved draft would have given are known also where it was not verified.
                seen_probs = probs[: outcome.num_committed] if is_asked else probs
                num_agreeing = cycle.num_agreeing(index, commit.token_lists[index])
                self.choice.ratings[outcome.row].observe(sum(seen_probs), num_agreeing)
            if is_asked or probs:
                self._num_drafts[is_asked] += 1
                self._num_accepted[is_asked] += outcome.num_accepted

    def join(self, other: Wrapper, numbers: dict[int, int]) -> None:
        self.choice.join(list(numbers.values()))
        super().join(other, numbers)
        self._bound_unread()

    def close(self) -> None:
        super().close()
        self.choice.close()
        counts = zip(self.options.methods, self._num_drafts, self._num_accepted)
        notes = [f"{method}: {accepted} tokens accepted from {drafts} drafts" for method, drafts, accepted in counts]
        self.session.notes += notes


@dataclass
class _Cycle:
    """The drafts of one cycle."""

    retrieved: DraftTree
    acceptance_probs: list[list[float]]  # what the first drafter estimates for them
    asked: list[bool]  # the rows whose draft is the second drafter's
    limits: list[int]  # largest depth of that for each row
    draft: DraftTree  # what is verified
    num_drafted: int = 0  # nodes of a row of the second drafter's drafts
    num_read: int = 0  # tokens of all rows that it was told of first

    def num_agreeing(self, index: int, committed: list[int]) -> int:
        """Number of committed tokens that the retrieved draft of a row has on one path."""
        node, count = -1, 0
        nodes = zip(self.retrieved.token_lists()[index], self.retrieved.parent_lists()[index])
        for place, (token, parent) in enumerate(nodes):
            if parent == node and count < len(committed) and token == committed[count]:
                node, count = place, count + 1
        return count


def merged(retrieved: DraftTree, drafted: DraftTree, from_model: Sequence[bool]) -> DraftTree:
    """The drafts of rows of which some, those `from_model`, have that of the model, and the others a retrieved one."""
    # Beside sampled drafts a retrieved one is a chain, sampled from point masses on its tokens, for which rejection
    # sampling is the same as following the target.
    if drafted.probs is not None and not retrieved.is_chain:
        chains = list(map(first_path, retrieved.token_lists(), retrieved.parent_lists()))
        retrieved = DraftTree.from_lists(chains, drafted.tokens.device)
    device, size = drafted.tokens.device, max(retrieved.size, drafted.size)
    is_drafted = upload(from_model, device).bool()
    column = is_drafted[:, None]

    def widened(values: torch.Tensor, filler: int = 0) -> torch.Tensor:
        return F.pad(values, (0, size - values.shape[1]), value=filler)

    tokens = torch.where(column, widened(drafted.tokens), widened(retrieved.tokens))
    if drafted.node_counts is None:
        # The host does not know how many nodes are valid.
        num_nodes = torch.where(is_drafted, drafted.num_nodes, retrieved.num_nodes)
    else:
        counts = zip(retrieved.counts(), drafted.node_counts, from_model)
        num_nodes = [theirs if is_drafted else ours for ours, theirs, is_drafted in counts]
    if not (retrieved.is_chain and drafted.is_chain):
        both = (widened(tree.parents.expand(len(from_model), -1), -1) for tree in (drafted, retrieved))
        return DraftTree(tokens, torch.where(column, *both), num_nodes)
    if drafted.probs is None:
        return DraftTree.chain(tokens, num_nodes)
    probs = F.pad(drafted.probs, (0, 0, 0, size - drafted.size))
    point_masses = torch.zeros_like(probs).scatter_(2, tokens[..., None], 1.0)
    return DraftTree.chain(tokens, num_nodes, torch.where(column[..., None], probs, point_masses))


# Least estimated probability that the first token of a lead is accepted.
_SURE = 0.5


class LedCandidateGenerator(Combination):
    """Asks a method that leads, and another one for what comes after the tokens that the first is sure of."""

    def __init__(self, config: SpeculativeConfig, resources: CombinedResources, session: Session):
        super().__init__(config, resources, session)
        self.leading: CandidateGenerator = self.generators[0]
        self.continuing: CandidateGenerator = self.generators[1]
        self._num_drafts = [0, 0]  # to which each part has added something
        self._added: tuple[DraftTree, ...] = ()  # to the last draft; of one, the second part's alone

    @property
    def num_draft_nodes(self) -> int:
        return self.leading.num_draft_nodes + self.continuing.num_draft_nodes

    def propose(self, step: DraftStep) -> DraftTree:
        first = self.leading.propose(step)
        if not self.may_mask:
            draft = self.continuing.propose(step)
            draft.drafters = [self.options.methods[1]] * len(step.rows)
            self._added = (draft,)
            return draft
        runs = map(run_of, first.token_lists(), first.parent_lists())
        # After a mere guess the second method drafts from the text itself, beside the guess.
        is_sure = [probs[:1] > [_SURE] for probs in self.leading.acceptance_probs]
        leads = [run if sure else [] for run, sure in zip(runs, is_sure)]
        rooms = [max(room - len(lead), 0) for room, lead in zip(self.draft_depths(step), leads)]
        second = self.continuing.propose(replace(step, leads=leads, max_draft_tokens=rooms))
        self._added = first, second
        trees = (zip(draft.token_lists(), draft.parent_lists()) for draft in self._added)
        rows = zip(*trees, leads)
        both = [grafted([(*one, -1), (*other, len(lead) - 1)]) for one, other, lead in rows]
        tokens, parents = map(list, zip(*both))
        draft = DraftTree.from_lists(tokens, self.session.device, parents)
        names = self.options.methods
        draft.drafters = [names[not ours] for ours in first.counts()]
        return draft

    @property
    def drafts_ahead(self) -> bool:
        # A grammar is walked on the host; without one the second method drafts as it does alone.
        return not self.may_mask and self.continuing.drafts_ahead

    def draft_ahead(self, commit: DeviceCommit) -> DraftTree | None:
        return self.continuing.draft_ahead(commit)

    def observe(self, commit: Commit) -> None:
        super().observe(commit)
        for part, added in enumerate(reversed(self._added)):
            self._num_drafts[1 - part] += sum(map(bool, added.counts()))
        self._added = ()

    def close(self) -> None:
        super().close()
        counts = zip(self.options.methods, self._num_drafts)
        self.session.notes += [f"{method}: a part of {count} drafts" for method, count in counts]


def run_of(tokens: list[int], parents: list[int]) -> list[int]:
    """The tokens of a row's tree before it branches."""
    run: list[int] = []
    for place, (token, parent) in enumerate(zip(tokens, parents)):
        if parent != place - 1 or parents.count(parent) > 1:
            break
        run.append(token)
    return run


@dataclass(frozen=True)
class CombinedOptions:
    """Options of a combination; the class of a pair has those of both parts beside its own one."""

    methods: ClassVar[tuple[str, ...]]
    owners: ClassVar[tuple[type, ...]]  # the options classes of the parts
    retrieval_num_speculative_tokens: int | None = setting(
        None,
        "Most tokens of a retrieved draft; `num_speculative_tokens` is that of the other method. Default: that of the "
        "retrieving method.",
        least=1,
        most=MAX_NODES,
        published=True,
    )

    def __post_init__(self) -> None:
        # What is wrong with them is said at once.
        _ = self.parts

    @cached_property
    def parts(self) -> tuple[Any, ...]:
        """The options of the two parts."""
        return tuple(
            owner(**{item.name: getattr(self, item.name) for item in fields(owner) if item.init})
            for owner in self.owners
        )

    def __reduce__(self) -> Any:
        # Their class has no name in a module.
        return _remade, (self.methods, {item.name: getattr(self, item.name) for item in fields(self)})


def _remade(methods: tuple[str, ...], values: dict[str, Any]) -> CombinedOptions:
    return combination(methods).options_class(**values)


def _options_class(methods: tuple[str, ...], owners: tuple[type, ...]) -> type[CombinedOptions]:
    """The options of a pair, in one set of names."""
    # Both may be of one class.
    hints = {item: hints_of(owner)[item.name] for owner in owners for item in fields(owner) if item.init}
    seen: set[str] = set()
    for item in (*fields(CombinedOptions), *hints):
        names = {item.name, item.metadata.get("key", item.name)}
        if names & seen:
            raise SpecConfigError(
                f"method='{COMBINING.join(methods)}': both methods have an option `{sorted(names & seen)[0]}`, and "
                "whose is meant could not be said. Rename the option of one, or use one of the methods alone."
            )
        seen |= names
    rows = [
        (item.name, hint, field(default=item.default, default_factory=item.default_factory, metadata=item.metadata))
        for item, hint in hints.items()
    ]
    own = {"methods": methods, "owners": owners}
    how: dict[str, Any] = {"bases": (CombinedOptions,), "namespace": own, "frozen": True, "kw_only": True}
    return make_dataclass("CombinedOptions", rows, **how)


def combination(methods: tuple[str, ...]) -> type[Combination]:
    """The candidate generator of two methods; those that cannot be combined are refused."""
    return _combination(methods, tuple(map(resolve_candidate_generator, methods)))


@cache
def _combination(methods: tuple[str, ...], parts: tuple[type[CandidateGenerator], ...]) -> type[Combination]:
    name = COMBINING.join(methods)
    if NO_DRAFTS in methods:
        raise SpecConfigError(f"method='{name}': '{NO_DRAFTS}' drafts nothing beside another method. Leave it out.")
    is_led = len(parts) == 2 and parts[0].leads and parts[1].continues_leads
    retrieves = [part.estimates_acceptance for part in parts]
    if not is_led and retrieves != [True, False]:
        if retrieves == [False, True]:
            problem = f"names the retrieving one last. Write '{methods[1]}+{methods[0]}'"
        elif len(parts) == 2:
            kind = "retrieve" if retrieves[0] else "draft everywhere"
            problem = f"names {'one method twice' if methods[0] == methods[1] else f'two that {kind}'}"
        else:
            problem = f"names {len(parts)}"
        raise SpecConfigError(
            f"method='{name}': a combination has two methods, one that retrieves (ngram, suffix) and one that drafts "
            f"everywhere, in this order, and this one {problem}. An example is 'suffix+eagle3'. Before any other "
            "method 'grammar' can stand."
        )
    loaded_by = [part.loaded_by for part in parts]
    attributes = {
        "parts": parts,
        "options_class": _options_class(methods, tuple(part.options_class for part in parts)),
        "default_num_speculative_tokens": parts[1].default_num_speculative_tokens,
        "most_speculative_tokens": parts[1].most_speculative_tokens,
        "loaded_by": None if None in loaded_by else tuple(dict.fromkeys(sum(loaded_by, ()))),
    }
    kind = LedCandidateGenerator if is_led else CombinedCandidateGenerator
    return type(kind.__name__, (kind,), attributes)
