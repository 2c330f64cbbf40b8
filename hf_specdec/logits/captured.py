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
from .randomness import CapturedUniforms, RowKeys
from .rules import StandardRule


@dataclass(frozen=True)
class CapturedJudge:
    """Judges drafts of one kind as [`Verifier`] does."""

    rule: StandardRule
    stack: ProcessorStack  # processors that run in graphs
    is_drawn: bool = False  # drafts come with the distributions that they were drawn from
    is_chain: bool = False  # drafts are chains; told of drawn ones alone, to which it matters
    keys: RowKeys | None = None  # of the rows that are judged now, for a rule that reads random numbers

    @classmethod
    def of(
        cls, rule: StandardRule, stack: ProcessorStack, draft: DraftTree, rows: list[int], positions: list[int]
    ) -> CapturedJudge:
        """The judge of drafts; rows and positions are those of [`Verifier.begin`]."""
        is_drawn = draft.probs is not None and rule.uniforms is not None
        keys = None if rule.stream is None else rule.stream.keys(rows, positions)
        return cls(rule, stack, is_drawn, is_drawn and draft.is_chain, keys)

    @property
    def settings(self) -> tuple[Any, ...] | None:
        """Whatever else a graph has built in; `None` where the target's best tokens decide."""
        is_plain = type(self.rule) is StandardRule and self.rule.uniforms is None and not self.stack
        return None if is_plain else (self.rule.signature, self.stack.signature)

    @property
    def may_fail(self) -> bool:
        """Tells whether scores may leave no token to choose."""
        return self.settings is not None

    def judge(self, draft: DraftTree, logits: torch.Tensor, keys: RowKeys) -> Acceptance:
        """Judges which nodes are accepted; a token that could not be drawn is -1.

        Args:
            draft (`DraftTree`): The drafts.
            logits (`torch.Tensor` of shape `(R, T, V)`): The target's.
            keys (`RowKeys`): Tensors of the graph.
        """
        needs_scores = self.rule.uniforms is not None or bool(self.stack)
        scores = self.stack.all_nodes(logits) if needs_scores else logits
        rule = self.rule.in_a_graph(None if self.keys is None else CapturedUniforms(keys))
        return rule.judge(draft, scores, [], [])
