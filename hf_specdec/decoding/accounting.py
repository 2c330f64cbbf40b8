"""Entries of a call in its statistics: what its cycles drafted and committed, and what ran as graphs."""

from __future__ import annotations

import torch

from ..drafts import DraftTree
from ..logits.verifier import Verdict
from ..metrics import CycleTrace, RowTrace, SpecDecodingStats
from ..protocol import Drafter, DraftStep
from .target import SlotModel


def count_cycle(
    stats: SpecDecodingStats, traces: list[list[CycleTrace]], draft: DraftTree, verdict: Verdict, rows: list[int]
) -> None:
    """Adds one cycle to the statistics, and its tokens to the traces.

    Args:
        stats (`SpecDecodingStats`): Those of the call.
        traces (`list[list[CycleTrace]]`): Of those who want to know the tokens, often none.
        draft (`DraftTree`), verdict (`Verdict`): What was drafted and committed.
        rows (`list[int]`): Numbers of the active rows.
    """
    drafted = draft.counts()
    counts = zip(drafted, draft.max_depths(), verdict.num_accepted, verdict.token_lists)
    for nodes, depth, accepted, committed in counts:
        stats.count(nodes, depth, accepted, len(committed))
    if not any(drafted):
        stats.count_without_drafts(draft.why_empty)
    if traces:
        drafts = draft.token_lists(), draft.parent_lists()
        traced = zip(rows, *drafts, verdict.num_accepted, verdict.token_lists)
        cycle = CycleTrace([RowTrace(row, list(t), list(p), n, list(c)) for row, t, p, n, c in traced])
        for trace in traces:
            trace.append(cycle)


def explain_empty(draft: DraftTree, step: DraftStep, generator: Drafter) -> None:
    """Notes in a draft why it is empty, where lengths are the reason."""
    if max(step.max_draft_tokens) == 0 < generator.num_speculative_tokens:
        draft.why_empty = "length_limit"
        return
    limit = generator.longest_row
    if limit is None or max(step.lengths) < limit[0]:
        return
    generator.note_longest_row()
    if min(step.lengths) >= limit[0]:
        draft.why_empty = "max_model_len"


def count_lookups(stats: SpecDecodingStats, generator: Drafter) -> None:
    """Copies what a retrieving method has looked up so far."""
    found = generator.lookups
    if found is not None:
        stats.num_lookups, stats.num_lookup_hits = found.num_rows, found.num_hits
        stats.cache_tokens, stats.cache_bytes = found.num_tokens, found.num_bytes


def count_graphs(stats: SpecDecodingStats, target: SlotModel, generator: Drafter) -> None:
    """Adds what ran as graphs in the call, and the memory of its device."""
    graphs, device = target.graphs, target.model.device
    if graphs is not None:
        stats.graphs = str(graphs)
        stats.num_graph_replays, stats.num_graph_captures = graphs.num_replays, graphs.num_captures
    drafts = generator.session.draft_graphs
    stats.draft_graphs = "; ".join(dict.fromkeys(map(str, drafts)))
    stats.num_draft_graph_replays = sum(graphs.num_replays for graphs in drafts)
    stats.num_draft_graph_captures = sum(graphs.num_captures for graphs in drafts)
    if device.type == "cuda":
        stats.peak_memory_bytes = torch.cuda.max_memory_allocated(device)
