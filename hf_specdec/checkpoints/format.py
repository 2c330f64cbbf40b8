"""Formats of published checkpoints, and how each is recognised.

Evidence is what `config.json` says and how the tensors are called; names of repositories are none. Names of classes in
a config are often those of something else, so tensors count for more.

A mark is what a config may say: `key=pattern` holds where the whole value, as text, matches the regular expression,
`key` alone where the value counts as true. `a.b` is a key inside of another, and `&` joins marks that only count
together. The first class stands for `architectures`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointFormatError
from .header import unwrapped


if TYPE_CHECKING:
    from .reader import CheckpointReader


@dataclass(frozen=True)
class Format:
    """A published format."""

    name: str  # short and stable
    producer: str  # who publishes or writes it
    config: tuple[str, ...] = ()  # marks in the config, of which one suffices
    # Names that all must be there, `|` between spellings. `x.` is the beginning of a name, `.x` the end of one. The
    # wrappers that files put around a head (`model.`, ...) are left out.
    tensors: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # names that must not be there
    is_hint: bool = False  # the marks also fit other checkpoints: they count where nothing else is known
    _: KW_ONLY
    method: str  # what drafts with it
    reader: type[CheckpointReader]  # knows what its settings and tensors mean

    def is_marked(self, config: Mapping[str, Any]) -> bool:
        return is_marked(config, self.config)

    def is_shown(self, names: TensorNames) -> bool:
        """True where the names of the tensors are those of this format."""
        return bool(self.tensors) and all(map(names.has, self.tensors)) and not any(map(names.has, self.without))


@dataclass(frozen=True)
class Unsupported:
    """A kind of drafter that is known and not supported; one mark or one tensor suffices to recognise it."""

    what: str  # such a drafter is or has; the subject is left out
    config: tuple[str, ...] = ()  # marks in the config
    tensors: tuple[str, ...] = ()  # shell patterns of names of tensors
    instead: str | None = None  # what to pass, where it is not what the method says for all kinds

    def is_there(self, places: Iterable[Mapping[str, Any]], names: Collection[str]) -> bool:
        """True where a config, spread over `places`, has a mark, or one of the tensors is such a one."""
        if any(is_marked(place, self.config) for place in places):
            return True
        return any(fnmatchcase(name, pattern) for pattern in self.tensors for name in names)


def is_marked(config: Mapping[str, Any], marks: Iterable[str]) -> bool:
    """True where a config has one of the marks."""

    def holds(mark: str) -> bool:
        key, equals, pattern = mark.partition("=")
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if key == "architectures":
            value = architecture(config)
        if not equals:
            return bool(value)
        return value is not None and re.fullmatch(pattern, str(value), re.DOTALL) is not None

    return any(all(map(holds, mark.split("&"))) for mark in marks)


def architecture(config: Mapping[str, Any]) -> str:
    """The first class that a config names."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


class TensorNames:
    """Names of tensors without the wrappers, to be asked in the language of the formats."""

    def __init__(self, stored: Iterable[str]):
        self.stored: dict[str, str] = {unwrapped(name): name for name in stored}
        # With beginnings that end with a dot, and ends that begin with one.
        dots = [(name, dot.start()) for name in self.stored for dot in re.finditer(r"\.", name)]
        parts = {part for name, dot in dots for part in (name[: dot + 1], name[dot:])}
        self._said: set[str] = parts.union(self.stored)

    def has(self, names: str) -> bool:
        """True where one of the spellings in `names` is there."""
        return not self._said.isdisjoint(names.split("|"))


def format_of(
    formats: Sequence[Format], name: str, config: Mapping[str, Any], tensors: Iterable[str] | None
) -> Format:
    """The format of a checkpoint called `name`, by its config and the names of its tensors, if these are known."""
    names = None if tensors is None else TensorNames(tensors)
    marked = [row for row in formats if row.is_marked(config)]
    shown = [] if names is None else [row for row in formats if row.is_shown(names)]
    certain = [row for row in formats if row in shown or (row in marked and not row.is_hint)]
    if len({row.method for row in certain}) > 1:
        raise CheckpointFormatError(
            f"The method of '{name}' is ambiguous: its config.json ({_described(config)}) and its tensors fit "
            f"{' and '.join(f'{row.name} (method {row.method!r})' for row in _one_each(certain))}. Name the method "
            "with `spec_method`."
        )
    fitting = [row for row in certain or marked if row.method == (certain or marked)[0].method]
    if not fitting:
        tensors = "" if names is None else f" and its tensors ({', '.join(list(names.stored.values())[:3]) or 'none'})"
        seen = f"config.json ({_described(config)}){tensors} {'are' if tensors else 'is'}"
        # Formats that have something in common with it.
        partly = [row for row in formats if names and any(map(names.has, row.tensors))]
        words = [str(value) for value in (architecture(config), config.get("model_type")) if value]
        by_mark = {re.sub(r"\W|[.]", "", mark.partition("=")[2]): row for row in formats for mark in row.config}
        close = [by_mark[match] for word in words for match in difflib.get_close_matches(word, by_mark, n=2)]
        rows = list(dict.fromkeys([*close, *_one_each(partly)]))[:3]
        near = ", ".join(f"{row.name} (method '{row.method}')" for row in rows)
        raise CheckpointFormatError(
            f"The method of '{name}' cannot be read: its {seen} of no known format."
            f"{f' Nearest: {near}.' if near else ''} Name it with `spec_method`."
        )
    agreed = [row for row in fitting if row in marked and (names is None or not row.tensors or row in shown)]
    # Without a mark the usual one.
    return (agreed or [row for row in fitting if row in shown][-1:] or fitting)[0]


def _one_each(rows: list[Format]) -> list[Format]:
    return list({row.method: row for row in reversed(rows)}.values())[::-1]


def _described(config: Mapping[str, Any]) -> str:
    keys = ("architectures", "model_type", "speculators_model_type")
    return ", ".join(f"{key}: {config.get(key)}" for key in keys if key in config) or "no architectures, no model_type"
