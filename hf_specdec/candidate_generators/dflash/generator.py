"""DFlash: a whole block of draft tokens from one forward of a small network (arXiv:2602.06036).

The draft reads the text through the target's hidden states alone: its keys and values for a token are made once, when
the token is committed, and kept. A cycle puts the block after them, the anchor and masks, and forgets it again. The
tokens of the block are drafted as a chain, or the most probable prefixes as a tree (DDTree, arXiv:2604.12989). With
several denoising steps the most confident tokens take the place of their masks and the rest is predicted again. Where
the tokens before a position correct its logits (DSpark, Domino), they are drafted from left to right. With a candidate
selector (DFlash 2) chains, trees and samples are walks through its scores. On a GPU all of that is one graph; tokens
are sampled outside of it where logits processors of the user's come in between that read more than scores.

Shapes: R active rows, C new tokens of the text, K drafted positions, S slots of the draft's cache, U its vocabulary,
V that of the target.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from transformers.utils import logging

from ...drafting.chain import CapturedDrawing, SteeredChain
from ...drafting.growth import DepthLimits, DynamicTree
from ...drafting.positions import MaskedWalk, Positions
from ...drafting.slots import Entries, KnownPrompt
from ...drafts import DraftTree, TokenTree
from ...errors import SpecConfigError
from ...kernels.best import best_tokens
from ...logits.grammar.masks import GrowingMasks
from ...protocol import Commit, DeviceCommit, DraftStep, Prompt, Session
from ...transfers import last_of_each
from ..base import CandidateGenerator
from .corrections import Block, Chain
from .denoising import Denoising, keep_counts
from .lattice import Lattice, Prefixes, best_candidates, best_prefixes, prefix_nodes
from .network import DFlashNetwork, check_mask_token, fitting_network, load_dflash
from .options import USUAL_TREE, USUAL_TREES, DFlashOptions
from .selector import Edges, SelectedPositions
from .text import DraftText


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig


logger = logging.get_logger(__name__)


# Most children of a node that are looked at under a grammar, where each node has a distribution of its own.
_MOST_MASKED_CHILDREN = 10


class DFlashCandidateGenerator(CandidateGenerator):
    """Drafts the blocks of a `DFlashNetwork` as chains or as trees."""

    options_class = DFlashOptions
    # What most published blocks yield; in a call it is what the draft's own block does.
    default_num_speculative_tokens = 15
    loaded_by: ClassVar[tuple[str, ...]] = (
        "model",
        "revision",
        "subfolder",
        "cache_dir",
        "dtype",
        "device",
        "quantization",
    )
    loaded_by += ("dflash_mask_token_id",)

    @classmethod
    def load(
        cls, config: SpeculativeConfig, target_model: torch.nn.Module, draft_model: DFlashNetwork | None = None
    ) -> DFlashNetwork:
        if draft_model is None:
            return load_dflash(config, target_model)
        return fitting_network(draft_model, config, target_model)

    @classmethod
    def default_length(cls, options: DFlashOptions) -> int:
        size = options.dflash_block_size
        return cls.default_num_speculative_tokens if size is None else max(size - 1, 1)

    def __init__(self, config: SpeculativeConfig, resources: DFlashNetwork, session: Session):
        super().__init__(config, resources, session)
        self.network = network = resources
        self.device: torch.device = network.device
        self.target_hidden_states: tuple[int | str, ...] = network.target_hidden_states
        self.mask_token_id: int = _mask_token_id(self.options, network)
        self.block_size: int
        self.num_speculative_tokens: int
        self.block_size, self.num_speculative_tokens = _sizes(config, network)
        self.num_steps: int = _num_steps(self.options, network)
        self.least_confidence: float = _least_confidence(self.options, network)
        self.samples_drafts = self.asks_to_sample
        self.tree_budget: int | None = self._tree_budget()
        self.draft_tree_top_k: int | None = self.options.draft_tree_top_k
        self._settle_contradictions()
        self.check_sampled_length()
        self.text: DraftText | None = None
        self.pending: Commit | None = None  # read by the next draft
        self._lengths: list[int] = []  # of the rows, when the last draft was made

    def _tree_budget(self) -> int:
        """Nodes of the trees; 0 for chains."""
        asked = self.options.num_draft_nodes
        if asked is not None:
            return asked
        usual = USUAL_TREES.get(self.session.device.type, USUAL_TREE)
        names_chain = self.config.fixed_length is not None or self.num_steps > 1
        if names_chain or self.chain_only_reason or self.session.batch_size > usual.most_rows:
            return 0
        return usual.num_nodes if self.network.config.suits_trees else 0

    def _settle_contradictions(self) -> None:
        """Gives up what the call or the draft has no room for, and says so."""
        notes = self.session.notes
        chosen = "several denoising steps have" if self.num_steps > 1 else None
        if self.network.config.xpress is not None:
            chosen = "XPress's passes have"
        if self.samples_drafts and chosen:
            self.samples_drafts: bool | None = False
            notes.append(f"draft tokens are chosen, not drawn: {chosen} no distribution")
        if not self.tree_budget:
            return
        reason = self.chain_only_reason
        if reason is None and (self.network.config.is_sequential or self.network.config.xpress is not None):
            reason = "the draft's tokens depend on each other"
        if reason:
            self.tree_budget = 0
            notes.append(f"chains instead of trees: {reason}")

    @property
    def num_draft_nodes(self) -> int:
        return self.tree_budget or self.num_speculative_tokens

    @property
    def most_committed(self) -> int:
        """Most tokens of a row that a cycle leaves to be read."""
        return self.num_speculative_tokens + 1

    # The text

    def prefill(self, prompt: Prompt) -> None:
        """Takes in the states of all tokens but the last one, which come again with the first committed token."""
        known, network = KnownPrompt(prompt), self.network
        slots = known.slots(network, self.config, self.session, self.block_size + self.most_committed)
        self.text = DraftText(network, **slots)
        self.text.begin(prompt.input_ids)
        for states, _, counts in known.chunks():
            self.text.extend(states, counts)

    def observe(self, commit: Commit) -> None:
        """Keeps what was committed; the next draft reads it, so that a call that ends here pays nothing."""
        self._read(self.pending)
        self.pending = commit

    def _read(self, new: Commit | None) -> None:
        if new is not None:
            self.text.extend(new.hidden_states, new.counts)
            self.text.add_tokens(new.tokens, new.counts)

    def keep_rows(self, keep: list[int]) -> None:
        self.text.keep_rows(keep)
        if self.pending is not None:
            self.pending = self.pending.of_rows(keep)

    def join(self, other: DFlashCandidateGenerator, numbers: dict[int, int]) -> None:
        if self.pending is None or other.pending is None:
            for generator in (self, other):
                generator._read(generator.pending)
                generator.pending = None
        else:
            self.pending = Commit.side_by_side([self.pending, other.pending])
        self.text.join(other.text)

    def close(self) -> None:
        if self.text is not None:
            self.text.close()
        self.text = self.pending = None

    # Drafting

    def propose(self, step: DraftStep) -> DraftTree:
        limits, self._lengths = self.draft_depths(step), step.lengths
        if max(limits) <= 0:
            # There will never be room again.
            self.pending = None
            return DraftTree.empty(len(step.rows), self.session.device)
        new, self.pending = self.pending, None
        masks = self.growing_masks(step, limits)
        # Masks are made on the host, level by level.
        predicted = self._replay(new, step, limits) if masks is None else None
        if predicted is None:
            self._read(new)
            self.text.begin_block(self.block_size)
        is_together = self.num_steps > 1 or self.network.config.lilicorr or self.network.config.xpress
        if masks is not None and not is_together:
            return self._draft_masked(step, limits, masks)
        # Between steps nothing is chosen one token after the other, nor from candidates that see each other.
        walk = None if masks is None else MaskedWalk(lambda: self.growing_masks(step, limits), self.network.token_ids)
        if predicted is None:
            predicted = self._predict(self.text, step.anchor_tokens.to(self.device), max(limits), walk)
        if isinstance(predicted, (Block, Edges)):
            return self._draft_steered(predicted, step, limits)
        return self._drafted(predicted, limits)

    def _drafted(self, predicted: Chain | Prefixes | Lattice, limits: list[int]) -> DraftTree:
        return self._tree(predicted, limits) if self.tree_budget else self._chain(predicted, limits)

    def _predict(
        self, text: DraftText, anchors: torch.LongTensor, count: int, walk: MaskedWalk | None = None
    ) -> Chain | Block | Edges | Lattice:
        """Predicts the first `count` tokens of the blocks that begin with `anchors` `(R,)`, which grammars may allow.

        Returns:
            If tokens are sampled, logits and outputs of `count` positions, or scores of a selector, under grammars
            always; for a tree its candidates; otherwise a chain, of at least `count` tokens.
        """
        network = self.network
        if network.xpress_head is not None:
            return self._refined(text, anchors, walk)
        is_chosen = not (self.samples_drafts or self.tree_budget)
        if is_chosen and (self.num_steps > 1 or not network.config.has_edges):
            return self._chosen(text, anchors, count, walk)
        if network.config.lilicorr is not None:
            # Its candidates see each other, whatever the rows have room for.
            count = self.num_speculative_tokens
        output = self._first_output(text, anchors, count)
        logits = network.logits(output)
        if network.config.has_edges:
            ranked = None if walk is None else walk.ranked(logits)
            edges = network.edges(logits, output, anchors, text.last_context, ranked)
            if is_chosen and walk is None:
                return Chain(edges.tokens_at(edges.walk()))
            return edges.lattice() if self.tree_budget else edges
        if self.samples_drafts:
            return Block(logits, output)
        return best_candidates(logits, self.draft_tree_top_k or self.tree_budget, network.token_ids)

    def _chain(self, chain: Chain, limits: list[int]) -> DraftTree:
        tokens = chain.tokens[:, : max(limits)].to(self.session.device)
        probs = None if chain.probs is None else chain.probs[:, : max(limits)].contiguous()
        return self._rated(DraftTree.chain(tokens, limits, probs), chain.confidence_logits)

    def _rated(self, draft: DraftTree, confidence_logits: torch.Tensor | None) -> DraftTree:
        """Chains with what is foreseen of them, which end before the first token of too little confidence."""
        if confidence_logits is None:
            return draft
        logits = confidence_logits[:, : draft.size].to(draft.tokens.device)
        padding = torch.arange(draft.size, device=logits.device) >= draft.num_nodes[:, None]
        draft.path_log_probs = F.logsigmoid(logits).cumsum(1).masked_fill(padding, -torch.inf)
        if not self.least_confidence:
            return draft
        # The width of the verification depends on it, so the device is waited for.
        is_trusted = logits.sigmoid() >= self.least_confidence
        return draft.shortened(is_trusted.int().cumprod(1).sum(1).tolist())

    def _tree(self, candidates: Prefixes | Lattice, limits: list[int]) -> DraftTree:
        """The most probable prefixes of the block."""
        device = self.session.device
        if isinstance(candidates, Prefixes):
            return candidates.draft(self.tree_budget, limits, self.draft_tree_top_k, device)
        return best_prefixes(candidates.to(device), self.tree_budget, limits, self.draft_tree_top_k)

    def _draft_masked(self, step: DraftStep, limits: list[int], masks: GrowingMasks) -> DraftTree:
        """Drafts what the grammars of the rows allow, in the shape of other drafts; a tree grows level by level."""
        anchors, count, network = step.anchor_tokens.to(self.device), max(limits), self.network
        output = self._first_output(self.text, anchors, count)
        logits, selector = network.logits(output), network.candidate_selector
        is_rated = network.config.has_confidence and not self.tree_budget
        if selector is None and (self.samples_drafts or network.config.is_sequential or is_rated):
            return self._draft_steered(Block(logits, output), step, limits)
        if selector is None:
            positions = Positions(logits, network.token_ids)
        else:
            positions = SelectedPositions(selector, logits, output, masks)
        if self.samples_drafts:
            chain = SteeredChain(self.session.sampler, step.rows, step.lengths)
            chain.choose_all(anchors, count, self._moved(positions.after))
            return chain.draft(limits)
        plan = TokenTree.chain(count)
        if self.tree_budget:
            width = min(self.draft_tree_top_k or self.tree_budget, _MOST_MASKED_CHILDREN, logits.shape[-1])
            plan = DynamicTree(count - 1, width, self.tree_budget + 1)
        shape = plan if self.tree_budget else plan.levels(self.device)
        limits = [min(limit, plan.max_depth) for limit in limits]
        nodes = positions.grow(shape, anchors, DepthLimits(torch.tensor(limits, device="cpu")), masks)
        return nodes.draft(plan, limits, self.session.device)

    def _output(
        self, text: DraftText, anchors: torch.LongTensor, masked: torch.LongTensor, count: int
    ) -> torch.Tensor:
        """The network's output `(R, count, h)` at the first positions that predict.

        Args:
            text (`DraftText`): Ready for a block.
            anchors (`torch.LongTensor` of shape `(R,)`): First tokens of the blocks.
            masked (`torch.LongTensor` of shape `(R, K)`): Tokens after them; masks follow up to the size of a block.
            count (`int`): Number of positions.
        """
        tokens = torch.cat((anchors[:, None], masked[:, : self.block_size - 1]), dim=1)
        tokens = F.pad(tokens, (0, self.block_size - tokens.shape[1]), value=self.mask_token_id)
        return self.network.predicting(text.read_block(tokens))[:, :count]

    def _first_output(self, text: DraftText, anchors: torch.LongTensor, count: int) -> torch.Tensor:
        return self._output(text, anchors, anchors.new_empty((len(anchors), 0)), count)

    def _chosen(self, text: DraftText, anchors: torch.LongTensor, count: int, walk: MaskedWalk | None = None) -> Chain:
        """The best tokens of the block, at least `count`."""
        network = self.network
        if network.config.is_sequential or network.config.has_confidence:
            return self._chosen_in_order(text, anchors, count)
        if self.num_steps > 1:
            # All of them compete for being kept.
            count = network.config.num_drafts(self.block_size)
        state = Denoising.start(len(anchors), count, self.mask_token_id, self.device)
        for keep in keep_counts(count, self.num_steps):
            network.denoise(state, self._output(text, anchors, state.inputs, count), anchors, keep, walk)
        return Chain(state.tokens)

    def _chosen_in_order(self, text: DraftText, anchors: torch.LongTensor, count: int) -> Chain:
        """The best tokens, each by the logits that the tokens before it have corrected."""
        output = self._first_output(text, anchors, count)
        walk = self.network.left_to_right(Block(self.network.logits(output), output))
        tokens = walk.best(anchors, count, self.network.target_ids)
        return Chain(torch.stack(tokens[1:], dim=1), self._confidence_logits(output, tokens[:-1]))

    def _refined(self, text: DraftText, anchors: torch.LongTensor, walk: MaskedWalk | None) -> Chain:
        """The tokens of the block after XPress's passes."""
        network = self.network
        tokens = F.pad(anchors[:, None], (0, self.block_size - 1), value=self.mask_token_id)
        output = text.read_block(tokens)
        before, _ = text.tokens_before.unbind(1)

        def best(logits: torch.Tensor) -> torch.LongTensor:
            return network.target_ids(best_tokens(logits if walk is None else walk.ranked(logits)))

        return Chain(network.xpress_head.refine(network.logits(output), output, anchors, before, best))

    def _confidence_logits(self, output: torch.Tensor, before: list[torch.LongTensor]) -> torch.Tensor | None:
        """Log-odds `(R, K)` that tokens are accepted, by the K tokens `(R,)` before them, the anchor the first."""
        if not self.network.config.has_confidence:
            return None
        tokens = torch.stack([tokens.to(self.device) for tokens in before], dim=1)
        return self.network.confidence_logits(output[:, : len(before)], tokens)

    def _draft_steered(self, predicted: Block | Edges, step: DraftStep, limits: list[int]) -> DraftTree:
        """Samples tokens from the draft's distributions, processed as the target's are, or chooses the best ones."""
        sampler = self.session.sampler
        chain = SteeredChain(sampler, step.rows, step.lengths, bool(self.samples_drafts))
        steered = self._steer(chain, predicted, step.anchor_tokens, max(limits), sampler.reads_tokens(step.rows))
        return self._chain(steered, limits)

    def _steer(
        self,
        chain: SteeredChain,
        predicted: Block | Edges,
        anchors: torch.LongTensor,
        count: int,
        reads_tokens: bool = False,
    ) -> Chain:
        """Chooses `count` tokens, each given those before it where anything depends on these."""
        network, is_walk = self.network, isinstance(predicted, Edges)
        if is_walk:
            after = partial(predicted.logits_of_walk, vocab_size=network.config.vocab_size)
            chain.choose_all(anchors, count, self._moved(after))
        elif network.config.is_sequential or reads_tokens:
            walk = network.left_to_right(predicted)
            after = self._moved(lambda _, tokens: network.target_logits(walk.after(tokens)))
            chain.choose_all(anchors, count, after)
        else:
            at_once = chain.scores(network.target_logits(predicted.logits).to(self.session.device))
            for depth in range(count):
                chain.choose(at_once[:, depth])
        tokens, probs = chain.stacked()
        before = [anchors, *chain.tokens[:-1]]
        return Chain(tokens, None if is_walk else self._confidence_logits(predicted.output, before), probs)

    def _moved(self, after: Callable[[int, torch.LongTensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The same for tokens and logits on the device of the call."""
        return lambda depth, tokens: after(depth, tokens.to(self.device)).to(self.session.device)

    # Drafting in graphs

    def _replay(self, new: Commit | None, step: DraftStep, limits: list[int]) -> Any:
        """Reads new tokens and predicts the whole block in a graph; `None` where there is none to run."""
        if new is None:
            return None
        before = [length - count for length, count in zip(step.lengths, new.counts)]
        predicted = self._launch(new, step.rows, before, limits)
        if predicted is None:
            return None
        self.text.add_tokens(new.tokens, new.counts)
        return predicted

    @property
    def drafts_ahead(self) -> bool:
        return self.pending is None and self.text.runs_graphs and not self.may_mask

    def draft_ahead(self, commit: DeviceCommit) -> DraftTree | None:
        limits = commit.max_draft_tokens
        predicted = self._launch(commit, commit.rows, self._lengths, limits)
        is_known = isinstance(predicted, (Chain, Prefixes)) and not self.least_confidence
        return self._drafted(predicted, limits) if is_known else None

    def _launch(self, new: Commit | DeviceCommit, rows: list[int], before: list[int], limits: list[int]) -> Any:
        """Runs the graph, for rows that had so many tokens `before` the new ones."""
        # Without a tree it predicts the whole block.
        limits = limits if self.tree_budget else [self.num_speculative_tokens] * len(limits)
        states = new.hidden_states
        if self.text.tokens_before is not None:
            states = {**states, "tokens_before": self.text.tokens_before[:, None]}
        kind = (self.block_size, self.num_speculative_tokens, self.num_steps, self.mask_token_id)
        drawing = CapturedDrawing.of(self.session, rows, self.device) if self.samples_drafts else None
        keys = None if drawing is None else self.session.sampler.uniforms.keys(rows, before)
        drawn = () if drawing is None else drawing.key
        return self.text.replay(
            (*kind, self.tree_budget, self.draft_tree_top_k, self.samples_drafts, *drawn),
            Entries(new.tokens, states, new.counts, keys, limits),
            self.most_committed,
            self.block_size,
            partial(self._captured_prediction, drawing),
        )

    def _captured_prediction(
        self, drawing: CapturedDrawing | None, text: DraftText, inputs: Entries
    ) -> Chain | Block | Prefixes | Edges:
        text.extend(inputs.states, inputs.counts)
        if text.tokens_before is not None:
            text.tokens_before = inputs.states["tokens_before"][:, 0]
            text.add_tokens(inputs.tokens, inputs.counts)
        text.begin_block(self.block_size)
        anchors = last_of_each(inputs.tokens, inputs.counts)
        predicted = self._predict(text, anchors, self.num_speculative_tokens)
        if drawing is not None and isinstance(predicted, (Block, Edges)):
            chain = drawing.chain(inputs.keys, inputs.counts, self.num_speculative_tokens)
            return self._steer(chain, predicted, anchors, self.num_speculative_tokens)
        if not isinstance(predicted, Lattice):
            return predicted
        return prefix_nodes(predicted, self.tree_budget, inputs.limits, self.draft_tree_top_k)


def _mask_token_id(options: DFlashOptions, network: DFlashNetwork) -> int:
    if options.dflash_mask_token_id is None:
        return network.config.mask_token_id
    check_mask_token(options.dflash_mask_token_id, network)
    return options.dflash_mask_token_id


def _sizes(config: SpeculativeConfig, network: DFlashNetwork) -> tuple[int, int]:
    """Tokens of a block, and number of those that are drafted.

    Raises:
        SpecConfigError: More than the draft was trained for, or than the block has.
    """
    trained, named = network.config.block_size, config.options.dflash_block_size
    length = config.num_speculative_tokens
    least = trained - network.config.num_drafts(trained) + 1
    if named is not None and not least <= named <= trained:
        raise SpecConfigError(
            f"`dflash_block_size` must be from {least} to {trained}, the block that the draft was trained with, got "
            f"{named}. It counts the last committed token."
        )
    most = network.config.num_drafts(named or trained)
    if length is not None and length > most:
        whose = f"`dflash_block_size`={named}" if named else f"the draft's block of {trained} tokens"
        raise SpecConfigError(
            f"`num_speculative_tokens` must be at most {most}, what {whose} yields, got {length}. Draft fewer."
        )
    if network.config.needs_whole_block:
        if named not in (None, trained):
            raise SpecConfigError(
                f"`dflash_block_size` must be {trained}, the block that this draft was trained with, got {named}: its "
                "tokens depend on all positions. Name fewer tokens with `num_speculative_tokens`."
            )
        return trained, length or most
    if named is None and length is not None:
        return trained - most + length, length
    return named or trained, length or most


def _least_confidence(options: DFlashOptions, network: DFlashNetwork) -> float:
    """Confidence with which a token is verified.

    Raises:
        SpecConfigError: There is nothing that says how confident the draft is.
    """
    least = options.draft_confidence_threshold
    if least and not network.config.has_confidence:
        raise SpecConfigError(
            f"`draft_confidence_threshold`={least} needs a DSpark draft with a confidence head, and this draft has "
            'none. Leave it out; num_speculative_tokens="auto" finds a length by what is accepted.'
        )
    return least


def _num_steps(options: DFlashOptions, network: DFlashNetwork) -> int:
    """Forwards for a block.

    Raises:
        SpecConfigError: Several, of a draft whose positions predict the next token, or whose tokens depend on each
            other.
    """
    config, asked = network.config, options.dflash_num_denoising_steps
    if config.selector_rank and (asked or 1) > config.num_denoising_steps:
        raise SpecConfigError(
            f"`dflash_num_denoising_steps` must be at most {config.num_denoising_steps}, what this DFlash 2 draft "
            f"declares, got {asked}: its selector was not trained on blocks of which tokens are known."
        )
    trained = 1 if config.takes_one_step else config.num_denoising_steps
    if asked is None:
        return 1 if options.num_draft_nodes else trained
    if asked > 1 and config.takes_one_step:
        raise SpecConfigError(
            "`dflash_num_denoising_steps` must be 1 for drafts whose positions predict the next token (DSpark), or "
            f"whose tokens depend on each other (Domino, LiLiCorr, XPress), got {asked}."
        )
    if asked > trained:
        logger.warning_once(
            f"dflash_num_denoising_steps={asked}, and the draft was trained for {trained}. Drafts that have never "
            "seen a known token in the place of a mask may be accepted less often with more steps (measured: 6.0 "
            "tokens per cycle with one step, 5.0 with three), and every step costs a forward."
        )
    return asked
