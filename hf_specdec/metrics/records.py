"""The calls made inside a `with record()` block: statistics, and the tokens and times of their cycles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from .listeners import CallObserver, Listener, add_listener, listening_here, remove_listener
from .stats import SpecDecodingStats


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
class CycleTiming:
    """The times of one cycle.

    Attributes:
        seconds (`float`): Wall-clock time from the end of the cycle before it, or of the prefill, to its own end.
        draft_seconds (`float`): Of the drafter. Its reading of the prompt is not part of the first cycle.
        verify_seconds (`float`): Of the target's forward, acceptance and stop rules.
        num_committed (`int`): Tokens committed, of all rows.
    """

    seconds: float
    draft_seconds: float
    verify_seconds: float
    num_committed: int


@dataclass
class CallRecord:
    """One `generate()` call.

    Attributes:
        stats (`SpecDecodingStats`): What the call drafted, accepted and spent.
        cycles (`list[CycleTrace]`): Filled by `record(trace=True)`; the first one follows the prefill.
        timings (`list[CycleTiming]`): Filled by `record(timings=True)`, an entry for each cycle.
    """

    stats: SpecDecodingStats
    cycles: list[CycleTrace] = field(default_factory=list)
    timings: list[CycleTiming] = field(default_factory=list)

    @property
    def cycle_seconds(self) -> list[float]:
        """Wall-clock time of each cycle."""
        return [timing.seconds for timing in self.timings]

    @property
    def draft_seconds(self) -> list[float]:
        """Seconds of the drafter in each cycle."""
        return [timing.draft_seconds for timing in self.timings]

    @property
    def verify_seconds(self) -> list[float]:
        """Seconds of the verification in each cycle."""
        return [timing.verify_seconds for timing in self.timings]


@dataclass
class Record(Listener):
    """The calls made inside a `with record()` block, in the order in which they began."""

    trace: bool = False
    timings: bool = False
    calls: list[CallRecord] = field(default_factory=list)
    is_open: bool = field(default=True, repr=False)

    def begin_call(self, stats: SpecDecodingStats, model_name: str) -> CallObserver | None:
        # A thread that was given the context may outlive the block.
        if not self.is_open:
            return None
        call = CallRecord(stats)
        self.calls.append(call)
        return _Recorder(call, self) if self.trace or self.timings else None


class _Recorder(CallObserver):
    """Fills a call's record while the call runs."""

    def __init__(self, call: CallRecord, wanted: Record):
        self.trace = call.cycles if wanted.trace else None
        self.timings = call.timings if wanted.timings else None

    def end_cycle(self, new: SpecDecodingStats, seconds: float) -> None:
        if self.timings is not None:
            timing = CycleTiming(seconds, new.draft_seconds, new.verify_seconds, new.num_committed_tokens)
            self.timings.append(timing)


@contextmanager
def record(trace: bool = False, timings: bool = False, all_threads: bool = False) -> Iterator[Record]:
    """Collects the statistics of every speculative `generate()` that is made inside the block.

    Calls made by pipelines count too. Those of other threads and tasks do not, so that two requests of a server that
    are recorded at the same time do not see each other, except where a thread runs in the context of the block:
    `asyncio.to_thread(...)`, or `Thread(target=contextvars.copy_context().run, args=(model.generate,))`. The workers
    of a `ThreadPoolExecutor` do not.

    Args:
        trace (`bool`): Also keep every cycle: drafts, parents, accepted and committed tokens of each row.
        timings (`bool`): Also keep the seconds of every cycle, for percentiles.
        all_threads (`bool`): Collect the calls of all threads that begin while the block is open.

    Example:

    ```python
    with hf_specdec.record(trace=True, timings=True) as r:
        model.generate(**inputs, spec_method="ngram")
    r.calls[0].stats.mean_acceptance_length
    r.calls[0].cycles[0].rows[0].draft_tokens
    numpy.percentile(r.calls[0].cycle_seconds, 95)
    ```
    """
    collected = Record(trace, timings)
    if all_threads:
        add_listener(collected)
    try:
        with nullcontext() if all_threads else listening_here(collected):
            yield collected
    finally:
        collected.is_open = False
        remove_listener(collected)
