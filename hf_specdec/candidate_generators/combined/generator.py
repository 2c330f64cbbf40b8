"""Two methods in one, "suffix+eagle3": where the text repeats the first drafts, elsewhere the second.

Retrieval (`ngram`, `suffix`) drafts long where a text repeats and nothing elsewhere, a drafter with weights a few
tokens everywhere. Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975), combine the two by the score of the
retrieved draft: its expected number of accepted tokens. So does this module, for each row and cycle. It also learns
while the call runs how far the score can be trusted, and what asking the second drafter costs.

Shapes: B active rows, N draft nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F

from ...control.clock import CycleClock
from ...control.latency import LatencyModel
from ...drafts import DraftTree
from ...drafts.static import MAX_NODES
from ...errors import SpecConfigError
from ...protocol import Commit, DraftStep, Lookups, Prompt, Session
from ...transfers import upload
from ...validation import check_bounds
from ..base import CandidateGenerator


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig


# Tokens, of all rows together, that the second drafter has at most not been told of.
_MOST_UNREAD_TOKENS = 4096

# Drafts are timed by the tokens that were read for them, in powers of two from here on.
_LEAST_READ = 8

# Expected tokens that the score of a retrieved draft is trusted in before anything was seen, and how much of what was
# seen remains after each further draft.
_TRUST = 2.0
_TRUST_MEMORY = 0.96
_TRUST_RANGE = (0.02, 2.0)

# How much of the tokens and seconds so far remains after each cycle in what a second is worth.
_RATE_MEMORY = 0.97

# The second drafter's mean begins with half of its length, which weighs as many drafts; later the newest draft has the
# other weight.
_PRIOR_DRAFTS = 2
_MEAN_WEIGHT = 1 / 32

# Its drafts after which its cost is known, and the share of all time that finding out more may cost then. It is tried
# where the retrieved draft promises less than so many tokens.
_FIRST_DRAFTS = 2
_TRIAL_SHARE = 0.01
_LITTLE = 1.0


@dataclass(frozen=True)
class CombinedOptions:
    """What a combination has beside the options of its parts.

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
class Experience:
    """What calls with one pair of drafters have found.

    Attributes:
        latency (`LatencyModel`): Of verifications, by their nodes.
        draft_latency (`LatencyModel`): Of drafts of the second drafter, by the tokens of a row that it reads first.
        mean_accepted (`float`, *optional*): Draft tokens of the second drafter that are accepted.
        num_drafts (`int`): Drafts of which that is the mean.
        budget (`float`): Seconds that may be spent on trials.
    """

    latency: LatencyModel = field(default_factory=LatencyModel)
    draft_latency: LatencyModel = field(default_factory=LatencyModel)
    mean_accepted: float | None = None
    num_drafts: int = 0
    budget: float = 0.0


@dataclass
class CombinedResources:
    """What outlives a call: that of the parts, and what calls have found."""

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

    def propose(self, step: DraftStep) -> DraftTree:
        retrieved = self.retrieval.propose(step)
        cycle = self._cycle = _Cycle(retrieved, self.retrieval.acceptance_probs, step.max_draft_tokens)
        lengths = self.model.draft_depths(step)
        cycle.num_unread = self._unread.num_tokens
        asked = self.choice.asks(step.rows, cycle.chances, retrieved.size, lengths, cycle.num_unread)
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
            chances = cycle.chances[index]
            if chances:
                # What the retrieved draft would have given is known also where it was not verified.
                self.choice.observe_retrieved(
                    row, chances[: len(committed)] if is_asked else chances, cycle.num_agreeing(index, committed)
                )
            if is_asked:
                self.choice.observe_drafted(
                    accepted, accepted == cycle.rooms[index] < self.model.num_speculative_tokens
                )
            if is_asked or chances:
                self._num_drafts[is_asked] += 1
                self._num_accepted[is_asked] += accepted

    def keep_rows(self, keep: list[int]) -> None:
        self.retrieval.keep_rows(keep)
        self._unread.keep_rows(keep)
        self.model.keep_rows(keep)

    def close(self) -> None:
        try:
            self.retrieval.close()
        finally:
            self.model.close()
        self._unread, self._cycle = UnreadText(self.model), None
        self.choice.leave_to(self.experience)
        self.session.notes += [
            f"{method}: {num_accepted} tokens accepted from {num_drafts} drafts"
            for method, num_drafts, num_accepted in zip(self.methods, self._num_drafts, self._num_accepted)
        ]


class UnreadText:
    """What a drafter has not been told, because it was not asked: a text that is repeated to its end costs it nothing.

    Args:
        generator (`CandidateGenerator`): The drafter.

    Attributes:
        num_tokens (`int`): Tokens of a row, padding included.
    """

    def __init__(self, generator: CandidateGenerator):
        self.generator, self.num_tokens = generator, 0
        self._prompt: Prompt | None = None
        self._commits: list[Commit] = []

    def begin(self, prompt: Prompt) -> None:
        """Keeps the prompt."""
        self._prompt = prompt
        self._add(prompt.input_ids)

    def add(self, commit: Commit) -> None:
        """Keeps what was committed in a cycle in which the drafter was not asked."""
        self._commits.append(commit)
        self._add(commit.tokens)

    def _add(self, tokens: torch.LongTensor) -> None:
        self.num_tokens += tokens.shape[1]
        if self.generator.target_hidden_states and self.num_tokens * len(tokens) > _MOST_UNREAD_TOKENS:
            self.hand_over()

    def hand_over(self) -> None:
        """Tells the drafter all of it."""
        if self._prompt is not None:
            self.generator.prefill(self._prompt)
        if self._commits:
            self.generator.observe(Commit.joined(self._commits))
        self._prompt, self._commits, self.num_tokens = None, [], 0

    def keep_rows(self, keep: list[int]) -> None:
        """Drops finished rows. Drafters count rows from the prompt on, so they must know it by then."""
        if self._prompt is not None:
            self.hand_over()
        self._commits = [commit.of_rows(keep) for commit in self._commits]


@dataclass
class _Cycle:
    """What one cycle drafts.

    Attributes:
        retrieved (`DraftTree`): Drafts of the first drafter.
        chances (`list[list[float]]`): Its rating of them.
        rooms (`list[int]`): How deep each row may draft.
        asked (`list[bool]`): The rows whose draft is the second drafter's.
        draft (`DraftTree`): What is verified.
        num_unread (`int`): Tokens of a row that the second drafter had not been told of.
    """

    retrieved: DraftTree
    chances: list[list[float]]
    rooms: list[int]
    asked: list[bool] = field(default_factory=list)
    draft: DraftTree | None = None
    num_unread: int = 0

    def num_agreeing(self, index: int, committed: list[int]) -> int:
        """How many of the committed tokens the retrieved draft of a row has on one path."""
        drafted = self.retrieved.token_lists()[index]
        if self.retrieved.is_chain:
            most = min(len(drafted), len(committed))
            return next((count for count in range(most) if drafted[count] != committed[count]), most)
        node, count = -1, 0
        for place, (token, parent) in enumerate(zip(drafted, self.retrieved.parent_lists()[index])):
            if parent == node and count < len(committed) and token == committed[count]:
                node, count = place, count + 1
        return count


class DrafterChoice:
    """Which rows the second drafter is asked for.

    With r_b the tokens expected from the retrieved draft of row b (its score times what scores have been worth in this
    row), m the mean of the second drafter, and lambda the tokens per second of the last cycles, asking it for the rows
    with m > r_b gains in seconds

        sum_b (m - r_b) / lambda - T_draft - (T_verify(nodes with its drafts) - T_verify(nodes without))

    It is asked where that is positive, as soon as what was lost without it outweighs the reading of the text that it
    does not know yet. If not, it is still tried now and then where little was retrieved, because text and costs
    change: for a small part of all time.

    Args:
        experience (`Experience`): Of earlier calls.
        num_rows (`int`): Rows of the call.
        length (`int`): Most tokens of a draft of the second drafter, on one path.
        num_nodes (`int`): Most nodes of it.
    """

    def __init__(self, experience: Experience, num_rows: int, length: int, num_nodes: int):
        self.latency = experience.latency.for_another_call()
        self.draft_latency = experience.draft_latency.for_another_call()
        known = experience.mean_accepted
        self.mean_accepted = length / 2 if known is None else known
        # The text of this call may be another, so that earlier drafts soon count little.
        self.num_drafts = min(experience.num_drafts, _FIRST_DRAFTS)
        self._agreed, self._expected = [_TRUST] * num_rows, [_TRUST] * num_rows
        self._num_nodes = float(num_nodes)
        self._budget = experience.budget  # seconds that trials may cost
        self._missed = 0.0  # seconds that were lost without the drafter
        self._tokens = self._seconds = 0.0  # of the last cycles

    def asks(
        self,
        rows: list[int],
        chances: list[list[float]],
        num_retrieved: int,
        lengths: list[int],
        num_unread: int,
    ) -> list[bool]:
        """For each row whether the second drafter is asked.

        Args:
            rows (`list[int]` of length B): Which row of the call each active row is.
            chances (`list[list[float]]`): Ratings of the retrieved drafts.
            num_retrieved (`int`): Nodes of a row of them, padding included.
            lengths (`list[int]`): Most tokens that the second drafter may draft for each row.
            num_unread (`int`): Tokens of a row that it would have to read first.
        """
        retrieved = [self._worth(row, sum(found), len(found)) for row, found in zip(rows, chances)]
        drafted = [min(self.mean_accepted, length) for length in lengths]
        if self.latency.verify:
            self._budget += _TRIAL_SHARE * self.latency.verify_seconds(num_retrieved + 1, len(rows))
        wanted = [length > 0 and theirs > ours for ours, theirs, length in zip(retrieved, drafted, lengths)]
        reading = self._draft_seconds(num_unread, len(rows)) - self._draft_seconds(0, len(rows))
        if any(wanted):
            self._missed += max(self._gain(wanted, retrieved, drafted, num_retrieved), 0.0)
            if self.num_drafts < _FIRST_DRAFTS or self._missed > max(reading, 0.0):
                self._missed = 0.0
                return wanted
        tried = [length > 0 and ours < _LITTLE for ours, length in zip(retrieved, lengths)]
        if any(tried) and reading - self._gain(tried, retrieved, drafted, num_retrieved) <= self._budget:
            self._budget = 0.0
            return tried
        return [False] * len(rows)

    def _worth(self, row: int, score: float, depth: int) -> float:
        """Tokens expected from a retrieved draft of this score."""
        low, high = _TRUST_RANGE
        trust = min(max(self._agreed[row] / self._expected[row], low), high)
        return min(trust * score, depth)

    def _gain(self, asked: list[bool], retrieved: list[float], drafted: list[float], num_retrieved: int) -> float:
        """Expected seconds that are won by asking for these rows, the reading of unread text not counted."""
        num_rows, latency = len(asked), self.latency
        more_tokens = sum(theirs - ours for ours, theirs, is_asked in zip(retrieved, drafted, asked) if is_asked)
        without = latency.verify_seconds(num_retrieved + 1, num_rows)
        nodes = self._num_nodes if all(asked) else max(self._num_nodes, num_retrieved)
        more_seconds = self._draft_seconds(0, num_rows) + latency.verify_seconds(nodes + 1, num_rows) - without
        rate = self._tokens / self._seconds if self._seconds else (num_rows + sum(retrieved)) / without
        return more_tokens / rate - more_seconds

    def _draft_seconds(self, num_unread: int, num_rows: int) -> float:
        """Of the second drafter where it has so many tokens to read first; 0 before it was measured."""
        return self.draft_latency.verify_seconds(_size(num_unread), num_rows) if self.draft_latency.verify else 0.0

    def observe_cycle(
        self,
        num_rows: int,
        num_nodes: int,
        draft_seconds: float | None,
        verify_seconds: float,
        num_unread: int,
        num_committed: int,
    ) -> None:
        """Takes in a cycle.

        Args:
            num_rows (`int`): Active rows.
            num_nodes (`int`): Nodes of a row that were verified, the anchor included.
            draft_seconds (`float`, *optional*): Of the second drafter; `None` where it was not asked.
            verify_seconds (`float`): Of everything else.
            num_unread (`int`): Tokens of a row that the second drafter has read before it drafted.
            num_committed (`int`): Tokens that were committed, in all rows.
        """
        self.latency.observe_verification(num_rows, num_nodes, verify_seconds)
        # Not the measured seconds: a stall of the machine says nothing about the text.
        seconds = self.latency.verify_seconds(num_nodes, num_rows)
        if draft_seconds is not None:
            self._num_nodes += 0.1 * (num_nodes - 1 - self._num_nodes)
            self.draft_latency.observe_verification(num_rows, _size(num_unread), draft_seconds)
            seconds += self._draft_seconds(num_unread, num_rows)
        self._tokens = _RATE_MEMORY * self._tokens + num_committed
        self._seconds = _RATE_MEMORY * self._seconds + seconds

    def observe_retrieved(self, row: int, chances: Sequence[float], num_agreeing: int) -> None:
        """Takes in how many tokens of a retrieved draft agree with the text, as far as that can be seen."""
        self._agreed[row] = _TRUST_MEMORY * self._agreed[row] + num_agreeing
        self._expected[row] = _TRUST_MEMORY * self._expected[row] + sum(chances)

    def observe_drafted(self, num_accepted: int, is_cut: bool) -> None:
        """Takes in a draft of the second drafter; one that was cut short and accepted as a whole says little."""
        self.num_drafts += 1
        if not is_cut:
            weight = max(1 / (_PRIOR_DRAFTS + self.num_drafts), _MEAN_WEIGHT)
            self.mean_accepted += weight * (num_accepted - self.mean_accepted)

    def leave_to(self, experience: Experience) -> None:
        """Leaves what was found to the next call."""
        experience.latency, experience.draft_latency = self.latency, self.draft_latency
        experience.mean_accepted, experience.num_drafts = self.mean_accepted, self.num_drafts
        experience.budget = self._budget


def _size(num_unread: int) -> int:
    """The size that stands for drafts before which so many tokens are read."""
    return max(1 << max(num_unread - 1, 0).bit_length(), _LEAST_READ)


def merged(retrieved: DraftTree, drafted: DraftTree, from_model: Sequence[bool]) -> DraftTree:
    """The drafts of one cycle, each row's from one of two drafters.

    Beside drafts that were drawn a retrieved one is a chain, drawn from a law of its tokens alone, for which rejection
    sampling is the same as following the target.

    Args:
        retrieved (`DraftTree`): Drafts of all rows, without `probs`.
        drafted (`DraftTree`): Others.
        from_model (`Sequence[bool]`): The rows of which `drafted` counts.
    """
    if drafted.probs is not None and not retrieved.is_chain:
        retrieved = _first_paths(retrieved)
    device, size = drafted.tokens.device, max(retrieved.size, drafted.size)
    is_drafted = upload(from_model, device).bool()
    column = is_drafted[:, None]

    def widened(values: torch.Tensor, filler: int = 0) -> torch.Tensor:
        return F.pad(values, (0, size - values.shape[1]), value=filler)

    tokens = torch.where(column, widened(drafted.tokens), widened(retrieved.tokens))
    num_nodes = _merged_counts(retrieved, drafted, from_model)
    if num_nodes is None:
        num_nodes = torch.where(is_drafted, drafted.num_nodes, retrieved.num_nodes)
    if not (retrieved.is_chain and drafted.is_chain):
        both = (widened(tree.parents.expand(len(from_model), -1), -1) for tree in (drafted, retrieved))
        return DraftTree(tokens, torch.where(column, *both), num_nodes)
    if drafted.probs is None:
        return DraftTree.chain(tokens, num_nodes)
    probs = F.pad(drafted.probs, (0, 0, 0, size - drafted.size))
    point_masses = torch.zeros_like(probs).scatter_(2, tokens[..., None], 1.0)
    return DraftTree.chain(tokens, num_nodes, torch.where(column[..., None], probs, point_masses))


def _merged_counts(retrieved: DraftTree, drafted: DraftTree, from_model: Sequence[bool]) -> list[int] | None:
    """Valid nodes of each row, if the host knows them."""
    if drafted.node_counts is None:
        return None
    rows = zip(retrieved.node_counts, drafted.node_counts, from_model)
    return [theirs if is_drafted else ours for ours, theirs, is_drafted in rows]


def _first_paths(draft: DraftTree) -> DraftTree:
    """Of each row's tree the path that always takes the first child."""
    chains = []
    for tokens, parents in zip(draft.token_lists(), draft.parent_lists()):
        node, chain = -1, []
        for place, (token, parent) in enumerate(zip(tokens, parents)):
            if parent == node:
                node = place
                chain.append(token)
        chains.append(chain)
    return DraftTree.from_lists(chains, draft.tokens.device)


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
