"""The errors of the package. Each also is the built-in error that callers expect of such a mistake.

What was found stands in a message as `shown(value)` says it: short, and safe to show whatever the value is. No message
holds an access token.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any


MOST_SHOWN = 200

HIDDEN = "***"

# Of the Hub.
_ACCESS_TOKEN = re.compile(r"\b(hf|api_org)_[A-Za-z0-9]{20,}")
# No word of a message is longer, the names of files among them; of longer ones both ends are shown.
_LONG_WORD = re.compile(r"\S{401,}")
_SECRET_KEY = re.compile(r"(token|password|secret|api_key)$", re.IGNORECASE)


class SpecDecError(Exception):
    """Base class of all errors raised by `hf_specdec`."""

    def __init__(self, *args: Any):
        super().__init__(*(_printable(item) if isinstance(item, str) else item for item in args))


def shown(value: Any) -> str:
    """A value as messages show it: its `repr` without secrets, cut to 200 characters, whatever its methods do."""
    try:
        text = _printable(_shown.repr(value))
    except Exception:  # noqa: BLE001 - a user's object may raise anything
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def is_secret_key(key: Any) -> bool:
    """Tells whether a text under this key is one that nobody else may read."""
    return isinstance(key, str) and _SECRET_KEY.search(key) is not None


def is_access_token(value: Any) -> bool:
    """Tells whether a value has the form of an access token of the Hub."""
    return isinstance(value, str) and _ACCESS_TOKEN.fullmatch(value) is not None


def _printable(text: str) -> str:
    """A text that every terminal and log takes, without access tokens and endless words."""
    text = _ACCESS_TOKEN.sub(HIDDEN, text)
    text = _LONG_WORD.sub(lambda word: f"{word[0][:MOST_SHOWN]}...{word[0][-MOST_SHOWN // 2 :]}", text)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class _Shown(reprlib.Repr):
    """A `repr` that takes no longer for large values than for small ones."""

    def __init__(self):
        super().__init__()
        self.maxstring = self.maxother = MOST_SHOWN
        self.maxtuple = self.maxlist = self.maxarray = self.maxdict = self.maxset = self.maxfrozenset = MOST_SHOWN // 2

    def repr_int(self, value: int, level: int) -> str:
        return repr(value) if value.bit_length() < MOST_SHOWN else f"<an integer of {value.bit_length()} bits>"

    def repr_str(self, value: str, level: int) -> str:
        # Before it is cut, perhaps in the middle of a token.
        return super().repr_str(_ACCESS_TOKEN.sub(HIDDEN, value), level)

    def repr_dict(self, value: Mapping, level: int) -> str:
        hidden = {key: HIDDEN if is_secret_key(key) and isinstance(item, str) else item for key, item in value.items()}
        return super().repr_dict(hidden, level)

    def repr_instance(self, value: Any, level: int) -> str:
        return self.repr_dict(value, level) if isinstance(value, Mapping) else super().repr_instance(value, level)


_shown = _Shown()


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns " Did you mean 'eagle3'?" where one of the names is close, else nothing."""
    close = difflib.get_close_matches(name[:100], names, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun: "1 prompt", "2 prompts"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


class SpecConfigError(SpecDecError, ValueError):
    """A setting, or a combination of settings, that cannot be honoured."""


class CheckpointFormatError(SpecDecError, ValueError):
    """A checkpoint that does not have the promised format, or does not fit its target model."""


class CheckpointAccessError(CheckpointFormatError, OSError):
    """A checkpoint that cannot be reached: there is none of that name, no access to it, or no connection."""


class UnsupportedModelError(SpecDecError, NotImplementedError):
    """A target or draft model whose architecture cannot be driven by the decoding loop."""


class MissingDependencyError(SpecDecError, ImportError):
    """A package that is needed is not installed, or not in a version that can be used."""
