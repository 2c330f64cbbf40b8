"""Settings that contradict each other: checks of a configuration as a whole, after those of its single values."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING

from ..errors import SpecConfigError, shown
from ..method import MOST_DRAFT_TOKENS, built_in_methods, drafting_method, takes_model
from .checks import thawed
from .names import AUTO


if TYPE_CHECKING:
    from . import SpeculativeConfig


def check_combinations(config: SpeculativeConfig) -> None:
    """Raises a [`SpecConfigError`] where two settings exclude each other; `options` are made later."""
    _check_acceptance_rule(config)
    _check_model_settings(config)
    _check_shapes(config)


def _check_acceptance_rule(config: SpeculativeConfig) -> None:
    rule, options = config.rejection_sample_method, config.rejection_sample_options
    is_pair = isinstance(options, tuple) and len(options) == 2 and options[0] <= 1
    are_rates = isinstance(options, tuple) and all(after <= before for before, after in pairwise((1.0, *options)))
    if rule == "typical" and not (options is None or is_pair):
        needed = "a pair of numbers, the first from 0 to 1"
    elif rule == "synthetic" and not (are_rates or (isinstance(options, float) and options >= 1)):
        needed = (
            f"the tokens per verification, from 1 to {MOST_DRAFT_TOKENS + 1}, or rates from 1 to 0 that never rise"
        )
    elif rule not in ("typical", "synthetic") and options is not None:
        needed = "left out; it belongs to 'typical' and 'synthetic'"
    else:
        return
    raise SpecConfigError(
        f"`rejection_sample_options` of rejection_sample_method='{rule}' must be {needed}, got "
        f"{shown(thawed(options))}."
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


def _check_shapes(config: SpeculativeConfig) -> None:
    tree, k, lengths = config.speculative_token_tree, config.fixed_length, config.num_speculative_tokens_per_batch_size
    if tree is None:
        longest = max((length or 0 for _, length in lengths or ()), default=0)
        if k is not None and longest > k:
            raise SpecConfigError(
                f"`num_speculative_tokens_per_batch_size` has k={longest}, more than `num_speculative_tokens`={k}, "
                "which is the most. Raise or leave out `num_speculative_tokens`."
            )
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
