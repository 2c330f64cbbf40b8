"""Reports of a call while it runs: its statistics, traces of its cycles, columns for its streamer.

The next forward depends on none of them, so on a GPU they wait until the device is busy with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..drafts import DraftTree
from ..logits.verifier import Verdict
from ..metrics import SpecDecodingStats
from ..protocol import DraftStep, Lookups
from ..target.model import SlotModel
from .sequences import Sequences, StopRules
from .tracing import Tracer


if TYPE_CHECKING:
    from ..candidate_generators.base import CandidateGenerator


class DeferredWork:
    """Work that is put off until the device is busy with the next forward, in the order in which it came.

    Args:
        device (`torch.device`): Where forwards run.

    Attributes:
        is_async (`bool`): It is put off; on a CPU, which has nothing to overlap with, it is done at once.
    """

    def __init__(self, device: torch.device):
        self.is_async: bool = is_async(device)
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, work: Callable[[], None]) -> None:
        """Puts work off, or does it at once where forwards are not asynchronous."""
        if self.is_async:
            self._waiting.append(work)
        else:
            work()

    def flush(self) -> None:
        """Does what has been put off."""
        while self._waiting:
            self._waiting.popleft()()


def is_async(device: torch.device) -> bool:
    """Tells whether a forward goes on after its call has returned."""
    return device.type != "cpu"


class ColumnStreamer:
    """Hands over every column that all rows have reached or ended before, one token a row at a time.

    Args:
        streamer (`BaseStreamer`, *optional*): The user's.
        sequences (`Sequences`), stop (`StopRules`): Tokens of the call, and where its rows end.
    """

    def __init__(self, streamer: Any, sequences: Sequences, stop: StopRules):
        self._streamer, self._sequences, self._stop = streamer, sequences, stop
        self._num_columns = 0

    def put_prompts(self, input_ids: torch.LongTensor) -> None:
        if self._streamer is not None:
            self._streamer.put(input_ids.cpu())

    def put_columns(self) -> None:
        """Hands over the columns that have become ready."""
        if self._streamer is None:
            return
        ready = self._stop.num_settled - self._sequences.prompt_length
        for column in self._sequences.new_columns(self._num_columns, ready).unbind(1):
            self._streamer.put(column.clone())
        self._num_columns = max(self._num_columns, ready)

    def end(self) -> None:
        self.put_columns()
        if self._streamer is not None:
            self._streamer.end()


def count_cycle(
    stats: SpecDecodingStats, tracer: Tracer | None, draft: DraftTree, verdict: Verdict, rows: list[int]
) -> None:
    """Adds one cycle to the statistics, and its tokens to the traces.

    Args:
        stats (`SpecDecodingStats`): Those of the call.
        tracer (`Tracer`, *optional*): Keeps the tokens, where someone wants to know them.
        draft (`DraftTree`), verdict (`Verdict`): What was drafted and committed.
        rows (`list[int]`): Numbers of the active rows.
    """
    drafted = draft.counts()
    counts = zip(drafted, draft.max_depths(), verdict.num_accepted, verdict.token_lists)
    for nodes, depth, accepted, committed in counts:
        stats.count(nodes, depth, accepted, len(committed))
    if not any(drafted):
        stats.count_without_drafts(draft.why_empty)
    if tracer is not None:
        tracer.add_cycle(draft, verdict, rows)


def explain_empty(draft: DraftTree, step: DraftStep, generator: CandidateGenerator) -> None:
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


def count_lookups(stats: SpecDecodingStats, lookups: Lookups) -> None:
    """Copies what a retrieving method has looked up so far."""
    stats.num_lookups, stats.num_lookup_hits = lookups.num_rows, lookups.num_hits
    stats.cache_tokens, stats.cache_bytes = lookups.num_tokens, lookups.num_bytes


def count_graphs(stats: SpecDecodingStats, target: SlotModel, generator: CandidateGenerator) -> None:
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
