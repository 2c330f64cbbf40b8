"""Drafts of networks that go on from a state of their own: their settings, and the shape that follows from these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from ..drafts import TokenTree
from ..drafts.static import MAX_NODES
from ..errors import SpecConfigError
from ..protocol import Session
from ..validation import check_bounds, check_draft_sample_method
from .growth import DynamicTree


if TYPE_CHECKING:
    from ..settings import SpeculativeConfig


# Trees where the settings name none, by device type: the published one needs a device where nodes cost little.
_TREE = DynamicTree(depth=7, top_k=10, total_tokens=60)
_TREES = {"cpu": DynamicTree(depth=4, top_k=4, total_tokens=12)}

# Most rows whose default is a tree, in general and by device type: nodes must ride along with the weights.
_TREE_BATCH_SIZE = 4
_TREE_BATCH_SIZES = {"cpu": 0}

# Where the settings name no shape, by device type: stop drafting below this path probability.
_THRESHOLDS = {"cpu": 0.2}

# Options of a dynamic tree, with the smallest and the largest value of each.
_GROWTH_OPTIONS = {"depth": (0, 128), "top_k": (1, 64), "total_tokens": (2, MAX_NODES + 1)}


@dataclass(frozen=True)
class ExtrapolationOptions:
    """Options of drafts that a network grows from states of its own.

    Raises:
        SpecConfigError: A value is out of range.
    """

    depth: int | None = field(
        default=None,
        metadata={
            "published": True,
            "help": "For the dynamic tree: how often its best nodes are continued; it is one token deeper. Left out, "
            f"{_TREE.depth}, on a CPU {_TREES['cpu'].depth}.",
        },
    )
    top_k: int | None = field(
        default=None,
        metadata={
            "published": True,
            "help": "For the dynamic tree: continuations of each node, and nodes of a level that are continued. Left "
            f"out, {_TREE.top_k}, on a CPU {_TREES['cpu'].top_k}.",
        },
    )
    total_tokens: int | None = field(
        default=None,
        metadata={
            "published": True,
            "help": "For the dynamic tree: verified tokens, the anchor included, so one more than are drafted. Left "
            f"out, {_TREE.total_tokens}, on a CPU {_TREES['cpu'].total_tokens}.",
        },
    )
    adaptive_threshold: float | None = field(
        default=None,
        metadata={
            "published": True,
            "help": "A row's draft is not continued behind nodes whose probability, along the whole path, is at most "
            "this. 0 always drafts the full depth. Left out, 0; on a CPU, where no shape is asked for, "
            f"{_THRESHOLDS['cpu']}.",
        },
    )
    draft_sample_method: Literal["greedy", "probabilistic"] | None = field(
        default=None,
        metadata={
            "help": "How draft tokens are chosen when the target samples: `greedy` takes the best ones, "
            "`probabilistic` draws a chain from the draft's distribution. Left out, `greedy`. A greedy target gets "
            "the best tokens always."
        },
    )

    def __post_init__(self):
        check_bounds(self, **_GROWTH_OPTIONS, adaptive_threshold=(0.0, 1.0))
        if self.adaptive_threshold == 1:
            raise SpecConfigError("`adaptive_threshold` must be below 1, got 1: nothing would be continued.")
        check_draft_sample_method(self.draft_sample_method)


def draft_shape(
    config: SpeculativeConfig,
    vocab_size: int,
    session: Session,
    chain_only_reason: str | None,
    chain_length: int,
    prefers_trees: bool = False,
) -> TokenTree | DynamicTree:
    """Shape of the drafts of a call: a static tree, chains among them, or a dynamic one.

    Args:
        config (`SpeculativeConfig`): The settings; its options are [`ExtrapolationOptions`].
        vocab_size (`int`): Tokens that the draft knows.
        session (`Session`): The call.
        chain_only_reason (`str`, *optional*): Reason for which it can only have chains.
        chain_length (`int`): Length of the chain that is drafted where the settings name nothing.
        prefers_trees (`bool`): A small batch gets a tree then.

    Raises:
        SpecConfigError: Settings contradict each other, or ask for more candidates than there are tokens.
    """
    paths, length, growth = config.speculative_token_tree, config.num_speculative_tokens, growth_option(config)
    if growth and (paths or length):
        name, shape = ("speculative_token_tree", "a static tree") if paths else ("num_speculative_tokens", "a chain")
        raise SpecConfigError(f"`{name}` asks for {shape}, and `{growth}` is about a dynamic one. Leave one out.")
    if paths:
        plan = _static_tree(paths, vocab_size)
    elif length or not (growth or (prefers_trees and _is_small(session))):
        return TokenTree.chain(length or chain_length)
    else:
        plan = _dynamic_tree(config.options, vocab_size, session.device)
    if not chain_only_reason or plan.is_chain:
        return plan
    session.notes.append(f"chains instead of trees: {chain_only_reason}")
    return TokenTree.chain(plan.max_depth if paths or growth else chain_length)


def growth_option(config: SpeculativeConfig) -> str | None:
    """An option of a dynamic tree that the settings name, if there is one."""
    return next((name for name in _GROWTH_OPTIONS if getattr(config.options, name) is not None), None)


def confidence_threshold(config: SpeculativeConfig, session: Session) -> float:
    """Path probability that a node must exceed for the draft to go on there; 0 for any."""
    threshold = config.options.adaptive_threshold
    if threshold is not None:
        return threshold
    names_shape = growth_option(config) or config.speculative_token_tree or config.num_speculative_tokens
    return 0.0 if names_shape else _THRESHOLDS.get(session.device.type, 0.0)


def _is_small(session: Session) -> bool:
    """There are so few rows that trees are the default."""
    return session.batch_size <= _TREE_BATCH_SIZES.get(session.device.type, _TREE_BATCH_SIZE)


def _static_tree(paths: tuple[tuple[int, ...], ...], vocab_size: int) -> TokenTree:
    tree = TokenTree(paths)
    if max(tree.widths) > vocab_size:
        raise SpecConfigError(
            f"`speculative_token_tree` has the rank {max(tree.widths) - 1}, and the draft knows {vocab_size} tokens. "
            "Pass a narrower tree."
        )
    return tree


def _dynamic_tree(options: ExtrapolationOptions, vocab_size: int, device: torch.device) -> TokenTree | DynamicTree:
    default = _TREES.get(device.type, _TREE)
    given = {name: getattr(options, name) for name in _GROWTH_OPTIONS}
    depth, top_k, total_tokens = (getattr(default, name) if value is None else value for name, value in given.items())
    tree = DynamicTree(depth, min(top_k, vocab_size), total_tokens)
    return TokenTree.chain(tree.max_depth) if tree.top_k == 1 else tree
