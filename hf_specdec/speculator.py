"""A speculator: settings, loaded draft weights and persistent caches, everything that outlives a `generate()` call."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any
from weakref import ref

import torch
from transformers.generation.candidate_generator import CandidateGenerator as HfCandidateGenerator
from transformers.generation.logits_process import LogitsProcessorList
from transformers.utils import logging

from .candidate_generators.assisted import StockCandidateGenerator, UnboundCandidateGenerator
from .candidate_generators.base import CandidateGenerator, NoDrafts
from .candidate_generators.combined.generator import part_configs
from .control import ControlProfile, ScheduledLength, SpeculationController
from .control.store import find_profile
from .decoding.graphs import forget_graphs
from .decoding.sequences import Sequences
from .errors import SpecConfigError, SpecDecError
from .hub.candidate import Candidate
from .hub.detect import reads_target_cache
from .hub.discover import Search
from .hub.files import RepoFiles, file_identity, only_safetensors
from .hub.published import IN_GENERATION_CONFIG, published_config, settings_of_generation_config
from .hub.target import Access, Target
from .hub.trust import one_line, restrictions, warn_of
from .loaded import forget_records, record_of
from .logits.processors import ProcessorStack
from .logits.sampling import DraftSampler
from .method import (
    drafting_method,
    is_language_model,
    language_model_method,
    own_layers_method,
    parts_of,
    resolve_candidate_generator,
)
from .protocol import Session
from .settings import AUTO, SpeculativeConfig
from .target_facts import vocabulary_size
from .threads import cached_property
from .transfers import on_cpu_unless_said


logger = logging.get_logger(__name__)


# Draft tokens per token of a match where lengths are adaptive and the settings leave the default.
_ADAPTIVE_SPEC_FACTOR = 2.0

# For so long a drafter that could not be loaded is not tried again where no call asks for it.
_SECONDS_REFUSED = 300.0

# Of a call that is begun for its checks alone.
_ANY_LENGTH = 2**20


class Speculator:
    """Made by [`load_speculator`]; pass it to `generate(assistant=speculator)`. Threads may share one.

    Args:
        config (`SpeculativeConfig`): The settings.
        generator_class (`type`): The method's candidate generator.
        resources (`Any`): What the method loaded for its target: weights, caches.
        note (`str`, *optional*): Goes into the statistics of every call, such as why this drafter was chosen.
        target_name (`str`, *optional*): Repo id or folder of the target, as far as it has one.
        target_revision (`str`, *optional*): Its commit.
        profile (`ControlProfile`, *optional*): Costs and acceptance that earlier calls with
            num_speculative_tokens="auto" have found; each call learns from it and adds to it.
        target (`PreTrainedModel`, *optional*): The target, which is not kept alive.

    Attributes:
        origin (`dict`): Of a drafter that no call has named: what was taken and from whom, for the statistics.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        generator_class: type[CandidateGenerator],
        resources: Any,
        note: str | None = None,
        target_name: str | None = None,
        target_revision: str | None = None,
        profile: ControlProfile | None = None,
        target: torch.nn.Module | None = None,
    ):
        self.config = config
        self.generator_class = generator_class
        self.resources = resources
        self.note = note
        self.target_name = target_name
        self.target_revision = target_revision
        self.profile = ControlProfile() if profile is None else profile
        self._target = None if target is None else ref(target)
        self.origin: dict[str, str | None] = {}

    @property
    def method(self) -> str:
        return self.config.method

    @property
    def target(self) -> torch.nn.Module | None:
        """The target, as far as it is known and still there."""
        return None if self._target is None else self._target()

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
        limit = self.config.disable_by_batch_size
        if limit is not None and session.batch_size > limit:
            session.notes.append(f"no drafts: {session.batch_size} rows are more than disable_by_batch_size={limit}")
            logger.info(f"Speculation is off for this call: {session.notes[-1]}.")
            return NoDrafts(self.config, None, session)
        generator = self.generator_class(self._longest_drafts, self.resources, session)
        is_adaptive = self.config.num_speculative_tokens == AUTO
        if not is_adaptive and self.config.num_speculative_tokens_per_batch_size is None:
            return generator
        from .control.generator import AdaptiveCandidateGenerator

        choose = self.controller if is_adaptive else self._scheduled_length
        return AdaptiveCandidateGenerator(generator, choose(generator))

    def check(self, target_model: torch.nn.Module) -> None:
        """Refuses settings that what was loaded for a target cannot follow.

        Raises:
            SpecConfigError: They ask for more than was loaded, such as for more tokens than there are heads.
        """
        if self.stock_assistant is None:
            self.generator_class.check(self._longest_drafts, self.resources, _session_of_any_call(target_model))

    def controller(self, generator: CandidateGenerator) -> SpeculationController:
        """The controller that chooses the lengths of one call with num_speculative_tokens="auto"."""
        most_tokens = self.config.most_tokens if self.config.num_speculative_tokens_per_batch_size else None
        usual = self.generator_class.default_length(self.config.options)
        most, num_rows = generator.num_speculative_tokens, generator.session.batch_size
        return SpeculationController(most, num_rows, self.profile, usual, most_tokens)

    def _scheduled_length(self, generator: CandidateGenerator) -> ScheduledLength:
        return ScheduledLength(self.config.most_tokens)

    @cached_property
    def _longest_drafts(self) -> SpeculativeConfig:
        """The settings with the largest length that is drafted in a cycle."""
        if self.config.num_speculative_tokens != AUTO:
            return self._with_scheduled_length
        # The profile is for the controller, and only beside "auto".
        changes: dict[str, Any] = {"num_speculative_tokens": None, "control_profile": None}
        if not self.config.speculative_token_tree:
            changes["num_speculative_tokens"] = self.generator_class.most_speculative_tokens
        if getattr(self.config.options, "max_spec_factor", None) == 1.0:
            # What is accepted decides how far a match is continued.
            changes["suffix_decoding_max_spec_factor"] = _ADAPTIVE_SPEC_FACTOR
        # The text of drawn drafts depends on where they end, and that on measured times.
        return self.config.with_greedy_drafts().replace(**changes)

    @property
    def _with_scheduled_length(self) -> SpeculativeConfig:
        """The settings with the largest length by batch size, where neither a length nor a tree is given."""
        config, by_batch_size = self.config, self.config.num_speculative_tokens_per_batch_size
        if by_batch_size is None or config.num_speculative_tokens is not None or config.speculative_token_tree:
            return config
        return config.replace(num_speculative_tokens=max(k for _, k in by_batch_size))

    def without_texts(self, target_model: torch.nn.Module) -> Speculator:
        """A speculator like this one without what it remembers of texts. Weights and learnt costs are shared."""
        resources = _without_texts(self.generator_class, self.config, self.resources, target_model)
        names = self.target_name, self.target_revision
        known = self.note, *names, self.profile, target_model
        speculator = Speculator(self.config, self.generator_class, resources, *known)
        speculator.origin = self.origin
        return speculator

    @property
    def stock_assistant(self) -> torch.nn.Module | None:
        """A draft model that only transformers' own assisted decoding can drive, not this package's loop."""
        return self.generator_class.stock_assistant(self.resources)

    def save_pretrained(self, folder: str | os.PathLike, **card) -> Path:
        """Saves the drafter to a folder that `spec_model=folder` loads again with the same settings.

        Args:
            folder (`str` or `os.PathLike`): Made if needed.
            card: What [`~hub.publish.save_speculator`] takes for the model card, such as `license`.

        Returns:
            `Path` of the folder.
        """
        from .hub.publish import save_speculator

        return save_speculator(self, folder, **card)

    def push_to_hub(self, repo_id: str, **options) -> str:
        """Uploads the drafter to a repository on the Hub, so that `spec_model=repo_id` loads it.

        Args:
            repo_id (`str`): The repository, made if needed.
            options: What [`~hub.publish.push_speculator`] takes: `private`, `token`, `commit_message`, `license`, ...

        Returns:
            `str`: The address of the commit.
        """
        from .hub.publish import push_speculator

        return push_speculator(self, repo_id, **options)

    def __repr__(self) -> str:
        return f"Speculator({self.config!r})"


class GivenCandidateGenerator:
    """Stands for a speculator in a call that was given a candidate generator.

    Args:
        generator (`HfCandidateGenerator`): One of this package, for any call, or one that only knows transformers'
            own protocol, for batch size 1.
    """

    def __init__(self, generator: HfCandidateGenerator):
        is_own = isinstance(generator, CandidateGenerator)
        self.generator = generator if is_own else StockCandidateGenerator(generator)

    @property
    def config(self) -> SpeculativeConfig | None:
        return self.generator.config

    @property
    def method(self) -> str:
        return "candidate_generator" if self.config is None else self.config.method

    @property
    def stock_assistant(self) -> torch.nn.Module | None:
        """`Speculator.stock_assistant` of the speculator that made the generator, if one did."""
        speculator = getattr(self.generator, "speculator", None)
        return None if speculator is None else speculator.stock_assistant

    def candidate_generator(self, session: Session) -> CandidateGenerator:
        return self.generator.bind(session)


@on_cpu_unless_said
def load_speculator(
    target_model: torch.nn.Module,
    config: Any = None,
    *,
    draft_model: torch.nn.Module | None = None,
    **settings,
) -> Speculator:
    """Loads what a method needs for a target, once: a second call with the same settings shares what was loaded.

    So do calls whose settings differ in what only matters while generating, such as `num_speculative_tokens`.

    Args:
        target_model (`PreTrainedModel`): The model whose `generate()` is to be sped up.
        config (*optional*): What [`SpeculativeConfig.resolve`] takes: a config, dict, JSON, method, repo id or path.
            With the method "auto", or one that needs weights, and no model: the best drafter (of that method) that is
            found for the target and that loads.
        draft_model (`PreTrainedModel`, *optional*): A loaded draft model, in place of the `model` setting.
        settings: Flat settings that take precedence over those of `config`.

    Returns:
        [`Speculator`].

    Raises:
        SpecConfigError: The settings are wrong, or do not fit the target.
        CheckpointFormatError: The draft checkpoint does not fit the target.
    """
    if draft_model is not None and settings.get("method") in (None, AUTO) and not _names_method(config):
        settings["method"] = _method_of(draft_model)
    resolved = SpeculativeConfig.resolve(config, target_config=target_model.config, **settings)
    if resolved.is_to_be_found and draft_model is None:
        return _load_found(target_model, resolved)
    return _load(target_model, resolved, draft_model)


def _load(
    target_model: torch.nn.Module, resolved: SpeculativeConfig, draft_model: torch.nn.Module | None = None
) -> Speculator:
    generator_class = resolve_candidate_generator(resolved.method)
    if draft_model is not None:
        _check_takes(generator_class, resolved.method, draft_model)
    _check_processes(resolved.draft_tensor_parallel_size, draft_model)
    resources = _resources(generator_class, resolved, target_model, draft_model)
    source = target_model.config
    name, revision = (getattr(source, attribute, None) or None for attribute in ("_name_or_path", "_commit_hash"))
    is_adaptive = resolved.num_speculative_tokens == AUTO
    profile = _profile(target_model, resolved, generator_class.network(resources)) if is_adaptive else None
    speculator = Speculator(resolved, generator_class, resources, None, name, revision, profile, target_model)
    checked, key = record_of(target_model).checked, resolved.compute_hash()
    if checked.get(key) != id(resources):
        speculator.check(target_model)
        checked.put(key, id(resources))
    return speculator


def _session_of_any_call(target_model: torch.nn.Module) -> Session:
    """The session of a greedy call of one row, without a prompt."""
    sequences = Sequences(torch.zeros((1, 0), dtype=torch.long), 0)
    sampler = DraftSampler(ProcessorStack(LogitsProcessorList()), sequences, None, vocabulary_size(target_model))
    return Session(1, _ANY_LENGTH, torch.device("cpu"), sampler)


def load_configured(
    target_model: torch.nn.Module, entry: Any, num_speculative_tokens: int | str | None = None
) -> Speculator:
    """Loads what a generation config names, whose settings count as far as a stranger's may.

    Args:
        target_model (`PreTrainedModel`): The target.
        entry: What the generation config says.
        num_speculative_tokens (`int` or "auto", *optional*): What the call says.

    Raises:
        SpecDecError: It cannot be followed.
    """
    try:
        settings = settings_of_generation_config(entry)
        given = {} if num_speculative_tokens is None else {"num_speculative_tokens": num_speculative_tokens}
        config = published_config(settings, IN_GENERATION_CONFIG, with_place=True)
        if config.model is None:
            return load_speculator(target_model, config, **given)
        return _load_found(target_model, SpeculativeConfig(AUTO, **given), settings)
    except SpecDecError:
        raise
    except Exception as error:
        # What strangers write may trip anything.
        raise SpecConfigError(f"{IN_GENERATION_CONFIG}: {one_line(error, 500)}") from error


def is_refused(target_model: torch.nn.Module, entry: Any) -> bool:
    """`True` if the entry of the target's generation config could not be followed a short while ago."""
    refused_at = record_of(target_model).refused.get((_written(entry), restrictions()))
    return refused_at is not None and monotonic() - refused_at < _SECONDS_REFUSED


def refuse(target_model: torch.nn.Module, entry: Any, error: Exception, *, for_a_while: bool) -> None:
    """Warns once that what the target's generation config says cannot be followed.

    With `for_a_while` the next calls do not try: the reason may be an outage, so it is not for ever.
    """
    if for_a_while:
        record_of(target_model).refused.put((_written(entry), restrictions()), monotonic())
    logger.warning_once(
        f"{type(target_model).__name__} generates without speculation, which its generation config sets: "
        f"{one_line(error, 500)} Correct the entry, or take it out with "
        "hf_specdec.store_settings(model.generation_config, None)."
    )


def _load_found(target_model: torch.nn.Module, config: SpeculativeConfig, entry: Any = None) -> Speculator:
    """The best drafter that is found for the target and that loads; a target is searched for once.

    Args:
        target_model (`PreTrainedModel`): The target.
        config (`SpeculativeConfig`): The settings; a method other than "auto" restricts the search to its drafters.
        entry (*optional*): Instead of searching, take the drafter that these settings of the target name.
    """
    config.check_can_be_found()
    access = Access.of(config)
    drafting = None if config.method == AUTO else parts_of(config.method)[-1]
    key = (drafting, access, config.dtype, config.device, config.quantization)
    key += (config.trusted_owners, restrictions(), None if entry is None else _written(entry))
    record = record_of(target_model)
    with record.searching:
        known = record.found.get(key)
        if known is not None:
            try:
                return _load_candidate(target_model, config, *known, entry)
            except Exception as error:  # noqa: BLE001 - as in the search
                # It has gone or changed, or does not fit the settings of this call: another one may.
                logger.info(f"Drafters are looked for again: {one_line(error)}")
        failures: dict[str, Exception] = {}
        target = Target.of_model(target_model)
        search = Search(target, access, method=drafting, trusted_owners=config.trusted_owners)
        for candidate in search.usable() if entry is None else search.named_by(entry):
            reason = _why_without_weights(search, failures) if candidate.place == "none" else candidate.reason
            try:
                speculator = _load_candidate(target_model, config, candidate, reason, entry)
            except Exception as error:  # noqa: BLE001 - weights of strangers may trip anything
                failures[f"{candidate.title}, {candidate.reason}: {one_line(error, 500)}"] = error
                logger.warning(f"{_asked(config, entry)} passes over {next(reversed(failures))}")
                continue
            record.found.put(key, (candidate, reason))
            logger.info(f"Speculation: {speculator.note}.")
            warn_of(candidate.left_out, f"The settings of {candidate}")
            return speculator
    seen = [*search.rejected, *failures]
    if len(seen) == len(failures) == 1 and drafting is not None and (not search.notes or candidate.place == "target"):
        # Of several one would be no answer, nor of one where others may lie; the target's own layers lie nowhere else.
        raise next(iter(failures.values()))
    if entry is not None:
        raise SpecConfigError(f"{IN_GENERATION_CONFIG} names a drafter that cannot be taken: {' '.join(seen)}")
    raise SpecConfigError(_nothing_found(config, target.name, seen, search.notes))


def _load_candidate(
    target_model: torch.nn.Module, config: SpeculativeConfig, candidate: Candidate, reason: str, entry: Any
) -> Speculator:
    # The target itself is what its user has named.
    is_named = candidate.place == "target" and config.method != AUTO
    with nullcontext() if is_named else only_safetensors():
        resolved = SpeculativeConfig.resolve(candidate.configured(config), target_config=target_model.config)
        speculator = _load(target_model, resolved)
    speculator.note = f"{_asked(config, entry)} chose {candidate.title}: {reason}"
    speculator.origin = candidate.origin
    return speculator


def _written(entry: Any) -> str:
    """An entry of a generation config as text, to know it again."""
    try:
        return repr(entry)
    except Exception:  # noqa: BLE001 - anything can stand there
        return type(entry).__name__


def _asked(config: SpeculativeConfig, entry: Any) -> str:
    return f"method='{config.method}'" if entry is None else IN_GENERATION_CONFIG


# Of what was seen in vain, so many are listed.
_MOST_LISTED = 8


def _nothing_found(config: SpeculativeConfig, target: str, seen: list[str], notes: list[str]) -> str:
    """The message about a search in vain: what was seen, and why it does not fit."""
    drafting = None if config.method == AUTO else drafting_method(config.method)
    drafter = (drafting and drafting.weights) or "a drafter"
    found = f" Seen: {' '.join(f'({i}) {line}' for i, line in enumerate(seen[:_MOST_LISTED], 1))}" if seen else ""
    more = f" And {len(seen) - _MOST_LISTED} more." if len(seen) > _MOST_LISTED else ""
    limits = f" Not searched: {'; '.join(map(one_line, notes))}." if notes else ""
    name = f"'{target}'" if target else "a target without a name"
    return (
        f"spec_method='{config.method}' needs {drafter}, and none was found for {name}.{found}{more}{limits} Pass its "
        "folder or repo id as `spec_model`, or leave the choice to spec_method='auto'."
    )


def _why_without_weights(search: Search, failures: Mapping[str, Exception]) -> str:
    """The reason in one line why the search has found no drafter with weights."""
    if failures:
        return "what was found cannot be loaded, as warnings say"
    limits = "; ".join(note.partition("\n")[0] for note in search.notes)
    return "no drafter with weights was found" + (f" ({limits})" if limits else "")


def _resources(generator_class, config, target_model, draft_model):
    """Everything that a method loads, shared by all configurations that load the same."""
    given: dict[str, Any] = {} if draft_model is None else {"draft_model": draft_model}
    if generator_class.parts:
        # Weights are shared with calls that use that part alone.
        given["load_part"] = _resources
    load = partial(generator_class.load, config, target_model, **given)
    key = (config.method, draft_model is not None, config.written(generator_class.loaded_by))
    source = generator_class.loaded_from(config, target_model) if draft_model is None else None
    files = None if source is None else RepoFiles.of(source)
    return record_of(target_model).load_once(key, generator_class, load, files, draft_model)


def _without_texts(generator_class, config, resources, target_model):
    """The resources of a method without remembered texts, which only methods without a network keep."""
    if generator_class.parts:
        own = _without_texts(generator_class.parts[0], part_configs(config)[0], resources.retrieval, target_model)
        return replace(resources, retrieval=own)
    return generator_class.load(config, target_model) if generator_class.network(resources) is None else resources


def _profile(
    target_model: torch.nn.Module, config: SpeculativeConfig, network: torch.nn.Module | None
) -> ControlProfile:
    """The costs and acceptance that calls with these settings and this draft network have found."""
    record = record_of(target_model)
    key = (config, target_model.device, target_model.dtype, file_identity(config.control_profile))
    with record.lock:
        known = record.learnt.get(key)
        # Of the networks with these settings the last one counts, as of loaded draft models.
        if known is None or known[0]() is not network:
            known = (lambda: None) if network is None else ref(network), find_profile(target_model, config, network)
            record.learnt.put(key, known)
        return known[1]


def _method_of(draft_model: torch.nn.Module) -> str:
    """The method of a loaded network: this package's own say it, those of transformers are known by their type."""
    if reads_target_cache(draft_model):
        return own_layers_method().name
    return getattr(draft_model, "spec_method", language_model_method().name)


def _check_takes(generator_class: type[CandidateGenerator], method: str, draft_model: torch.nn.Module) -> None:
    if generator_class.parts:
        generator_class, method = generator_class.parts[-1], parts_of(method)[-1]
    kind, own = type(draft_model).__name__, _method_of(draft_model)
    if "draft_model" not in inspect.signature(generator_class.load).parameters:
        raise SpecConfigError(
            f"method='{method}' drafts without a model, and got a {kind}. Leave the model or the method out."
        )
    # Each method's own loader looks closer.
    if own != method and not is_language_model(own):
        raise SpecConfigError(f"method='{method}' cannot draft with a {kind}, which is for method='{own}'.")
    if is_language_model(method) and not hasattr(draft_model, "config"):
        raise SpecConfigError(f"A {kind} is no draft model. Pass a causal language model, or name the method.")


def _check_processes(asked: int, draft_model: torch.nn.Module | None) -> None:
    found = getattr(draft_model, "tp_size", None) or 1
    if asked not in (1, found):
        what = "a draft model that is loaded by name" if draft_model is None else f"this {type(draft_model).__name__}"
        raise SpecConfigError(
            f"`draft_tensor_parallel_size`={asked}, and {what} is held by {found} process{'es' * (found > 1)}. Leave "
            "it out, or load the draft model itself with a tensor-parallel plan and pass it as `assistant`."
        )


def _names_method(config: Any) -> bool:
    if isinstance(config, Mapping):
        return config.get("method") not in (None, AUTO)
    return config is not None and getattr(config, "method", config) != AUTO


def forget_speculators(target_model: torch.nn.Module | None = None) -> None:
    """Frees what was loaded for one target, or for all: draft weights, caches of past responses, CUDA graphs.

    Which drafter was found for it is forgotten, too.
    """
    forget_graphs(target_model)
    for record in forget_records(target_model):
        for entry in record.loaded:
            # Without one, all graphs would be meant.
            if (network := entry.network) is not None:
                forget_graphs(network)
