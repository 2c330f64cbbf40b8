"""DFlash: a whole block of draft tokens from one forward of a small network (arXiv:2602.06036).

Keys and values of a token of the text are made once, when it is committed, and kept. A cycle puts the block after them
and forgets it again. Its tokens are drafted as a chain, or the most probable prefixes as a tree (DDTree,
arXiv:2604.12989). How they depend on each other, the draft's head says, see [`~candidate_generators.dflash.heads`]. On
a GPU all of that is one graph; tokens are sampled outside of it where logits processors of the user's come in between
that read more than scores.

Shapes: R active rows, C new tokens of the text, K drafted positions, T positions of a block, S slots of the draft's
cache, h and th hidden sizes of draft and target, V vocabulary of the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from transformers.utils import logging

from ...checkpoints.loading import LOADED_BY, load
from ...drafting.draw import DepthLimits, Draw
from ...drafting.growth import DraftNodes, DynamicTree
from ...drafting.prefixes import best_prefixes
from ...drafting.slots import DraftSlots
from ...drafting.state import Entries, NetworkState
from ...drafts import TokenTree
from ...drafts.static import MAX_NODES
from ...errors import SpecConfigError
from ...kernels.tree_attention import SlotTree, pack_words
from ...protocol import Prompt
from ...settings import SpeculativeConfig
from ...settings.checks import Options, draft_sample_method_field, setting
from ...target.masks import FULL, Span, TreeMask
from ...transfers import kept_on_device, kept_tensor
from ..networks import NetworkGenerator
from .formats import DFlashReader
from .heads import HeadConfig
from .heads.walks import Block, Denoising, Memory, keep_counts
from .network import BlockView, DFlashNetwork, check_mask_token


logger = logging.get_logger(__name__)

# Formats know the heads, these the recipes, and these the network, which cannot know its formats itself.
DFlashNetwork.reader_class = DFlashReader

# Most children of a node that are looked at under a grammar, where each node has a distribution of its own.
_MOST_MASKED_CHILDREN = 10


# Nodes of the tree of drafts that were made for trees, where the settings name nothing, and the largest batch that has
# one, by device type. Measured on a CPU; elsewhere half of JetSpec's own.
_USUAL_TREE = 63, 4
_USUAL_TREES = {"cpu": (20, 1)}


@dataclass(frozen=True)
class DFlashOptions(Options):
    """Options of `spec_method="dflash"`."""

    dflash_block_size: int | None = setting(
        None,
        "Tokens of a block, the last committed one included; at most what the draft was trained with. "
        "Default: one more than `num_speculative_tokens`, or the trained size.",
        least=1,
        most=MAX_NODES + 1,
        published=True,
        engine_names={"speculative_num_draft_tokens": 0},
    )
    dflash_num_denoising_steps: int | None = setting(
        None,
        "Forwards of the draft for a block; between them the surest tokens are kept and the others are "
        "masked again. Default: what the checkpoint declares, otherwise 1.",
        least=1,
        most=MAX_NODES,
        published=True,
    )
    dflash_mask_token_id: int | None = setting(
        None,
        "The token at positions that are to be filled. Default: what the checkpoint says, or the "
        "tokenizer's mask token.",
        least=0,
        published=True,
    )
    num_draft_nodes: int | None = setting(
        None,
        "Nodes of the tree of the most probable prefixes of a block. 0 drafts the block as a chain. Default: a "
        f"chain; for DFlash 2 and JetSpec drafts without a `num_speculative_tokens` {_USUAL_TREES['cpu'][0]} "
        f"for a single row on a CPU, {_USUAL_TREE[0]} for up to {_USUAL_TREE[1]} rows elsewhere.",
        least=0,
        most=MAX_NODES,
        published=True,
    )
    draft_tree_top_k: int | None = setting(
        None,
        "With `num_draft_nodes`: children that a node of the tree gets at once, the most probable node first "
        "(JetSpec). Default: the most probable prefixes, whatever their parents are.",
        least=1,
        most=64,
        published=True,
    )
    draft_confidence_threshold: float = setting(
        0.0,
        "For DSpark drafts with a confidence head: a row's draft ends before the first token that the head gives less "
        "probability of being accepted, once those before it are, in [0, 1]. 0 keeps all.",
        least=0,
        most=1,
        published=True,
    )
    draft_sample_method: Literal["greedy", "probabilistic"] | None = draft_sample_method_field("greedy")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_draft_nodes and (self.dflash_num_denoising_steps or 1) > 1:
            raise SpecConfigError(
                f"`num_draft_nodes`={self.num_draft_nodes} makes a tree out of the probabilities of one "
                f"forward, and `dflash_num_denoising_steps`={self.dflash_num_denoising_steps} asks for several. Leave "
                "one out."
            )
        if self.num_draft_nodes and self.draft_confidence_threshold:
            raise SpecConfigError(
                f"`num_draft_nodes`={self.num_draft_nodes} makes a tree, and `draft_confidence_threshold`="
                f"{self.draft_confidence_threshold} ends chains. Leave one out."
            )
        # A 0 is a call's word against the tree that was saved with a draft.
        if self.draft_tree_top_k and self.num_draft_nodes is None:
            raise SpecConfigError(
                f"`draft_tree_top_k`={self.draft_tree_top_k} is about a tree, and without `num_draft_nodes` a chain "
                "is drafted. Name both, or neither."
            )


class DraftText(DraftSlots):
    """The draft's keys and values of each row's text, and after them those of the current block."""

    network: DFlashNetwork

    def extend(self, new: Entries) -> torch.Tensor:
        """Takes in what is new of the text; returns what the layers see of it, `(R, C, h)`."""
        fused = self.network.fuse(new.states)
        here = self.plan_read(fused.shape[1])
        for layer, (keys, values) in enumerate(self.network.context(fused, here.positions, here.bound)):
            self.cache.update(keys, values, layer)
        self.cache.commit(new.counts)
        return fused

    def begin_block(self, size: int) -> None:
        """Prepares for blocks of this size; they may be read more than once."""
        self._block = self.plan_read(size)
        self._masks: dict[BlockView, torch.Tensor | TreeMask | None] = {}
        for view in self.network.views:
            if not self.has_kernel and view.sees_all and self._block.is_uniform:
                self._masks[view] = None
                continue
            # Distances of slots are of positions.
            bits, depths = _block_bits(view, size, self.device), kept_tensor(tuple(range(size)), self.device)
            tree = SlotTree(self.cache.plan.starts(self.device), self.first_slots[:, 0], bits, depths)
            mask = TreeMask(tree, FULL if view.window is None else Span("sliding", view.window))
            additive = None if self.has_kernel else mask.additive(self._block.plan.columns, self.network.dtype)
            self._masks[view] = mask if additive is None else additive

    def read_block(self, tokens: torch.LongTensor) -> torch.Tensor:
        """The network's output `(R, T, h)` for blocks `(R, T)`; nothing of them is kept."""
        return self.network(tokens, self._block.positions, self._masks, self.cache, self._block.bound)


@kept_on_device
def _block_bits(view: BlockView, size: int, device: torch.device) -> torch.LongTensor:
    """Words of bits `(1, T, W)`: which positions of a block each of them sees."""
    places = torch.arange(size, device=device)
    return pack_words(~view.hidden(places[:, None] - places))[None]


class DFlashCandidateGenerator(NetworkGenerator):
    """Drafts the blocks of a `DFlashNetwork` as chains or as trees."""

    options_class = DFlashOptions
    # What most published blocks yield; in a call it is what the draft's own block does.
    default_num_speculative_tokens = 15
    loaded_by: ClassVar[tuple[str, ...]] = (*LOADED_BY, "dflash_mask_token_id")
    drafts_whole = True

    @classmethod
    def load(
        cls, config: SpeculativeConfig, target_model: torch.nn.Module, draft_model: DFlashNetwork | None = None
    ) -> DFlashNetwork:
        return load(DFlashNetwork, config, target_model, draft_model)

    @classmethod
    def default_length(cls, options: DFlashOptions) -> int:
        size = options.dflash_block_size
        return cls.default_num_speculative_tokens if size is None else max(size - 1, 1)

    def shape(self) -> TokenTree | DynamicTree:
        network, options = self.network, self.options
        self.head: HeadConfig = network.config.head
        self.target_hidden_states: tuple[int | str, ...] = network.target_hidden_states
        self.mask_token_id: int = network.config.mask_token_id
        if options.dflash_mask_token_id is not None:
            check_mask_token(options.dflash_mask_token_id, network)
            self.mask_token_id = options.dflash_mask_token_id
        self.block_size: int
        self.num_drafts: int  # of a block
        self.block_size, self.num_drafts = _sizes(self.config, network)
        self.num_steps: int = _num_steps(options, network)
        self.threshold: float = options.draft_confidence_threshold
        if self.threshold and not self.head.has_confidence:
            raise SpecConfigError(
                f"`draft_confidence_threshold`={self.threshold} needs a DSpark draft with a confidence head, and this "
                'draft has none. Leave it out; num_speculative_tokens="auto" finds a length by what is accepted.'
            )
        if self.samples_drafts and (self.num_steps > 1 or not self.head.draws):
            self.samples_drafts: bool | None = False
            reason = f"{self.head.what} has" if not self.head.draws else "several denoising steps have"
            self.note(f"draft tokens are chosen, not drawn: {reason} no distribution")
        num_nodes, reason = options.num_draft_nodes, self.chain_only_reason
        if num_nodes is None:
            usual, most_rows = _USUAL_TREES.get(self.session.device.type, _USUAL_TREE)
            names_chain = self.config.fixed_length is not None or self.num_steps > 1
            is_chain = names_chain or reason or self.session.batch_size > most_rows or not network.config.suits_trees
            num_nodes = 0 if is_chain else usual
        elif num_nodes and (reason or not self.head.grows_trees):
            reason = reason or "the draft's tokens depend on each other"
            self.note(f"chains instead of trees: {reason}")
            num_nodes = 0
        self.tree_budget: int = num_nodes  # 0 for chains
        if not num_nodes:
            return TokenTree.chain(self.num_drafts)
        # Under a grammar the tree grows level by level.
        width = min(options.draft_tree_top_k or num_nodes, _MOST_MASKED_CHILDREN, network.config.draft_vocab_size)
        return DynamicTree.of(self.num_drafts - 1, width, num_nodes + 1)

    @property
    def num_draft_nodes(self) -> int:
        return self.tree_budget or self.num_speculative_tokens

    # The text

    def make_slots(self, **places: Any) -> DraftText:
        return DraftText(self.network, **places)

    @property
    def num_ahead(self) -> int:
        return self.block_size

    def prefill(self, prompt: Prompt) -> None:
        super().prefill(prompt)
        self.state.kept = self.network.block_head.begin_text(prompt.input_ids, self.device)

    def take_in(self, state: NetworkState, new: Entries) -> Memory:
        return self.network.block_head.remember(state.kept, state.slots.extend(new), new)

    # Drafting

    @property
    def graph_key(self) -> tuple[Any, ...]:
        sizes = (self.block_size, self.num_drafts, self.num_steps, self.mask_token_id)
        return (*sizes, self.tree_budget, self.options.draft_tree_top_k)

    def draft(self, state: NetworkState, new: Entries, limits: DepthLimits, draw: Draw) -> DraftNodes:
        network, text, anchors = self.network, state.slots, new.last(new.tokens).to(self.device)
        memory, grammar = self.take_in(state, new), None
        if not draw.is_plain and limits.waits and self.may_mask:
            # Masks are made on the host.
            begin = partial(self.growing_masks, self._step, limits.depths.tolist())
            grammar = None if begin() is None else begin
        text.begin_block(self.block_size)

        def block(count: int, masked: torch.LongTensor | None = None) -> Block:
            """Predictions of `count` positions of blocks with tokens `(R, K)` after the anchors, by default masks."""
            tokens = anchors[:, None] if masked is None else torch.cat((anchors[:, None], masked), dim=1)
            tokens = F.pad(tokens, (0, self.block_size - tokens.shape[1]), value=self.mask_token_id)
            return network.block(text.read_block(tokens), anchors, memory, count)._replace(grammar=grammar)

        if self.num_steps > 1:
            # All positions compete for being kept.
            count = network.config.num_drafts(self.block_size)
            blocks = Denoising(len(anchors), count, self.mask_token_id, self.device)
            for keep in keep_counts(count, self.num_steps):
                blocks.update(block(count, blocks.inputs), keep)
            return DraftNodes(blocks.tokens[:, : limits.deepest])
        walk: Any = network.block_head.begin(block(self.num_drafts if self.head.chooses_together else limits.deepest))
        if self.tree_budget and (grammar is None or self.head.chooses_together):
            top_k = self.options.draft_tree_top_k
            return best_prefixes(walk.lattice(top_k or self.tree_budget), self.tree_budget, limits, top_k)
        # The threshold is about estimates of a head, not about probabilities.
        depths = DepthLimits(limits.depths, deepest=None if limits.waits else limits.deepest)
        nodes = walk.draft(self.plan, depths, draw)
        if self.tree_budget or not self.head.has_confidence:
            return nodes
        logits = walk.head.confidence_logits(walk.block, nodes.tokens.to(self.device))
        nodes = nodes._replace(log_probs=F.logsigmoid(logits).cumsum(1))
        if not limits.threshold:
            return nodes
        num_trusted = (logits.sigmoid() >= limits.threshold).int().cumprod(1).sum(1)
        return nodes._replace(depths=torch.minimum(limits.depths.to(self.device), num_trusted))


def _sizes(config: SpeculativeConfig, network: DFlashNetwork) -> tuple[int, int]:
    """Tokens of a block, and number of those that are drafted."""
    trained, named, length = network.config.block_size, config.options.dflash_block_size, config.fixed_length
    num_undrafted = trained - network.config.num_drafts(trained)
    if named is not None and not num_undrafted < named <= trained:
        raise SpecConfigError(
            f"`dflash_block_size` must be from {num_undrafted + 1} to {trained}, the block that the draft was trained "
            f"with, got {named}. It counts the last committed token."
        )
    most = (named or trained) - num_undrafted
    if length is not None and length > most:
        whose = f"`dflash_block_size`={named}" if named else f"the draft's block of {trained} tokens"
        raise SpecConfigError(
            f"`num_speculative_tokens` must be at most {most}, what {whose} yields, got {length}. Draft fewer."
        )
    num_drafts = length or most
    if not network.config.head.needs_whole_block:
        return named or num_drafts + num_undrafted, num_drafts
    if named not in (None, trained):
        raise SpecConfigError(
            f"`dflash_block_size` must be {trained}, the block that this draft was trained with, got {named}: its "
            "tokens depend on all positions. Name fewer tokens with `num_speculative_tokens`."
        )
    return trained, num_drafts


def _num_steps(options: DFlashOptions, network: DFlashNetwork) -> int:
    """Forwards for a block."""
    config, asked = network.config, options.dflash_num_denoising_steps
    trained = config.num_denoising_steps if config.takes_steps else 1
    if asked is None:
        return 1 if options.num_draft_nodes else trained
    if asked > 1 and not config.takes_steps:
        raise SpecConfigError(
            "`dflash_num_denoising_steps` must be 1 for drafts whose positions predict the next token or whose tokens "
            f"depend on each other, got {asked}."
        )
    if asked > trained and not config.head.takes_untrained_steps:
        raise SpecConfigError(
            f"`dflash_num_denoising_steps` must be at most {trained}, what this draft declares, "
            f"got {asked}: {config.head.what} was not trained on blocks of which tokens are known."
        )
    if asked > trained:
        logger.warning_once(
            f"dflash_num_denoising_steps={asked}, and the draft was trained for {trained}. Drafts that have never "
            "seen a known token in the place of a mask may be accepted less often with more steps (measured: 6.0 "
            "tokens per cycle with one step, 5.0 with three), and every step costs a forward."
        )
    return asked
