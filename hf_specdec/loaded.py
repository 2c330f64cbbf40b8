"""What is kept for a target: drafters that were loaded, which one was chosen, what calls have learnt.

The record lives as long as the target, and nothing of it is written to the target.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from .threads import Lock, Recent


if TYPE_CHECKING:
    import torch

    from .checkpoints.files import RepoFiles


# Drafters of a target that stay loaded, and settings of which it is remembered what was chosen or learnt.
_MOST_LOADED = 4
_MOST_CHOSEN = 16
_MOST_LEARNT = 64


@dataclass(frozen=True, eq=False)
class Loaded:
    """The resources that one method has loaded with one choice of settings."""

    generator_class: type
    resources: Any
    draft_model: torch.nn.Module | None = None  # that was passed
    files: RepoFiles | None = None  # that were read,
    identity: Hashable = None  # and what these were like
    key: Hashable = None  # under which it is kept
    # Speculators by the hash of their settings, each after what else it rests on.
    speculators: Recent[tuple[Any, Any]] = field(default_factory=lambda: Recent(_MOST_LEARNT))

    @property
    def network(self) -> torch.nn.Module | None:
        return self.generator_class.network(self.resources)


class TargetRecord:
    """Everything that is kept for one target."""

    def __init__(self):
        self.drafters: Recent[Loaded] = Recent(_MOST_LOADED)
        self.chosen: Recent[Any] = Recent(_MOST_CHOSEN)  # the drafter and why, by the settings of the search
        self.learnt: Recent[Any] = Recent(_MOST_LEARNT)  # profiles, each beside a weak reference to its draft network
        self.accepted: Recent[Any] = Recent(_MOST_LEARNT)  # sums of the last drafts, by settings
        # By the text of what calls asked for, the key of their drafter and the hash of their settings.
        self.requests: Recent[tuple[Hashable, str]] = Recent(_MOST_LEARNT)
        self.searching: Lock = Lock()  # held while drafters are looked for: threads that begin together search once
        self.lock: Lock = Lock()  # held for short updates
        self._loading: WeakValueDictionary[Hashable, Lock] = WeakValueDictionary()

    @property
    def loaded(self) -> list[Loaded]:
        """Resources that are loaded, the least recently used first."""
        return self.drafters.values()

    def of_request(self, request: str, draft_model: torch.nn.Module | None) -> tuple[Any, Any, Any] | None:
        """Of an earlier call that asked for the same: its files, what its speculator rests on, and that itself."""
        key, settings = self.requests.get(request, (None, None))
        entry = self.drafters.get(key)
        if entry is None or entry.draft_model is not draft_model:
            return None
        known = entry.speculators.get(settings)
        return None if known is None else (entry.files, *known)

    def load_once(
        self,
        key: Hashable,
        generator_class: type,
        load: Callable[[], Any],
        files: RepoFiles | None = None,
        draft_model: torch.nn.Module | None = None,
    ) -> Loaded:
        """What is loaded under a key; loads it, once, if nothing is yet, or its files or draft model have changed."""
        with self.lock:
            loading = self._loading.setdefault(key, Lock())
        with loading:
            entry = self.drafters.get(key)
            identity = None if files is None else files.identity()
            # Files that are gone have left nothing else to load.
            if entry is None or entry.draft_model is not draft_model or identity not in (None, entry.identity):
                # Freed first: there may be no room for both.
                entry = None
                self.drafters.forget(lambda other: other == key)
                resources = load()
                if files is not None and files.folder is None:
                    # The commit of a repository is known once it is read. A folder that has changed meanwhile is read
                    # anew by the next call.
                    identity = files.identity()
                entry = Loaded(generator_class, resources, draft_model, files, identity, key)
                self.drafters.put(key, entry)
            return entry


_records: WeakKeyDictionary[torch.nn.Module, TargetRecord] = WeakKeyDictionary()
_lock = Lock()


def record_of(target_model: torch.nn.Module) -> TargetRecord:
    """The one record of a target."""
    with _lock:
        if target_model not in _records:
            _records[target_model] = TargetRecord()
        return _records[target_model]


def holds(model: torch.nn.Module, target_model: torch.nn.Module) -> bool:
    """Tells whether a model, or a draft model that is kept for it, has the target inside, and so keeps it alive."""
    if any(module is target_model for module in model.modules()):
        return True
    record = _records.get(model)
    drafts = [] if record is None else [entry.draft_model for entry in record.loaded]
    return any(draft is not None and holds(draft, target_model) for draft in drafts)


def forget_records(target_model: torch.nn.Module | None = None) -> list[TargetRecord]:
    """Takes away the record of one target, or all, and returns what it took."""
    with _lock:
        targets = list(_records) if target_model is None else [target_model]
        records = [_records.pop(target, None) for target in targets]
    return [record for record in records if record is not None]


def all_loaded() -> list[Loaded]:
    """What is loaded in this process, of all targets."""
    with _lock:
        records = list(_records.values())
    return [entry for record in records for entry in record.loaded]


def num_bytes(entries: Iterable[Loaded]) -> int:
    """Bytes of weights, those that several have counted once, and of remembered texts."""
    tensors: dict[int, int] = {}
    text_bytes = 0
    for entry in entries:
        if (network := entry.network) is not None:
            tensors |= {id(tensor): tensor.nbytes for tensor in (*network.parameters(), *network.buffers())}
        text_bytes += entry.generator_class.text_bytes(entry.resources)
    return sum(tensors.values()) + text_bytes
