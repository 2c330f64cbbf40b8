"""Walks through candidates: positions keep their k best tokens, whose scores depend on the token before.

A draft is a walk through these scores, from left to right, or a tree of the most probable walks, by the softmax of the
scores after each candidate.

Shapes: R rows, K positions, k candidates of each, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ....drafting.prefixes import Lattice
from ....kernels.best import best_tokens
from . import Block, Walk


def best_tokens_of(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.LongTensor]:
    """The largest logits and their tokens, `(..., k)` each; of equal ones the lower id comes first."""
    ids = logits.topk(min(count, logits.shape[-1])).indices.sort(dim=-1).values
    best = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return best.values, ids.gather(-1, best.indices)


class CandidateWalk(Walk):
    """A walk through the scores of candidates after each other."""

    is_independent = False

    def __init__(self, block: Block, tokens: torch.LongTensor, scores: torch.FloatTensor):
        super().__init__(block)
        self.tokens = tokens  # (R, K, k), by their logits, of equal ones the lower id first
        self.scores = scores  # (R, K, k, k), after each of the position before; after the anchor all rows are equal

    def best(self) -> torch.LongTensor:
        return self.tokens_at(self.places())

    def places(self) -> torch.LongTensor:
        """Places `(R, K)` of the best candidates, each after the one chosen before it."""
        best = best_tokens(self.scores)
        places = [torch.zeros_like(best[:, 0, 0])]
        for position in range(best.shape[1]):
            places.append(best[:, position].gather(1, places[-1][:, None])[:, 0])
        return torch.stack(places[1:], dim=1)

    def tokens_at(self, places: torch.LongTensor) -> torch.LongTensor:
        """Tokens `(R, K)` of the candidates at these places `(R, K)`."""
        return self.tokens.gather(2, places[..., None])[..., 0]

    def probs_along(self, places: torch.LongTensor) -> torch.FloatTensor:
        """Probabilities `(R, K)` of the candidates at these places, each among those after the one before it."""
        before = F.pad(places[:, :-1], (1, 0))[..., None, None]
        probs = self.scores.gather(2, before.expand(-1, -1, 1, self.scores.shape[3]))[:, :, 0].softmax(-1)
        return probs.gather(2, places[..., None])[..., 0]

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
