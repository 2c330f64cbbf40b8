"""Drafts of networks that go on from a state of their own: their settings, and the shape that follows from these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..drafts import TokenTree
from ..drafts.static import MAX_NODES
from ..errors import SpecConfigError
from ..protocol import Session
from ..settings import SpeculativeConfig
from ..settings.checks import Options, draft_sample_method_field, setting
from .growth import DynamicTree


# Options of a dynamic tree where the settings name none, by device type: the published one needs a device where nodes
# cost little.
_TREE = {"draft_tree_depth": 8, "draft_tree_top_k": 10, "num_draft_nodes": 59}
_TREES = {"cpu": {"draft_tree_depth": 5, "draft_tree_top_k": 4, "num_draft_nodes": 11}}

# Most rows whose default is a tree, in general and by device type: nodes must ride along with the weights.
_TREE_BATCH_SIZE = 4
_TREE_BATCH_SIZES = {"cpu": 0}

# Default path probability below which drafting stops, by device type, if the settings name no shape.
_THRESHOLDS = {"cpu": 0.2}


@dataclass(frozen=True)
class ExtrapolationOptions(Options):
    """Options of drafts that a network grows from states of its own."""

    draft_tree_depth: int | None = setting(
        None,
        "For the dynamic tree: levels that are grown, so tokens of the longest path. Default: "
        f"{_TREE['draft_tree_depth']}, on a CPU {_TREES['cpu']['draft_tree_depth']}.",
        least=1,
        most=129,
        published=True,
        engine_names={"speculative_num_steps": 0},
    )
    draft_tree_top_k: int | None = setting(
        None,
        "For the dynamic tree: continuations of each node, and nodes of a level that are continued. Default: "
        f"{_TREE['draft_tree_top_k']}, on a CPU {_TREES['cpu']['draft_tree_top_k']}.",
        least=1,
        most=64,
        published=True,
        engine_names={"speculative_eagle_topk": 0},
    )
    num_draft_nodes: int | None = setting(
        None,
        "For the dynamic tree: nodes that are drafted, the most probable ones of those grown. Default: "
        f"{_TREE['num_draft_nodes']}, on a CPU {_TREES['cpu']['num_draft_nodes']}.",
        least=1,
        most=MAX_NODES,
        published=True,
        engine_names={"speculative_num_draft_tokens": -1},
    )
    draft_confidence_threshold: float | None = setting(
        None,
        "A row's draft is not continued after nodes whose probability, along the whole path, is at most "
        "this. 0 always drafts the full depth. Default: 0; on a CPU, where no shape is asked for, "
        f"{_THRESHOLDS['cpu']}.",
        least=0,
        most=1,
        published=True,
    )
    draft_sample_method: Literal["greedy", "probabilistic"] | None = draft_sample_method_field("greedy")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_confidence_threshold == 1:
            raise SpecConfigError("`draft_confidence_threshold` must be below 1, got 1: nothing would be continued.")


def draft_shape(
    config: SpeculativeConfig,
    vocab_size: int,
    session: Session,
    chain_only_reason: str | None,
    chain_length: int,
    prefers_trees: bool = False,
) -> TokenTree | DynamicTree:
    """Shape of the drafts of a call: a static tree, chains among them, or a dynamic one.

    With a `chain_only_reason` it is a chain. Where the settings, [`ExtrapolationOptions`] among them, name nothing, it
    is one of `chain_length`, or a tree for a small batch if the method `prefers_trees`. Settings that contradict each
    other, or ask for more candidates than the `vocab_size` tokens that the draft knows, are refused.
    """
    most_rows = _TREE_BATCH_SIZES.get(session.device.type, _TREE_BATCH_SIZE)
    paths, length, growth = config.speculative_token_tree, config.num_speculative_tokens, growth_option(config)
    if growth and (paths or length):
        name, shape = ("speculative_token_tree", "a static tree") if paths else ("num_speculative_tokens", "a chain")
        raise SpecConfigError(f"`{name}` asks for {shape}, and `{growth}` is about a dynamic one. Leave one out.")
    if paths:
        plan = static_tree(paths, vocab_size)
    elif length or not (growth or (prefers_trees and session.batch_size <= most_rows)):
        return TokenTree.chain(length or chain_length)
    else:
        usual = _TREES.get(session.device.type, _TREE)
        depth, top_k, num_nodes = (getattr(config.options, name) or usual[name] for name in _TREE)
        plan = DynamicTree.of(depth - 1, min(top_k, vocab_size), num_nodes + 1)
        if plan.widths[0] == 1:
            plan = TokenTree.chain(plan.max_depth)
    if not chain_only_reason or plan.is_chain:
        return plan
    session.notes.append(f"chains instead of trees: {chain_only_reason}")
    return TokenTree.chain(plan.max_depth if paths or growth else chain_length)


def growth_option(config: SpeculativeConfig) -> str | None:
    """An option of a dynamic tree that the settings name, if there is one."""
    return next((name for name in _TREE if getattr(config.options, name) is not None), None)


def confidence_threshold(config: SpeculativeConfig, session: Session) -> float:
    """Path probability that a node must exceed for the draft to go on there; 0 for any."""
    threshold = config.options.draft_confidence_threshold
    if threshold is not None:
        return threshold
    names_shape = growth_option(config) or config.speculative_token_tree or config.num_speculative_tokens
    return 0.0 if names_shape else _THRESHOLDS.get(session.device.type, 0.0)


def static_tree(paths: tuple[tuple[int, ...], ...], vocab_size: int, num_heads: int | None = None) -> TokenTree:
    """The tree of these paths, of tokens that the draft knows, and no deeper than there are heads for its tokens."""
    tree = TokenTree(paths)
    if num_heads is not None and tree.max_depth > num_heads:
        raise SpecConfigError(
            f"`speculative_token_tree` is {tree.max_depth} deep, and the draft has {num_heads} heads. Cut the tree."
        )
    if max(tree.widths) > vocab_size:
        raise SpecConfigError(
            f"`speculative_token_tree` has the rank {max(tree.widths) - 1}, and the draft knows {vocab_size} tokens. "
            "Pass a narrower tree."
        )
    return tree
