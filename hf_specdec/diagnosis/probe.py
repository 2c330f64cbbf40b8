"""Probes how many drafts a target would accept, by position, also if the drafter were wired differently.

A drafter that reads the wrong states or feeds itself the wrong ones raises no error: it drafts, and little of it is
accepted. Here it drafts at every token of a text that the target writes one by one, and the drafts are compared with
what the target writes next. So all wirings are judged at the same places, and the smallest difference shows.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..bench.engine import greedy_texts
from ..bench.prompts import Batch
from ..candidate_generators.base import CandidateGenerator
from ..checkpoints.header import TargetSizes
from ..drafts import DraftTree
from ..layers.draft_network import DraftNetwork
from ..protocol import Commit, DraftStep, Prompt, Session
from ..settings import FIXED
from ..speculator import Speculator


# Standard errors beyond which a difference is taken for real. Seven wirings are tried at most.
_SIGNIFICANT = 2.5

# Tokens of context: a token after the same ones once more, in a text that repeats itself, is no further evidence.
_CONTEXT = 4


@dataclass
class Acceptance:
    """Acceptance of drafts at every token of a target's texts.

    Attributes:
        reached (`list[int]`): How often a token at each position of a draft is judged: those before it are accepted.
        accepted (`list[int]`): How many of these are accepted.
        counts (`dict`): For each place (text and index in it) whose context is new the draft tokens accepted there.
        first_tokens (`list[tuple[int, int]]`): For each of these the likeliest first draft token and the target's.
        tokens (`list[int]`): What the target wrote.
    """

    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    counts: dict[tuple[int, int], int] = field(default_factory=dict)
    first_tokens: list[tuple[int, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_places: int = 0

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

    def is_better_than(self, other: Acceptance) -> bool:
        """Tells if significantly more is accepted than by `other`, at the places that both have: a sign test."""
        both = self.counts.keys() & other.counts.keys()
        wins = sum(self.counts[place] > other.counts[place] for place in both)
        losses = sum(self.counts[place] < other.counts[place] for place in both)
        return wins - losses > _SIGNIFICANT * math.sqrt(wins + losses)

    def is_above(self, other: Acceptance) -> bool:
        """Tells if more is accepted than in other texts: a test of two shares, of places with an accepted draft."""
        (hits, total), (other_hits, other_total) = [
            (sum(count > 0 for count in found.counts.values()), len(found.counts)) for found in (self, other)
        ]
        if not total or not other_total:
            return False
        share = (hits + other_hits) / (total + other_total)
        error = math.sqrt(share * (1 - share) * (1 / total + 1 / other_total))
        return hits / total - other_hits / other_total > _SIGNIFICANT * error

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain JSON types."""
        return {
            "acceptance_length": self.acceptance_length,
            "rates": self.rates,
            "reached": self.reached,
            "num_places": self.num_places,
        }


def measure_acceptance(
    model: PreTrainedModel,
    speculator: Speculator,
    batches: Sequence[Batch],
    wiring: Wiring | None = None,
    **sampling: Any,
) -> Acceptance:
    """Lets the target write and the drafter draft at every token.

    Args:
        model (`PreTrainedModel`): The target.
        speculator (`Speculator`): Drafts; its best tokens, never drawn ones.
        batches (`Sequence[Batch]`): Prompts.
        wiring (`Wiring`, *optional*): How the drafter is connected; `None`: as it is.
        sampling: Arguments of `generate()`; greedy without any.
    """
    watching = _Watching.of(speculator, wiring)
    found = Acceptance()
    number = 0
    for batch in batches:
        watching.drafts.clear()
        for row, new in enumerate(greedy_texts(model, batch, **sampling, assistant=watching)):
            prompt = batch.inputs["input_ids"][row][batch.inputs["attention_mask"][row].bool()].tolist()
            found.tokens += new
            _count(found, number, prompt + new, watching.drafts[row])
            number += 1
    return found


# The drafts of one text by the length of the text before them: their tokens and parents.
Drafts = dict[int, tuple[list[int], list[int]]]


def _count(found: Acceptance, number: int, text: list[int], drafts: Drafts) -> None:
    """Judges the drafts of a text."""
    seen = set()
    for length, (tokens, parents) in drafts.items():
        if length >= len(text):
            continue
        found.num_places += 1
        accepted = _accepted(found, tokens, parents, text[length:])
        context = tuple(text[max(length - _CONTEXT, 0) : length])
        if tokens and context not in seen:
            seen.add(context)
            found.counts[number, length] = accepted
            found.first_tokens.append((tokens[0], text[length]))


def _accepted(found: Acceptance, tokens: list[int], parents: list[int], following: list[int]) -> int:
    """Counts one draft, and returns how many of its tokens are accepted."""
    children: dict[int, list[int]] = defaultdict(list)
    for index, parent in enumerate(parents):
        children[parent].append(index)
    node = -1
    for position, token in enumerate(following):
        if not children[node]:
            return position
        if position == len(found.reached):
            found.reached.append(0)
            found.accepted.append(0)
        found.reached[position] += 1
        matching = [child for child in children[node] if tokens[child] == token]
        if not matching:
            return position
        found.accepted[position] += 1
        node = matching[0]
    return len(following)


def consistent_meaning(pairs: Collection[tuple[int, int]]) -> tuple[float, float]:
    """Measures if wrong draft tokens stand for others, always the same ones: then a table of ids is wrong.

    Args:
        pairs (`Collection[tuple[int, int]]`): Draft tokens, each with the target's.

    Returns:
        Two shares of the pairs: of those whose target token is the commonest one that the same draft token has in the
        *other* pairs, and of the commonest target token of all, which a drafter without any knowledge reaches.
    """
    if not pairs:
        return 0.0, 0.0
    meanings: dict[int, Counter] = defaultdict(Counter)
    for drafted, meant in pairs:
        meanings[drafted][meant] += 1
    hits = 0
    for drafted, meant in pairs:
        others = meanings[drafted].copy()
        others[meant] -= 1
        token, count = others.most_common(1)[0]
        hits += count > 0 and token == meant
    commonest = Counter(meant for _, meant in pairs).most_common(1)[0][1]
    return hits / len(pairs), commonest / len(pairs)


# -------------------------------------------------------------------------------------------------- other wirings


@dataclass(frozen=True)
class Wiring:
    """Target states that a drafter is given.

    Attributes:
        sources (`Mapping`): For each state that it asks for the one that it gets; empty: that one.
        factor (`float`): What they are multiplied by.
    """

    sources: Mapping[int | str, int | str] = field(default_factory=dict)
    factor: float = 1.0


@dataclass(frozen=True)
class Variant:
    """A drafter that is wired differently.

    Attributes:
        cause (`str`): What is wrong if more of its drafts are accepted.
        remedy (`str`): What to do then.
        speculator (`Speculator`): It.
        wiring (`Wiring`, *optional*): What it is shown; `None`: what it asks for.
    """

    cause: str
    remedy: str
    speculator: Speculator
    wiring: Wiring | None = None


def variants(model: PreTrainedModel, speculator: Speculator) -> Iterator[Variant]:
    """Undoes each of the mistakes that are made in wiring drafters like this one."""
    network = speculator.generator_class.network(speculator.resources)
    keys = tuple(getattr(network, "target_hidden_states", speculator.generator_class.target_hidden_states))
    if not keys:
        return
    sizes = TargetSizes.of(model)
    for sources in _other_states(keys, sizes.num_hidden_layers):
        yield Variant(
            f"It reads the target's states {_listed(keys)} and was trained on {_listed(sources)}.",
            _states_remedy(getattr(network, "states_setting", None), sources),
            speculator,
            Wiring(dict(zip(keys, sources))),
        )
    root = math.sqrt(sizes.hidden_size)
    for factor, name in ((root, "larger"), (1 / root, "smaller")):
        yield Variant(
            f"The scale of the target's states is wrong: those of its training were {name} by the root of the hidden "
            "size.",
            "Look for a norm, or a scale of embeddings or states, that training had and the checkpoint lacks, or the "
            "reverse.",
            speculator,
            Wiring(factor=factor),
        )
    if speculator.resources is network and isinstance(network, DraftNetwork):
        yield from _network_variants(model, speculator, network)


def _other_states(keys: tuple, num_layers: int) -> Iterator[tuple]:
    """Lists states that a drafter whose config says `keys` may have been trained on."""
    found: list[tuple] = []
    if "last" not in keys:
        found += [tuple(key + shift for key in keys) for shift in (1, -1)]
        found += [keys[::-1]]
        usual = (2, num_layers // 2, num_layers - 3)
        found += [usual] if len(keys) == len(set(usual)) else []
    if keys == ("last",):
        # Before the final norm, and what enters the last layer.
        found += [(num_layers,), (num_layers - 1,)]
    if keys == (num_layers,):
        found.append(("last",))
    for sources in dict.fromkeys(found):
        if sources != keys and all(key == "last" or 0 <= key <= num_layers for key in sources):
            yield sources


def _states_remedy(setting: str | None, sources: tuple) -> str:
    if setting is not None and list(sources) == sorted(sources):
        return f"Pass {setting}={list(sources)}, or correct them in its config.json."
    return "Correct the layers in its config.json, or pass the drafter that was trained on these states."


def _listed(keys: tuple) -> str:
    return ", ".join("after the final norm" if key == "last" else str(key) for key in keys)


class _WatchedGenerator(CandidateGenerator):
    """Keeps what a method drafts, and hands nothing of it on: the target writes token by token.

    Args:
        generator (`CandidateGenerator`): The method's.
        wiring (`Wiring`): What it is shown.
        drafts (`dict[int, Drafts]`): Where the drafts of each row are put.
    """

    samples_drafts = False

    def __init__(self, generator: CandidateGenerator, wiring: Wiring, drafts: dict[int, Drafts]):
        self.generator, self.wiring, self.drafts = generator, wiring, drafts
        self.session, self.config = generator.session, generator.config
        self.num_speculative_tokens = generator.num_speculative_tokens
        self.sources = {key: wiring.sources.get(key, key) for key in generator.target_hidden_states}
        self.target_hidden_states = tuple(dict.fromkeys(self.sources.values()))

    @property
    def num_draft_nodes(self) -> int:
        return self.generator.num_draft_nodes

    def _shown(self, states: dict) -> dict:
        factor = self.wiring.factor
        shown = {key: states[source] for key, source in self.sources.items()}
        return shown if factor == 1 else {key: state * factor for key, state in shown.items()}

    def prefill(self, prompt: Prompt) -> None:
        self.generator.prefill(replace(prompt, hidden_states=self._shown(prompt.hidden_states)))

    def propose(self, step: DraftStep) -> DraftTree:
        draft = self.generator.propose(step)
        for row, length, *drafted in zip(step.rows, step.lengths, draft.token_lists(), draft.parent_lists()):
            self.drafts[row][length] = tuple(drafted)
        return DraftTree.empty(len(step.rows), self.session.device)

    def observe(self, commit: Commit) -> None:
        self.generator.observe(replace(commit, hidden_states=self._shown(commit.hidden_states)))

    def keep_rows(self, keep: list[int]) -> None:
        self.generator.keep_rows(keep)

    def close(self) -> None:
        self.generator.close()


class _Watching(Speculator):
    """A speculator whose generators are watched."""

    wiring: Wiring
    drafts: dict[int, Drafts]

    @classmethod
    def of(cls, speculator: Speculator, wiring: Wiring | None) -> _Watching:
        # A length that adapts would learn that nothing is ever accepted.
        config = speculator.config.replace(
            num_speculative_tokens=speculator.config.fixed_length or FIXED,
            disable_by_batch_size=None,
        )
        if hasattr(config.options, "draft_sample_method"):
            # Sampled tokens are accepted by their probabilities, not by being the target's.
            config = config.replace(draft_sample_method="greedy")
        found = cls(config, speculator.generator_class, speculator.resources)
        found.wiring, found.drafts = wiring or Wiring(), defaultdict(dict)
        return found

    def candidate_generator(self, session: Session) -> CandidateGenerator:
        return _WatchedGenerator(super().candidate_generator(session), self.wiring, self.drafts)


def _network_variants(model: PreTrainedModel, speculator: Speculator, network: DraftNetwork) -> Iterator[Variant]:
    """Yields the drafter with other settings of its own network."""

    def with_network(changed: nn.Module) -> Speculator:
        return Speculator(speculator.config, speculator.generator_class, changed)

    config = network.config
    for flag in network.unreliable_flags:
        value = not getattr(config, flag)
        yield Variant(
            f"Its config says {flag}={not value} and it was trained with {value}.",
            f"Set `{flag}` to {str(value).lower()} in its config.json.",
            with_network(network.with_settings(**{flag: value})),
        )
    own, theirs = config.rope_parameters, _rope_parameters(model)
    if theirs and own.get("rope_theta") != theirs["rope_theta"]:
        yield Variant(
            f"Its rotary embedding has rope_theta={own['rope_theta']:g} and it was trained with the target's, "
            f"{theirs['rope_theta']:g}.",
            "Set `rope_theta` in its config.json to the target's.",
            with_network(network.with_settings(rope_parameters={**own, "rope_theta": theirs["rope_theta"]})),
        )


def _rope_parameters(model: PreTrainedModel) -> Mapping[str, Any] | None:
    """Rotary settings of the target; `None` where it has none, or several."""
    found = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None)
    return found if isinstance(found, Mapping) and "rope_theta" in found else None
