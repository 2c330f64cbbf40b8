"""Traces of a call: the tokens of its cycles, and the target's opinion of each.

Scores stay on the device until the call ends, so that no cycle waits for them.

Shapes: R active rows, N draft nodes, T = N + 1 verified nodes, M committed tokens, S scored tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from math import isnan

import torch

from ..metrics import CallTrace, CycleTrace, RowTrace, TokenScore
from ..protocol import Prompt
from .cycle import Cycle
from .observers import Observer


class Tracer(Observer):
    """Keeps the tokens of a call for those who want to know them, in their `traces`.

    `method` makes the drafts that do not say who made them.
    """

    reads_logits = reads_drafts = True

    def __init__(self, traces: list[CallTrace], method: str, is_joint: bool):
        self._traces, self._method, self._is_joint = traces, method, is_joint
        # Scores `(R, N + M, 4)` of draft nodes, then of committed tokens, as `token_scores` says, with the probability
        # with which each was drafted, NaN where it was not sampled. Of cycles that are still to be told; then of those
        # that have been.
        self._scored: deque[torch.FloatTensor] = deque()
        self._unread: list[tuple[CycleTrace, int, torch.FloatTensor]] = []

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
        self._scored.append(torch.cat([scores, sampled], dim=2))

    def tell(self, cycle: Cycle) -> None:
        draft, verdict = cycle.draft, cycle.verdict
        drafters = draft.drafters or [self._method] * len(cycle.rows)
        table = zip(
            cycle.rows, draft.token_lists(), draft.parent_lists(), verdict.num_accepted, verdict.token_lists, drafters
        )
        traced = CycleTrace(
            [RowTrace(row, list(t), list(p), n, list(c), drafter) for row, t, p, n, c, drafter in table],
            "" if any(draft.counts()) else draft.why_empty,
        )
        self._unread.append((traced, draft.size, self._scored.popleft()))
        for trace in self._traces:
            if trace.first is None:
                trace.first = traced
            else:
                trace.cycles.append(traced)

    def end(self) -> None:
        """Writes the scores into what was added. Waits for the device, once."""
        if not self._unread:
            return
        values = iter(torch.cat([scores.flatten() for *_, scores in self._unread]).tolist())
        for cycle, num_nodes, scores in self._unread:
            for row in cycle.rows:
                table = [[next(values) for _ in range(4)] for _ in range(scores.shape[1])]
                opinions = [TokenScore(prob, int(rank), margin) for prob, rank, margin, _ in table]
                sampled = [line[3] for line in table[: len(row.draft_tokens)]]
                row.draft_scores = opinions[: len(row.draft_tokens)]
                row.draft_probs = [] if any(map(isnan, sampled)) else sampled
                row.committed_scores = opinions[num_nodes:][: len(row.committed_tokens)]


def token_scores(logits: torch.Tensor, nodes: torch.LongTensor, tokens: torch.LongTensor) -> torch.FloatTensor:
    """The target's probability of tokens, their ranks from 1 on, and how far each is above the best other token.

    Logits `(R, T, V)` are those before any processor; tokens `(R, S)` follow verified nodes `(R, S)`. Returns
    `(R, S, 3)`.
    """
    return torch.stack([_scores_of_row(*row) for row in zip(logits, nodes, tokens)])


def _scores_of_row(logits: torch.Tensor, nodes: torch.LongTensor, tokens: torch.LongTensor) -> torch.FloatTensor:
    if logits.device.type == "cpu":
        # Most nodes of a tree are leaves that nothing follows. To know which, a host would wait for its GPU.
        used, nodes = nodes.unique(return_inverse=True)
        logits = logits[used]
    logits = logits.float()
    chosen = logits[nodes, tokens]
    best = logits.topk(min(2, logits.shape[-1]), dim=-1)
    values, winners = best.values[nodes], best.indices[nodes, 0]
    best_other = torch.where(tokens == winners, values[:, -1], values[:, 0])
    # Token by token, which on a CPU takes an eighth of the time of all together.
    ranks = torch.stack([1 + (logits.index_select(0, node) > of).sum() for node, of in zip(nodes.split(1), chosen)])
    return torch.stack([(chosen - logits.logsumexp(-1)[nodes]).exp(), ranks.float(), chosen - best_other], dim=-1)
