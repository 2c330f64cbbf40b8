"""Settings to speculator: what they name is found, loaded once for a target, and checked.

`load_speculator` takes what a call says and ends in `_load`; where no drafter is named, `_load_found` searches for one
first.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any
from weakref import ref

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .candidate_generators.base import CandidateGenerator
from .checkpoints.files import RepoFiles, only_safetensors
from .control import ControlProfile
from .errors import CheckpointAccessError, CheckpointFormatError, SpecConfigError, SpecDecError
from .hub.candidate import Candidate
from .hub.detect import detect_method
from .hub.discover import Search, Target
from .hub.trust import one_line, restrictions, warn_of
from .loaded import Loaded, forget_records, holds, record_of
from .method import (
    built_in_methods,
    drafting_method,
    is_language_model,
    is_method_name,
    own_layers_method,
    parts_of,
    resolve_candidate_generator,
)
from .modules import forget_kept
from .resolve import as_text, resolve
from .settings import AUTO, SpeculativeConfig
from .speculator import Speculator
from .target.graphs import forget_graphs
from .target_facts import no_target, reads_target_cache
from .transfers import keepers, on_cpu_unless_said


logger = logging.get_logger(__name__)


def load_speculator(
    target_model: torch.nn.Module,
    config: Any = None,
    *,
    draft_model: torch.nn.Module | None = None,
    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None = None,
    **settings: Any,
) -> Speculator:
    """Loads what a method needs for a target, once: a second call with the same settings shares what was loaded.

    So do calls whose settings differ in what only matters while generating, such as `num_speculative_tokens`.

    Args:
        target_model (`PreTrainedModel`): The model whose `generate()` is to be sped up.
        config (*optional*): What [`SpeculativeConfig.resolve`] takes: a config, dict, JSON, method, repo id or path.
            With the method "auto", or one that needs weights, and no model: the best drafter (of that method) that is
            found for the target and that loads.
        draft_model (`PreTrainedModel`, *optional*): A loaded draft model, in place of the `model` setting.
        tokenizers (`tuple`, *optional*): Those of the target and of a draft model with another one; by default those
            next to the two models.
        settings: Flat settings that take precedence over those of `config`.

    Returns:
        [`Speculator`].

    Raises:
        SpecConfigError: The settings are wrong, or do not fit the target.
        CheckpointFormatError: The draft checkpoint does not fit the target.
    """
    if not hasattr(target_model, "config"):
        raise no_target(target_model)
    # What torch.compile() makes of a model holds it.
    draft_model = getattr(draft_model, "_orig_mod", draft_model)
    if draft_model is not None and _named_method(config, settings) in (None, AUTO):
        settings["method"] = _method_of(draft_model)
    request = as_text(config, settings) if tokenizers is None else None
    if request is not None and (known := record_of(target_model).of_request(request, draft_model)) is not None:
        files, basis, speculator = known
        if basis == _basis(target_model, speculator.config, None if files is None else files.identity()):
            return speculator
    resolved = resolve(config, settings, target_model.config)
    if resolved.is_to_be_found and draft_model is None:
        return _load_found(target_model, resolved)
    # A checkpoint that is given without a method may be one for another method the next time.
    named = _named_method(config, settings)
    is_named = isinstance(named, str) and is_method_name(named)
    return _load(target_model, resolved, draft_model, tokenizers, request if is_named else None)


def _named_method(config: Any, settings: Mapping[str, Any]) -> Any:
    """The method that a call names, or the text that it gives in the place of one."""
    named = config.get("method") if isinstance(config, Mapping) else getattr(config, "method", config)
    return settings.get("method") or named


def _basis(target_model: torch.nn.Module, config: SpeculativeConfig, identity: Any) -> tuple[Any, ...]:
    """What a speculator rests on beside its settings, that of its files included."""
    # Methods are registered anew, and some settings leave it to the environment whether lengths adapt.
    generator_class = resolve_candidate_generator(config.method)
    return generator_class, identity, config.is_adaptive, target_model.device, target_model.dtype


@on_cpu_unless_said
def _load(
    target_model: torch.nn.Module,
    config: SpeculativeConfig,
    draft_model: torch.nn.Module | None = None,
    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None = None,
    request: str | None = None,
) -> Speculator:
    """The speculator of these settings, which is found again by the text of a call's `request`."""
    generator_class = resolve_candidate_generator(config.method)
    if tokenizers is not None and not is_language_model(config.method):
        raise SpecConfigError(
            f"`assistant_tokenizer` is the tokenizer of a draft model, and method='{config.method}' drafts without "
            "one that has a tokenizer of its own. Leave it out."
        )
    if draft_model is not None:
        _check_takes(generator_class, config.method, draft_model)
    try:
        loaded = _loaded(generator_class, config, target_model, draft_model, tokenizers)
    except CheckpointAccessError:
        raise
    except CheckpointFormatError as error:
        detected = None
        with suppress(SpecDecError):
            detected = detect_method(config) if config.model is not None else None
        # Another head than the one named.
        if detected is not None and not is_language_model(detected) and detected not in parts_of(config.method):
            raise CheckpointFormatError(f"{error} It is a checkpoint for spec_method='{detected}'.") from error
        raise
    known, basis = loaded.speculators.get(config.compute_hash()), _basis(target_model, config, loaded.identity)
    if known is None or known[0] != basis:
        profile = _profile(target_model, config, loaded.network) if config.is_adaptive else None
        known = basis, Speculator(config, generator_class, loaded.resources, profile, target_model)
        known[1].check(target_model)
        loaded.speculators.put(config.compute_hash(), known)
    if request is not None:
        record_of(target_model).requests.put(request, (loaded.key, config.compute_hash()))
    return known[1]


def _load_found(target_model: torch.nn.Module, config: SpeculativeConfig) -> Speculator:
    """The best drafter, maybe of one method, that is found for a target and that loads; it is searched for once."""
    config.check_can_be_found()
    drafting = None if config.method == AUTO else parts_of(config.method)[-1]
    settings = ("token", "cache_dir", "local_files_only", "dtype", "device", "quantization", "trusted_owners")
    key = (drafting, *(getattr(config, name) for name in settings), restrictions())
    record = record_of(target_model)
    with record.searching:
        if (chosen := record.chosen.get(key)) is not None:
            try:
                return _load_candidate(target_model, config, *chosen)
            except Exception as error:  # noqa: BLE001 - as in the search
                # It has gone or changed, or does not fit the settings of this call: another one may.
                logger.info(f"Drafters are looked for again: {one_line(error)}")
        failures: dict[str, Exception] = {}
        target = Target.of_model(target_model)
        search = Search(target, config)
        for candidate in search.usable():
            reason = _why_without_weights(search, failures) if candidate.place == "none" else candidate.reason
            if candidate.is_downloaded:
                size = candidate.num_bytes or "an unknown number of"
                logger.warning(f"method='{config.method}' takes {candidate.title}, {size} bytes: {reason}.")
            try:
                speculator = _load_candidate(target_model, config, candidate, reason)
            except Exception as error:  # noqa: BLE001 - weights of strangers may trip anything
                failure = f"{candidate.title}, {candidate.reason}: {one_line(error, 500)}"
                failures[failure] = error
                logger.warning(f"method='{config.method}' passes over {failure}")
                continue
            record.chosen.put(key, (candidate, reason))
            search.keep_card(candidate)
            logger.info(f"Speculation: {speculator.note}.")
            warn_of(candidate.left_out, f"The settings of {candidate}")
            return speculator
    unusable = [*search.rejected, *failures]
    # One error says it all if nothing else was seen or could have been; own layers of a target lie nowhere else.
    if len(unusable) == len(failures) == 1 and drafting and (not search.notes or candidate.place == "target"):
        raise next(iter(failures.values()))
    raise SpecConfigError(_nothing_found(config, target.name, unusable, search.notes))


def _load_candidate(
    target_model: torch.nn.Module, config: SpeculativeConfig, candidate: Candidate, reason: str
) -> Speculator:
    # The user has named the target itself.
    is_named = candidate.place == "target" and config.method != AUTO
    with nullcontext() if is_named else only_safetensors():
        speculator = _load(target_model, resolve(candidate.configured(config), {}, target_model.config))
    note = f"method='{config.method}' chose {candidate.title}: {reason}"
    return speculator.changed(note=note, origin=candidate.origin)


# Most rejected candidates that an error lists.
_MOST_LISTED = 8


def _nothing_found(config: SpeculativeConfig, target: str, unusable: list[str], notes: list[str]) -> str:
    """The message about a search in vain: what was seen, and why it does not fit."""
    drafting = None if config.method == AUTO else drafting_method(config.method)
    drafter = (drafting and drafting.weights) or "a drafter"
    lines = " ".join(f"({number}) {line}" for number, line in enumerate(unusable[:_MOST_LISTED], 1))
    listed = f" Seen: {lines}" if unusable else ""
    more = f" And {len(unusable) - _MOST_LISTED} more." if len(unusable) > _MOST_LISTED else ""
    limits = f" Not searched: {'; '.join(map(one_line, notes))}." if notes else ""
    name = f"'{target}'" if target else "a target without a name"
    return (
        f"spec_method='{config.method}' needs {drafter}, and none was found for {name}.{listed}{more}{limits} Pass "
        "its folder or repo id as `spec_model`, or leave the choice to spec_method='auto'."
    )


def _why_without_weights(search: Search, failures: Mapping[str, Exception]) -> str:
    """The reason in one line why the search has found no drafter with weights."""
    if failures:
        return "what was found cannot be loaded, as warnings say"
    limits = "; ".join(note.partition("\n")[0] for note in search.notes)
    return "no drafter with weights was found" + (f" ({limits})" if limits else "")


def _loaded(
    generator_class: type[CandidateGenerator],
    config: SpeculativeConfig,
    target_model: torch.nn.Module,
    draft_model: torch.nn.Module | None,
    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None = None,
) -> Loaded:
    """Everything that a method loads, shared by all configurations that load the same."""
    arguments: dict[str, Any] = {} if draft_model is None else {"draft_model": draft_model}
    if generator_class.parts:
        # Weights are shared with calls that use that part alone.
        arguments["load_part"] = lambda *part: _loaded(*part, tokenizers=tokenizers).resources
    elif tokenizers is not None:
        arguments["tokenizers"] = tokenizers
    load = partial(generator_class.load, config, target_model, **arguments)
    # A tokenizer that is loaded again is the same. A wrong one costs acceptance, never the output.
    pair = [(type(item), item.name_or_path or id(item), len(item)) for item in tokenizers or ()]
    key = (config.method, draft_model is not None, config.written(generator_class.loaded_by), *pair)
    # The files that it reads, if it does.
    source = generator_class.loaded_from(config, target_model) if draft_model is None else None
    files = None if source is None else RepoFiles.of(source)
    if draft_model is not None and holds(draft_model, target_model):
        # What is kept for the target must not keep it alive.
        return Loaded(generator_class, load())
    return record_of(target_model).load_once(key, generator_class, load, files, draft_model)


def _profile(
    target_model: torch.nn.Module, config: SpeculativeConfig, network: torch.nn.Module | None
) -> ControlProfile:
    """The costs and acceptance that calls with these settings and this draft network have found."""
    record = record_of(target_model)
    key = (config.replace(num_speculative_tokens=AUTO), target_model.device, target_model.dtype)
    with record.lock:
        learnt = record.learnt.get(key)
        # Only the latest network with these settings is kept, as with loaded draft models.
        if learnt is None or learnt[0]() is not network:
            learnt = (lambda: None) if network is None else ref(network), ControlProfile()
            record.learnt.put(key, learnt)
        return learnt[1]


def _method_of(draft_model: torch.nn.Module) -> str:
    """The method of a loaded network: this package's own say it, those of transformers are known by their type."""
    if reads_target_cache(draft_model):
        return own_layers_method().name
    language_model = next(method.name for method in built_in_methods() if method.is_language_model)
    return getattr(draft_model, "spec_method", language_model)


def _check_takes(generator_class: type[CandidateGenerator], method: str, draft_model: torch.nn.Module) -> None:
    if generator_class.parts:
        generator_class, method = generator_class.parts[-1], parts_of(method)[-1]
    kind = type(draft_model).__name__
    if "draft_model" not in inspect.signature(generator_class.load).parameters:
        raise SpecConfigError(
            f"method='{method}' drafts without a model, and got a {kind}. Leave the model or the method out."
        )
    # Each method's own loader looks closer.
    made_for = _method_of(draft_model)
    if made_for != method and not is_language_model(made_for):
        raise SpecConfigError(f"method='{method}' cannot draft with a {kind}, which is for method='{made_for}'.")
    if is_language_model(method) and not hasattr(draft_model, "config"):
        raise SpecConfigError(f"A {kind} is no draft model. Pass a causal language model, or name the method.")


def age_texts(target_model: torch.nn.Module, most_age: int) -> int:
    """Makes remembered texts older by one, forgets those older than `most_age`, and returns how many these were."""
    return sum(entry.generator_class.age_texts(entry.resources, most_age) for entry in record_of(target_model).loaded)


def forget_speculators(target_model: torch.nn.Module | None = None) -> None:
    """Frees what was loaded for one target, or for all: draft weights, caches of past responses, CUDA graphs.

    Which drafter was found for it is forgotten, too.

    Args:
        target_model (`PreTrainedModel`, *optional*): The target; all by default.
    """
    forget_graphs(target_model)
    forget_kept(target_model)
    for keeper in keepers if target_model is None else ():
        keeper.cache_clear()
    for record in forget_records(target_model):
        for entry in record.loaded:
            # Without one, all graphs would be meant.
            if (network := entry.network) is not None:
                forget_graphs(network)
