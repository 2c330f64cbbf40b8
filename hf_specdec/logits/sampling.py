"""Sampling of draft tokens from the drafter's logits, processed as the target's.

Any distribution may be drafted from; sampling from one that is sharpened like the target's is accepted most often.

Shapes: R rows, V target vocabulary, W draft logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers.generation.logits_process import LogitsProcessorList

from ..drafts import DraftTree
from ..kernels.sampling import sample_from_probs
from .grammar.masks import GrowingMasks, constrained
from .grammar.matchers import GrammarMatcher
from .processors import ProcessorStack
from .randomness import DRAFT, RowUniforms


if TYPE_CHECKING:
    from ..loop.rows import Rows


@dataclass(eq=False)
class DraftSampler:
    """What the rows of a loop draw draft tokens by: their processors, as far as known, grammars and random numbers."""

    rows: Rows | None
    uniforms: RowUniforms | None
    vocab_size: int

    def matchers(self, rows: list[int]) -> list[GrammarMatcher | None]:
        """The places of rows in their grammars, after all that was committed; `None` for rows without one."""
        if self.rows is None:
            return [None] * len(rows)
        return [group.matcher(index) for group, index in map(self.rows.at, rows)]

    def growing(self, rows: list[int], limits: list[int]) -> GrowingMasks | None:
        """Masks for drafts that grow level by level, to depths `limits`; `None` where no row needs some."""
        matchers = [matcher if limit > 0 else None for matcher, limit in zip(self.matchers(rows), limits)]
        return GrowingMasks(matchers, self.vocab_size) if any(matchers) else None

    def constrained(self, draft: DraftTree, rows: list[int]) -> DraftTree:
        """The drafts of rows as far as their grammars allow them, with the masks after all nodes."""
        matchers = self.matchers(rows)
        return constrained(draft, matchers) if any(matchers) else draft

    def numbers(self, rows: list[int], lengths: list[int], depth: int) -> torch.FloatTensor:
        """Random numbers `(R, depth)` that draw the drafts of rows with so many committed tokens."""
        return self.uniforms.keys(rows, [length - 1 for length in lengths]).for_nodes(depth, DRAFT)

    def scores_by(self, stack: ProcessorStack, logits: torch.Tensor, drafted: Any = ()) -> torch.Tensor:
        """As `scores`, by a stack that reads no tokens."""
        return stack.all_nodes(fit_width(logits, self.vocab_size))

    def scores(self, rows: list[int], logits: torch.Tensor, drafted: list[torch.LongTensor]) -> torch.Tensor:
        """Processed draft scores `(R, V)` in float32, from logits `(R, W)` after `drafted` tokens, each `(R,)`."""
        stack = self._stack(rows)
        if stack is not None and not stack.reads_tokens:
            return self.scores_by(stack, logits)
        logits = fit_width(logits, self.vocab_size)
        if logits.dim() > 2:
            # Of several positions at once the tokens in between are not known.
            stacks = [self.rows.group(row).draft_stack for row in rows]
            pairs = zip(stacks, logits.float())
            return torch.stack([scores if own.reads_tokens else own.all_nodes(scores) for own, scores in pairs])
        tail = torch.stack(drafted, dim=1) if drafted else logits.new_zeros((len(rows), 0), dtype=torch.long)
        texts = [torch.cat([text, new.to(text)]) for text, new in zip(map(self.rows.row, rows), tail)]
        if stack is not None:
            return stack.rows(texts, logits, [self.rows.at(row)[1] for row in rows])
        scores = [
            group.draft_stack.rows([text], logits[i : i + 1], [index])[0]
            for i, ((group, index), text) in enumerate(zip(map(self.rows.at, rows), texts))
        ]
        return torch.stack(scores)

    def reads_tokens(self, rows: list[int]) -> bool:
        """Whether the scores of these rows depend on the tokens before them."""
        return self.rows is not None and any(self.rows.group(row).draft_stack.reads_tokens for row in rows)

    def in_graphs(self, rows: list[int]) -> ProcessorStack | None:
        """The processors of all these rows, where they are the same and a graph can repeat them."""
        stack = self._stack(rows)
        return stack if stack is not None and stack.runs_in_graphs else None

    def _stack(self, rows: list[int]) -> ProcessorStack | None:
        return _NO_PROCESSORS if self.rows is None else self.rows.draft_stack(rows)


_NO_PROCESSORS = ProcessorStack(LogitsProcessorList())


def drawn(scores: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.LongTensor, torch.Tensor]:
    """Samples from `softmax(scores)` by numbers `(R,)`: tokens `(R,)`, and the distributions `(R, V)` sampled from."""
    probs = scores.softmax(-1)
    # Where nothing can be drawn (the processors forbid all that the draft knows, or half precision overflows) a token
    # is proposed nevertheless: rules that judge whole drafts ask for a distribution at every node.
    return sample_from_probs(probs, uniforms, proposes=True), probs


def fit_width(logits: torch.Tensor, width: int) -> torch.Tensor:
    """Logits `(..., W)` as `(..., width)`: what is missing gets no probability."""
    missing = width - logits.shape[-1]
    return logits[..., :width] if missing <= 0 else F.pad(logits, (0, missing), value=-torch.inf)
