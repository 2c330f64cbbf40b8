"""The calls made inside a `with record()` block: statistics, and the tokens and times of their cycles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import SpecConfigError
from .listeners import CallObserver, Listener, add_listener, listening_here, remove_listener
from .stats import SpecDecodingStats


class TokenScore(NamedTuple):
    """The target's opinion of a token, by its logits before any logits processor.

    Attributes:
        prob (`float`): Its probability.
        rank (`int`): Its place among all tokens; 1 is the likeliest.
        margin (`float`): Its logit minus that of the best other token: above 0 for the likeliest one, and near 0 where
            two are almost tied.
    """

    prob: float
    rank: int
    margin: float


@dataclass
class RowTrace:
    """One row of one cycle, as plain lists and numbers.

    Attributes:
        row (`int`): Row of the call.
        draft_tokens (`list[int]`): The drafted nodes' tokens.
        parents (`list[int]`): Their parents, -1 for a child of the anchor.
        num_accepted (`int`): Draft tokens that were committed.
        committed_tokens (`list[int]`): Tokens committed: the accepted ones and one more of the target's.
        drafter (`str`): Method that made the draft; of a combination, the one of its two that this row asked.
        draft_scores (`list[TokenScore]`): The target's opinion of each drafted node. Filled when the call ends.
        draft_probs (`list[float]`): Probability with which the drafter has sampled each node; empty where drafts are
            not sampled.
        committed_scores (`list[TokenScore]`): The target's opinion of each committed token.
    """

    row: int
    draft_tokens: list[int]
    parents: list[int]
    num_accepted: int
    committed_tokens: list[int]
    drafter: str = ""
    # Two traces with the same tokens are equal, however the forwards have rounded.
    draft_scores: list[TokenScore] = field(default_factory=list, compare=False)
    draft_probs: list[float] = field(default_factory=list, compare=False)
    committed_scores: list[TokenScore] = field(default_factory=list, compare=False)


@dataclass
class CycleTrace:
    """One draft and its verification.

    Attributes:
        rows (`list[RowTrace]`): The rows that were active.
        why_empty (`str`): Why no row has a draft, as in `SpecDecodingStats.num_cycles_without_drafts`; else empty.
    """

    rows: list[RowTrace]
    why_empty: str = ""


@dataclass
class CallTrace:
    """The tokens of one call.

    Attributes:
        prompts (`list[list[int]]`): Each row's prompt, without padding.
        first (`CycleTrace`, *optional*): The first token of each row, which the prefill gives. `None` where the call
            ended before.
        cycles (`list[CycleTrace]`): What followed.
        is_joint (`bool`): Rows are places that several requests take in turn. Prompts and first tokens are those of
            the requests that begin.
    """

    prompts: list[list[int]] = field(default_factory=list)
    first: CycleTrace | None = None
    cycles: list[CycleTrace] = field(default_factory=list)
    is_joint: bool = False


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
        model_name (`str`): The target's repo id or folder, or its class.
        trace (`CallTrace`, *optional*): Its tokens, with `record(trace=True)`.
        timings (`list[CycleTiming]`): Filled by `record(timings=True)` and `record(trace=True)`, an entry for each
            cycle.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): What `record` was given to show tokens as text.
    """

    stats: SpecDecodingStats
    model_name: str = ""
    trace: CallTrace | None = None
    timings: list[CycleTiming] = field(default_factory=list)
    tokenizer: Any = field(default=None, repr=False, compare=False)

    @property
    def cycles(self) -> list[CycleTrace]:
        """The cycles that followed the prefill; empty without `record(trace=True)`."""
        return [] if self.trace is None else self.trace.cycles

    def to_html(self, path: str | Path | None = None, tokenizer: Any = None) -> str:
        """Draws the call as a page: who wrote each token, every cycle's draft, and where the time went.

        Args:
            path (`str` or `Path`, *optional*): File to write the page to. It needs no other file and no network.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): Shows tokens as text. Default: that of `record`; without
                one, tokens are shown by their numbers.

        Returns:
            `str`: The page.

        Raises:
            SpecConfigError: The call was recorded without a trace, ended before its first token, or served requests in
                turn; or `tokenizer` cannot decode.
            OSError: The file cannot be written.
        """
        if self.trace is None:
            raise SpecConfigError(
                "This call was recorded without its tokens, so there is nothing to draw. Record it inside "
                "`with hf_specdec.record(trace=True) as r:`."
            )
        if self.trace.is_joint:
            raise SpecConfigError(
                "Several requests took turns in the rows of this call, so there is no one text to draw. Record a call "
                "of generate() with one of the prompts."
            )
        if self.trace.first is None:
            raise SpecConfigError(
                "The call ended before its first token, so there is nothing to draw. Record another one."
            )
        # Only those who draw a page pay for it.
        from .picture import page

        html = page(self, self.tokenizer if tokenizer is None else tokenizer)
        if path is not None:
            Path(path).write_text(html, encoding="utf-8", newline="\n")
        return html

    def _repr_html_(self) -> str | None:
        """The page of [`to_html`] for a notebook; `None`, which shows the `repr`, where there is nothing to draw."""
        if self.trace is None or self.trace.first is None or self.trace.is_joint:
            return None
        from .picture import in_notebook

        return in_notebook(self.to_html())

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
    tokenizer: Any = field(default=None, repr=False, compare=False)

    def begin_call(self, stats: SpecDecodingStats, model_name: str) -> CallObserver | None:
        # A thread that was given the context may outlive the block.
        if not self.is_open:
            return None
        trace = CallTrace() if self.trace else None
        call = CallRecord(stats, model_name, trace, tokenizer=self.tokenizer)
        self.calls.append(call)
        return _Recorder(call) if self.trace or self.timings else None


class _Recorder(CallObserver):
    """Fills a call's record while the call runs."""

    def __init__(self, call: CallRecord):
        self.trace, self.timings = call.trace, call.timings

    def end_cycle(self, new: SpecDecodingStats, seconds: float) -> None:
        timing = CycleTiming(seconds, new.draft_seconds, new.verify_seconds, new.num_committed_tokens)
        self.timings.append(timing)


@contextmanager
def record(
    trace: bool = False, timings: bool = False, all_threads: bool = False, tokenizer: Any = None
) -> Iterator[Record]:
    """Collects the statistics of every speculative `generate()` that is made inside the block.

    Calls made by pipelines count too. Those of other threads and tasks do not, so that two requests of a server that
    are recorded at the same time do not see each other, except where a thread runs in the context of the block:
    `asyncio.to_thread(...)`, or `Thread(target=contextvars.copy_context().run, args=(model.generate,))`. The workers
    of a `ThreadPoolExecutor` do not.

    Args:
        trace (`bool`): Also keep every cycle: drafts, parents, accepted and committed tokens of each row, the target's
            opinion of each, and the seconds. [`CallRecord.to_html`] draws them.
        timings (`bool`): Also keep the seconds of every cycle, for percentiles.
        all_threads (`bool`): Collect the calls of all threads that begin while the block is open.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Shows tokens as text where a call is drawn.

    Example:

    ```python
    with hf_specdec.record(trace=True, timings=True) as r:
        model.generate(**inputs, spec_method="ngram")
    r.calls[0].stats.mean_acceptance_length
    r.calls[0].cycles[0].rows[0].draft_tokens
    numpy.percentile(r.calls[0].cycle_seconds, 95)
    r.calls[0].to_html("call.html", tokenizer=tokenizer)
    ```
    """
    collected = Record(trace, timings, tokenizer=tokenizer)
    if all_threads:
        add_listener(collected)
    try:
        with nullcontext() if all_threads else listening_here(collected):
            yield collected
    finally:
        collected.is_open = False
        remove_listener(collected)
