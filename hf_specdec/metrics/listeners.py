"""Listeners, which are told of the calls of this process while they run.

A call asks once, when it begins, who listens: one that began before somebody listened goes on untold, and one that has
begun is told to its end. With nobody listening a cycle does nothing for it. A listener that fails says so in the log,
once for each kind of failure, and hears no more of that call; the call itself goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..threads import Lock
from .stats import SpecDecodingStats


if TYPE_CHECKING:
    from .records import CallTrace


# transformers' `get_logger` gives the same one; this module is imported without transformers.
logger = logging.getLogger("hf_specdec.metrics")


class CallObserver:
    """Listener of one call, in the thread that makes it; the loop adds to its `trace`, if it has one."""

    trace: CallTrace | None = None

    def end_prefill(self, new: SpecDecodingStats) -> None:
        """Every row has its first token, and the drafter has read the prompts. `new`: counts and seconds until now."""

    def end_cycle(self, new: SpecDecodingStats, seconds: float) -> None:
        """A cycle has ended. `new`: what it counted; `seconds`: since the end of the one before, or of the prefill."""

    def end_call(self, new: SpecDecodingStats) -> None:
        """The call has ended, or failed. `new`: what a cycle or prefill that failed had counted."""


class Listener:
    """Gives every call that begins an observer."""

    def begin_call(self, stats: SpecDecodingStats, model_name: str) -> CallObserver | None:
        """`stats` are filled as the call goes on; `model_name` is the target's. `None`: no more needs to be told."""
        raise NotImplementedError


class CallProgress:
    """Tells the observers of one call how it gets on. As a context it also tells them that the call has ended."""

    def __init__(self, stats: SpecDecodingStats, observers: list[CallObserver]):
        self.observers = observers
        self.traces: list[CallTrace] = [observer.trace for observer in observers if observer.trace is not None]
        self._stats, self._told = stats, SpecDecodingStats()
        self._cycle_began = 0.0

    def __enter__(self) -> CallProgress:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.end_call()

    def end_prefill(self) -> None:
        self._cycle_began = perf_counter()
        self._tell("end_prefill")

    def end_cycle(self) -> None:
        """The cycle's counts and seconds are in the statistics."""
        began, self._cycle_began = self._cycle_began, perf_counter()
        self._tell("end_cycle", self._cycle_began - began)

    def end_call(self) -> None:
        self._tell("end_call")

    def _tell(self, event: str, *details: float) -> None:
        if not self.observers:
            return
        new = self._stats.since(self._told)
        self._told.add(new)
        # Those that fail are taken out of the list.
        for observer in list(self.observers):
            try:
                getattr(observer, event)(new, *details)
            except Exception as error:  # noqa: BLE001 - of any kind: the user's text does not depend on it
                self.observers.remove(observer)
                _complain(observer, error)


_listeners: list[Listener] = []
_lock = Lock()

# Those that are told of the calls of one context only: of a thread, a task, and what they start with their context.
_listeners_here: ContextVar[tuple[Listener, ...]] = ContextVar("hf_specdec_listeners", default=())

# Kinds of failures that have been logged.
_complaints: set[tuple[str, str]] = set()


@contextmanager
def listening_here(listener: Listener) -> Iterator[None]:
    """Tells it of the calls of this context inside of the block."""
    _listeners_here.set((*_listeners_here.get(), listener))
    try:
        yield
    finally:
        # Not by the variable's token, which a generator that is closed elsewhere could not use.
        _listeners_here.set(tuple(other for other in _listeners_here.get() if other is not listener))


def add_listener(listener: Listener) -> None:
    """Calls that begin from now on are told to it, whichever thread makes them."""
    with _lock:
        _listeners.append(listener)


def remove_listener(listener: Listener) -> None:
    with _lock:
        # By identity: two records with the same calls are equal.
        _listeners[:] = [other for other in _listeners if other is not listener]


def begin_call(stats: SpecDecodingStats, model_name: str) -> CallProgress:
    """Tells everybody who listens that a call begins, which fills the statistics and tells how it gets on."""
    with _lock:
        listeners = [*_listeners, *_listeners_here.get()]
    observers = []
    for listener in listeners:
        try:
            observer = listener.begin_call(stats, model_name)
        except Exception as error:  # noqa: BLE001 - as above
            _complain(listener, error)
            continue
        if observer is not None:
            observers.append(observer)
    return CallProgress(stats, observers)


def _complain(who: Any, error: Exception) -> None:
    kind = type(who).__qualname__, type(error).__qualname__
    if kind not in _complaints:
        _complaints.add(kind)
        logger.warning("%s fails and is told no more of this call, which goes on.", kind[0], exc_info=error)
