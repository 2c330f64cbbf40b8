"""Medusa: heads on the target's last hidden state each guess one of the next tokens, all in one pass.

Cai et al. 2024 (arXiv:2401.10774). Head i sees the state from which the anchor was predicted, but not the anchor, and
guesses the i-th token after it. The candidates of the heads are combined to a static tree: the node of path
(r_1, .., r_d) carries the candidate of rank r_d of head d.

On a GPU the candidates come from one graph, whatever the tree is, so that a tree may change. With a least probability
the tree is not static: it has the most probable paths of a row's candidates ([`~drafting.prefixes`]).

Shapes: B active rows, D depth of the tree (heads used), N nodes, C candidates of a head, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F

from ...checkpoints.loading import LOADED_BY, load
from ...drafting.draw import DepthLimits, Draw
from ...drafting.growth import DraftNodes, DynamicTree, Positions
from ...drafting.prefixes import best_candidates, best_prefixes
from ...drafting.shape import static_tree
from ...drafting.state import Entries, NetworkState
from ...drafts import DraftTree, TokenTree
from ...drafts.static import MAX_NODES, prior_accuracies
from ...errors import SpecConfigError
from ...layers.draft_network import TargetParts
from ...metrics import LOSSLESS_RULES
from ...protocol import Commit, Session
from ...settings import SpeculativeConfig
from ...settings.checks import Options, setting
from ...threads import Lock
from ...transfers import kept_on_device, upload
from ..networks import NetworkGenerator
from .network import NUM_RANKS, MedusaHeads


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
    """Options of `spec_method="medusa"`."""

    num_draft_nodes: int | None = setting(
        None,
        "Nodes of the default tree. Default: 63, on a CPU as many as gain time.",
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
    draft_confidence_threshold: float = setting(
        0.0,
        "Above 0 each row gets the most probable paths of its candidates, `num_draft_nodes` at most, instead of one "
        "tree for all texts, as far as their probability is above this. A chain or tree that is asked for ends there.",
        least=0,
        most=1,
        published=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_confidence_threshold and self.tree == "measured":
            raise SpecConfigError(
                f"`draft_confidence_threshold`={self.draft_confidence_threshold} lets probabilities choose the tree, "
                "and `tree`='measured' counts. Leave one out."
            )


class RankCounts:
    """Counts the rank of the right token of each head, where all heads before it were right. Threads may share one."""

    def __init__(self, expected: Sequence[Sequence[float]] | None, num_heads: int):
        self.accuracies = expected  # [head][rank], as last reviewed; a new object each time
        prior = expected or prior_accuracies(num_heads, NUM_RANKS)
        self._prior = [[*ranks, *[0.0] * NUM_RANKS][:NUM_RANKS] for ranks in prior]
        self._num_drafts = 0
        self._next_review = _FIRST_REVIEW
        self._counts: torch.Tensor | None = None  # (K, 1 + C): drafts in which the head counts, hits by rank
        self._lock = Lock()

    def add(self, candidates: torch.LongTensor, tokens: torch.LongTensor, lengths: Sequence[int]) -> None:
        """Counts verified drafts, `(D, B, C)`, by the committed tokens, `(B, M)`; read back only for a review."""
        depth = min(candidates.shape[0], tokens.shape[1])
        counted = _is_committed(tuple(lengths), depth, tokens.device)
        is_right = candidates[:depth] == tokens.T[:depth, :, None]
        counts = torch.cat([counted, is_right & counted], dim=-1).sum(1)
        counts = F.pad(counts, (0, 0, 0, len(self._prior) - depth))
        with self._lock:
            # A new tensor each time: calls inside and outside of inference mode may take turns.
            self._counts = counts if self._counts is None else self._counts + counts
            self._num_drafts += len(lengths)
            if self._num_drafts >= self._next_review:
                self._next_review = 2 * self._num_drafts
                self.accuracies: list[list[float]] = [
                    [(hit + _PRIOR_WEIGHT * share) / (drafts + _PRIOR_WEIGHT) for hit, share in zip(hits, prior)]
                    for (drafts, *hits), prior in zip(self._counts.tolist(), self._prior)
                ]


class MedusaResources(NamedTuple):
    """Outlives a call."""

    heads: MedusaHeads
    target: TargetParts  # for its lm_head. Some targets scale or cap its logits; the ranks stay
    counts: RankCounts  # of calls with a measured tree


class MedusaCandidateGenerator(NetworkGenerator):
    """Drafts one tree for all rows, or the most probable paths of each."""

    options_class = MedusaOptions
    target_hidden_states: ClassVar[tuple[int | str, ...]] = ("last",)
    loaded_by: ClassVar[tuple[str, ...]] = LOADED_BY
    reads_tokens = False

    @classmethod
    def load(
        cls, config: SpeculativeConfig, target_model: torch.nn.Module, draft_model: MedusaHeads | None = None
    ) -> MedusaResources:
        heads = load(MedusaHeads, config, target_model, draft_model)
        return MedusaResources(heads, TargetParts(target_model), RankCounts(heads.accuracies, heads.num_heads))

    @classmethod
    def network(cls, resources: MedusaResources) -> torch.nn.Module:
        return resources.heads

    def __init__(self, config: SpeculativeConfig, resources: MedusaResources, session: Session):
        self.resources: MedusaResources = resources
        super().__init__(config, resources, session)
        self.token_ids: torch.LongTensor | None = resources.heads.token_map
        if self.counts:
            self.num_speculative_tokens: int = resources.heads.num_heads
        self.candidates: torch.LongTensor | None = None  # (D, B, C), of the last draft, to be counted

    def shape(self) -> TokenTree | DynamicTree:
        heads, options, session = self.network, self.options, self.session
        paths, length = self.config.speculative_token_tree, self.config.num_speculative_tokens
        self.num_nodes = options.num_draft_nodes or _NUM_NODES
        self.node_cost: float = 0.0  # of verifying a node, as a share of a cycle without any
        if options.num_draft_nodes is None and session.device.type == "cpu":
            # Measured: a node in each of B rows costs what B / (5 + 5 B) such cycles do in float32, B / (18 + 5 B) in
            # half precision, since small products are bound by arithmetic. The published trees were made for GPUs,
            # where all nodes ride along with the weights.
            alone = 5 if heads.weights[0].dtype == torch.float32 else 18
            self.node_cost = session.batch_size / (alone + 5 * session.batch_size)
        self.threshold: float = options.draft_confidence_threshold
        self.counts: RankCounts | None = None
        if options.tree == "measured":
            if paths is not None or length is not None:
                name = "num_speculative_tokens" if paths is None else "speculative_token_tree"
                raise SpecConfigError(
                    f"`{name}` fixes the draft tree, and medusa_tree='measured' changes it. Leave one of them out; "
                    "the size of a measured tree is `num_draft_nodes`."
                )
            rule = self.config.rejection_sample_method
            if rule not in LOSSLESS_RULES:
                # Wrong tokens that are accepted would be counted as right ones.
                session.notes.append(f"medusa counts nothing for its tree under rejection_sample_method='{rule}'.")
            elif session.supports_trees:
                self.counts = self.resources.counts
        self._accuracies = self.counts.accuracies if self.counts else heads.accuracies
        if paths is not None:
            return self.fitting(static_tree(paths, heads.lm_head_size, heads.num_heads))
        if length is not None:
            self.config.check_against_target(num_heads=heads.num_heads)
            return TokenTree.chain(length)
        if self.threshold and session.supports_trees:
            # Under a grammar it grows level by level.
            return DynamicTree.of(heads.num_heads - 1, min(NUM_RANKS, heads.lm_head_size), self.num_nodes + 1)
        return self.fitting(self._default_tree())

    @property
    def shared_modules(self) -> tuple[torch.nn.Module, ...]:
        return (self.resources.target.head,) if self.network.lm_heads is None else ()

    def _default_tree(self) -> TokenTree:
        return default_tree(self.network, self._accuracies, self.num_nodes, self.node_cost)

    @property
    def num_draft_nodes(self) -> int:
        return self.num_nodes if self.counts else len(self.plan)

    @property
    def graph_key(self) -> tuple[Any, ...]:
        # Candidates that are counted are those of any tree.
        return () if self.counts else (self.plan,)

    def draft(
        self, state: NetworkState, new: Entries, limits: DepthLimits, draw: Draw
    ) -> DraftNodes | RankedCandidates:
        heads, plan = self.network, self.plan
        hidden, depth = new.last(new.states["last"]), min(limits.deepest, plan.max_depth)
        # What a measured tree leaves out is counted, too.
        num_heads = min(depth + 1, heads.num_heads) if self.counts else depth
        logits = heads.short_logits(hidden, self.resources.target.head, num_heads)
        if limits.threshold or not draw.is_plain:
            logits = logits.transpose(0, 1) * heads.logit_scale
            if not (draw.is_plain and isinstance(plan, DynamicTree)):
                # No head looks at the anchors, which graphs have not.
                return Positions(logits).grow(plan, hidden.new_zeros(len(hidden), dtype=torch.long), limits, draw)
            nodes = best_prefixes(best_candidates(logits, len(plan), self.token_ids), len(plan), limits)
            assert nodes.log_probs is not None, "prefixes have their probabilities"
            # The best come first, and the first one in any case.
            counts = (nodes.log_probs > math.log(limits.threshold)).sum(1)
            return nodes._replace(counts=counts.maximum((nodes.log_probs[:, 0] > -math.inf).long()))
        tree = plan.up_to(depth)
        count = min(NUM_RANKS, heads.lm_head_size) if self.counts else max(tree.widths)
        best = logits.topk(count, dim=-1).indices.transpose(0, 1).contiguous()
        best = best if self.token_ids is None else self.token_ids[best]
        if self.counts:
            return RankedCandidates(best)
        return DraftNodes(best.flatten(1).index_select(1, _candidate_of_node(tree, count, best.device)))

    def drafted(self, nodes: DraftNodes | RankedCandidates, limits: list[int]) -> DraftTree:
        if isinstance(nodes, DraftNodes):
            return super().drafted(nodes, limits)
        best, tree = nodes.tokens.to(self.session.device), self.plan.up_to(max(limits))
        self.candidates = best.transpose(0, 1)
        tokens = best.flatten(1).index_select(1, _candidate_of_node(tree, best.shape[2], best.device))
        return DraftTree.of_shape(tree, tokens, limits)

    @property
    def drafts_ahead(self) -> bool:
        # Candidates that are to be counted lie in the memory of the graph.
        return self.counts is None and super().drafts_ahead

    def observe(self, commit: Commit) -> None:
        if self.candidates is not None:
            self.counts.add(self.candidates, commit.tokens, commit.counts)
            if self.counts.accuracies is not self._accuracies:
                self._accuracies = self.counts.accuracies
                self.plan: TokenTree = self._default_tree()
        # What is committed without a draft says nothing of these.
        self.candidates = None
        super().observe(commit)


class RankedCandidates(NamedTuple):
    """Candidates of heads for trees of any shape."""

    tokens: torch.LongTensor  # (B, D, C), best first


def default_tree(
    heads: MedusaHeads,
    accuracies: Sequence[Sequence[float]] | None = None,
    num_nodes: int = _NUM_NODES,
    node_cost: float = 0.0,  # of verifying a node, as a share of a cycle without any
) -> TokenTree:
    """The tree for heads of these accuracies; if they are unknown, the best of the published one that fits."""
    if accuracies:
        tree = TokenTree.from_accuracies(accuracies[: heads.num_heads], num_nodes, heads.lm_head_size)
    else:
        base = (heads.base_model or "").lower()
        name = next(name for parts, name in _TREE_OF_BASE_MODEL if all(part in base for part in parts))
        paths = TokenTree.published(name).up_to(heads.num_heads).paths
        tree = TokenTree.from_paths(path for path in paths if max(path) < heads.lm_head_size)
        accuracies = prior_accuracies(heads.num_heads, NUM_RANKS)
    # The likeliest nodes, as long as one more raises the expected tokens per time.
    probs = {path: math.prod(accuracies[head][rank] for head, rank in enumerate(path)) for path in tree.paths}
    kept, tokens = [], 1.0
    for path in sorted(tree.paths, key=lambda path: -probs[path])[:num_nodes]:
        cost = 1.0 + node_cost * len(kept)
        if kept and probs[path] * cost < tokens * node_cost:
            break
        kept.append(path)
        tokens += probs[path]
    return TokenTree.from_paths(kept)


@kept_on_device
def _candidate_of_node(tree: TokenTree, count: int, device: torch.device) -> torch.LongTensor:
    """Place of each node's token among the candidates of all heads, `count` a head."""
    return upload([(d - 1) * count + rank for d, rank in zip(tree.depths, tree.ranks)], device)


@kept_on_device
def _is_committed(lengths: tuple[int, ...], depth: int, device: torch.device) -> torch.BoolTensor:
    """Tells for each depth and row whether a token of it was committed: `(D, B, 1)`."""
    return (torch.arange(depth, device=device)[:, None] < upload(lengths, device))[..., None]
