"""Walks through the positions of a block: how the tokens of a draft follow each other.

In plain DFlash they do not depend on each other. In other variants a token changes the logits of the positions after
it, or positions keep their k best tokens, whose scores depend on the token before.

Several denoising steps over one block are drafting by masked diffusion (MaskGIT, Chang et al. 2022, arXiv:2202.04200,
section 3.2); DFlash itself has a single step. The most confident tokens stay, the others are predicted again. A token
that is kept carries its value and its confidence on; it may still be masked again when more confident ones turn up.
The outcome is a function of the logits, bit for bit: a schedule of integers, booleans instead of a look at the ids (a
predicted token may equal the mask's id), the first id among equal logits, the first position among equal confidences,
and per position a result that does not depend on the rows around it.

Shapes: R rows, T positions of a block, K of them that predict what is drafted, k candidates of each, h hidden size, U
vocabulary of the draft, V that of the target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from ....drafting.draw import DepthLimits, Draw, SteeredDraw
from ....drafting.growth import DraftNodes, DynamicTree, Positions
from ....drafting.prefixes import Lattice, best_candidates, confidences
from ....drafts import TokenTree
from ....kernels.best import best_tokens
from ....logits.grammar.masks import GrowingMasks


if TYPE_CHECKING:
    from ..network import DFlashNetwork


# What a head remembers of the text, by name; each `(R, ...)`.
Memory = dict[str, torch.Tensor]


# What forbidden tokens lose: all others come before them, and no sum of logits becomes infinite.
_FORBIDDEN = 1e4


class Block(NamedTuple):
    """Predictions of one forward."""

    network: DFlashNetwork
    anchors: torch.LongTensor  # (R,), first tokens of the blocks
    output: torch.Tensor  # (R, K, h), of the network at the first K positions that predict
    logits: torch.Tensor  # (R, K, U), of the draft there
    whole: torch.Tensor  # (R, T, h), output of the network at all positions
    memory: Memory  # what the head remembers of the text, see `BlockHead`
    grammar: Callable[[], GrowingMasks] | None = None  # begins the masks of the rows' grammars, after the anchors
    known: Denoising | None = None  # what earlier denoising steps have settled

    def allowed_first(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `(R, K, U)` in which tokens that the grammars of rows allow at a position come before all others.

        What is allowed depends on the tokens before: those that are settled, else the best ones that are allowed.
        """
        if self.grammar is None:
            return logits
        masks, levels = self.grammar(), []
        for position in range(logits.shape[1]):
            level, column = logits[:, position, None], slice(position, position + 1)
            masked = masks.apply(level, self.network.token_ids)
            levels.append(torch.where(masked == -torch.inf, level - _FORBIDDEN, level))
            best = self.network.target_ids(best_tokens(levels[-1]))
            if self.known is not None:
                best = torch.where(self.known.settled[:, column], self.known.tokens[:, column], best)
            masks.follow(best, slice(None))
        return torch.cat(levels, dim=1)


class Walk(Positions):
    """A way through the positions of a block; here their tokens do not depend on each other."""

    is_independent: ClassVar[bool] = True

    def __init__(self, block: Block):
        super().__init__(block.logits)
        self.block = block
        self.head: Any = block.network.block_head

    def best(self) -> torch.LongTensor:
        """The best tokens `(R, K)`, each after those before it, in the target's ids."""
        return self.block.network.target_ids(best_tokens(self.block.logits))

    def confidences(self) -> torch.FloatTensor:
        """Probabilities `(R, K)` of the best tokens; 0 where logits are no distribution."""
        return confidences(self.block.logits)

    def lattice(self, count: int) -> Lattice:
        """Up to `count` candidates of each position, for trees of the most probable prefixes."""
        return best_candidates(self.block.logits, count, self.block.network.token_ids)

    def draft(self, plan: TokenTree | DynamicTree, limits: DepthLimits, draw: Draw) -> DraftNodes:
        """A chain, or where a grammar is in force a tree that grows level by level."""
        if draw.is_plain or not self.block.network.config.head.draws:
            return DraftNodes(self.best()[:, : limits.deepest])
        if self.is_independent and isinstance(draw, SteeredDraw) and not draw.reads_tokens:
            return DraftNodes(draw.choose_at_once(self.block.logits[:, : limits.deepest]), probs=draw.all_probs)
        return self.grow(plan, self.block.anchors, limits, draw)


class CorrectedWalk(Walk):
    """A walk whose tokens change the logits of the positions after them, so that no tree can be searched.

    The head has a method `correction(walk, tokens)`: what is added to the logits of the position, `(R, U)` or nothing,
    after tokens `(R,)`; positions come in turn.
    """

    is_independent = False
    state: torch.Tensor | None = None  # what the head keeps of the tokens so far

    def logits(self, tokens: torch.LongTensor) -> torch.Tensor:
        logits, added = self.block.logits[:, self.position, None], self.head.correction(self, tokens[:, 0])
        return logits if added is None else logits + added[:, None]

    def best(self) -> torch.LongTensor:
        tokens = [self.block.anchors[:, None]]
        for position in range(self.block.logits.shape[1]):
            self.position = position
            tokens.append(self.block.network.target_ids(best_tokens(self.logits(tokens[-1]))))
        return torch.cat(tokens[1:], dim=1)


def best_tokens_of(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.LongTensor]:
    """The largest logits and their tokens, `(..., k)` each; of equal ones the lower id comes first."""
    ids = logits.topk(min(count, logits.shape[-1])).indices.sort(dim=-1).values
    best = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return best.values, ids.gather(-1, best.indices)


class CandidateWalk(Walk):
    """A walk through the scores of candidates after each other; of trees it drafts the most probable walks."""

    is_independent = False

    def __init__(self, block: Block, tokens: torch.LongTensor, scores: torch.FloatTensor):
        super().__init__(block)
        self.tokens = tokens  # (R, K, k), by their logits, of equal ones the lower id first
        self.scores = scores  # (R, K, k, k), after each of the position before; after the anchor all rows are equal

    def best(self) -> torch.LongTensor:
        best = best_tokens(self.scores)
        places = [torch.zeros_like(best[:, 0, 0])]
        for position in range(best.shape[1]):
            places.append(best[:, position].gather(1, places[-1][:, None])[:, 0])
        self.places: torch.LongTensor = torch.stack(places[1:], dim=1)  # (R, K), of what is best among the candidates
        return self.tokens.gather(2, self.places[..., None])[..., 0]

    def confidences(self) -> torch.FloatTensor:
        # Of what `best` has chosen, each among those after the one before it.
        before = F.pad(self.places[:, :-1], (1, 0))[..., None, None]
        probs = self.scores.gather(2, before.expand(-1, -1, 1, self.scores.shape[3]))[:, :, 0].softmax(-1)
        return probs.gather(2, self.places[..., None])[..., 0]

    def logits(self, tokens: torch.LongTensor) -> torch.FloatTensor:
        """Logits `(R, 1, V)` of the position after tokens `(R, 1)`, -inf for all but its candidates."""
        places = torch.zeros_like(tokens)
        if self.position:
            # A token that is no candidate counts as the first one.
            places = (self.tokens[:, self.position - 1] == tokens).int().argmax(-1, keepdim=True)
        scores = self.scores[:, self.position].gather(1, places[..., None].expand(-1, 1, self.scores.shape[3]))
        logits = scores.new_full((len(tokens), 1, self.block.network.config.vocab_size), -torch.inf)
        return logits.scatter_(2, self.tokens[:, self.position, None], scores)

    def lattice(self, count: int) -> Lattice:
        best = self.scores.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
        tokens = self.tokens[:, :, None].expand_as(best.indices).gather(3, best.indices)
        return Lattice(tokens, best.values, best.indices)


def keep_counts(num_positions: int, num_steps: int) -> tuple[int, ...]:
    """Number of positions that are known after each step: `ceil(K * (i + 1) / n)`; steps past K change nothing."""
    counts = [-(-num_positions * step // num_steps) for step in range(1, num_steps + 1)]
    return tuple(counts[: counts.index(num_positions) + 1])


class Denoising:
    """The state of the blocks of a batch between the steps; of new ones nothing is known. The anchors are no part."""

    def __init__(self, rows: int, num_positions: int, mask_token_id: int, device: torch.device | str):
        self.mask_token_id = mask_token_id  # what the draft sees at positions that are not settled
        # (R, K) each: what was last predicted at each position, and whether the next step sees it.
        self.tokens: torch.Tensor = torch.full((rows, num_positions), mask_token_id, device=device)
        self.settled: torch.Tensor = torch.zeros_like(self.tokens, dtype=torch.bool)
        # The probability that it was predicted with. What the last step fills in has none: nobody ranks it.
        self.confidences: torch.Tensor = torch.zeros_like(self.tokens, dtype=torch.float32)

    @property
    def inputs(self) -> torch.LongTensor:
        """Tokens `(R, K)` that the draft reads after the anchor."""
        return torch.where(self.settled, self.tokens, self.mask_token_id)

    def update(self, block: Block, keep: int) -> None:
        """One step: takes the unknown positions from the predictions of a block, and keeps the most confident of all.

        Where logits are no distribution (NaN, an infinity, nothing but minus infinity), the first largest entry is
        taken, NaN being largest, with confidence 0.
        """
        block = block._replace(known=self)
        walk = block.network.block_head.begin(block._replace(logits=block.allowed_first(block.logits), grammar=None))
        self.tokens = torch.where(self.settled, self.tokens, walk.best())
        if keep == self.tokens.shape[1]:
            self.settled = torch.ones_like(self.settled)
            return
        self.confidences = torch.where(self.settled, self.confidences, walk.confidences())
        # Not topk: it leaves open which of equal ones it takes.
        order = self.confidences.sort(dim=1, descending=True, stable=True).indices
        self.settled = torch.zeros_like(self.settled).scatter_(1, order[:, :keep], True)
