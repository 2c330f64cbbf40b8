"""The candidate selector of DFlash 2: positions keep their k best tokens, whose scores depend on the token before.

    score_j(p -> c) = L_j[c] + (A[p] * P y_j) . S[c]         for the k tokens c with the largest logits L_j

A and S are codebooks of the target's tokens, P y_j is the projected output of position j, p the token that was chosen
at position j - 1, and at first the anchor. A draft is a walk through these scores, from left to right.

Shapes: R rows, K positions, k candidates of each, h hidden size, r rank, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ...drafting.positions import Positions
from ...kernels.best import best_tokens
from ...logits.grammar.masks import GrowingMasks
from .config import DFlashConfig
from .denoising import Denoising
from .lattice import Lattice


class CandidateSelector(nn.Module):
    """Scores of candidates; a new one adds next to nothing to their logits.

    Args:
        config (`DFlashConfig`): Has `selector_rank`, `selector_top_k`.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        shape = config.vocab_size, config.selector_rank
        self.top_k: int = config.selector_top_k
        self.predecessor_codebook: nn.Parameter = nn.Parameter(torch.randn(shape))
        # Of zeros alone the other parts would learn nothing at first.
        self.successor_codebook: nn.Parameter = nn.Parameter(1e-3 * torch.randn(shape))
        self.hidden_projection: nn.Linear = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(
        self, logits: torch.Tensor, output: torch.Tensor, anchors: torch.LongTensor, known: Known | None = None
    ) -> Edges:
        """Scores of the candidates after each candidate of the position before.

        Args:
            logits (`torch.Tensor` of shape `(R, K, V)`): Of the positions.
            output (`torch.Tensor` of shape `(R, K, h)`): The network's output there.
            anchors (`torch.LongTensor` of shape `(R,)`): Tokens before the first position.
            known (`Known`, *optional*): Tokens that stand already at some of the positions.
        """
        values, tokens = best_tokens_of(logits, self.top_k)
        if known is not None:
            # Whichever candidate is chosen there, it is this one.
            tokens = torch.where(known.where[..., None], known.tokens[..., None], tokens)
        steps = self.scores(tokens, self.before(anchors, tokens), output)
        return Edges(tokens, values.float()[:, :, None] + steps)

    @staticmethod
    def before(anchors: torch.LongTensor, tokens: torch.LongTensor) -> torch.LongTensor:
        """Tokens `(R, K, k)` before those of each position."""
        return torch.cat((anchors[:, None, None].expand(-1, 1, tokens.shape[2]), tokens[:, :-1]), dim=1)

    def chosen(self, logits: torch.Tensor, before: torch.LongTensor, output: torch.Tensor) -> torch.FloatTensor:
        """Logits `(R, F, V)` of a position after tokens `before` `(R, F)`, -inf for all but the candidates of each.

        Args:
            logits (`torch.Tensor` of shape `(R, F, V)`): Of the position, with -inf for what may not come there.
            before (`torch.LongTensor` of shape `(R, F)`): Tokens in front of it.
            output (`torch.Tensor` of shape `(R, h)`): The network's output there.
        """
        values, tokens = best_tokens_of(logits, self.top_k)
        steps = self.scores(tokens, before[..., None], output[:, None])[..., 0, :]
        scores = values.float() + steps
        return scores.new_full(logits.shape, -torch.inf).scatter_(-1, tokens, scores)

    def scores(self, tokens: torch.LongTensor, before: torch.LongTensor, output: torch.Tensor) -> torch.FloatTensor:
        """Scores `(..., p, k)` of tokens `(..., k)` after other tokens `(..., p)`, by outputs `(..., h)`."""
        projected = self.hidden_projection(output)[..., None, :]
        before, after = self.predecessor_codebook[before] * projected, self.successor_codebook[tokens]
        return before.float() @ after.float().transpose(-1, -2)


def best_tokens_of(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.LongTensor]:
    """The largest logits and their tokens, `(..., k)` each; of equal ones the lower id comes first."""
    ids = logits.topk(min(count, logits.shape[-1])).indices.sort(dim=-1).values
    best = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return best.values, ids.gather(-1, best.indices)


class Known(NamedTuple):
    """Tokens of a block that are known: `where` and `tokens`, `(R, K)` each."""

    where: torch.BoolTensor
    tokens: torch.LongTensor


class Edges(NamedTuple):
    """Scores of one block.

    Attributes:
        tokens (`torch.LongTensor` of shape `(R, K, k)`): Candidates by their logits, of equal ones the lower id first.
        scores (`torch.FloatTensor` of shape `(R, K, k, k)`): Those of the candidates, after each of the position
            before. After the anchor all rows are equal.
    """

    tokens: torch.LongTensor
    scores: torch.FloatTensor

    def walk(self) -> torch.LongTensor:
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

    def logits_after(self, position: int, places: torch.LongTensor, vocab_size: int) -> torch.FloatTensor:
        """Logits `(R, V)` of a position after candidates `(R,)` of the one before, -inf for all but its own."""
        width = self.scores.shape[3]
        scores = self.scores[:, position].gather(1, places[:, None, None].expand(-1, 1, width))[:, 0]
        return scores.new_full((len(places), vocab_size), -torch.inf).scatter_(1, self.tokens[:, position], scores)

    def logits_of_walk(self, position: int, tokens: torch.LongTensor, vocab_size: int) -> torch.FloatTensor:
        """Logits `(R, V)` of a position after tokens `(R,)` of the one before; after the anchor there is one place."""
        places = self.places_of(position - 1, tokens) if position else torch.zeros_like(tokens)
        return self.logits_after(position, places, vocab_size)

    def places_of(self, position: int, tokens: torch.LongTensor) -> torch.LongTensor:
        """Places `(R,)` of tokens among the candidates of a position; 0 for one that is none."""
        return (self.tokens[:, position] == tokens[:, None]).int().argmax(-1)

    def lattice(self) -> Lattice:
        """The candidates as a lattice with a table after each, by their probabilities among the candidates."""
        best = self.scores.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
        tokens = self.tokens[:, :, None].expand_as(best.indices).gather(3, best.indices)
        return Lattice(tokens, best.values, best.indices)


class SelectedPositions(Positions):
    """Positions whose best tokens are chosen under the grammar's masks, and then scored after the token before.

    Args:
        selector (`CandidateSelector`): The selector.
        logits (`torch.Tensor` of shape `(R, K, V)`): Of the positions.
        output (`torch.Tensor` of shape `(R, K, h)`): The network's output there.
        masks (`GrowingMasks`): At the nodes whose children are next.
    """

    def __init__(self, selector: CandidateSelector, logits: torch.Tensor, output: torch.Tensor, masks: GrowingMasks):
        super().__init__(logits)
        self.selector: CandidateSelector = selector
        self.output: torch.Tensor = output
        self.masks: GrowingMasks = masks

    def logits(self, tokens: torch.LongTensor) -> torch.Tensor:
        return self.selector.chosen(self.masks.apply(super().logits(tokens)), tokens, self.output[:, self.position])

    def after(self, position: int, tokens: torch.LongTensor) -> torch.Tensor:
        """Logits `(R, V)` of a position after tokens `(R,)` of the one before it, of which it is told in turn."""
        tokens = tokens[:, None]
        if position > 0:
            self.masks.follow(tokens, slice(None))
        self.position = position
        return self.logits(tokens)[:, 0]


def walk_on(
    state: Denoising,
    selector: CandidateSelector,
    logits: torch.Tensor,
    output: torch.Tensor,
    anchors: torch.LongTensor,
    keep: int,
) -> None:
    """A denoising step whose predictions are a walk, which goes through the tokens that are known.

    Args:
        state (`Denoising`): The blocks.
        selector (`CandidateSelector`): The selector.
        logits, output, anchors: As for its call.
        keep (`int`): As for [`Denoising.update`].
    """
    edges = selector(logits, output, anchors, Known(state.known, state.tokens))
    places = edges.walk()
    state.take(edges.tokens_at(places), keep, lambda: edges.probs_along(places))
