"""A speculator: settings, loaded draft weights and persistent caches, everything that outlives a `generate()` call."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.generation.candidate_generator import CandidateGenerator as HfCandidateGenerator
from transformers.utils import logging

from .candidate_generators import resolve_candidate_generator
from .candidate_generators.base import CandidateGenerator, NoDrafts, Session, StockCandidateGenerator
from .config import SpeculativeConfig
from .errors import SpecConfigError
from .hub.detect import reads_target_cache


logger = logging.get_logger(__name__)


class Speculator:
    """Made by [`load_speculator`]; pass it to `generate(assistant=speculator)`. Threads may share one.

    Args:
        config (`SpeculativeConfig`): The settings.
        generator_class (`type`): The method's candidate generator.
        resources (`Any`): What the method loaded for its target: weights, caches.
    """

    def __init__(self, config: SpeculativeConfig, generator_class: type[CandidateGenerator], resources: Any):
        self.config = config
        self.generator_class = generator_class
        self.resources = resources

    @property
    def method(self) -> str:
        return self.config.method

    def candidate_generator(self, session: Session) -> CandidateGenerator:
        """A fresh candidate generator for one `generate()` call."""
        limit = self.config.disable_by_batch_size
        if limit is not None and session.batch_size > limit:
            session.notes.append(f"no drafts: {session.batch_size} rows are more than disable_by_batch_size={limit}")
            logger.info(f"Speculation is off for this call: {session.notes[-1]}.")
            return NoDrafts(self.config, None, session)
        return self.generator_class(self.config, self.resources, session)

    @property
    def stock_assistant(self) -> torch.nn.Module | None:
        """A draft model that only transformers' own assisted decoding can drive, not this package's loop."""
        return self.generator_class.stock_assistant(self.resources)

    def __repr__(self) -> str:
        return f"Speculator({self.config!r})"


class StockSpeculator:
    """Drives a candidate generator of transformers' own protocol through the loop, at batch size 1."""

    method = "candidate_generator"
    stock_assistant = None

    def __init__(self, generator: HfCandidateGenerator):
        self.generator = generator

    def candidate_generator(self, session: Session) -> CandidateGenerator:
        if session.batch_size != 1:
            raise SpecConfigError(
                f"{type(self.generator).__name__} proposes for one row, the batch has {session.batch_size}. Name a "
                "`spec_method` instead, or generate row by row."
            )
        return StockCandidateGenerator(self.generator, session)


# For each target what has been loaded for it, by method and by the settings that were read in loading.
_loaded: WeakKeyDictionary[torch.nn.Module, dict] = WeakKeyDictionary()
_lock = threading.Lock()


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
        draft_model (`PreTrainedModel`, *optional*): A loaded draft model, in place of the `model` setting.
        settings: Flat settings that take precedence over those of `config`.

    Returns:
        [`Speculator`].

    Raises:
        SpecConfigError: The settings are wrong, or do not fit the target.
        CheckpointFormatError: The draft checkpoint does not fit the target.
    """
    if draft_model is not None and not settings.get("method") and not _names_method(config):
        settings["method"] = _method_of(draft_model)
    resolved = SpeculativeConfig.resolve(config, target_config=target_model.config, **settings)
    generator_class = resolve_candidate_generator(resolved.method)
    if draft_model is not None:
        _check_takes(generator_class, resolved.method, draft_model)
    with _lock:
        resources = _resources(generator_class, resolved, target_model, draft_model)
    return Speculator(resolved, generator_class, resources)


def _resources(generator_class, config, target_model, draft_model):
    """What the method loads, shared by all configurations that load the same."""
    if draft_model is target_model:
        # Remembering it would keep the target alive for ever.
        return generator_class.load(config, target_model, draft_model=draft_model)
    flat = config.to_dict(defaults=True)
    names = flat if generator_class.loaded_by is None else generator_class.loaded_by
    key = (config.method, draft_model is not None, json.dumps({name: flat[name] for name in sorted(names)}))
    loaded = _loaded.setdefault(target_model, {})
    # Of loaded draft models only the last one is remembered, or an evaluation loop would keep all of its checkpoints.
    if key not in loaded or loaded[key][1] is not draft_model:
        given = {} if draft_model is None else {"draft_model": draft_model}
        loaded[key] = (generator_class.load(config, target_model, **given), draft_model)
    return loaded[key][0]


def _method_of(draft_model: torch.nn.Module) -> str:
    """The method of a loaded network: this package's own say it, those of transformers are known by their type."""
    if reads_target_cache(draft_model):
        return "mtp"
    return getattr(draft_model, "spec_method", "draft_model")


def _check_takes(generator_class: type[CandidateGenerator], method: str, draft_model: torch.nn.Module) -> None:
    kind, own = type(draft_model).__name__, _method_of(draft_model)
    if "draft_model" not in inspect.signature(generator_class.load).parameters:
        raise SpecConfigError(
            f"method='{method}' drafts without a model, and got a {kind}. Leave the model or the method out."
        )
    # Each method's own loader looks closer.
    if own not in ("draft_model", method):
        raise SpecConfigError(f"method='{method}' cannot draft with a {kind}, which is for method='{own}'.")
    if method == "draft_model" and not hasattr(draft_model, "config"):
        raise SpecConfigError(f"A {kind} is no draft model. Pass a causal language model, or name the method.")


def _names_method(config: Any) -> bool:
    if isinstance(config, Mapping):
        return bool(config.get("method"))
    return config is not None


def forget_speculators(target_model: torch.nn.Module | None = None) -> None:
    """Frees what was loaded for one target, or for all: draft weights and caches of past responses."""
    with _lock:
        if target_model is None:
            _loaded.clear()
        else:
            _loaded.pop(target_model, None)
