"""A speculator: settings, loaded draft weights and persistent caches, everything that outlives a `generate()` call."""

from __future__ import annotations

import os
from contextlib import closing
from copy import copy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar
from weakref import ref

import torch
from transformers.generation.candidate_generator import CandidateGenerator as HfCandidateGenerator

from .candidate_generators.adaptive import AdaptiveCandidateGenerator
from .candidate_generators.assisted import StockCandidateGenerator, UnboundCandidateGenerator
from .candidate_generators.base import CandidateGenerator
from .candidate_generators.combined.generator import part_configs
from .candidate_generators.none.generator import NoDrafts
from .control import ControlProfile, ScheduledLength, SpeculationController
from .control.constants import LARGEST_FIRST_LENGTH
from .errors import SpecConfigError
from .logits.sampling import DraftSampler
from .protocol import Session
from .settings import AUTO, FIXED, SpeculativeConfig
from .target_facts import vocabulary_size


# Maximum length of the imagined call whose checks are run.
_ANY_LENGTH = 2**20

# Lengths by the number of rows that allow no drafts for any.
_NEVER = ((1, 0),)


class Speculator:
    """Made by [`load_speculator`]; pass it to `generate(assistant=speculator)`. Threads may share one.

    Args:
        config (`SpeculativeConfig`): The settings.
        generator_class (`type`): The method's candidate generator.
        resources (`Any`): What the method loaded for its target: weights, caches.
        profile (`ControlProfile`, *optional*): Costs and acceptance that earlier calls with adaptive lengths have
            found; each call learns from it and adds to it.
        target (`PreTrainedModel`, *optional*): The target, which is not kept alive.

    Attributes:
        target_name, target_revision (`str`, *optional*): Repo id or folder of the target, and its commit.
        note (`str`, *optional*): Goes into the statistics of every call, such as why this drafter was chosen.
        origin (`dict`): Of a drafter that discovery chose: what it is and from whom, for the statistics.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        generator_class: type[CandidateGenerator],
        resources: Any,
        profile: ControlProfile | None = None,
        target: torch.nn.Module | None = None,
    ):
        self.config = config
        self.method: str = config.method
        self.generator_class = generator_class
        self.resources = resources
        # A method of the user's may draw its drafts always: then their lengths would decide the text.
        asks = config.num_speculative_tokens == AUTO
        self.is_adaptive: bool = config.is_adaptive and (asks or generator_class.samples_drafts is not True)
        self.profile: ControlProfile | None = ControlProfile() if profile is None and self.is_adaptive else profile
        self._target = None if target is None else ref(target)
        target_config = getattr(target, "config", None)
        self.target_name: str | None = getattr(target_config, "_name_or_path", None) or None
        self.target_revision: str | None = getattr(target_config, "_commit_hash", None) or None
        self.note: str | None = None
        self.origin: dict[str, str | None] = {}

    @property
    def target(self) -> torch.nn.Module | None:
        """The target, as far as it is known and still there."""
        return None if self._target is None else self._target()

    # A generation config may hold one: transformers copies it, and writes it as it writes a dataclass.
    __dataclass_fields__: ClassVar[dict[str, Any]] = {}

    def to_dict(self) -> dict[str, Any]:
        """The settings, as plain Python and JSON types."""
        return self.config.to_dict()

    def __deepcopy__(self, memo: dict[int, Any]) -> Speculator:
        # What it loaded is shared.
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Another process has another target.
        return {**vars(self), "_target": None}

    def candidate_generator(self, session: Session | None = None) -> CandidateGenerator:
        """A fresh candidate generator for one `generate()` call.

        Args:
            session (`Session`, *optional*): The call. Without it the generator is bound to the call that it is passed
                to as `generate(assistant=...)`; transformers' own assisted decoding can drive it, too.
        """
        if session is None:
            return UnboundCandidateGenerator(self)
        if self.note is not None:
            session.notes.append(self.note)
        schedule = self.config.num_speculative_tokens_per_batch_size
        if schedule == _NEVER:
            return NoDrafts(self.config, None, session, "batch_size")
        session.adapts = self.is_adaptive
        longest_drafts = _longest_drafts(self.config, self.generator_class, self.is_adaptive)
        generator = self.generator_class(longest_drafts, self.resources, session)
        if not self.is_adaptive and schedule is None:
            return generator
        if not self.is_adaptive:
            longest = generator.num_speculative_tokens
            rule = ScheduledLength(lambda num_rows: min(self.config.most_tokens(num_rows), longest))
            return AdaptiveCandidateGenerator(generator, rule)
        usual, target = self.generator_class.default_length(self.config.options), self.target
        is_known = target is None or self.profile.latency.knows_anything
        cost = None if is_known else self.generator_class.draft_cost(self.resources, target)
        controller = SpeculationController(
            generator.num_speculative_tokens,
            session.batch_size,
            self.profile,
            min(usual, LARGEST_FIRST_LENGTH.get(session.device.type, usual)),
            None if schedule is None else self.config.most_tokens,
            cost or 0.0,
        )
        return AdaptiveCandidateGenerator(generator, controller)

    def check(self, target_model: torch.nn.Module) -> None:
        """Refuses settings that ask for more than was loaded, such as for more tokens than there are heads."""
        # Beginning a call makes every check, also of what earlier settings have loaded.
        longest_drafts = _longest_drafts(self.config, self.generator_class, self.is_adaptive)
        self.generator_class(longest_drafts, self.resources, _session_of_any_call(target_model)).close()

    def check_joining(self, target_model: torch.nn.Module) -> None:
        """Refuses methods that do not let rows join a call."""
        with closing(self.candidate_generator(_session_of_any_call(target_model))) as generator:
            if not generator.takes_rows:
                raise SpecConfigError(
                    f"{self.generator_class.__name__} keeps something of each row and does not implement "
                    "join(other, numbers), through which rows take the places of finished ones. Implement it, or pass "
                    "batch_size=1."
                )

    def at_full_length(self) -> Speculator:
        """A speculator like this one whose lengths are the largest that this one may choose, in every cycle."""
        if not self.is_adaptive:
            return self
        longest = _longest_drafts(self.config, self.generator_class, self.is_adaptive)
        config = longest.replace(num_speculative_tokens=longest.num_speculative_tokens or FIXED)
        return self.changed(config=config, is_adaptive=False)

    def without_texts(self, target_model: torch.nn.Module) -> Speculator:
        """A speculator like this one without what it remembers of texts. Weights and learnt costs are shared."""
        resources = _without_texts(self.generator_class, self.config, self.resources, target_model)
        return self.changed(resources=resources, _target=ref(target_model))

    def changed(self, **attributes: Any) -> Speculator:
        """A speculator like this one with other attributes."""
        speculator = copy(self)
        vars(speculator).update({"_target": self._target, **attributes})
        return speculator

    def save_pretrained(self, folder: str | os.PathLike[str], **card: Any) -> Path:
        """Saves the drafter to a folder that `spec_model=folder` loads again with the same settings.

        Args:
            folder (`str` or `os.PathLike`): Made if needed. A card that is there keeps its text.
            card: Of the model card: `name`, the repo id (by default the folder's name), `target`, the target's (by
                default where it was loaded from), and `license`, `tags`, `base_model_relation` and `report` of
                [`~hub.make_card`].

        Returns:
            `Path` of the folder.

        Raises:
            SpecConfigError: The network has no format to be written in, or the card cannot be made.
            CheckpointFormatError: The checkpoint that it was loaded from is damaged or gone.
        """
        from .hub.publish import save_speculator

        return save_speculator(self, folder, **card)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Uploads the drafter to a repository on the Hub, so that `spec_model=repo_id` loads it.

        Args:
            repo_id (`str`): The repository, made if needed. A card that it has keeps its text.
            options: `private` (of a new repository), `token`, `revision` (a branch that is there), `create_pr`,
                `commit_message`, and of the card what `save_pretrained` takes.

        Returns:
            `str`: The address of the commit.

        Raises:
            SpecConfigError: As `save_pretrained`, or `repo_id` is no valid id.
            huggingface_hub.errors.HfHubHTTPError: The Hub refuses: no login, no rights.
        """
        from .hub.publish import push_speculator

        return push_speculator(self, repo_id, **options)

    def __repr__(self) -> str:
        return f"Speculator({self.config!r})"


class GivenCandidateGenerator:
    """Stands for a speculator in a call that was given a candidate generator, of this package or transformers."""

    origin: ClassVar[dict[str, str | None]] = {}

    def __init__(self, generator: HfCandidateGenerator):
        is_of_ours = isinstance(generator, CandidateGenerator)
        self.generator: CandidateGenerator = generator if is_of_ours else StockCandidateGenerator(generator)
        self.config: SpeculativeConfig | None = self.generator.config
        self.method: str = "candidate_generator" if self.config is None else self.config.method
        # As the speculator that has made it, if one did.
        self.is_adaptive: bool = getattr(getattr(self.generator, "speculator", None), "is_adaptive", False)

    def candidate_generator(self, session: Session) -> CandidateGenerator:
        return self.generator.bind(session)


@lru_cache(maxsize=64)
def _longest_drafts(
    config: SpeculativeConfig, generator_class: type[CandidateGenerator], is_adaptive: bool
) -> SpeculativeConfig:
    """The settings with the largest length that is drafted in a cycle; under a controller the method's own most."""
    schedule = config.num_speculative_tokens_per_batch_size
    if not is_adaptive:
        lengths = [k for _, k in schedule or ((1, None),)]
        if None not in lengths and config.fixed_length is None and config.speculative_token_tree is None:
            return config.replace(num_speculative_tokens=max(lengths) or None)
        return config.replace(num_speculative_tokens=None) if config.num_speculative_tokens == FIXED else config
    changes: dict[str, Any] = {"num_speculative_tokens": None}
    most = generator_class.most_speculative_tokens
    if most is not None and not config.speculative_token_tree:
        # The most that is asked for any number of rows is no contradiction then.
        changes["num_speculative_tokens"] = max([most, *(k or 0 for _, k in schedule or ())])
    for part in generator_class.parts or (generator_class,):
        changes |= part.adaptive_settings(config.options)
    # The text of drawn drafts depends on where they end, and that on measured times.
    return config.with_greedy_drafts().replace(**changes)


def _session_of_any_call(target_model: torch.nn.Module) -> Session:
    """The session of a greedy call of one row, without a prompt."""
    sampler = DraftSampler(None, None, vocabulary_size(target_model))
    return Session(1, _ANY_LENGTH, torch.device("cpu"), sampler)


def _without_texts(
    generator_class: type[CandidateGenerator],
    config: SpeculativeConfig,
    resources: Any,
    target_model: torch.nn.Module,
) -> Any:
    """The resources of a method without remembered texts, which only methods without a network keep."""
    if generator_class.parts:
        retriever, model = generator_class.parts
        of_retriever, of_model = part_configs(config)
        return replace(
            resources,
            retrieval=_without_texts(retriever, of_retriever, resources.retrieval, target_model),
            model=_without_texts(model, of_model, resources.model, target_model),
        )
    return generator_class.load(config, target_model) if generator_class.network(resources) is None else resources
