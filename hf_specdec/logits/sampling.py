"""Sampling of draft tokens from the drafter's logits, processed as the target's, with random numbers of the call.

Any distribution may be drafted from; sampling from one that is sharpened like the target's is accepted most often.

Shapes: R rows, V target vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from ..drafts import DraftTree
from ..kernels.sampling import propose_from_probs
from .grammar.growth import GrowingMasks
from .grammar.matchers import GrammarMatcher
from .grammar.rows import RowGrammars, constrained
from .processors import ProcessorStack
from .randomness import RowUniforms


class DraftSampler:
    """Draws draft tokens for the rows of one call.

    Args:
        stack (`ProcessorStack`): The target's processors; only those that are known to be free of state are applied.
        sequences (`Sequences`): The tokens so far.
        uniforms (`RowUniforms`, *optional*): Random numbers of the call; `None` if the target decodes greedily.
        vocab_size (`int`): V, the width of the target's logits.
    """

    def __init__(self, stack: ProcessorStack, sequences: Any, uniforms: RowUniforms | None, vocab_size: int):
        self.stack: ProcessorStack = stack.known_only()
        self.grammar: RowGrammars | None = stack.grammar
        self.sequences: Any = sequences
        self.uniforms: RowUniforms | None = uniforms
        self.vocab_size: int = vocab_size

    @property
    def may_mask(self) -> bool:
        """Tells whether rows have grammars now."""
        return self.grammar is not None

    @property
    def is_greedy(self) -> bool:
        return self.uniforms is None

    def matchers(self, rows: list[int]) -> list[GrammarMatcher | None]:
        """The places of rows in their grammars, after all that was committed; `None` for rows without one.

        Raises:
            SpecDecError: Something other than the grammar has chosen a token that it forbids.
        """
        if self.grammar is None:
            return [None] * len(rows)
        return [self.grammar.at(row, self.sequences.tokens(row)) for row in rows]

    def growing(self, rows: list[int], limits: list[int]) -> GrowingMasks | None:
        """Masks for drafts that grow level by level; `None` where no row has a grammar.

        Args:
            rows (`list[int]`): Row of the call of each.
            limits (`list[int]`): Largest depth of each row's draft. Rows that get none need no masks.
        """
        return None if self.grammar is None else GrowingMasks.of(self.matchers(rows), limits, self.vocab_size)

    def constrained(self, draft: DraftTree, rows: list[int]) -> DraftTree:
        """The drafts of rows as far as their grammars allow them, with the masks after all nodes."""
        return draft if self.grammar is None else constrained(draft, self.matchers(rows))

    def scores(self, logits: torch.Tensor, rows: list[int], drafted: list[torch.LongTensor]) -> torch.Tensor:
        """Processed draft scores `(R, V)` in float32.

        Args:
            logits (`torch.Tensor` of shape `(R, W)`): Draft logits. Where the widths differ, ids that one of the two
                models lacks get no probability: they are padding rows of the larger vocabulary.
            rows (`list[int]`): Row of the call of each.
            drafted (`list[torch.LongTensor]`): Draft tokens before this one, each of shape `(R,)`.
        """
        logits = fit_width(logits, self.vocab_size)
        if not self.stack.reads_tokens:
            return self.stack.all_nodes(logits)
        tail = torch.stack(drafted, dim=1) if drafted else logits.new_zeros((len(rows), 0), dtype=torch.long)
        sequences = [torch.cat([self.sequences.row(row), new]) for row, new in zip(rows, tail)]
        return self.stack.rows(sequences, logits, rows)

    def draw(
        self, scores: torch.Tensor, rows: list[int], anchor_positions: list[int], depth: int
    ) -> tuple[torch.LongTensor, torch.Tensor]:
        """Samples from `softmax(scores)`: a token of each row `(R,)`, and the distributions `(R, V)` sampled from."""
        return drawn(scores, self.uniforms.draft_at(rows, anchor_positions, depth))

    def reads_tokens(self, rows: list[int]) -> bool:
        """Tells whether the scores of these rows depend on the tokens before them."""
        return self.stack.reads_tokens

    def in_graphs(self, rows: list[int]) -> ProcessorStack | None:
        """The processors of all these rows, where they are the same and a graph can repeat them."""
        return self.stack if self.stack.runs_in_graphs else None


class CapturedSampler:
    """[`DraftSampler`] inside of a graph, of which nothing but the random numbers changes.

    Args:
        stack (`ProcessorStack`): Processors that run in graphs.
        uniforms (`torch.FloatTensor` of shape `(R, K)`): The numbers that draw K successive draft tokens of each row.
        vocab_size (`int`): As of a [`DraftSampler`].
    """

    def __init__(self, stack: ProcessorStack, uniforms: torch.Tensor, vocab_size: int):
        self.stack, self.uniforms, self.vocab_size = stack, uniforms, vocab_size

    def scores(self, logits: torch.Tensor, rows: list[int], drafted: list[torch.LongTensor]) -> torch.Tensor:
        return self.stack.all_nodes(fit_width(logits, self.vocab_size))

    def draw(
        self, scores: torch.Tensor, rows: list[int], anchor_positions: list[int], depth: int
    ) -> tuple[torch.LongTensor, torch.Tensor]:
        return drawn(scores, self.uniforms[:, depth])


def drawn(scores: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.LongTensor, torch.Tensor]:
    """Samples from `softmax(scores)` by numbers `(R,)`: tokens `(R,)`, and the distributions `(R, V)` sampled from."""
    probs = scores.softmax(-1)
    # Where nothing can be drawn (the processors forbid all that the draft knows, or half precision overflows) a token
    # is proposed nevertheless: rules that judge whole drafts ask for a distribution at every node.
    return propose_from_probs(probs, uniforms), probs


def fit_width(logits: torch.Tensor, width: int) -> torch.Tensor:
    """Logits `(..., W)` as `(..., width)`: what is missing gets no probability."""
    missing = width - logits.shape[-1]
    if missing <= 0:
        return logits[..., :width]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
