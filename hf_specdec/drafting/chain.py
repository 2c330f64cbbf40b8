"""Chains whose tokens are chosen one by one, with the call's logits processors in between.

Shapes: R rows that are drafted for, V vocabulary of the target, W logits of a draft.
"""

from __future__ import annotations

import torch

from ..drafts import DraftTree
from ..logits.acceptance import best_tokens
from ..logits.sampling import CapturedSampler, DraftSampler


class SteeredChain:
    """Draft tokens of one cycle, sampled from the draft's processed distributions, or the best ones of these.

    Args:
        sampler (`DraftSampler` or `CapturedSampler`): Processes logits as the target's are processed, and samples.
        rows (`list[int]` of length R): Number of each row in the call.
        lengths (`list[int]` of length R): Committed tokens of each row, the anchor included.
        samples (`bool`): Tokens are sampled.

    Attributes:
        tokens (`list[torch.LongTensor]`): The tokens so far, each `(R,)`.
        probs (`list[torch.FloatTensor]`): Distributions that they were sampled from, each `(R, V)`.
    """

    def __init__(
        self, sampler: DraftSampler | CapturedSampler, rows: list[int], lengths: list[int], samples: bool = True
    ):
        self._sampler, self._rows, self._samples = sampler, rows, samples
        self._anchor_positions = [length - 1 for length in lengths]
        self.tokens: list[torch.LongTensor] = []
        self.probs: list[torch.FloatTensor] = []

    def scores(self, logits: torch.Tensor) -> torch.FloatTensor:
        """Processed scores `(R, V)` of logits `(R, W)` after the tokens so far."""
        return self._sampler.scores(logits, self._rows, self.tokens)

    def choose(self, scores: torch.FloatTensor) -> torch.LongTensor:
        """Adds the next token of each row by its scores `(R, V)`; returns the tokens `(R,)`."""
        if self._samples:
            tokens, probs = self._sampler.draw(scores, self._rows, self._anchor_positions, len(self.tokens))
            self.probs.append(probs)
        else:
            tokens = best_tokens(scores)
        self.tokens.append(tokens)
        return tokens

    def stacked(self) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """The tokens `(R, K)`, and the distributions `(R, K, V)` that they were sampled from, if they were."""
        return torch.stack(self.tokens, dim=1), torch.stack(self.probs, dim=1) if self.probs else None

    def draft(self, counts: list[int] | torch.LongTensor) -> DraftTree:
        """The chains, of which the first `counts[r]` tokens are valid."""
        tokens, probs = self.stacked()
        return DraftTree.chain(tokens, counts, probs)
