"""Medusa: heads on the target's last hidden state each guess one of the next tokens, all in one pass.

Cai et al. 2024 (arXiv:2401.10774). Head i sees the state from which the anchor was predicted, but not the anchor, and
guesses the i-th token after it. The candidates of the heads are combined to a static tree: the node of path
(r_1, .., r_d) carries the candidate of rank r_d of head d. Checkpoints:
[`~candidate_generators.medusa.network`].

On a GPU the candidates come from one graph, whatever the tree is, so that a tree may change.

Shapes: B active rows, D depth of the tree (heads used), N nodes, C candidates of a head, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from ...drafting.graphs import AnchorStates, RowGraphs, States, graph_depth
from ...drafting.growth import DepthLimits
from ...drafting.positions import Positions
from ...drafts import DraftTree, TokenTree
from ...drafts.static import MAX_NODES, prior_accuracies
from ...errors import SpecConfigError
from ...layers.draft_network import TargetParts
from ...logits.grammar.masks import GrowingMasks
from ...metrics import LOSSLESS_RULES
from ...protocol import Commit, DeviceCommit, DraftStep, Prompt, Session
from ...threads import Lock
from ...transfers import kept_on_device, upload
from ...validation import Options, setting
from ..base import CandidateGenerator
from .network import NUM_RANKS, MedusaHeads, fitting_heads, load_medusa


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig


# Nodes of the published trees, and the most of a default one.
_NUM_NODES = 63

# Published trees by the model that heads were trained for: parts of its name, in this order.
_TREE_OF_BASE_MODEL = (
    (("zephyr",), "zephyr_stage2"),
    (("vicuna", "33b"), "vicuna_33b_stage2"),
    (("vicuna", "13b"), "vicuna_13b_stage2"),
    (("vicuna", "7b"), "vicuna_7b_stage2"),
    ((), "mc_sim_7b_63"),
)

# A measured tree is made anew after this many verified drafts, then after twice as many, and so on.
_FIRST_REVIEW = 64
# The prior accuracies weigh as much as this many drafts.
_PRIOR_WEIGHT = 32.0


@dataclass(frozen=True)
class MedusaOptions(Options):
    """Options of `spec_method="medusa"`.

    Raises:
        SpecConfigError: A value is out of range.
    """

    num_draft_nodes: int | None = setting(
        None,
        "Nodes of the default tree. Left out, 63, on a CPU as many as pay.",
        least=1,
        most=MAX_NODES,
        published=True,
    )
    tree: Literal["static", "measured"] = setting(
        "static",
        "`static` keeps one tree; `measured` counts which candidates turn out right while generating, and "
        "makes the tree anew from that. The output does not depend on it.",
        key="medusa_tree",
        published=True,
    )


class RankCounts:
    """Counts the rank of the right token among the candidates of its head. Threads may share one.

    A head is counted only where all heads before it were right: a node's probability is the product along its path.

    Args:
        expected (`Sequence[Sequence[float]]`, *optional*): Accuracies `[head][rank]` before anything is counted.
        num_heads (`int`): K.

    Attributes:
        accuracies (`Sequence[Sequence[float]]`, *optional*): The accuracies as last reviewed; a new object each time.
    """

    def __init__(self, expected: Sequence[Sequence[float]] | None, num_heads: int):
        self.accuracies = expected
        prior = expected or prior_accuracies(num_heads, NUM_RANKS)
        self._prior = [[*ranks, *[0.0] * NUM_RANKS][:NUM_RANKS] for ranks in prior]
        self._num_drafts = 0
        self._next_review = _FIRST_REVIEW
        self._counts: torch.Tensor | None = None  # (K, 1 + C): drafts in which the head counts, hits by rank
        self._lock = Lock()

    def add(self, candidates: torch.LongTensor, tokens: torch.LongTensor, lengths: Sequence[int]) -> None:
        """Counts verified drafts; one small sum, read back only for a review.

        Args:
            candidates (`torch.LongTensor` of shape `(D, B, C)`): What the heads proposed, best first.
            tokens (`torch.LongTensor` of shape `(B, M)`): What was committed, padded.
            lengths (`Sequence[int]` of length B): Committed tokens of each row.
        """
        depth = min(candidates.shape[0], tokens.shape[1])
        counted = _is_committed(tuple(lengths), depth, tokens.device)
        is_right = candidates[:depth] == tokens.T[:depth, :, None]
        found = torch.cat([counted, is_right & counted], dim=-1).sum(1)
        found = F.pad(found, (0, 0, 0, len(self._prior) - depth))
        with self._lock:
            # A new tensor each time: calls inside and outside of inference mode may take turns.
            self._counts = found if self._counts is None else self._counts + found
            self._num_drafts += len(lengths)
            if self._num_drafts >= self._next_review:
                self._next_review = 2 * self._num_drafts
                self.accuracies: list[list[float]] = self._review(self._counts.tolist())

    def _review(self, counts: list[list[int]]) -> list[list[float]]:
        return [
            [(hit + _PRIOR_WEIGHT * share) / (drafts + _PRIOR_WEIGHT) for hit, share in zip(hits, prior)]
            for (drafts, *hits), prior in zip(counts, self._prior)
        ]


@dataclass
class MedusaResources:
    """Outlives a call.

    Attributes:
        heads (`MedusaHeads`): The loaded heads.
        target (`TargetParts`): The target's lm_head. Some targets scale or cap its logits; the ranks stay.
        counts (`RankCounts`): What calls with a measured tree have counted.
    """

    heads: MedusaHeads
    target: TargetParts
    counts: RankCounts


class MedusaCandidateGenerator(CandidateGenerator):
    """Drafts one tree for all rows."""

    options_class = MedusaOptions
    target_hidden_states: ClassVar[tuple[int | str, ...]] = ("last",)
    samples_drafts: bool | None = False
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
        cls, config: SpeculativeConfig, target_model: torch.nn.Module, draft_model: MedusaHeads | None = None
    ) -> MedusaResources:
        if draft_model is None:
            heads = load_medusa(config, target_model)
        else:
            heads = fitting_heads(draft_model, config, target_model)
        counts = RankCounts(heads.accuracies, heads.num_heads)
        return MedusaResources(heads, TargetParts(target_model), counts)

    @classmethod
    def network(cls, resources: MedusaResources) -> torch.nn.Module:
        return resources.heads

    def __init__(self, config: SpeculativeConfig, resources: MedusaResources, session: Session):
        super().__init__(config, resources, session)
        self.heads: MedusaHeads = resources.heads
        self.lm_head: Any = resources.target.head
        asked = self.options.num_draft_nodes
        self.num_nodes = asked or _NUM_NODES
        self.node_cost: float = node_cost(session, self.heads.weights[0].dtype) if asked is None else 0.0
        tree = chosen_tree(config, self.heads)
        self.counts: RankCounts | None = resources.counts if tree is None and self._measures() else None
        self._accuracies = self.counts.accuracies if self.counts else self.heads.accuracies
        self.tree = self._fitting(tree or self._default_tree())
        self.num_speculative_tokens: int = self.heads.num_heads if self.counts else self.tree.max_depth
        self.hidden: AnchorStates = AnchorStates()
        self.candidates: torch.LongTensor | None = None  # (D, B, C), of the last draft, to be counted
        self.graphs: RowGraphs = RowGraphs(self.heads, (self.lm_head,) if self.heads.lm_heads is None else ())

    def _measures(self) -> bool:
        """The tree follows what is counted. Rules that accept wrong tokens would be counted as right ones."""
        if self.options.tree != "measured":
            return False
        rule = self.config.rejection_sample_method
        if rule not in LOSSLESS_RULES:
            self.session.notes.append(f"medusa counts nothing for its tree under rejection_sample_method='{rule}'.")
        return self.session.supports_trees and rule in LOSSLESS_RULES

    def _default_tree(self) -> TokenTree:
        return default_tree(self.heads, self._accuracies, self.num_nodes, self.node_cost)

    def _fitting(self, tree: TokenTree) -> TokenTree:
        """The tree, or its best path where the target cannot verify branches."""
        if self.session.supports_trees or tree.is_chain:
            return tree
        self.session.notes.append("medusa drafts chains: the target cannot verify trees.")
        return TokenTree.chain(tree.max_depth)

    @property
    def num_draft_nodes(self) -> int:
        return self.num_nodes if self.counts else len(self.tree)

    def prefill(self, prompt: Prompt) -> None:
        self.graphs.begin(self.config, self.session)

    def propose(self, step: DraftStep) -> DraftTree:
        depths = self.draft_depths(step)
        tree = self.tree.up_to(max(depths))
        if len(tree) == 0:
            self.candidates = None
            return DraftTree.empty(len(step.rows), self.session.device)
        masks = self.growing_masks(step, depths)
        if masks is not None:
            return self._propose_masked(tree, step, depths, masks)
        tree, count = self._captured_tree(step.depth) if self.graphs.are_on else tree, len(step.rows)
        tokens = self._counted(tree, count) if self.counts else self._filled(tree, count, self.hidden)
        return DraftTree.of_shape(tree, tokens, depths)

    def _captured_tree(self, depth: int | None) -> TokenTree:
        """The tree that a graph fills where this depth was chosen."""
        return self.tree.up_to(graph_depth(depth, self.tree.max_depth))

    def _filled(self, tree: TokenTree, num_rows: int, states: States) -> torch.LongTensor:
        """Tokens `(B, N)` of the tree after states `(B, H)`."""
        count = max(tree.widths)

        def read(hidden: torch.Tensor) -> torch.LongTensor:
            best = self._best_tokens(hidden, tree.max_depth, count)
            return best.flatten(1).index_select(1, _candidate_of_node(tree, count, best.device))

        return self.graphs.run((tree,), num_rows, read, lambda: {"hidden": states()}).to(self.session.device)

    def _counted(self, tree: TokenTree, num_rows: int) -> torch.LongTensor:
        """Tokens `(B, N)` of the tree, which `observe` will count together with what the tree leaves out."""
        depth, count = min(tree.max_depth + 1, self.heads.num_heads), min(NUM_RANKS, self.heads.lm_head_size)
        read = partial(self._best_tokens, depth=depth, count=count)
        best = self.graphs.run((depth, count), num_rows, read, lambda: {"hidden": self.hidden()})
        best = best.to(self.session.device)
        self.candidates = best.transpose(0, 1)
        return best.flatten(1).index_select(1, _candidate_of_node(tree, count, best.device))

    def _propose_masked(self, tree: TokenTree, step: DraftStep, depths: list[int], masks: GrowingMasks) -> DraftTree:
        """Fills the tree with the best candidates that the grammar allows at each node."""
        self.candidates = None
        logits = self.heads.short_logits(self.hidden(), self.lm_head, tree.max_depth).transpose(0, 1)
        positions = Positions(logits, self.heads.token_map)
        limits = DepthLimits(torch.tensor(depths, device="cpu"))
        nodes = positions.grow(tree.levels(logits.device), step.anchor_tokens, limits, masks)
        return nodes.draft(tree, depths, self.session.device)

    @property
    def drafts_ahead(self) -> bool:
        # Candidates that are to be counted lie in the memory of the graph.
        return self.graphs.are_on and self.candidates is None and not self.may_mask

    def draft_ahead(self, commit: DeviceCommit) -> DraftTree:
        tree = self._captured_tree(commit.depth)
        tokens = self._filled(tree, len(commit.rows), partial(commit.anchor_states, "last"))
        return DraftTree.of_shape(tree, tokens, commit.max_draft_tokens)

    def _best_tokens(self, hidden: torch.Tensor, depth: int, count: int) -> torch.LongTensor:
        """The `count` best tokens of the first `depth` heads by states `(B, H)`, best first: `(B, D, C)`."""
        return self.heads.top_tokens(hidden, count, self.lm_head, depth).transpose(0, 1).contiguous()

    def observe(self, commit: Commit) -> None:
        if self.candidates is not None:
            self._count(commit.tokens, commit.counts)
        # What is committed without a draft says nothing of these.
        self.candidates = None
        self.hidden.observe(commit)

    def _count(self, tokens: torch.LongTensor, lengths: list[int]) -> None:
        self.counts.add(self.candidates, tokens, lengths)
        if self.counts.accuracies is not self._accuracies:
            self._accuracies = self.counts.accuracies
            self.tree: TokenTree = self._default_tree()

    def keep_rows(self, keep: list[int]) -> None:
        self.hidden.keep_rows(keep)

    def join(self, other: MedusaCandidateGenerator, numbers: dict[int, int]) -> None:
        self.hidden.join(other.hidden)
        self.candidates = None

    def close(self) -> None:
        self.graphs.close()
        self.hidden.forget()
        self.candidates = None


def chosen_tree(config: SpeculativeConfig, heads: MedusaHeads) -> TokenTree | None:
    """The tree that the user asks for: a given one, or a chain of k; `None` where neither is given.

    Raises:
        SpecConfigError: It asks for more heads or candidates than there are.
    """
    paths, k = config.speculative_token_tree, config.num_speculative_tokens
    if paths is None and k is None:
        return None
    if paths is None:
        config.check_against_target(num_heads=heads.num_heads)
    tree = TokenTree.chain(k) if paths is None else TokenTree(paths)
    if config.options.tree == "measured":
        name = "num_speculative_tokens" if paths is None else "speculative_token_tree"
        raise SpecConfigError(
            f"`{name}` fixes the draft tree, and medusa_tree='measured' changes it. Leave one of them out; the size "
            "of a measured tree is `num_draft_nodes`."
        )
    if tree.max_depth > heads.num_heads:
        raise SpecConfigError(
            f"`speculative_token_tree` is {tree.max_depth} deep, and the Medusa checkpoint has {heads.num_heads} "
            "heads. Cut the tree to that depth."
        )
    if max(tree.widths) > heads.lm_head_size:
        raise SpecConfigError(
            f"`speculative_token_tree` asks for {max(tree.widths)} candidates of a head, and its vocabulary has "
            f"{heads.lm_head_size}. Use ranks below that."
        )
    return tree


def default_tree(
    heads: MedusaHeads,
    accuracies: Sequence[Sequence[float]] | None = None,
    num_nodes: int = _NUM_NODES,
    node_cost: float = 0.0,
) -> TokenTree:
    """The tree for heads of these accuracies; if they are unknown, the best of the published one that fits the heads.

    Args:
        heads (`MedusaHeads`): The heads.
        accuracies (`Sequence[Sequence[float]]`, *optional*): `[head][rank]`.
        num_nodes (`int`): Most nodes.
        node_cost (`float`): What verifying a node costs, as a share of a cycle without any.
    """
    if accuracies:
        tree = TokenTree.from_accuracies(accuracies[: heads.num_heads], num_nodes, heads.lm_head_size)
        return _paying(tree, accuracies, num_nodes, node_cost)
    base = (heads.base_model or "").lower()
    name = next(name for parts, name in _TREE_OF_BASE_MODEL if all(part in base for part in parts))
    paths = TokenTree.published(name).up_to(heads.num_heads).paths
    possible = TokenTree.from_paths(path for path in paths if max(path) < heads.lm_head_size)
    return _paying(possible, prior_accuracies(heads.num_heads, NUM_RANKS), num_nodes, node_cost)


def _paying(tree: TokenTree, accuracies: Sequence[Sequence[float]], num_nodes: int, node_cost: float) -> TokenTree:
    """The likeliest nodes, as long as one more raises the expected tokens per time."""
    probs = {path: math.prod(accuracies[head][rank] for head, rank in enumerate(path)) for path in tree.paths}
    kept, tokens = [], 1.0
    for path in sorted(tree.paths, key=lambda path: -probs[path])[:num_nodes]:
        cost = 1.0 + node_cost * len(kept)
        if kept and probs[path] * cost < tokens * node_cost:
            break
        kept.append(path)
        tokens += probs[path]
    return TokenTree.from_paths(kept)


def node_cost(session: Session, dtype: torch.dtype) -> float:
    """Cost of verifying a node, as a share of a cycle without any.

    Measured on a CPU: a node in each of B rows costs what B / (5 + 5 B) such cycles do in float32, and B / (18 + 5 B)
    in half precision, since small products are bound by arithmetic. The published trees were made for GPUs, where all
    nodes ride along with the weights.
    """
    if session.device.type != "cpu":
        return 0.0
    batch_size, alone = session.batch_size, 5 if dtype == torch.float32 else 18
    return batch_size / (alone + 5 * batch_size)


@kept_on_device
def _candidate_of_node(tree: TokenTree, count: int, device: torch.device) -> torch.LongTensor:
    """Place of each node's token among the candidates of all heads, `count` a head."""
    return upload([(d - 1) * count + rank for d, rank in zip(tree.depths, tree.ranks)], device)


@kept_on_device
def _is_committed(lengths: tuple[int, ...], depth: int, device: torch.device) -> torch.BoolTensor:
    """Tells for each depth and row whether a token of it was committed: `(D, B, 1)`."""
    return (torch.arange(depth, device=device)[:, None] < upload(lengths, device))[..., None]
