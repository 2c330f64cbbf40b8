"""Judging of drafts inside of the graph that verifies them, where nothing of the host is asked for.

Shapes: R active rows, N draft nodes, T = N + 1 verified nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..drafts import DraftTree
from ..kernels.acceptance import Acceptance
from .processors import ProcessorStack
from .randomness import RowKeys
from .rules import StandardRule


@dataclass(frozen=True)
class CapturedJudge:
    """Judges drafts of one kind as [`Verifier`] does."""

    rule: StandardRule
    stack: ProcessorStack  # processors that run in graphs
    is_drawn: bool  # drafts come with the distributions that they were drawn from
    is_chain: bool  # drafts are chains; told of drawn ones alone, to which it matters
    keys: RowKeys | None  # of the rows that are judged now, for a rule that reads random numbers

    @property
    def settings(self) -> tuple[Any, ...] | None:
        """Whatever else a graph has built in; `None` where the target's best tokens decide."""
        is_plain = type(self.rule) is StandardRule and not self.rule.samples and not self.stack
        return None if is_plain else (self.rule.signature, self.stack.signature)

    @property
    def may_fail(self) -> bool:
        """Tells whether scores may leave no token to choose."""
        return self.settings is not None

    def judge(self, draft: DraftTree, logits: torch.Tensor, keys: RowKeys) -> Acceptance:
        """Judges drafts by logits `(R, T, V)`, with keys of the graph; a token that could not be drawn is -1."""
        needs_scores = self.rule.samples or bool(self.stack)
        return self.rule.judge(draft, self.stack.all_nodes(logits) if needs_scores else logits, keys)
