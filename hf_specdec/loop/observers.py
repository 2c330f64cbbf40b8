"""Who watches a loop: statistics, streamers, listeners; traces and what is returned have files of their own.

The next forward depends on none of them. What needs the logits of a verification is done at once, before a graph
writes to them again; the rest waits on a GPU until the device is busy with the next forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..metrics import SpecDecodingStats, watch_acceptance
from ..metrics.listeners import CallProgress
from ..protocol import Prompt
from ..target.attention import describe_layers
from ..target.forward import SlotOutput
from ..target.model import SlotModel
from .cycle import Cycle
from .rows import Group, Rows


if TYPE_CHECKING:
    from ..candidate_generators.base import CandidateGenerator
    from ..settings import SpeculativeConfig


class Observer:
    """Watches a loop; does nothing by itself."""

    # Logits are read when the verdict is known, so no forward that writes to them may run before.
    reads_logits: bool = False
    # The tokens of drafts are read on the device, where the next draft may be written over them.
    reads_drafts: bool = False

    def begin(self, prompt: Prompt) -> None:
        """The target has read the prompts."""

    def see(self, cycle: Cycle) -> None:
        """A cycle is committed: at once. The first one is before the drafter reads the prompts."""

    def tell(self, cycle: Cycle) -> None:
        """A cycle has ended, and its seconds are counted: when the device is busy, without logits."""

    def leave(self, rows: list[int], indices: list[int]) -> list[int]:
        """Rows leave the batch, of `rows` those at `indices`; those returned keep their slots, behind the others."""
        return []

    def end(self) -> None:
        """The loop has ended, and not failed."""

    def close(self) -> None:
        """The loop has ended or failed."""


class Observers(list[Observer]):
    """All who watch a loop, and the committed cycle of which they are still to be told."""

    def __init__(self, observers: Iterable[Observer]):
        super().__init__(observers)
        self.wait: bool = False  # for the device to be busy with the next forward; then they are told
        self._seeing, self._told = self.of("see"), self.of("tell")
        self._untold: Cycle | None = None

    def of(self, event: str) -> list[Observer]:
        """Those that do something then."""
        return [one for one in self if getattr(type(one), event) is not getattr(Observer, event)]

    def see(self, cycle: Cycle) -> None:
        for observer in self._seeing:
            observer.see(cycle)
        self._untold = cycle
        if self.wait:
            # Without memory that graphs write again.
            self._untold = replace(cycle, draft=cycle.draft.without_probs(), output=SlotOutput(torch.empty(0)))

    def tell(self) -> None:
        """Tells of the last cycle, once."""
        cycle, self._untold = self._untold, None
        if cycle is not None:
            for observer in self._told:
                observer.tell(cycle)


@dataclass(eq=False)
class Statistics(Observer):
    """Counts drafts and tokens, for each of many requests too, and at the end what ran as graphs.

    Users of `watched` settings are told of drafts that are hardly ever accepted, call after call.
    """

    stats: SpecDecodingStats
    rows: Rows
    drafter: CandidateGenerator
    target: SlotModel
    watched: SpeculativeConfig | None

    def __post_init__(self) -> None:
        self._lookups, self._longest_row = self.drafter.lookups, self.drafter.longest_row

    def tell(self, cycle: Cycle) -> None:
        stats, draft, verdict = self.stats, cycle.draft, cycle.verdict
        if cycle.is_first:  # those of a request count its first token when it begins
            stats.num_committed_tokens += len(cycle.rows)
            return
        # Where rows are too long for drafts the drafter does not say why they have none.
        if max(cycle.rooms) == 0 < self.drafter.num_speculative_tokens:
            draft.why_empty = "length_limit"
        elif self._longest_row is not None and max(cycle.positions) >= self._longest_row[0]:
            self.drafter.note_longest_row()
            if min(cycle.positions) >= self._longest_row[0]:
                draft.why_empty = "max_model_len"
        nodes = draft.counts()
        counts = zip(nodes, draft.max_depths(), verdict.num_accepted, verdict.counts)
        for number, counts_of_row in zip(cycle.rows, counts):
            stats.count(*counts_of_row)
            place = self.rows.places[number]
            if place is not None and place[0].stats is not None:
                place[0].stats.count(*counts_of_row)
        if not any(nodes):
            stats.count_without_drafts(draft.why_empty)
        if (lookups := self._lookups) is not None:
            stats.num_lookups, stats.num_lookup_hits = lookups.num_rows, lookups.num_hits
            stats.cache_tokens, stats.cache_bytes = lookups.num_tokens, lookups.num_bytes

    def end(self) -> None:
        stats, graphs, drafts = self.stats, self.target.graphs, self.drafter.session.draft_graphs
        stats.attention = describe_layers(self.target.attention_layers)
        if graphs is not None:
            stats.graphs = str(graphs)
            stats.num_graph_replays, stats.num_graph_captures = graphs.num_replays, graphs.num_captures
        stats.draft_graphs = "; ".join(dict.fromkeys(map(str, drafts)))
        stats.num_draft_graph_replays = sum(graphs.num_replays for graphs in drafts)
        stats.num_draft_graph_captures = sum(graphs.num_captures for graphs in drafts)
        device = self.target.model.device
        if device.type == "cuda":
            stats.peak_memory_bytes = torch.cuda.max_memory_allocated(device)
        if self.watched is not None:
            watch_acceptance(self.target.model, self.watched.compute_hash(), stats)


class ColumnStreamer(Observer):
    """Hands a user's streamer every column that all rows have reached or ended before, one token a row at a time."""

    def __init__(self, streamer: Any, group: Group):
        self._streamer, self._group = streamer, group
        self._num_shown: int = group.texts.prompt_length

    def begin(self, prompt: Prompt) -> None:
        self._streamer.put(self._group.request.input_ids.cpu())

    def see(self, cycle: Cycle) -> None:
        if cycle.is_first:
            self._show()

    def tell(self, cycle: Cycle) -> None:
        self._show()

    def end(self) -> None:
        self._show()
        self._streamer.end()

    def _show(self) -> None:
        settled = self._group.texts.num_settled
        for column in self._group.texts.columns(settled, self._num_shown).unbind(1):
            self._streamer.put(column.clone())
        self._num_shown = max(self._num_shown, settled)


class Listeners(Observer):
    """Tells those who listen to the calls of this process."""

    def __init__(self, progress: CallProgress):
        self._progress = progress

    def tell(self, cycle: Cycle) -> None:
        if cycle.is_first:
            self._progress.end_prefill()
        else:
            self._progress.end_cycle()

    def close(self) -> None:
        self._progress.end_call()
