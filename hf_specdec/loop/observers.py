"""Who watches a loop: statistics, streamers, traces, listeners, what is returned for each token.

The next forward depends on none of them. What needs the logits of a verification is done at once, before a graph
writes to them again; the rest waits on a GPU until the device is busy with the next forward.

Shapes: R active rows, B rows of the call, N draft nodes, T = N + 1 verified nodes, M committed tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..drafts import DraftTree
from ..metrics import SpecDecodingStats, watch_acceptance
from ..metrics.listeners import CallProgress
from ..protocol import DraftStep, Prompt
from ..target.attention import describe_layers
from ..target.forward import SlotOutput
from ..target.model import SlotModel
from ..transfers import take_nodes
from .recorder import StepRecorder
from .rows import Group
from .verdict import Verdict


if TYPE_CHECKING:
    from transformers import GenerationConfig

    from ..candidate_generators.base import CandidateGenerator
    from ..settings import SpeculativeConfig


@dataclass(frozen=True)
class Cycle:
    """One verification: its rows, what was drafted, what the target made of it, and what is committed.

    A provisional one is compared with plain generation before anybody is shown its tokens.
    """

    rows: list[int]
    draft: DraftTree
    output: SlotOutput
    verdict: Verdict
    is_provisional: bool = False

    def without_logits(self) -> Cycle:
        """What can be told later, without memory that graphs write again."""
        return Cycle(self.rows, self.draft.without_probs(), _NO_OUTPUT, self.verdict)


_NO_OUTPUT = SlotOutput(torch.empty(0))


class Observer:
    """Watches a loop; does nothing by itself."""

    # Logits are read when the verdict is known, so no forward that writes to them may run before.
    reads_logits: bool = False
    # The tokens of drafts are read, also where the host need not know them.
    reads_drafts: bool = False

    def begin(self, prompt: Prompt) -> None:
        """The target has read the prompts."""

    def leave(self, rows: list[int], indices: list[int]) -> list[int]:
        """Rows leave the batch, of `rows` those at `indices`; those returned keep their slots, behind the others."""
        return []

    def see_first(self, cycle: Cycle) -> None:
        """The first token of each row is committed, before the drafter reads the prompts."""
        self.see(cycle)
        self.tell(cycle.without_logits())

    def end_prefill(self) -> None:
        """The drafter has read the prompts."""

    def see(self, cycle: Cycle) -> None:
        """A cycle is committed: at once."""

    def tell(self, cycle: Cycle) -> None:
        """A cycle is committed: when the device is busy, without logits."""

    def end_cycle(self) -> None:
        """A cycle has ended, and its seconds are counted: when the device is busy."""

    def read(self) -> None:
        """Reads what lies on the device still. Rows have ended, or the loop."""

    def end(self) -> None:
        """The loop has ended, and not failed."""

    def close(self) -> None:
        """The loop has ended or failed."""


class Statistics(Observer):
    """Counts drafts and tokens, and at the end what ran as graphs."""

    def __init__(self, stats: SpecDecodingStats, drafter: CandidateGenerator, target: SlotModel):
        self.stats: SpecDecodingStats = stats
        self._drafter, self._target = drafter, target

    def see_first(self, cycle: Cycle) -> None:
        self.stats.num_committed_tokens += len(cycle.rows)

    def tell(self, cycle: Cycle) -> None:
        draft, verdict = cycle.draft, cycle.verdict
        nodes = draft.counts()
        for counts in zip(nodes, draft.max_depths(), verdict.num_accepted, verdict.counts):
            self.stats.count(*counts)
        if not any(nodes):
            self.stats.count_without_drafts(draft.why_empty)

    def see(self, cycle: Cycle) -> None:
        self._count_lookups()

    def _count_lookups(self) -> None:
        if (lookups := self._drafter.lookups) is not None:
            self.stats.num_lookups, self.stats.num_lookup_hits = lookups.num_rows, lookups.num_hits
            self.stats.cache_tokens, self.stats.cache_bytes = lookups.num_tokens, lookups.num_bytes

    def end(self) -> None:
        stats, graphs, drafts = self.stats, self._target.graphs, self._drafter.session.draft_graphs
        self._count_lookups()
        stats.attention = describe_layers(self._target.attention_layers)
        if graphs is not None:
            stats.graphs = str(graphs)
            stats.num_graph_replays, stats.num_graph_captures = graphs.num_replays, graphs.num_captures
        stats.draft_graphs = "; ".join(dict.fromkeys(map(str, drafts)))
        stats.num_draft_graph_replays = sum(graphs.num_replays for graphs in drafts)
        stats.num_draft_graph_captures = sum(graphs.num_captures for graphs in drafts)
        device = self._target.model.device
        if device.type == "cuda":
            stats.peak_memory_bytes = torch.cuda.max_memory_allocated(device)


class ColumnStreamer(Observer):
    """Hands a user's streamer every column that all rows have reached or ended before, one token a row at a time."""

    def __init__(self, streamer: Any, group: Group):
        self._streamer, self._group = streamer, group
        self._num_columns = 0

    def begin(self, prompt: Prompt) -> None:
        self._streamer.put(self._group.request.input_ids.cpu())

    def see_first(self, cycle: Cycle) -> None:
        if not cycle.is_provisional:
            self.tell(cycle)

    def tell(self, cycle: Cycle | None = None) -> None:
        sequences = self._group.sequences
        ready = self._group.stop.num_settled - sequences.prompt_length
        for column in sequences.new_columns(self._num_columns, ready).unbind(1):
            self._streamer.put(column.clone())
        self._num_columns = max(self._num_columns, ready)

    def end(self) -> None:
        self.tell()
        self._streamer.end()


class Listeners(Observer):
    """Tells those who listen to the calls of this process."""

    def __init__(self, progress: CallProgress):
        self._progress = progress
        self._has_ended = False

    def end_prefill(self) -> None:
        self._progress.end_prefill()

    def end_cycle(self) -> None:
        self._progress.end_cycle()

    def end(self) -> None:
        self.close()

    def close(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._progress.end_call()


class AcceptanceWatch(Observer):
    """Tells users of drafts that are hardly ever accepted, call after call with these settings."""

    def __init__(self, stats: SpecDecodingStats, model: torch.nn.Module, config: SpeculativeConfig):
        self._stats, self._model, self._config = stats, model, config

    def end(self) -> None:
        watch_acceptance(self._model, self._config.compute_hash(), self._stats)


class OutputRecorder(Observer):
    """The optional fields of what `generate()` returns, of B rows."""

    def __init__(self, batch_size: int, config: GenerationConfig):
        wants_dict = config.return_dict_in_generate
        # Scores come from the verifier, which has them when the stopping rules see a token.
        self.scores: StepRecorder | None = StepRecorder(batch_size) if wants_dict and config.output_scores else None
        self.logits: StepRecorder | None = StepRecorder(batch_size) if wants_dict and config.output_logits else None
        self.wants_states: bool = bool(wants_dict and config.output_hidden_states)
        self.prompt_states: tuple[Any, ...] | None = None
        self.reads_logits: bool = self.wants_states or self.scores is not None or self.logits is not None
        self._batch_size = batch_size
        self._states: list[StepRecorder] = []

    def see(self, cycle: Cycle) -> None:
        path, counts = cycle.verdict.path, cycle.verdict.counts
        if self.logits is not None:
            self.logits.add(cycle.rows, take_nodes(cycle.output.logits, path).float(), counts)
        if not self.wants_states:
            return
        all_states = cycle.output.all_hidden_states or ()
        if self.prompt_states is None:
            # The first token comes from the prompt's states, which are returned whole.
            self.prompt_states = all_states
            self._states = [StepRecorder(self._batch_size) for _ in all_states]
            return
        for recorder, states in zip(self._states, all_states):
            recorder.add(cycle.rows, take_nodes(states, path), counts)

    def cut(self, lengths: list[int]) -> None:
        """Drops what goes beyond the tokens that each row has generated."""
        for recorder in filter(None, (self.scores, self.logits)):
            recorder.cut(lengths)
        for recorder in self._states:
            recorder.cut([length - 1 for length in lengths])

    def hidden_states(self) -> tuple[Any, ...] | None:
        """Tuples over layers, one for each generated token, `(B, P, H)` for the first one and `(B, 1, H)` after it."""
        if not self.wants_states:
            return None
        layers = [recorder.steps() for recorder in self._states]
        later = [tuple(state[:, None] for state in step) for step in zip(*layers)]
        return (self.prompt_states, *later)


def explain_empty(draft: DraftTree, step: DraftStep, drafter: CandidateGenerator) -> None:
    """Notes in a draft why it is empty, where lengths are the reason."""
    if max(step.max_draft_tokens) == 0 < drafter.num_speculative_tokens:
        draft.why_empty = "length_limit"
        return
    limit = drafter.longest_row
    if limit is None or max(step.lengths) < limit[0]:
        return
    drafter.note_longest_row()
    if min(step.lengths) >= limit[0]:
        draft.why_empty = "max_model_len"
