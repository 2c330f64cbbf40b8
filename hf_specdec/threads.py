"""Tools for threads: locks that survive a fork, attributes that are computed once, maps that evict the least recently
used, and changes of a model that several calls share.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet


Value = TypeVar("Value")


class Lock(type(threading.RLock())):  # pyright: ignore[reportGeneralTypeIssues]
    """A reentrant lock for `with`. A forked child finds it open, unless the thread that forked holds it itself."""

    def __init__(self):
        super().__init__()
        _locks.add(self)


_locks: WeakSet[Lock] = WeakSet()


def _open_locks_in_child() -> None:
    # Only the thread that forked has gone along: what another one holds would never be released.
    for lock in list(_locks):
        if lock.acquire(blocking=False):
            lock.release()
        else:
            # As logging does with its locks.
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open_locks_in_child)


class cached_property:
    """That of functools, which before Python 3.12 holds one lock of all instances while it computes."""

    def __init__(self, function: Callable[[Any], Any]):
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = vars(instance)[self._name] = self._function(instance)
        return value

    if TYPE_CHECKING:
        # Not there when it runs: whoever knows the value sets it beforehand.
        def __set__(self, instance: Any, value: Any) -> None: ...


class Recent(Generic[Value]):
    """A map of at most `most` values, which evicts the least recently used one."""

    def __init__(self, most: int):
        self._most = most
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, default: Any = None) -> Value | Any:
        with self._lock:
            if key not in self._values:
                return default
            self._values.move_to_end(key)
            return self._values[key]

    def put(self, key: Hashable, value: Value) -> None:
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._most:
                self._values.popitem(last=False)

    def forget(self, matches: Callable[[Any], bool]) -> None:
        """Evicts the values whose keys match."""
        with self._lock:
            for key in [key for key in self._values if matches(key)]:
                del self._values[key]

    def values(self) -> list[Value]:
        """The values, the least recently used first."""
        with self._lock:
            return list(self._values.values())

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._values


class StandIns:
    """Attributes of objects that hold others than their own while somebody needs that, one thread or several."""

    def __init__(
        self,
        places: Iterable[tuple[Any, str, Any]],
        may_replace: Callable[[Any, Any], bool] = lambda owner, value: True,
    ):
        # Each an object, the name of an attribute, and what stands in; `None` for nothing.
        self.places: tuple[tuple[Any, str, Any], ...] = tuple(places)
        self._may_replace = may_replace
        self._before: dict[int, Any] = {}  # what has made way, by the number of the place
        self._users: set[object] = set()
        self._lock = Lock()

    @property
    def are_in_place(self) -> bool:
        """`True` if all objects have them, and none one of the user's."""
        return all(vars(owner).get(name) is stand_in for owner, name, stand_in in self.places)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Has them in place inside of the block, and afterwards no longer, wherever an exception comes."""
        user = object()
        try:
            try:
                with self._lock:
                    self._users.add(user)
                    for number, (owner, name, stand_in) in enumerate(self.places):
                        value = vars(owner).get(name)
                        if value is not stand_in and self._may_replace(owner, value):
                            self._before[number] = value
                            _put(owner, name, stand_in)
                yield
            finally:
                self._leave(user)
        finally:
            # Does what is left where an exception, such as that of Ctrl-C, has come in between.
            self._leave(user)

    def _leave(self, user: object) -> None:
        with self._lock:
            self._users.discard(user)
            if self._users:
                return
            for number, value in list(self._before.items()):
                owner, name, stand_in = self.places[number]
                if vars(owner).get(name) is stand_in:
                    _put(owner, name, value)
                self._before.pop(number)


def _put(owner: Any, name: str, value: Any) -> None:
    if value is None:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value


class OwnForwards(StandIns):
    """Forwards in the places of modules' own, or of a method of this `name`; one of the user's stays."""

    def __init__(self, pairs: Iterable[tuple[Any, Callable[..., Any]]], name: str = "forward"):
        places = [(module, name, forward) for module, forward in pairs]
        super().__init__(places, lambda module, value: value is None or is_of_class(value, module))


def is_of_class(forward: Any, module: Any) -> bool:
    """`True` for the forward that a module's class gives it."""
    return getattr(forward, "__self__", None) is module and forward.__func__ is type(module).forward
