"""Chains whose tokens are chosen one by one, with the call's logits processors in between.

Shapes: R rows that are drafted for, K tokens of a chain, V vocabulary of the target, W logits of a draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..drafts import DraftTree
from ..kernels.best import best_tokens
from ..logits.processors import ProcessorStack
from ..logits.randomness import RowKeys
from ..logits.sampling import CapturedSampler, DraftSampler
from ..protocol import Session
from ..target.graphs import Variant


class SteeredChain:
    """Draft tokens of one cycle, sampled from the draft's processed distributions, or the best ones of these.

    The sampler processes logits as the target's are processed. Rows are their numbers in the call, lengths their
    committed tokens, the anchor included.
    """

    def __init__(
        self, sampler: DraftSampler | CapturedSampler, rows: list[int], lengths: list[int], samples: bool = True
    ):
        self._sampler = sampler
        self._rows = rows
        self._samples = samples
        self._anchor_positions = [length - 1 for length in lengths]
        self.tokens: list[torch.LongTensor] = []  # (R,) each
        self.probs: list[torch.FloatTensor] = []  # (R, V) each: what tokens were sampled from

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

    def choose_all(
        self, anchors: torch.LongTensor, count: int, logits_after: Callable[[int, torch.LongTensor], torch.Tensor]
    ) -> None:
        """Adds `count` tokens, each by logits `(R, W)` of its position after the tokens `(R,)` before it."""
        tokens = anchors
        for depth in range(count):
            tokens = self.choose(self.scores(logits_after(depth, tokens)))

    def stacked(self) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """The tokens `(R, K)`, and the distributions `(R, K, V)` that they were sampled from, if they were."""
        return torch.stack(self.tokens, dim=1), torch.stack(self.probs, dim=1) if self.probs else None

    def draft(self, counts: list[int] | torch.LongTensor) -> DraftTree:
        """The chains, of which the first `counts[r]` tokens are valid."""
        tokens, probs = self.stacked()
        return DraftTree.chain(tokens, counts, probs)


@dataclass(frozen=True)
class CapturedDrawing:
    """Draws the chains of a graph, through processors that run in graphs."""

    stack: ProcessorStack
    vocab_size: int

    @classmethod
    def of(cls, session: Session, rows: list[int], device: torch.device) -> CapturedDrawing | None:
        """That of these rows of the call, by a drafter on a device; `None` where a graph cannot draw for them."""
        stack = session.sampler.in_graphs(rows) if device == session.device else None
        return None if stack is None else cls(stack, session.sampler.vocab_size)

    @property
    def key(self) -> tuple[Any, ...]:
        """Whatever of it is built into a graph."""
        return Variant(self.stack.signature), self.vocab_size

    def chain(self, keys: RowKeys, counts: torch.LongTensor, depth: int) -> SteeredChain:
        """Chains of up to `depth` tokens, after `counts` tokens `(R,)` from the positions of the keys on."""
        return SteeredChain(CapturedSampler(self.stack, keys.drafts_after(counts, depth), self.vocab_size), [], [])
