"""A pair of methods as one: what loads both, and makes their candidate generators for a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ...control import ControlProfile
from ...errors import SpecConfigError
from ...method import COMBINING, NO_DRAFTS, resolve_candidate_generator
from ...protocol import Session
from ..base import CandidateGenerator
from .generator import CombinedCandidateGenerator
from .led import LedCandidateGenerator
from .options import CombinedOptions, CombinedOptionsClass


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig


@dataclass
class CombinedResources:
    """Outlives a call: what the parts have loaded, and what calls have found of the second one."""

    retrieval: Any
    model: Any
    profile: ControlProfile = field(default_factory=ControlProfile)


def _load_part(
    generator_class: type[CandidateGenerator],
    config: SpeculativeConfig,
    target_model: torch.nn.Module,
    draft_model: torch.nn.Module | None,
) -> Any:
    given = {} if draft_model is None else {"draft_model": draft_model}
    return generator_class.load(config, target_model, **given)


@dataclass(frozen=True)
class Combination:
    """Two methods, used like the candidate generator's class of one.

    Args:
        methods (`tuple[str, str]`): Their names.
        parts (`tuple[type, type]`): The classes of their candidate generators: one that retrieves and one that drafts
            everywhere, or one that leads and one that goes on from there.
        generator_class (`type`): Asks the two in a call.

    Raises:
        SpecConfigError: Both have an option of one name.
    """

    methods: tuple[str, str]
    parts: tuple[type[CandidateGenerator], type[CandidateGenerator]]
    generator_class: type[CombinedCandidateGenerator | LedCandidateGenerator] = CombinedCandidateGenerator
    options_class: CombinedOptionsClass = field(init=False, compare=False)

    # The draft network, and in a call its generator, say which states they read, and whether drafts are sampled.
    target_hidden_states = ()
    samples_drafts = None

    def __post_init__(self) -> None:
        retrieval, model = (part.options_class for part in self.parts)
        object.__setattr__(self, "options_class", CombinedOptionsClass(self.methods, retrieval, model))

    @property
    def default_num_speculative_tokens(self) -> int:
        return self.parts[1].default_num_speculative_tokens

    @property
    def most_speculative_tokens(self) -> int | None:
        return self.parts[1].most_speculative_tokens

    @property
    def loaded_by(self) -> tuple[str, ...] | None:
        """Flat settings that `load` reads; `None`: all of them."""
        names = [part.loaded_by for part in self.parts]
        return None if None in names else tuple(dict.fromkeys(sum(names, ())))

    def default_length(self, options: CombinedOptions) -> int:
        """The longest draft of the two."""
        retrieval, model = self.parts
        own = options.retrieval_num_speculative_tokens or retrieval.default_length(options.retrieval)
        return max(own, model.default_length(options.model))

    def load(
        self,
        config: SpeculativeConfig,
        target_model: torch.nn.Module,
        draft_model: torch.nn.Module | None = None,
        load_part: Callable[..., Any] = _load_part,
    ) -> CombinedResources:
        """Loads both parts. Retrieval searches the responses of calls with this combination alone.

        Args:
            config, target_model, draft_model: As for the second part.
            load_part (`Callable`): Loads that one; takes its class and settings, the target and the draft model.
        """
        retrieval, model = self.parts
        own = part_configs(config)
        return CombinedResources(
            retrieval.load(own[0], target_model), load_part(model, own[1], target_model, draft_model)
        )

    def network(self, resources: CombinedResources) -> torch.nn.Module | None:
        """The draft network of the second part."""
        return self.parts[1].network(resources.model)

    def loaded_from(self, config: SpeculativeConfig, target_model: torch.nn.Module) -> SpeculativeConfig | None:
        """Settings that name the files of the second part."""
        return self.parts[1].loaded_from(part_configs(config)[1], target_model)

    def text_bytes(self, resources: CombinedResources) -> int:
        """Bytes of memory that texts take in what was loaded."""
        return self.parts[0].text_bytes(resources.retrieval) + self.parts[1].text_bytes(resources.model)

    def __call__(
        self, config: SpeculativeConfig, resources: CombinedResources, session: Session
    ) -> CombinedCandidateGenerator | LedCandidateGenerator:
        """The candidate generator of a call."""
        loaded = (resources.retrieval, resources.model)
        retrieval, model = (
            part(own, given, session) for part, own, given in zip(self.parts, _call_configs(config), loaded)
        )
        return self.generator_class(config, session, retrieval, model, resources.profile)

    def check(self, config: SpeculativeConfig, resources: CombinedResources, session: Session) -> None:
        """Refuses settings that what was loaded cannot follow, as that of a single method."""
        self(config, resources, session).close()


def combination(methods: tuple[str, ...]) -> Combination:
    """The combination of two methods.

    Raises:
        SpecConfigError: They cannot be combined, or one is unknown.
    """
    return _combination(methods, tuple(map(resolve_candidate_generator, methods)))


@lru_cache
def _combination(methods: tuple[str, ...], parts: tuple[type[CandidateGenerator], ...]) -> Combination:
    if NO_DRAFTS in methods:
        raise SpecConfigError(
            f"method='{COMBINING.join(methods)}': '{NO_DRAFTS}' drafts nothing beside another method. Leave it out."
        )
    first, *others = parts
    if first.leads and len(others) == 1 and others[0].continues_leads:
        return Combination(methods, parts, LedCandidateGenerator)
    _check_parts(methods, parts)
    return Combination(methods, parts)


def _check_parts(methods: tuple[str, ...], parts: tuple[type[CandidateGenerator], ...]) -> None:
    retrieves = [part.estimates_acceptance for part in parts]
    if retrieves == [True, False]:
        return
    name = COMBINING.join(methods)
    if retrieves == [False, True]:
        problem = f"names the retrieving one last. Write '{methods[1]}+{methods[0]}'"
    elif len(parts) == 2:
        kind = "retrieve" if retrieves[0] else "draft everywhere"
        problem = f"names {'one method twice' if methods[0] == methods[1] else f'two that {kind}'}"
    else:
        problem = f"names {len(parts)}"
    raise SpecConfigError(
        f"method='{name}': a combination has two methods, one that retrieves (ngram, suffix) and one that drafts "
        f"everywhere, in this order, and this one {problem}. An example is 'suffix+eagle3'. Before any other method "
        "'grammar' can stand."
    )


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
