"""Settings that contradict each other: checks of a configuration as a whole, after those of its single values."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING

from transformers.utils import logging

from ..errors import SpecConfigError, shown
from ..method import built_in_methods, drafting_method, takes_model
from .names import AUTO


if TYPE_CHECKING:
    from . import SpeculativeConfig


logger = logging.get_logger(__name__)


def check_combinations(config: SpeculativeConfig) -> None:
    """Raises a [`SpecConfigError`] where two settings exclude each other; `options` are made later."""
    if config.disable_padded_drafter_batch:
        logger.warning_once("`disable_padded_drafter_batch` changes nothing: rows are not padded to each other here.")
    _check_acceptance_rule(config)
    _check_model_settings(config)
    _check_token_tree(config)
    _check_lengths(config)


def _check_acceptance_rule(config: SpeculativeConfig) -> None:
    rule = config.rejection_sample_method
    rates = config.synthetic_acceptance_rates or ()
    if any(later > earlier for earlier, later in pairwise(rates)):
        raise SpecConfigError(
            f"`synthetic_acceptance_rates` must not increase, got {shown(list(rates))}: more draft tokens cannot be "
            "accepted more often than fewer."
        )
    for setting in fields(config):
        owner = setting.metadata.get("rule")
        value = getattr(config, setting.name)
        if owner not in (None, rule) and value != setting.default:
            raise SpecConfigError(
                f"`{setting.name}`={shown(value)} belongs to rejection_sample_method='{owner}', got '{rule}'. "
                "Leave it out, or change the rule."
            )
    is_set = [config.synthetic_acceptance_rates is not None, config.synthetic_acceptance_length is not None]
    if rule == "synthetic" and sum(is_set) != 1:
        raise SpecConfigError(
            "rejection_sample_method='synthetic' needs either `synthetic_acceptance_rates` or "
            f"`synthetic_acceptance_length`, got {'both' if all(is_set) else 'neither'}."
        )


def _check_model_settings(config: SpeculativeConfig) -> None:
    if config.method == AUTO:
        config.check_can_be_found()
    if takes_model(config.method):
        return
    for setting in fields(config):
        value = getattr(config, setting.name, None)
        if setting.metadata.get("describes_model") and value != setting.default:
            assigned = "" if setting.metadata.get("is_secret") else f"={shown(value)}"
            raise SpecConfigError(
                f"`{setting.name}`{assigned} is about a draft model, and method='{config.method}' drafts without "
                f"one. Leave out `{setting.name}`, or choose a method that has a draft model."
            )


def _check_lengths(config: SpeculativeConfig) -> None:
    k, lengths = config.fixed_length, config.num_speculative_tokens_per_batch_size
    if lengths is None or k is None or config.speculative_token_tree is not None:
        return
    longest = max(length for _, length in lengths)
    if longest > k:
        raise SpecConfigError(
            f"`num_speculative_tokens_per_batch_size` has k={longest}, more than `num_speculative_tokens`={k}, "
            "which is the most. Raise or leave out `num_speculative_tokens`."
        )


def _check_token_tree(config: SpeculativeConfig) -> None:
    tree, k = config.speculative_token_tree, config.fixed_length
    if tree is None:
        return
    # Of a combination the one with weights.
    method = drafting_method(config.method)
    if method is not None and not method.drafts_static_trees:
        drafting = ", ".join(method.name for method in built_in_methods() if method.drafts_static_trees)
        raise SpecConfigError(
            f"`speculative_token_tree` belongs to the methods that draft trees ({drafting}), got "
            f"method='{config.method}'. Leave it out and set `num_speculative_tokens`."
        )
    if k is not None and k != len(tree):
        raise SpecConfigError(
            f"`num_speculative_tokens`={k} and `speculative_token_tree` with {len(tree)} nodes contradict each "
            "other. Leave out `num_speculative_tokens`, or give the tree's number of nodes."
        )
