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
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from ...drafts import DraftTree, TokenTree
from ...drafts.static import MAX_NODES
from ...errors import SpecConfigError
from ...logits.grammar.matchers import GrammarMatcher, allows
from ...protocol import Commit, DraftStep, Prompt, Session, VerifiedNodes
from ...target_facts import vocabulary_size
from ...threads import Lock
from ...transfers import upload
from ...validation import Options, setting
from ..base import CandidateGenerator


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig


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
    """Options of `spec_method="recycling"`.

    Raises:
        SpecConfigError: A value is out of range.
    """

    num_draft_nodes: int | None = setting(
        None,
        f"Nodes of the default tree. Left out, {_NUM_NODES}, on a CPU {_NUM_NODES_OF['cpu']}.",
        least=1,
        most=MAX_NODES,
        published=True,
    )


class SuccessorTable:
    """The best successors of each token, as the target has last seen them. Threads may share one.

    Args:
        vocab_size (`int`): V.

    Attributes:
        successors (`np.ndarray` of shape `(V, 8)`, int32): Best first; -1 where nothing is known.
    """

    def __init__(self, vocab_size: int):
        # Numba is imported here, before the cycles, which are timed.
        from ...kernels import text

        self._kernels = text
        self.successors: np.ndarray[Any, Any] = np.full((vocab_size, NUM_SUCCESSORS), -1, dtype=np.int32)
        self._lock = Lock()

    def learn(self, tokens: Sequence[int], best: np.ndarray) -> None:
        """Takes the successors of nodes.

        Args:
            tokens (`Sequence[int]` of length T): The nodes' tokens. Of equal ones the last counts.
            best (`np.ndarray` of shape `(T, K)`): The target's best next tokens at each node, best first; K is at
                most 8.
        """
        with self._lock:
            # The value of the last of equal indices remains, as numpy promises.
            self.successors[np.asarray(tokens, dtype=np.intp), : best.shape[1]] = best

    def learn_text(self, tokens: Sequence[int]) -> None:
        """Takes the successors in a text, of which only one is known each time, in front of those that were known.

        Ids outside of the vocabulary, which stand for images and the like, have none and are none.
        """
        text = np.array(tokens, dtype=np.int64)
        with self._lock:
            self._kernels.learn_text(self.successors, text)

    def fill(
        self, tree: TokenTree, anchor: int, matcher: GrammarMatcher | None = None
    ) -> tuple[list[int], list[int], list[int]]:
        """Fills a tree of ranks with tokens.

        Args:
            tree (`TokenTree`): The tree.
            anchor (`int`): Token of its root.
            matcher (`GrammarMatcher`, *optional*): The anchor's place in a grammar. Then ranks are those among the
                successors that it allows.

        Returns:
            `tuple[list[int], list[int], list[int]]`: Tokens, parents (-1: the anchor) and nodes of `tree` of those
            that have a token, which with an empty entry also those below it have not.
        """
        if matcher is not None:
            return self._fill_allowed(tree, anchor, matcher)
        tokens, parents, nodes = self._kernels.fill_tree(self.successors, *_arrays(tree), anchor).tolist()
        return tokens, parents, nodes

    def _fill_allowed(
        self, tree: TokenTree, anchor: int, matcher: GrammarMatcher
    ) -> tuple[list[int], list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        nodes: list[int] = []
        places = {-1: -1}
        paths: dict[int, list[int]] = {-1: []}
        allowed: dict[int, list[int]] = {}
        for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks)):
            if parent not in places:
                continue
            if parent not in allowed:
                found = self.successors[tokens[places[parent]] if paths[parent] else anchor].tolist()
                (mask,) = matcher.masks_after([paths[parent]])
                allowed[parent] = [token for token in found if token >= 0 and allows(mask, token)]
            if rank >= len(allowed[parent]):
                continue
            token = allowed[parent][rank]
            places[node], paths[node] = len(tokens), [*paths[parent], token]
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
        self.tree: TokenTree = self._chosen_tree()
        self.num_speculative_tokens: int = self.tree.max_depth
        self._log_probs = list(map(math.log, self.tree.prior_probs))
        self._anchors: list[int] = []

    def _chosen_tree(self) -> TokenTree:
        """The user's tree, or the likeliest nodes of those that are no deeper than k."""
        asked, device = self.config.speculative_token_tree, self.session.device
        if asked is None:
            num_nodes = self.options.num_draft_nodes or _NUM_NODES_OF.get(device.type, _NUM_NODES)
            paths = TokenTree.from_accuracies([_ACCURACIES] * self.num_speculative_tokens, num_nodes).paths
        else:
            paths = asked
            highest = max(map(max, paths))
            if highest >= NUM_SUCCESSORS:
                raise SpecConfigError(
                    f"`speculative_token_tree` asks for the child of rank {highest}, and token recycling knows "
                    f"{NUM_SUCCESSORS} successors of a token. Use ranks below that."
                )
        tree = TokenTree(paths, _ACCURACIES)
        if self.session.supports_trees or tree.is_chain:
            return tree
        self.session.notes.append("recycling drafts chains: the target cannot verify trees.")
        return TokenTree(TokenTree.chain(tree.max_depth).paths, _ACCURACIES)

    @property
    def num_draft_nodes(self) -> int:
        return len(self.tree)

    def prefill(self, prompt: Prompt) -> None:
        self._anchors = [0] * len(prompt.starts)  # until something is committed
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
            for anchor, depth, matcher in zip(self._anchors, self.draft_depths(step), matchers)
        ]
        tokens, parents, nodes = map(list, zip(*filled))
        if all(len(row) == len(self.tree) for row in tokens):
            draft = DraftTree.of_shape(self.tree, upload(tokens, self.session.device))
            draft.node_lists = tokens
            return draft
        log_probs = [[self._log_probs[node] for node in row] for row in nodes]
        return DraftTree.from_lists(tokens, self.session.device, parents, log_probs)

    def observe(self, commit: Commit) -> None:
        self._anchors = [tokens[-1] if tokens else anchor for tokens, anchor in zip(commit.token_lists, self._anchors)]

    def keep_rows(self, keep: list[int]) -> None:
        self._anchors = [self._anchors[position] for position in keep]

    def join(self, other: RecyclingCandidateGenerator, numbers: dict[int, int]) -> None:
        self._anchors = self._anchors + other._anchors
