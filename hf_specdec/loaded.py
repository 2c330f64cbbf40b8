"""What is kept for a target while it lives: drafters that were loaded, which one was found, what calls have learnt.

Nothing that is kept refers to the target itself, or it would live for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .threads import Lock, Recent


# Most drafters of a target that stay loaded, and most settings of which it is known what was found or learnt.
_MOST_LOADED = 16
_MOST_FOUND = 16
_MOST_LEARNT = 64


class Loaded:
    """What one method has loaded with one choice of settings, and the lock that is held while it does.

    Attributes:
        generator_class (`type`, *optional*): The method's candidate generator; `None` until something is loaded.
        resources (`Any`): What it has loaded.
        draft_model (`nn.Module`, *optional*): The draft model that was passed for it.
    """

    def __init__(self):
        self.lock = Lock()
        self.generator_class: type | None = None
        self.resources: Any = None
        self.draft_model: torch.nn.Module | None = None

    @property
    def network(self) -> torch.nn.Module | None:
        return None if self.generator_class is None else self.generator_class.network(self.resources)


class TargetRecord:
    """What is known of one target.

    Attributes:
        found (`Recent`): The drafter that was found for it and why it was chosen, by the settings of the search.
        learnt (`Recent`): What calls with adaptive length have learnt, by settings, device and data type, each beside
            a weak reference to the draft network.
        searching (`Lock`): Held while drafters are looked for, so that threads that begin together search once.
        lock (`Lock`): For what takes no time.
    """

    def __init__(self):
        self.found, self.learnt = Recent(_MOST_FOUND), Recent(_MOST_LEARNT)
        self.searching, self.lock = Lock(), Lock()
        self._loaded: OrderedDict[Hashable, Loaded] = OrderedDict()

    @property
    def loaded(self) -> list[Loaded]:
        """What is loaded, the least recently used first."""
        with self.lock:
            return [entry for entry in self._loaded.values() if entry.generator_class is not None]

    def has(self, key: Hashable, draft_model: torch.nn.Module) -> bool:
        """Whether this draft model is what is loaded under a key."""
        with self.lock:
            return key in self._loaded and self._loaded[key].draft_model is draft_model

    def load_once(
        self,
        key: Hashable,
        generator_class: type,
        load: Callable[[], Any],
        draft_model: torch.nn.Module | None = None,
    ) -> Any:
        """What is loaded under a key, by `load` where nothing is yet.

        Threads that need the same wait for the one that loads it; what is under other keys, or of other targets, can
        be had and loaded meanwhile. Of draft models that were passed only the last one is kept, or an evaluation loop
        would keep all of its checkpoints.
        """
        with self.lock:
            entry = self._loaded.setdefault(key, Loaded())
        with entry.lock:
            if entry.generator_class is None or entry.draft_model is not draft_model:
                try:
                    entry.resources = load()
                    entry.generator_class, entry.draft_model = generator_class, draft_model
                finally:
                    self._settle(key, entry)
            else:
                self._settle(key, entry)
            return entry.resources

    def _settle(self, key: Hashable, entry: Loaded) -> None:
        """Puts what was used last at the end, and lets go of what was not loaded and of what is too much."""
        with self.lock:
            if entry.generator_class is None:
                if self._loaded.get(key) is entry:
                    del self._loaded[key]
                return
            self._loaded[key] = entry
            self._loaded.move_to_end(key)
            while len(self._loaded) > _MOST_LOADED:
                self._loaded.popitem(last=False)


_records: WeakKeyDictionary[torch.nn.Module, TargetRecord] = WeakKeyDictionary()
_lock = Lock()


def record_of(target_model: torch.nn.Module) -> TargetRecord:
    """The one record of a target."""
    with _lock:
        record = _records.get(target_model)
        if record is None:
            record = _records[target_model] = TargetRecord()
        return record


def forget_records(target_model: torch.nn.Module | None = None) -> list[TargetRecord]:
    """Takes away the record of one target, or all, and returns what it took."""
    with _lock:
        if target_model is None:
            taken = list(_records.values())
            _records.clear()
        else:
            taken = [record] if (record := _records.pop(target_model, None)) else []
        return taken


def keeps_alive(draft_model: torch.nn.Module, target_model: torch.nn.Module) -> bool:
    """Whether the target would live as long as the draft model: it is part of it, or of what is loaded for it."""
    seen: set[int] = set()
    waiting = [draft_model]
    while waiting:
        for module in waiting.pop().modules():
            if module is target_model:
                return True
            with _lock:
                record = _records.get(module)
            if record is not None and id(record) not in seen:
                seen.add(id(record))
                waiting += [entry.draft_model for entry in record.loaded if entry.draft_model is not None]
    return False
