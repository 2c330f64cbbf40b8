"""Traces of a call: the tokens of its cycles, and the target's opinion of each.

Scores stay on the device until the call ends, so that no cycle waits for them.

Shapes: R active rows, N draft nodes, T = N + 1 verified nodes, M committed tokens, S scored tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import isnan
from typing import NamedTuple

import torch

from ..metrics import CallTrace, CycleTrace, RowTrace, TokenScore
from ..protocol import Prompt
from .observers import Cycle, Observer


class Tracer(Observer):
    """Keeps the tokens of a call for those who want to know them, in their `traces`.

    `method` makes the drafts that do not say who made them.
    """

    reads_logits = reads_drafts = True

    def __init__(self, traces: list[CallTrace], method: str, is_joint: bool):
        self._traces, self._method, self._is_joint = traces, method, is_joint
        # Of verifications whose tokens are still to be added; then of those whose tokens have been.
        self._scored: deque[_Scores] = deque()
        self._unread: list[tuple[CycleTrace, _Scores]] = []

    def begin(self, prompt: Prompt) -> None:
        for trace in self._traces:
            trace.prompts = [list(tokens) for tokens in prompt.token_lists]
            trace.is_joint = self._is_joint

    def see(self, cycle: Cycle) -> None:
        """Scores the tokens of a verification, before its logits are overwritten. Does not wait for the device."""
        draft, path, logits = cycle.draft, cycle.verdict.path, cycle.output.logits
        drafted = draft.tokens.clamp(min=0)
        parents = draft.topology.parents[..., 1:].expand_as(drafted)
        nodes = torch.cat([parents, path.to(drafted.device)], dim=1)
        tokens = torch.cat([drafted, cycle.verdict.tokens.to(drafted.device)], dim=1)
        scores = token_scores(logits, nodes.to(logits.device), tokens.to(logits.device))
        sampled = torch.full_like(scores[..., :1], torch.nan)
        if draft.probs is not None:
            sampled[:, : draft.size] = draft.probs.gather(2, drafted[..., None]).to(scores)
        self._scored.append(_Scores(torch.cat([scores, sampled], dim=2), draft.size))

    def tell(self, cycle: Cycle) -> None:
        """Adds the tokens of the next verification among those that were scored; the first one is the prefill's."""
        draft, verdict = cycle.draft, cycle.verdict
        drafters = draft.drafters or [self._method] * len(cycle.rows)
        table = zip(
            cycle.rows, draft.token_lists(), draft.parent_lists(), verdict.num_accepted, verdict.token_lists, drafters
        )
        traced = CycleTrace(
            [RowTrace(row, list(t), list(p), n, list(c), drafter) for row, t, p, n, c, drafter in table],
            "" if any(draft.counts()) else draft.why_empty,
        )
        self._unread.append((traced, self._scored.popleft()))
        for trace in self._traces:
            if trace.first is None:
                trace.first = traced
            else:
                trace.cycles.append(traced)

    def read(self) -> None:
        """Writes the scores into what was added. Waits for the device, once."""
        if not self._unread:
            return
        values = iter(torch.cat([scores.values.flatten() for _, scores in self._unread]).tolist())
        for cycle, scores in self._unread:
            for row in cycle.rows:
                _fill(row, [_next_score(values) for _ in range(scores.values.shape[1])], scores.num_drafted)
        self._unread = []


class _Scores(NamedTuple):
    """Scores of a verification.

    Attributes:
        values (`torch.FloatTensor` of shape `(R, N + M, 4)`): Those of `token_scores` and the probability with which
            the token was drafted, NaN where it was not sampled: of draft nodes, then of committed tokens.
        num_drafted (`int`): N.
    """

    values: torch.FloatTensor
    num_drafted: int


def _next_score(values: Iterator[float]) -> tuple[TokenScore, float]:
    """The target's opinion of a token, and the probability with which it was drafted."""
    prob, rank, margin, sampled = (next(values) for _ in range(4))
    return TokenScore(prob, int(rank), margin), sampled


def _fill(row: RowTrace, scores: list[tuple[TokenScore, float]], num_drafted: int) -> None:
    """Scores of a row: those of its drafted nodes, padding, those of its committed tokens, padding."""
    drafted = scores[: len(row.draft_tokens)]
    row.draft_scores = [score for score, _ in drafted]
    row.draft_probs = [] if any(isnan(sampled) for _, sampled in drafted) else [sampled for _, sampled in drafted]
    row.committed_scores = [score for score, _ in scores[num_drafted:][: len(row.committed_tokens)]]


def token_scores(logits: torch.Tensor, nodes: torch.LongTensor, tokens: torch.LongTensor) -> torch.FloatTensor:
    """The target's probability of tokens, their ranks from 1 on, and how far each is above the best other token.

    Args:
        logits (`torch.Tensor` of shape `(R, T, V)`): After each verified node, before any logits processor.
        nodes (`torch.LongTensor` of shape `(R, S)`): The verified node that each token follows.
        tokens (`torch.LongTensor` of shape `(R, S)`): The tokens.

    Returns:
        `torch.FloatTensor` of shape `(R, S, 3)`: Probability, rank, and difference of logits.
    """
    return torch.stack([_scores_of_row(*row) for row in zip(logits, nodes, tokens)])


def _scores_of_row(logits: torch.Tensor, nodes: torch.LongTensor, tokens: torch.LongTensor) -> torch.FloatTensor:
    if logits.device.type == "cpu":
        # Most nodes of a tree are leaves that nothing follows. To know which, a host would wait for its GPU.
        used, nodes = nodes.unique(return_inverse=True)
        logits = logits[used]
    logits = logits.float()
    own = logits[nodes, tokens]
    best = logits.topk(min(2, logits.shape[-1]), dim=-1)
    values, winners = best.values[nodes], best.indices[nodes, 0]
    best_other = torch.where(tokens == winners, values[:, -1], values[:, 0])
    # Token by token, which on a CPU takes an eighth of the time of all together.
    ranks = torch.stack([1 + (logits.index_select(0, node) > of).sum() for node, of in zip(nodes.split(1), own)])
    return torch.stack([(own - logits.logsumexp(-1)[nodes]).exp(), ranks.float(), own - best_other], dim=-1)
