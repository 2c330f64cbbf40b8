"""The record of a target while it lives: drafters that were loaded, which one was found, what calls have learnt.

No entry refers to the target itself, which could otherwise never be freed. The number and size of loaded drafters are
bounded: the least recently used one is evicted first, and its memory is freed unless a user still holds a speculator
of it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch

from .environment import variable
from .errors import CheckpointFormatError, SpecConfigError
from .threads import Lock, Recent


if TYPE_CHECKING:
    from .checkpoints.files import RepoFiles


# Bytes that a target's drafters may have; 512MB, 2GiB and the like are understood. Unset: as many as the target has,
# and at least so many.
CACHE_BYTES = "HF_SPECDEC_CACHE_BYTES"
_LEAST_CACHE_BYTES = 2 * 2**30

# Most drafters of a target that stay loaded, and most settings of which it is known what was found or learnt.
_MOST_LOADED = 16
_MOST_FOUND = 16
_MOST_LEARNT = 64

# Attempts to read files that change meanwhile.
_MOST_READINGS = 3

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{letter}I": 2 ** (10 * power) for power, letter in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]I?|)B?")


@dataclass(frozen=True, eq=False)
class Loaded:
    """The resources that one method has loaded with one choice of settings.

    Attributes:
        generator_class (`type`): The method's candidate generator.
        resources (`Any`): What it has loaded.
        draft_model (`nn.Module`, *optional*): The draft model that was passed for it.
        identity (`Hashable`): Of the files that were read, as by `RepoFiles.identity`.
        weights (`dict[int, int]`): Bytes of each tensor of the network.
    """

    generator_class: type
    resources: Any
    draft_model: torch.nn.Module | None
    identity: Hashable
    weights: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", {} if self.network is None else _weights(self.network))

    @property
    def network(self) -> torch.nn.Module | None:
        return self.generator_class.network(self.resources)

    @property
    def text_bytes(self) -> int:
        return self.generator_class.text_bytes(self.resources)


class _Place:
    """A place for one thing that is loaded, `None` until then, and the lock that is held meanwhile."""

    def __init__(self):
        self.lock = Lock()
        self.loaded: Loaded | None = None


def _weights(module: torch.nn.Module) -> dict[int, int]:
    return {id(tensor): tensor.nbytes for tensors in (module.parameters(), module.buffers()) for tensor in tensors}


def _num_bytes(entries: Iterable[Loaded]) -> int:
    """Bytes of weights, those that several have counted once, and of remembered texts."""
    weights: dict[int, int] = {}
    num_bytes = 0
    for entry in entries:
        weights |= entry.weights
        num_bytes += entry.text_bytes
    return num_bytes + sum(weights.values())


class TargetRecord:
    """Everything that is kept for one target.

    Args:
        target_model (`nn.Module`): The target, which is not kept alive.

    Attributes:
        found (`Recent`): The drafter that was found for it and why it was chosen, by the settings of the search.
        learnt (`Recent`): What calls with adaptive length have learnt, by settings, device and data type, each beside
            a weak reference to the draft network.
        checked (`Recent`): For settings that were checked, with the identity of what was loaded.
        searching (`Lock`): Held while drafters are looked for, so that threads that begin together search once.
        lock (`Lock`): Held for short updates.
    """

    def __init__(self, target_model: torch.nn.Module):
        self._target = ref(target_model)
        self.found: Recent[Any] = Recent(_MOST_FOUND)
        self.learnt: Recent[Any] = Recent(_MOST_LEARNT)
        self.checked: Recent[Any] = Recent(_MOST_LEARNT)
        self.searching: Lock = Lock()
        self.lock: Lock = Lock()
        self._places: OrderedDict[Hashable, _Place] = OrderedDict()

    @property
    def loaded(self) -> list[Loaded]:
        """Resources that are loaded, the least recently used first."""
        with self.lock:
            return [loaded for place in self._places.values() if (loaded := place.loaded) is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of what is loaded."""
        return _num_bytes(self.loaded)

    def load_once(
        self,
        key: Hashable,
        generator_class: type,
        load: Callable[[], Any],
        files: RepoFiles | None = None,
        draft_model: torch.nn.Module | None = None,
    ) -> Any:
        """Returns what is loaded under a key; loads it if nothing is yet, or if its files have changed.

        Threads that need the same wait for the one that loads it; what is under other keys, or of other targets, can
        be had and loaded meanwhile. Of draft models that were passed only the last one is kept, or an evaluation loop
        would keep all of its checkpoints.

        Args:
            key (`Hashable`): The method and the settings that it reads in loading.
            generator_class (`type`): The method's candidate generator.
            load (`Callable`): Loads.
            files (`RepoFiles`, *optional*): What it reads.
            draft_model (`nn.Module`, *optional*): The draft model that was passed.

        Raises:
            CheckpointFormatError: The files are changed all the time.
        """
        most_bytes = cache_bytes()
        with self.lock:
            place = self._places.get(key) or self._places.setdefault(key, _Place())
        with place.lock:
            try:
                loaded = place.loaded
                is_known = loaded is not None and loaded.draft_model is draft_model
                # Files that are gone have left nothing else to load.
                if not is_known or (files and files.identity()) not in (None, loaded.identity):
                    place.loaded = None
                    if draft_model is not None and _keeps_alive(draft_model, self._target()):
                        return load()
                    resources, identity = _read(load, files)
                    place.loaded = Loaded(generator_class, resources, draft_model, identity)
                return place.loaded.resources
            finally:
                self._settle(key, place, most_bytes)

    def _settle(self, key: Hashable, place: _Place, most_bytes: int | None) -> None:
        """Puts what was used last at the end, and lets go of what was not loaded and of what is too much."""
        with self.lock:
            if place.loaded is None:
                if self._places.get(key) is place:
                    del self._places[key]
                return
            self._places[key] = place
            self._places.move_to_end(key)
            while len(self._places) > 1 and self._is_too_much(most_bytes):
                self._places.popitem(last=False)

    def _is_too_much(self, most_bytes: int | None) -> bool:
        if len(self._places) > _MOST_LOADED:
            return True
        num_bytes = self.num_bytes
        if most_bytes is None:
            target = self._target()
            most_bytes = _LEAST_CACHE_BYTES
            if num_bytes > most_bytes and target is not None:
                most_bytes = max(most_bytes, sum(_weights(target).values()))
        return num_bytes > most_bytes


def _read(load: Callable[[], Any], files: RepoFiles | None) -> tuple[Any, Hashable]:
    """Calls `load`, again if its files change meanwhile, and returns the result and the identity of the files."""
    if files is None or files.folder is None:
        # All files of a repository are read from one commit.
        return load(), None if files is None else files.identity()
    before = files.identity()
    error: Exception | None = None
    for _ in range(_MOST_READINGS):
        try:
            resources, error = load(), None
        except Exception as failure:  # noqa: BLE001 - raised below, unless the files have changed
            resources, error = None, failure
        began, before = before, files.identity()
        if began == before:
            if error is not None:
                raise error
            return resources, before
    raise CheckpointFormatError(
        f"The files of '{files.name}' change while they are read: something is writing them. Load the drafter when "
        "they are complete, or write to another folder and rename that."
    ) from error


def cache_bytes() -> int | None:
    """The limit of the environment variable `HF_SPECDEC_CACHE_BYTES`, `None` where it is not set.

    Raises:
        SpecConfigError: It is no size.
    """
    text = variable("CACHE_BYTES")
    if text is None:
        return None
    match = _SIZE.fullmatch(text.upper())
    if match is None:
        raise SpecConfigError(
            f"{CACHE_BYTES}={text[:200]!r} is no number of bytes. Set it to one such as 500000000, 512MB or 2GiB."
        )
    return int(float(match[1]) * _UNITS[match[2]])


_records: WeakKeyDictionary[torch.nn.Module, TargetRecord] = WeakKeyDictionary()
_lock = Lock()


def record_of(target_model: torch.nn.Module) -> TargetRecord:
    """The one record of a target."""
    with _lock:
        record = _records.get(target_model)
        if record is None:
            record = _records[target_model] = TargetRecord(target_model)
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


def loaded_drafters() -> int:
    """Drafters that are loaded in this process, of all targets."""
    with _lock:
        records = list(_records.values())
    return sum(len(record.loaded) for record in records)


def loaded_bytes() -> int:
    """Bytes of their weights and of the texts that they remember."""
    with _lock:
        records = list(_records.values())
    return _num_bytes(entry for record in records for entry in record.loaded)


def _keeps_alive(draft_model: torch.nn.Module, target_model: torch.nn.Module | None) -> bool:
    """`True` if the target would live as long as the draft model: it is part of it, or of what is loaded for it."""
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
