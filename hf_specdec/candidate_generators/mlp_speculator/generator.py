"""MLP speculator: a small network goes on from the target's last hidden state, one stage for each drafted token.

Wertheimer et al. 2024 (arXiv:2404.19124). Unlike Medusa's heads, every stage is told the token chosen before it, so
branches know what they branch from, and drafts can be drawn from the network's distribution. Drafts are chains, static
trees, the best nodes of a tree that is grown level by level, or the published "candidates": the best whole sequences
of such a tree. The network keeps no cache: it starts anew from the target's state after the final norm.

On a GPU a draft is one graph, a sampled chain too. Of chains whose processors no graph can run, each token is one.

Shapes: B active rows, N draft nodes, H hidden size of the target.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, fields
from itertools import accumulate, count
from typing import Any, ClassVar, Literal

import torch

from ...checkpoints.loading import LOADED_BY, load
from ...drafting.draw import DepthLimits, Draw
from ...drafting.growth import DraftNodes, DynamicTree, grow
from ...drafting.shape import static_tree
from ...drafting.slots import DRAFT_STATE
from ...drafting.state import Entries, NetworkState
from ...drafts import TokenTree
from ...drafts.static import MAX_NODES
from ...errors import SpecConfigError
from ...settings import SpeculativeConfig
from ...settings.checks import MOST_DRAFT_TOKENS, Options, draft_sample_method_field, setting
from ...settings.names import key_of
from ..networks import NetworkGenerator
from .network import MLPSpeculator, MLPStage


# Draft tokens of the default chain, if there are as many stages.
_CHAIN_LENGTH = 3

# Nodes of a tree where none are named. A forward of many nodes costs a GPU about what one token does; a CPU pays for
# each node, so that chains are the default there.
_NUM_NODES = {"cpu": 8}
_NUM_NODES_ELSEWHERE = 32

# Of which `num_candidates` are chosen.
_MOST_SEQUENCES = 2**16

# Options that say how a tree is grown.
_GROWTH_OPTIONS = ("draft_tree_top_k", "num_candidates", "num_draft_nodes")


@dataclass(frozen=True)
class MLPSpeculatorOptions(Options):
    """Options of `spec_method="mlp_speculator"`."""

    draft_tree_top_k: tuple[int, ...] | None = setting(
        None,
        "Continuations that each depth of a tree gives every node. Default: `top_k_tokens_per_head` of the "
        "checkpoint.",
        least=1,
        most=MOST_DRAFT_TOKENS,
        published=True,
    )
    num_candidates: int | None = setting(
        None,
        "Draft the tree of this many best sequences, as the published code does (there: `n_candidates`), "
        "instead of the tree of the best nodes.",
        least=1,
        most=MAX_NODES,
        key="mlp_speculator_num_candidates",
        published=True,
    )
    num_draft_nodes: int | None = setting(
        None,
        "Draft the tree of about this many most probable nodes. Without any setting of the draft's shape "
        f"that is the default, with {_NUM_NODES_ELSEWHERE} nodes, except on a CPU: there it is a chain of at most "
        f"{_CHAIN_LENGTH} tokens.",
        least=1,
        most=MAX_NODES,
        published=True,
    )
    draft_sample_method: Literal["greedy", "probabilistic"] | None = draft_sample_method_field("greedy")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_candidates is not None and self.num_draft_nodes is not None:
            raise SpecConfigError(
                f"`num_candidates`={self.num_candidates} and `num_draft_nodes`={self.num_draft_nodes} are two ways to "
                "choose the nodes of a tree. Keep one."
            )


class MLPSpeculatorCandidateGenerator(NetworkGenerator):
    """Drafts chains and trees."""

    options_class = MLPSpeculatorOptions
    target_hidden_states: ClassVar[tuple[int | str, ...]] = ("last",)
    default_num_speculative_tokens = _CHAIN_LENGTH
    steers_chains = True
    has_steps = True
    loaded_by: ClassVar[tuple[str, ...]] = LOADED_BY

    @classmethod
    def load(
        cls, config: SpeculativeConfig, target_model: torch.nn.Module, draft_model: MLPSpeculator | None = None
    ) -> MLPSpeculator:
        return load(MLPSpeculator, config, target_model, draft_model)

    @classmethod
    def default_length(cls, options: MLPSpeculatorOptions) -> int:
        return len(options.draft_tree_top_k or ()) or cls.default_num_speculative_tokens

    def shape(self) -> TokenTree | DynamicTree:
        config, network, sizes = self.config, self.network, self.network.config
        self.stages: list[MLPStage] = [network.stage(index) for index in range(sizes.n_predict)]
        options = [item for item in fields(self.options) if item.name in _GROWTH_OPTIONS]
        growth = [key_of(item) for item in options if getattr(self.options, item.name) is not None]
        if config.speculative_token_tree is not None:
            if growth:
                raise SpecConfigError(
                    f"`speculative_token_tree` is a whole tree, and `{growth[0]}` is about growing one. Leave one out."
                )
            return self.fitting(static_tree(config.speculative_token_tree, network.num_tokens, sizes.n_predict))
        config.check_against_target(num_heads=sizes.n_predict)
        prefers_trees = self.session.device.type != "cpu" and not self.chain_only_reason
        if growth or (prefers_trees and config.num_speculative_tokens is None):
            return self.fitting(self._growing_tree())
        return TokenTree.chain(config.num_speculative_tokens or min(_CHAIN_LENGTH, sizes.n_predict))

    def _growing_tree(self) -> TokenTree | DynamicTree:
        options, sizes, num_tokens = self.options, self.network.config, self.network.num_tokens
        widths = options.draft_tree_top_k or sizes.top_k_tokens_per_head
        if len(widths) > sizes.n_predict:
            raise SpecConfigError(
                f"`draft_tree_top_k`={list(widths)} has {len(widths)} entries, and the checkpoint has "
                f"{sizes.n_predict} stages, one for each. Use at most {sizes.n_predict}."
            )
        depth = self.config.fixed_length or len(widths)
        if depth > len(widths):
            raise SpecConfigError(
                f"`num_speculative_tokens`={depth} needs as many entries of `draft_tree_top_k`, got {len(widths)}."
            )
        num_nodes = options.num_draft_nodes or _NUM_NODES.get(self.session.device.type, _NUM_NODES_ELSEWHERE)
        widths = tuple(min(width, num_tokens) for width in widths[:depth])
        if max(widths) == 1:
            return TokenTree.chain(depth)
        if options.num_candidates is None:
            return grown_tree(widths, num_nodes)
        *expanded, num_sequences = accumulate(widths, operator.mul)
        if num_sequences > _MOST_SEQUENCES:
            raise SpecConfigError(
                f"`draft_tree_top_k`={list(widths)} gives {num_sequences} sequences to choose "
                f"`mlp_speculator_num_candidates`={options.num_candidates} from. Make them at most {_MOST_SEQUENCES}, "
                "or use `num_draft_nodes`."
            )
        return DynamicTree(widths, tuple(expanded), num_nodes, options.num_candidates, cuts_chosen=True)

    @property
    def graph_key(self) -> tuple[Any, ...]:
        # Targets of other vocabularies may share the network.
        return self.plan, self.network.target_size

    def stage(self, depth: int) -> int:
        return depth

    def draft(self, state: NetworkState, new: Entries, limits: DepthLimits, draw: Draw) -> DraftNodes:
        stages = count(1)

        def step(tokens: torch.LongTensor, hidden: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return self._run(next(stages), hidden, tokens)

        return grow(self.plan, step, *self.read(state, new, 0), limits, draw)

    def read(self, state: NetworkState, new: Entries, stage: int) -> tuple[torch.Tensor, torch.Tensor]:
        if stage == 0:
            hidden = self.network.start(new.last(new.states["last"]).to(self.stages[0].projection.dtype))
        else:
            hidden = new.last(new.states[DRAFT_STATE])
        return self._run(stage, hidden, new.last(new.tokens))

    def _run(self, stage: int, hidden: torch.Tensor, tokens: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """New states and logits of a stage; tokens that it lacks, such as padding, are read as its last one."""
        if self.network.num_tokens < self.network.target_size:
            tokens = tokens.clamp(max=self.network.num_tokens - 1)
        return self.stages[stage](hidden, tokens)


def grown_tree(widths: tuple[int, ...], num_nodes: int) -> DynamicTree:
    """A tree of the most probable nodes, whose nodes have so many continuations by depth."""
    expanded, size = [], 1
    for depth, width in enumerate(widths[:-1], start=1):
        # More nodes than these rarely have children among the chosen: reading all that could gains no tokens.
        size = min(size * width, math.ceil(num_nodes / (2 * depth + 1)))
        expanded.append(size)
    return DynamicTree(widths, tuple(expanded), num_nodes, cuts_chosen=True)
