"""Token recycling: drafts the tokens that the target considered likely when it last saw the same token.

Luo et al. 2024, "Turning Trash into Treasure" (arXiv:2408.08696). Every verification computes the target's next-token
logits at all nodes of a draft, the rejected ones included. The best tokens of each are kept as the successors of the
node's token, and a static tree of ranks is filled from them. No weights; unlike lookups it also drafts where a text
does not repeat.

Shapes: B active rows, N draft nodes, T = N + 1 verified nodes, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch

from ...drafting.state import RowState
from ...drafts import DraftTree, TokenTree
from ...drafts.static import MAX_NODES
from ...errors import SpecConfigError
from ...logits.grammar.matchers import GrammarMatcher, allows
from ...protocol import Commit, DraftStep, Prompt, Session, VerifiedNodes
from ...settings import SpeculativeConfig
from ...settings.checks import Options, setting
from ...target_facts import vocabulary_size
from ...threads import Lock
from ...transfers import upload
from ..base import CandidateGenerator


# Successors of a token.
NUM_SUCCESSORS = 8

# Nodes of the default tree, and by device type: the published one has 80, and CUDA graphs take 64 with the anchor.
_NUM_NODES = 63
_NUM_NODES_OF = {"cpu": 8}

_MAX_DEPTH = 6

# Assumed shares of nodes after which the successor of each rank is right. A model of 135 M, on 4,400 tokens of its own
# answers after as many others, had 0.30, 0.08, 0.04, ... at first, and 0.43 at first rank after an accepted one.
_ACCURACIES = (0.36, 0.083, 0.041, 0.024, 0.018, 0.015, 0.013, 0.008)


@dataclass(frozen=True)
class RecyclingOptions(Options):
    """Options of `spec_method="recycling"`."""

    num_draft_nodes: int | None = setting(
        None,
        f"Nodes of the default tree. Default: {_NUM_NODES}, on a CPU {_NUM_NODES_OF['cpu']}.",
        least=1,
        most=MAX_NODES,
        published=True,
    )


class SuccessorTable:
    """The best successors of each token, as the target has last seen them. Threads may share one."""

    def __init__(self, vocab_size: int):
        # Numba is imported here, before the cycles, which are timed.
        from ...kernels import text

        self._kernels = text
        # (V, 8), best first; -1 where nothing is known.
        self.successors: np.ndarray[Any, Any] = np.full((vocab_size, NUM_SUCCESSORS), -1, dtype=np.int32)
        self._lock = Lock()

    def learn(self, tokens: Sequence[int], best: np.ndarray) -> None:
        """Takes the best successors `(T, K)` of nodes with these T tokens; of equal ones the last counts."""
        with self._lock:
            # The value of the last of equal indices remains, as numpy promises.
            self.successors[np.asarray(tokens, dtype=np.intp), : best.shape[1]] = best

    def learn_text(self, tokens: Sequence[int]) -> None:
        """Takes the successors in a text, in front of those known; ids outside of the vocabulary have none."""
        text = np.array(tokens, dtype=np.int64)
        with self._lock:
            self._kernels.learn_text(self.successors, text)

    def fill(
        self, tree: TokenTree, anchor: int, matcher: GrammarMatcher | None = None
    ) -> tuple[list[int], list[int], list[int]]:
        """Tokens, parents and nodes of a tree of ranks after an anchor, as far as allowed tokens are known."""
        if matcher is None:
            tokens, parents, nodes = self._kernels.fill_tree(self.successors, *_arrays(tree), anchor).tolist()
            return tokens, parents, nodes
        tokens, parents, nodes = [], [], []
        places: dict[int, int] = {-1: -1}
        paths: dict[int, list[int]] = {-1: []}
        allowed: dict[int, list[int]] = {}
        for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks)):
            if parent not in places:
                continue
            path = paths[parent]
            if parent not in allowed:
                successors = self.successors[path[-1] if path else anchor].tolist()
                (mask,) = matcher.masks_after([path])
                allowed[parent] = [token for token in successors if token >= 0 and allows(mask, token)]
            if rank >= len(allowed[parent]):
                continue
            token = allowed[parent][rank]
            places[node], paths[node] = len(tokens), [*path, token]
            tokens.append(token)
            parents.append(places[parent])
            nodes.append(node)
        return tokens, parents, nodes


@lru_cache(maxsize=256)
def _arrays(tree: TokenTree) -> tuple[np.ndarray, np.ndarray]:
    """Parents and ranks of a tree's nodes."""
    return np.array(tree.parents, dtype=np.int64), np.array(tree.ranks, dtype=np.int64)


class RecyclingCandidateGenerator(CandidateGenerator):
    """Drafts a static tree of successors. All rows and calls share the [`SuccessorTable`] of their target."""

    options_class = RecyclingOptions
    default_num_speculative_tokens = _MAX_DEPTH
    num_best_tokens = NUM_SUCCESSORS
    samples_drafts: bool | None = False
    loaded_by: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def load(cls, config: SpeculativeConfig, target_model: torch.nn.Module) -> SuccessorTable:
        """An empty table, to be kept between calls."""
        return SuccessorTable(vocabulary_size(target_model))

    @classmethod
    def text_bytes(cls, resources: SuccessorTable) -> int:
        return resources.successors.nbytes

    def __init__(self, config: SpeculativeConfig, resources: SuccessorTable, session: Session):
        super().__init__(config, resources, session)
        self.table = resources
        # The user's tree, or the likeliest nodes of those that are no deeper than k.
        paths = self.config.speculative_token_tree
        if paths is None:
            num_nodes = self.options.num_draft_nodes or _NUM_NODES_OF.get(session.device.type, _NUM_NODES)
            paths = TokenTree.from_accuracies([_ACCURACIES] * self.num_speculative_tokens, num_nodes).paths
        elif (highest := max(map(max, paths))) >= NUM_SUCCESSORS:
            raise SpecConfigError(
                f"`speculative_token_tree` asks for the child of rank {highest}, and token recycling knows "
                f"{NUM_SUCCESSORS} successors of a token. Use ranks below that."
            )
        self.tree: TokenTree = TokenTree(self.fitting(TokenTree(paths)).paths, _ACCURACIES)
        self.num_speculative_tokens: int = self.tree.max_depth
        self._log_probs = list(map(math.log, self.tree.prior_probs))
        self.state: RowState = RowState(anchors=[])

    @property
    def num_draft_nodes(self) -> int:
        return len(self.tree)

    def prefill(self, prompt: Prompt) -> None:
        self.state.anchors = [0] * len(prompt.starts)  # until something is committed
        for tokens in prompt.texts:
            self.table.learn_text(tokens)

    def learn(self, nodes: VerifiedNodes) -> None:
        # All rows at once: a batch without drafts has one node in each.
        best = [rows[: len(tokens)] for tokens, rows in zip(nodes.token_lists, nodes.best.numpy())]
        self.table.learn(list(chain.from_iterable(nodes.token_lists)), np.concatenate(best))

    def propose(self, step: DraftStep) -> DraftTree:
        sampler = self.session.sampler
        matchers = [None] * len(step.rows) if sampler is None else sampler.matchers(step.rows)
        filled = [
            self.table.fill(self.tree.up_to(depth), anchor, matcher)
            for anchor, depth, matcher in zip(self.state.anchors, self.draft_depths(step), matchers)
        ]
        tokens, parents, nodes = map(list, zip(*filled))
        if all(len(row) == len(self.tree) for row in tokens):
            draft = DraftTree.of_shape(self.tree, upload(tokens, self.session.device))
            draft.node_lists = tokens
            return draft
        log_probs = [[self._log_probs[node] for node in row] for row in nodes]
        return DraftTree.from_lists(tokens, self.session.device, parents, log_probs)

    def observe(self, commit: Commit) -> None:
        pairs = zip(commit.token_lists, self.state.anchors)
        self.state.anchors = [tokens[-1] if tokens else anchor for tokens, anchor in pairs]
