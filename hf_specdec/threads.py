"""Tools for threads: locks that survive a fork, attributes that are computed once, maps that evict the least recently
used, and forwards in the place of modules' own that several calls share.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
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


class OwnForwards:
    """Forwards that take the place of modules' own while calls need them; calls of several threads share them.

    A forward that a module has of the user's stays. `name` is the method, if it is another one than the forward; or
    where another forward keeps the class's.
    """

    def __init__(self, pairs: Iterable[tuple[Any, Callable[..., Any]]], name: str = "forward"):
        self.name = name
        self.pairs: tuple[tuple[Any, Callable[..., Any]], ...] = tuple(pairs)
        self._users: set[object] = set()
        self._lock = Lock()
        self._before: dict[Any, Any] = {}  # the class's own, of modules that keep it under the name

    @property
    def are_in_place(self) -> bool:
        """`True` if all modules have them, and none one of the user's."""
        return all(vars(module).get(self.name) is forward for module, forward in self.pairs)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Has them in place inside of the block, and afterwards no longer, wherever an exception comes."""
        user = object()
        try:
            try:
                with self._lock:
                    self._users.add(user)
                    for module, forward in self.pairs:
                        current = vars(module).get(self.name)
                        if is_of_class(current, module):
                            self._before[module] = current
                            vars(module)[self.name] = forward
                        else:
                            vars(module).setdefault(self.name, forward)
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
            for module, forward in self.pairs:
                if vars(module).get(self.name) is forward:
                    if module in self._before:
                        vars(module)[self.name] = self._before[module]
                    else:
                        del vars(module)[self.name]
                self._before.pop(module, None)


def is_of_class(forward: Any, module: Any) -> bool:
    """`True` for the forward that a module's class gives it."""
    return getattr(forward, "__self__", None) is module and forward.__func__ is type(module).forward
