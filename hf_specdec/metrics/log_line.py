"""A line in the log every few seconds while calls run, in the form of serving engines."""

from __future__ import annotations

import logging
import math
from time import perf_counter

from ..environment import variable
from ..errors import SpecConfigError, shown
from ..settings.checks import Bounds, checked
from ..threads import Lock
from .listeners import CallObserver, Listener, add_listener, logger, remove_listener
from .stats import SpecDecodingStats


_VARIABLE = "HF_SPECDEC_LOG_INTERVAL"

_MOST_POSITIONS = 16


class IntervalLog(Listener, CallObserver):
    """Adds up all calls of the process; the call whose cycle ends when an interval is over logs the sums."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._lock = Lock()
        self._num_running = 0
        self._counted_until = 0.0
        self._begin_interval()

    def begin_call(self, stats: SpecDecodingStats, model_name: str) -> CallObserver:
        with self._lock:
            self._count_seconds()
            self._num_running += 1
            if self._sums.num_committed_tokens == 0 and self._num_running == 1:
                self._begin_interval()
        return self

    def end_prefill(self, new: SpecDecodingStats) -> None:
        self.end_cycle(new, 0.0)

    def end_cycle(self, new: SpecDecodingStats, seconds: float) -> None:
        with self._lock:
            self._sums.add(new)
            if perf_counter() - self._began >= self.seconds:
                self._end_interval()

    def end_call(self, new: SpecDecodingStats) -> None:
        with self._lock:
            self._count_seconds()
            self._num_running -= 1

    def close(self) -> None:
        """Logs what has been generated since the last line, if anything was, and nothing from then on."""
        self.seconds: float = math.inf
        with self._lock:
            if self._sums.num_committed_tokens:
                self._end_interval()

    def _begin_interval(self) -> None:
        self._sums = SpecDecodingStats()
        self._began = perf_counter()
        self._busy_seconds = 0.0

    def _end_interval(self) -> None:
        self._count_seconds()
        logger.info(log_line(self._sums, self._busy_seconds))
        self._begin_interval()

    def _count_seconds(self) -> None:
        """Adds the time since the last look, if calls ran."""
        now = perf_counter()
        if self._num_running:
            self._busy_seconds += now - self._counted_until
        self._counted_until = now


def log_line(stats: SpecDecodingStats, seconds: float) -> str:
    """The statistics of an interval in which calls ran for `seconds`."""
    accepted, drafted, drafts = stats.num_accepted_tokens, stats.num_draft_tokens, max(stats.num_drafts, 1)
    rates = [f"{count / drafts:.3f}" for count in stats.num_accepted_tokens_per_pos]
    per_position = ", ".join(rates[:_MOST_POSITIONS] + ["..."] * (len(rates) > _MOST_POSITIONS))
    line = (
        f"SpecDecoding metrics: Mean acceptance length: {stats.mean_acceptance_length:.2f}, "
        f"Accepted throughput: {accepted / seconds:.2f} tokens/s, "
        f"Drafted throughput: {drafted / seconds:.2f} tokens/s, "
        f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
        f"Per-position acceptance rate: {per_position or '-'}, "
        f"Avg Draft acceptance rate: {100 * stats.draft_acceptance_rate:.1f}%, "
        f"Generation throughput: {stats.num_committed_tokens / seconds:.2f} tokens/s"
    )
    without = stats.num_cycles_without_drafts
    if not without:
        return line
    reasons = ", ".join(f"{reason} {count}" for reason, count in without.items())
    return f"{line}, Cycles without drafts: {sum(without.values())} ({reasons})"


class _IfNobodyElse(logging.StreamHandler):
    """Writes to stderr in programs that have not configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logger.parent.hasHandlers():
            super().emit(record)


_active: IntervalLog | None = None
_lock = Lock()


def log_every(seconds: float | None = 10.0) -> None:
    """Logs a line of metrics at level INFO every few seconds while speculative calls run.

    It counts all calls of the process that begin from now on, and is logged by the calls themselves at the end of a
    cycle, as `hf_specdec.metrics`: to the handlers of the application, or to stderr where logging is not configured.

    Args:
        seconds (`float`, *optional*): The least time between two lines. `None` logs what is left and stops.

    Raises:
        SpecConfigError: It is no number above 0.
    """
    global _active
    seconds = checked("seconds", seconds, float | None, Bounds(least=0, inclusive=False))
    with _lock:
        if seconds is None and _active is not None:
            remove_listener(_active)
            _active.close()
            _active = None
        elif seconds is not None and _active is not None:
            _active.seconds = seconds
        elif seconds is not None:
            # Lets the lines through: they were asked for.
            if logger.level == logging.NOTSET:
                logger.setLevel(logging.INFO)
            if not logger.handlers:
                logger.addHandler(_IfNobodyElse())
            _active = IntervalLog(seconds)
            add_listener(_active)


def log_as_environment_says() -> None:
    """`log_every` with the seconds of the environment variable HF_SPECDEC_LOG_INTERVAL, if it is set; 0 is off."""
    value = variable("LOG_INTERVAL") or "0"
    try:
        if seconds := float(value):
            log_every(seconds)
    except ValueError as error:
        raise SpecConfigError(
            f"{_VARIABLE}={shown(value)} is no number of seconds. Set it to one such as 10, or to 0."
        ) from error
