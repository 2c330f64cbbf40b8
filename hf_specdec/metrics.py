"""Statistics of speculative decoding: of one call, and of the calls inside a `with record()` block."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field


# Acceptance rules that keep the target's distribution.
LOSSLESS_RULES = ("standard", "block")


@dataclass
class SpecDecodingStats:
    """What one `generate()` call drafted, accepted and spent.

    Attributes:
        method (`str`): Name of the method.
        rejection_sample_method (`str`): The acceptance rule that was applied: "standard" also where "block" or
            "typical" was asked for and the target is greedy, or "block" and the method draws nothing.
        batch_size (`int`): Rows of the call.
        num_drafts (`int`): Non-empty drafts verified, one per row and cycle.
        num_draft_tokens (`int`): Tokens in them.
        num_accepted_tokens (`int`): Tokens of them that were committed.
        num_accepted_tokens_per_pos (`list[int]`): Of these, how many at depth 1, 2, ... of a draft.
        num_reached_tokens (`int`): Draft tokens that were compared at all: the accepted ones, and where a draft was
            left before its end, the one after them.
        num_committed_tokens (`int`): Tokens generated, those without a draft included.
        num_row_cycles (`int`): Verifications, counted per row: a forward over 4 active rows counts 4.
        num_target_forwards (`int`): Forwards of the target model, the prefill included.
        draft_seconds, verify_seconds, prefill_seconds, total_seconds (`float`): Wall-clock time. Verification is the
            target's forward, acceptance and stop rules.
        attention (`str`): What computed the attention of the last verification: "tree kernel" (of Triton, on a GPU),
            "masked", or how many layers each and why.
        graphs (`str`): Whether verifications ran as CUDA graphs: "on", or "off" and why.
        num_graph_replays (`int`): Verifications that did.
        num_graph_captures (`int`): Graphs that were captured for it in this call, rather than in earlier ones.
        peak_memory_bytes (`int`): Most memory of the target's GPU that torch has had in use, since the process began
            or its peak statistics were reset. 0 on a CPU.
        notes (`list[str]`): What was switched off or limited in this call, and why; what a rule made of the text.
    """

    method: str = ""
    rejection_sample_method: str = "standard"
    batch_size: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_reached_tokens: int = 0
    num_committed_tokens: int = 0
    num_row_cycles: int = 0
    num_target_forwards: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    prefill_seconds: float = 0.0
    total_seconds: float = 0.0
    attention: str = "masked"
    graphs: str = "off: not on a CUDA device"
    num_graph_replays: int = 0
    num_graph_captures: int = 0
    peak_memory_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def other_seconds(self) -> float:
        """Seconds outside of prefill, drafting and verification: bookkeeping and streaming."""
        return self.total_seconds - self.prefill_seconds - self.draft_seconds - self.verify_seconds

    @property
    def is_lossless(self) -> bool:
        """Whether the text has the target's distribution."""
        return self.rejection_sample_method in LOSSLESS_RULES

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens among those that were reached. 0 without drafts.

        An estimate of `sum_x min(p, q)` where tokens are judged one after the other, by the rule "standard".
        """
        return _ratio(self.num_accepted_tokens, self.num_reached_tokens)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted draft tokens among all drafted ones. 0 without drafts."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per verification of a row: accepted ones and one more, cut where a row ends.

        The first token of each row comes from the prefill and is not counted. 1 without drafts.
        """
        if self.num_row_cycles == 0:
            return 1.0
        return (self.num_committed_tokens - self.batch_size) / self.num_row_cycles

    def count(self, num_nodes: int, max_depth: int, num_accepted: int, num_committed: int) -> None:
        """Adds one row's part of a cycle: nodes drafted and their depth, draft tokens accepted, tokens committed."""
        self.num_row_cycles += 1
        self.num_committed_tokens += num_committed
        if num_nodes == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_nodes
        self.num_accepted_tokens += num_accepted
        self.num_reached_tokens += min(num_accepted + 1, max_depth)
        per_position = self.num_accepted_tokens_per_pos
        per_position.extend([0] * (max_depth - len(per_position)))
        for depth in range(num_accepted):
            per_position[depth] += 1

    def to_dict(self) -> dict:
        """All counts and rates as plain values, for JSON."""
        rates = ("acceptance_rate", "draft_acceptance_rate", "mean_acceptance_length", "other_seconds")
        return {**asdict(self), **{name: getattr(self, name) for name in ("is_lossless", *rates)}}

    def __str__(self) -> str:
        rule = "" if self.rejection_sample_method == "standard" else f", {self.rejection_sample_method} acceptance"
        notes = "".join(f"; {note}" for note in self.notes)
        return (
            f"SpecDecoding [{self.method}{rule}]: mean acceptance length {self.mean_acceptance_length:.2f}, "
            f"accepted {self.num_accepted_tokens} of {self.num_draft_tokens} draft tokens "
            f"({100 * self.draft_acceptance_rate:.1f} %), {self.num_committed_tokens} tokens in "
            f"{self.num_target_forwards} target forwards, {self.total_seconds:.2f} s "
            f"(draft {self.draft_seconds:.2f}, verify {self.verify_seconds:.2f}, other {self.other_seconds:.2f})"
            + notes
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@dataclass
class RowTrace:
    """One row of one cycle, as plain lists and ints.

    Attributes:
        row (`int`): Row of the call.
        draft_tokens (`list[int]`): The drafted nodes' tokens.
        parents (`list[int]`): Their parents, -1 for a child of the anchor.
        num_accepted (`int`): Draft tokens that were committed.
        committed_tokens (`list[int]`): Tokens committed: the accepted ones and one more of the target's.
    """

    row: int
    draft_tokens: list[int]
    parents: list[int]
    num_accepted: int
    committed_tokens: list[int]


@dataclass
class CycleTrace:
    """One draft and its verification; `rows` are the rows that were active."""

    rows: list[RowTrace]


@dataclass
class CallRecord:
    """One `generate()` call. `cycles` is filled by `record(trace=True)`; its first entry follows the prefill."""

    stats: SpecDecodingStats
    cycles: list[CycleTrace] = field(default_factory=list)


@dataclass
class Record:
    """The calls made inside a `with record()` block, in the order in which they began."""

    trace: bool = False
    calls: list[CallRecord] = field(default_factory=list)


_open_records: list[Record] = []
_lock = threading.Lock()


@contextmanager
def record(trace: bool = False):
    """Collects the statistics of every speculative `generate()` that begins while the block is open.

    Calls made by pipelines and in other threads count too: a streaming application generates in a thread of its own.

    Args:
        trace (`bool`): Also keep every cycle: drafts, parents, accepted and committed tokens of each row.

    Example:

    ```python
    with hf_specdec.record(trace=True) as r:
        model.generate(**inputs, spec_method="ngram")
    r.calls[0].stats.mean_acceptance_length
    r.calls[0].cycles[0].rows[0].draft_tokens
    ```
    """
    collected = Record(trace)
    with _lock:
        _open_records.append(collected)
    try:
        yield collected
    finally:
        with _lock:
            # By identity: two records with the same calls are equal.
            _open_records[:] = [other for other in _open_records if other is not collected]


def begin_call(stats: SpecDecodingStats) -> list[CallRecord]:
    """Adds a call to every open record; returns those entries that want its cycles."""
    tracing = []
    with _lock:
        open_records = list(_open_records)
    for open_record in open_records:
        entry = CallRecord(stats)
        open_record.calls.append(entry)
        if open_record.trace:
            tracing.append(entry)
    return tracing
