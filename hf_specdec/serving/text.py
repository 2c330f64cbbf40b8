"""Text of an answer as its tokens come."""

from __future__ import annotations

from typing import Any


# Decoders show it for bytes that are no character yet.
UNFINISHED = "\ufffd"


class GrowingText:
    """Decodes tokens that arrive in parts, up to the one of the strings `stop` that is complete first."""

    def __init__(self, tokenizer: Any, stop: list[str], shows_special: bool = False):
        self._tokenizer, self._skips_special = tokenizer, not shows_special
        self.stop: list[str] = stop
        self._text = ""
        self.num_shown: int = 0  # characters that have been returned
        # Tokens from `_first` on are decoded; those in front of `_read` have been before, and are only the context.
        self._first = self._read = 0
        self.has_stopped: bool = False  # there was a stop string

    @property
    def num_read(self) -> int:
        """Characters that tokens have made so far, whether they are certain or not."""
        return len(self._text)

    def add(self, tokens: list[int], is_last: bool) -> str:
        """Returns what is certain of the text of all `tokens` so far, and has not been returned."""
        before, now = self._decode(tokens[self._first : self._read]), self._decode(tokens[self._first :])
        if is_last or (len(now) > len(before) and not now.endswith(UNFINISHED)):
            self._text += now[len(before) :]
            self._first, self._read = self._read, len(tokens)
        end = self._end(is_last)
        new, self.num_shown = self._text[self.num_shown : end], max(end, self.num_shown)
        return new

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skips_special)

    def _end(self, is_last: bool) -> int:
        """End of the certain text: before a stop string, or what may become one."""
        found = [(place + len(s), place) for s in self.stop if (place := self._text.find(s, self.num_shown)) >= 0]
        if found:
            self.has_stopped = True
            # The first to be complete: however the tokens arrive, nothing comes after it.
            return min(found)[1]
        if is_last:
            return len(self._text)
        return len(self._text) - num_open(self._text[self.num_shown :], self.stop)


def num_open(text: str, marks: list[str]) -> int:
    """Characters at the end of a text with which one of the marks may begin."""
    lengths = range(min(max(map(len, marks), default=1) - 1, len(text)), 0, -1)
    return next((length for length in lengths if any(mark.startswith(text[-length:]) for mark in marks)), 0)
