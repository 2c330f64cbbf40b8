"""Masks for drafts while they grow, so that no node is spent on what the grammar forbids.

Shapes: R rows, F nodes of a level, V vocabulary of the target, U that of a draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .matchers import GrammarMatcher


class GrowingMasks:
    """Masks after the nodes of a draft whose children are chosen next; at first, after the anchors.

    Args:
        matchers (`Sequence[GrammarMatcher]` of length R): The rows' places; `None` for rows without a grammar.
        vocab_size (`int`): V.
    """

    def __init__(self, matchers: Sequence[GrammarMatcher | None], vocab_size: int):
        self._matchers = matchers
        # Processors of the call move the same matchers.
        self._begins = [None if matcher is None else list(matcher.tokens) for matcher in matchers]
        self._vocab_size = vocab_size
        self._paths: list[list[tuple[int, ...]]] = [[()] for _ in matchers]
        self._forbidden: np.ndarray | None = None  # (R, F, V), of this level

    @classmethod
    def of(
        cls, matchers: Sequence[GrammarMatcher | None], limits: Sequence[int], vocab_size: int
    ) -> GrowingMasks | None:
        """Those of rows whose drafts have a largest depth; `None` where no row with room for a draft has a grammar."""
        needed = [matcher if limit > 0 else None for matcher, limit in zip(matchers, limits)]
        return cls(needed, vocab_size) if any(needed) else None

    def apply(self, logits: torch.Tensor, ids: torch.LongTensor | None = None) -> torch.Tensor:
        """Logits `(R, F, U)` with -inf for tokens that may not follow their nodes.

        Args:
            logits (`torch.Tensor` of shape `(R, F, U)`): After the nodes.
            ids (`torch.LongTensor` of shape `(U,)`, *optional*): The target's id of each of the draft's, if others.
        """
        if self._forbidden is None:
            self._forbidden = np.stack([self._row(*row) for row in zip(self._matchers, self._begins, self._paths)])
        forbidden = torch.from_numpy(self._forbidden)
        if ids is None:
            width = min(logits.shape[-1], self._vocab_size)
            forbidden = torch.nn.functional.pad(forbidden[..., :width], (0, logits.shape[-1] - width), value=True)
        else:
            forbidden = forbidden.index_select(2, ids.cpu())
        return logits.masked_fill(forbidden.to(logits.device), -torch.inf)

    def _row(
        self, matcher: GrammarMatcher | None, begin: list[int] | None, paths: list[tuple[int, ...]]
    ) -> np.ndarray:
        """Forbidden tokens `(F, V)` after the nodes of a row."""
        if matcher is None or begin is None:
            return np.zeros((len(paths), self._vocab_size), dtype=bool)
        matcher.move_to(begin)
        forbidden = ~matcher.masks_after(paths)
        if forbidden.shape[1] * 32 < self._vocab_size:
            forbidden = np.pad(
                forbidden, ((0, 0), (0, -(-self._vocab_size // 32) - forbidden.shape[1])), constant_values=-1
            )
        return np.unpackbits(forbidden.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little").view(bool)

    def follow(self, tokens: torch.LongTensor, parents: torch.LongTensor | slice) -> None:
        """Goes on to the next level.

        Args:
            tokens (`torch.LongTensor` of shape `(R, F)`): Its nodes, in the target's ids.
            parents (`torch.LongTensor` of shape `(F,)` or `(R, F)`, or `slice`): Their parents among the nodes of the
                level before.
        """
        if isinstance(parents, slice):
            parents = torch.arange(len(self._paths[0]), device="cpu")[parents]
        token_lists, parent_lists = tokens.tolist(), parents.expand(tokens.shape).tolist()
        self._paths = [
            [(*paths[parent], token) for token, parent in zip(row, above)]
            for paths, row, above in zip(self._paths, token_lists, parent_lists)
        ]
        self._forbidden = None
