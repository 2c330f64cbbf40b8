"""MLP speculator: a small network goes on from the target's last hidden state, one stage for each drafted token.

Wertheimer et al. 2024 (arXiv:2404.19124). Unlike Medusa's heads, every stage is told the token chosen before it, so
branches know what they branch from, and drafts can be drawn from the network's distribution. Drafts are chains, static
trees, the best nodes of a tree that is grown level by level, or the published "candidates": the best whole sequences
of such a tree. The network keeps no cache: it starts anew from the target's state after the final norm. Checkpoint:
[`~candidate_generators.mlp_speculator.network`].

On a GPU a draft is one graph, a sampled chain too. Of chains whose processors no graph can run, each token is one.

Shapes: B active rows, N draft nodes, H hidden size of the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from ...checkpoints.loading import check_given
from ...drafting.chain import CapturedDrawing, SteeredChain
from ...drafting.graphs import AnchorStates, RowGraphs, States, graph_depth
from ...drafts import DraftTree, TokenTree
from ...drafts.static import MAX_NODES
from ...errors import SpecConfigError
from ...kernels.best import best_tokens
from ...logits.grammar.masks import GrowingMasks
from ...logits.randomness import RowKeys
from ...protocol import Commit, DeviceCommit, DraftStep, Prompt, Session
from ...target_facts import vocabulary_size
from ...transfers import kept_tensor, on_host
from ...validation import MOST_DRAFT_TOKENS, Options, draft_sample_method_field, setting
from ..base import CandidateGenerator
from .growth import ChosenNodes, GrownTree, GrowthPlan
from .network import MLPSpeculator, MLPStage, load_mlp_speculator


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig


# Draft tokens of the default chain, if there are as many stages.
_CHAIN_LENGTH = 3

# Nodes of a tree where none are named. A forward of many nodes costs a GPU about what one token does; a CPU pays for
# each node, so that chains are the default there.
_NUM_NODES = {"cpu": 8}
_NUM_NODES_ELSEWHERE = 32

# Of which `num_candidates` are chosen.
_MOST_SEQUENCES = 2**16

# Options that say how a tree is grown, and their flat names.
_GROWTH_OPTIONS = {
    "top_k_tokens_per_head": "top_k_tokens_per_head",
    "num_candidates": "mlp_speculator_num_candidates",
    "num_draft_nodes": "num_draft_nodes",
}


@dataclass(frozen=True)
class MLPSpeculatorOptions(Options):
    """Options of `spec_method="mlp_speculator"`.

    Raises:
        SpecConfigError: A value is out of range.
    """

    top_k_tokens_per_head: tuple[int, ...] | None = setting(
        None,
        "Continuations that each depth of a tree gives every node. Left out, the checkpoint's.",
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
        key=_GROWTH_OPTIONS["num_candidates"],
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


@dataclass
class LoadedSpeculator:
    """Outlives a call.

    Attributes:
        speculator (`MLPSpeculator`): As stored.
        stages (`list[MLPStage]`): Those that draft, with no logits of tokens that the target lacks.
        unknown_tokens (`bool`): The target has tokens that the speculator lacks.
    """

    speculator: MLPSpeculator
    stages: list[MLPStage]
    unknown_tokens: bool

    @property
    def vocab_size(self) -> int:
        """Tokens that can be drafted."""
        return self.stages[0].head.shape[0]


class MLPSpeculatorCandidateGenerator(CandidateGenerator):
    """Drafts chains and trees."""

    options_class = MLPSpeculatorOptions
    target_hidden_states: ClassVar[tuple[int | str, ...]] = ("last",)
    default_num_speculative_tokens = _CHAIN_LENGTH
    loaded_by: ClassVar[tuple[str, ...]] = (
        "model",
        "revision",
        "subfolder",
        "cache_dir",
        "dtype",
        "device",
        "quantization",
    )

    @classmethod
    def load(
        cls, config: SpeculativeConfig, target_model: torch.nn.Module, draft_model: MLPSpeculator | None = None
    ) -> LoadedSpeculator:
        if draft_model is None:
            speculator = load_mlp_speculator(config, target_model)
        else:
            check_given(draft_model, MLPSpeculator, config, target_model)
            speculator = draft_model
        sizes, vocab_size = speculator.config, vocabulary_size(target_model)
        stages = [speculator.stage(index, vocab_size) for index in range(sizes.n_predict)]
        return LoadedSpeculator(speculator, stages, unknown_tokens=sizes.vocab_size < vocab_size)

    @classmethod
    def default_length(cls, options: MLPSpeculatorOptions) -> int:
        return len(options.top_k_tokens_per_head or ()) or cls.default_num_speculative_tokens

    @classmethod
    def network(cls, resources: LoadedSpeculator) -> torch.nn.Module:
        return resources.speculator

    def __init__(self, config: SpeculativeConfig, resources: LoadedSpeculator, session: Session):
        super().__init__(config, resources, session)
        self.speculator: MLPSpeculator = resources.speculator
        self.stages: list[MLPStage] = resources.stages
        self.last_token: int | None = resources.vocab_size - 1 if resources.unknown_tokens else None
        weight = self.stages[0].projection
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = weight.dtype
        self.samples_drafts: bool | None = self.asks_to_sample
        self.plan: TokenTree | GrowthPlan = _plan(config, resources, session, self.chain_only_reason)
        self.num_speculative_tokens: int = self.plan.max_depth
        self.states: AnchorStates = AnchorStates()
        self._step: DraftStep | None = None  # that of the last draft
        self.graphs: RowGraphs = RowGraphs(self.speculator)
        # Targets of other vocabularies may share the network.
        self.vocabulary: tuple[int, int | None] = resources.vocab_size, self.last_token

    @property
    def num_draft_nodes(self) -> int:
        return len(self.plan)

    def prefill(self, prompt: Prompt) -> None:
        self.graphs.begin(self.config, self.session)

    def observe(self, commit: Commit) -> None:
        self.states.observe(commit)

    def keep_rows(self, keep: list[int]) -> None:
        self.states.keep_rows(keep)

    def join(self, other: MLPSpeculatorCandidateGenerator, numbers: dict[int, int]) -> None:
        self.states.join(other.states)

    def close(self) -> None:
        self.graphs.close()
        self.states.forget()

    def propose(self, step: DraftStep) -> DraftTree:
        limits = self.draft_depths(step)
        self._step = step if max(limits) > 0 else None
        if self._step is None:
            return DraftTree.empty(len(step.rows), self.session.device)
        if self._is_steered(step.rows):
            return self._draft_steered(step, limits)
        masks, depth = self.growing_masks(step, limits), max(limits)
        if masks is None and self.graphs.are_on:
            depth = self._captured_depth(step.depth, limits)
        return self._drafted(self._draft(self.states, step.anchor_tokens, depth, masks), depth, limits)

    def _captured_depth(self, chosen: int | None, limits: list[int]) -> int:
        """Depth to which a graph drafts for rows of these limits."""
        # The best nodes of a depth are not the first ones of those to a larger depth.
        grows = isinstance(self.plan, GrowthPlan)
        return max(limits) if grows else graph_depth(chosen, self.num_speculative_tokens)

    def _drafted(self, drafted: torch.LongTensor | ChosenNodes, depth: int, limits: list[int]) -> DraftTree:
        if isinstance(drafted, ChosenNodes):
            return drafted.draft(limits, self.session.device)
        return DraftTree.of_shape(self.plan.up_to(depth), drafted.to(self.session.device), limits)

    @property
    def drafts_ahead(self) -> bool:
        if self._step is None or self.may_mask or not self.graphs.are_on:
            return False
        return not self._is_steered(self._step.rows) or self._drawing(self._step.rows) is not None

    def draft_ahead(self, commit: DeviceCommit) -> DraftTree:
        drawing, limits = self._drawing(commit.rows), commit.max_draft_tokens
        given = partial(commit.anchor_states, "last"), commit.anchors
        if drawing is None:
            depth = self._captured_depth(commit.depth, limits)
            return self._drafted(self._draft(*given, depth), depth, limits)
        return self._draw(drawing, limits, *given, commit.rows, self._step.lengths, commit.counts)

    def _is_steered(self, rows: list[int]) -> bool:
        """Tells whether the tokens of chains are sampled, or chosen by what processors leave of their logits."""
        sampler = self.session.sampler
        if not self.plan.is_chain or sampler is None:
            return False
        return bool(self.samples_drafts) or sampler.in_graphs(rows) is None

    def _drawing(self, rows: list[int]) -> CapturedDrawing | None:
        return CapturedDrawing.of(self.session, rows, self.device) if self.samples_drafts else None

    def _draft(
        self, states: States, anchors: torch.LongTensor, depth: int, masks: GrowingMasks | None = None
    ) -> torch.LongTensor | ChosenNodes:
        """Drafts the plan up to a depth, after states `(B, H)` and the anchors `(B,)` that were predicted from them.

        Returns:
            Tokens `(B, N)`, or nodes that differ from row to row.
        """
        plan = self.plan
        if isinstance(plan, GrowthPlan):
            read = self._grow_best
        elif plan.is_chain:
            read = self._best_chain
        else:
            read = self._ranked
        if masks is not None:
            # Masks are made on the host, level by level.
            return read(depth, states(), anchors, masks=masks)
        key, run = (plan, depth, *self.vocabulary), partial(read, depth)
        return self.graphs.run(key, len(anchors), run, lambda: {"states": states(), "anchors": anchors})

    def _start(self, states: torch.Tensor) -> torch.Tensor:
        """Input of stage 0."""
        return self.speculator.start(states.to(self.device, self.dtype))

    def _readable(self, tokens: torch.LongTensor) -> torch.LongTensor:
        """Tokens for a stage; those that the speculator lacks, such as padding, are read as its last one."""
        tokens = tokens.to(self.device)
        return tokens if self.last_token is None else tokens.clamp(max=self.last_token)

    def _draft_steered(self, step: DraftStep, limits: list[int]) -> DraftTree:
        """Chooses one token a stage, the best or a sampled one, from logits as the call's processors leave them."""
        drawing = self._drawing(step.rows) if self.graphs.are_on else None
        if drawing is not None:
            before = [length - 1 for length in step.lengths]
            return self._draw(drawing, limits, self.states, step.anchor_tokens, step.rows, before)
        state, tokens = self.states(), step.anchor_tokens
        chain = SteeredChain(self.session.sampler, step.rows, step.lengths, self.samples_drafts)
        for depth in range(max(limits)):
            key, values = (depth, *self.vocabulary), partial(dict, state=state, tokens=tokens)
            state, logits = self.graphs.run(key, len(step.rows), partial(self._read, depth), values)
            tokens = chain.choose(chain.scores(logits.to(self.session.device)))
        return chain.draft(limits)

    def _draw(
        self,
        drawing: CapturedDrawing,
        limits: list[int],
        states: States,
        anchors: torch.LongTensor,
        rows: list[int],
        before: list[int],
        counts: torch.LongTensor | None = None,
    ) -> DraftTree:
        """Samples chains of full depth in a graph, after states and anchors as for `_draft`, and cuts them to limits.

        Args:
            rows (`list[int]`): Row of the call of each.
            before (`list[int]`), counts (`torch.LongTensor` of shape `(B,)`): Tokens before, and after those, or 1.
        """

        def values() -> dict[str, torch.Tensor]:
            ahead = kept_tensor((1,) * len(rows), self.device) if counts is None else counts
            keys = on_host(list(zip(*self.session.sampler.uniforms.keys(rows, before))), self.device)
            return {"states": states(), "anchors": anchors, "keys": keys, "counts": ahead}

        depth = self.num_speculative_tokens
        key = (self.plan, depth, *self.vocabulary, *drawing.key)
        tokens, probs = self.graphs.run(key, len(rows), partial(self._drawn_chain, drawing, depth), values)
        return DraftTree.chain(tokens, probs=probs).shortened(limits)

    def _drawn_chain(
        self,
        drawing: CapturedDrawing,
        depth: int,
        states: torch.Tensor,
        anchors: torch.LongTensor,
        keys: torch.LongTensor,
        counts: torch.LongTensor,
    ) -> tuple[torch.LongTensor, torch.FloatTensor]:
        keys = keys.to(counts.device)
        chain, state, tokens = drawing.chain(RowKeys(*keys.unbind(1)), counts, depth), states, anchors
        for index in range(depth):
            state, logits = self._read(index, state, tokens)
            tokens = chain.choose(chain.scores(logits))
        return chain.stacked()

    def _read(self, depth: int, state: torch.Tensor, tokens: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The stage of a depth, counted from 0; the first takes the target's states."""
        return self.stages[depth](state if depth else self._start(state), self._readable(tokens))

    def _best_chain(self, depth: int, states: torch.Tensor, anchors: torch.LongTensor) -> torch.LongTensor:
        """The best token of each stage."""
        state, tokens, drafted = self._start(states), self._readable(anchors), []
        for stage in self.stages[:depth]:
            state, logits = stage(state, tokens)
            tokens = best_tokens(logits)
            drafted.append(tokens)
        return torch.stack(drafted, dim=1)

    def _ranked(
        self, depth: int, states: torch.Tensor, anchors: torch.LongTensor, masks: GrowingMasks | None = None
    ) -> torch.LongTensor:
        """The candidates of the given ranks; only nodes that have children are read."""
        state, tokens, drafted = self._start(states)[:, None], self._readable(anchors)[:, None], []
        for stage, level in zip(self.stages, self.plan.up_to(depth).levels(self.device)):
            state, logits = stage(state, tokens)
            logits = logits if masks is None else masks.apply(logits)
            candidates = logits.topk(level.width).indices.flatten(1)
            drafted.append(candidates[:, level.picks])
            tokens, state = candidates[:, level.read_picks], state[:, level.read_parents]
            if masks is not None:
                masks.follow(tokens, level.read_parents)
        return torch.cat(drafted, dim=1)

    def _grow_best(
        self, depth: int, states: torch.Tensor, anchors: torch.LongTensor, masks: GrowingMasks | None = None
    ) -> ChosenNodes:
        return self._grow(self._start(states), self._readable(anchors), depth, masks).chosen(self.plan)

    def _grow(
        self, state: torch.Tensor, anchors: torch.LongTensor, depth: int, masks: GrowingMasks | None = None
    ) -> GrownTree:
        """Level by level the best continuations of the nodes that are read."""
        state, tokens = state[:, None], anchors[:, None]
        nodes = torch.full_like(tokens, -1)
        scores = torch.zeros_like(tokens, dtype=torch.float32)
        levels, num_nodes = [], 0
        for stage, width, num_reads in zip(self.stages, self.plan.widths[:depth], self.plan.num_reads):
            state, logits = stage(state, tokens)
            logits = logits if masks is None else masks.apply(logits)
            best = logits.float().log_softmax(-1).topk(width)
            tokens, scores = best.indices.flatten(1), (scores[..., None] + best.values).flatten(1)
            if masks is not None:
                # Where nothing may follow there is no distribution.
                scores = scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
            levels.append((tokens, nodes[..., None].expand(-1, -1, width).flatten(1), scores))
            if len(levels) == depth:
                break
            if num_reads < tokens.shape[1]:
                scores, read = scores.topk(num_reads)
                tokens = tokens.gather(1, read)
            else:
                read = torch.arange(num_reads, device=tokens.device).expand_as(tokens)
            nodes, num_nodes = read + num_nodes, num_nodes + levels[-1][0].shape[1]
            parents = read // width
            state = state.gather(1, parents[..., None].expand(-1, -1, state.shape[-1]))
            if masks is not None:
                masks.follow(tokens, parents)
        sizes = [level[0].shape[1] for level in levels]
        return GrownTree(*(torch.cat(parts, dim=1) for parts in zip(*levels)), sizes)


def _plan(
    config: SpeculativeConfig, loaded: LoadedSpeculator, session: Session, chain_only_reason: str | None
) -> TokenTree | GrowthPlan:
    """Shape of the drafts of a call: a static tree, chains among them, or one that is grown.

    Args:
        config (`SpeculativeConfig`): The settings.
        loaded (`LoadedSpeculator`): What drafts.
        session (`Session`): The call.
        chain_only_reason (`str`, *optional*): Reason for which it can only have chains.

    Raises:
        SpecConfigError: Settings contradict each other, or ask for more stages than there are.
    """
    growth = [key for name, key in _GROWTH_OPTIONS.items() if getattr(config.options, name) is not None]
    if config.speculative_token_tree is not None:
        if growth:
            raise SpecConfigError(
                f"`speculative_token_tree` is a whole tree, and `{growth[0]}` is about growing one. Leave one out."
            )
        plan = _static_tree(config, loaded)
    else:
        sizes = loaded.speculator.config
        config.check_against_target(num_heads=sizes.n_predict)
        grows = config.num_speculative_tokens is None and session.device.type != "cpu" and not chain_only_reason
        if growth or grows:
            plan = _growth_plan(config, loaded, session.device)
        else:
            plan = TokenTree.chain(config.num_speculative_tokens or min(_CHAIN_LENGTH, sizes.n_predict))
    if not chain_only_reason or plan.is_chain:
        return plan
    session.notes.append(f"chains instead of trees: {chain_only_reason}")
    return TokenTree.chain(plan.max_depth)


def _static_tree(config: SpeculativeConfig, loaded: LoadedSpeculator) -> TokenTree:
    tree, sizes = TokenTree(config.speculative_token_tree), loaded.speculator.config
    if tree.max_depth > sizes.n_predict:
        raise SpecConfigError(
            f"`speculative_token_tree` is {tree.max_depth} tokens deep, and the checkpoint has {sizes.n_predict} "
            "stages, one for each token. Pass a shallower tree."
        )
    if max(tree.widths) > loaded.vocab_size:
        raise SpecConfigError(
            f"`speculative_token_tree` has the rank {max(tree.widths) - 1}, and speculator and target share a "
            f"vocabulary of {loaded.vocab_size} tokens. Pass a narrower tree."
        )
    return tree


def _growth_plan(config: SpeculativeConfig, loaded: LoadedSpeculator, device: torch.device) -> TokenTree | GrowthPlan:
    options, sizes = config.options, loaded.speculator.config
    widths = options.top_k_tokens_per_head or sizes.top_k_tokens_per_head
    if len(widths) > sizes.n_predict:
        raise SpecConfigError(
            f"`top_k_tokens_per_head`={list(widths)} has {len(widths)} entries, and the checkpoint has "
            f"{sizes.n_predict} stages, one for each. Use at most {sizes.n_predict}."
        )
    depth = config.fixed_length or len(widths)
    if depth > len(widths):
        raise SpecConfigError(
            f"`num_speculative_tokens`={depth} needs as many entries of `top_k_tokens_per_head`, got {len(widths)}."
        )
    num_nodes = options.num_draft_nodes or _NUM_NODES.get(device.type, _NUM_NODES_ELSEWHERE)
    widths = tuple(min(width, loaded.vocab_size) for width in widths[:depth])
    if max(widths) == 1:
        return TokenTree.chain(depth)
    plan = GrowthPlan(widths, num_nodes, options.num_candidates)
    if max(plan.num_reads) > _MOST_SEQUENCES:
        raise SpecConfigError(
            f"`top_k_tokens_per_head`={list(widths)} gives {max(plan.num_reads)} sequences to choose "
            f"`mlp_speculator_num_candidates`={plan.num_candidates} from. Make them at most {_MOST_SEQUENCES}, or use "
            "`num_draft_nodes`."
        )
    return plan
