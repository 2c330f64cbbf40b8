"""Texts of tokens: what each adds to the text before it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from os.path import commonprefix
from typing import Any

from ...errors import SpecConfigError, shown


# Tokens in front of a token, and after it, that its text may depend on: a character has at most four bytes, and they
# may be a token each.
_BEFORE, _AFTER = 6, 4


class Pieces:
    """The texts of tokens, joined a row's text: the token that completes a character has all of it."""

    def __init__(self, tokenizer: Any = None):
        if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
            raise SpecConfigError(
                f"`tokenizer` must be a tokenizer of transformers, with a method `decode`, got {shown(tokenizer)}."
            )
        self._tokenizer = tokenizer
        self.shows_text: bool = tokenizer is not None
        self._decoded = lru_cache(maxsize=65536)(self._decode)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of several tokens."""
        return self._decoded(tuple(tokens))

    def of_row(self, tokens: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        """The text that each of a row's tokens adds, where `before` are the tokens in front of them."""
        everything, pieces = [*before, *tokens], []
        for end in range(len(before), len(everything)):
            begin = max(end - _BEFORE, 0)
            told, now = (self._settled(everything, begin, last) for last in (end, end + 1))
            pieces.append(now[len(commonprefix((told, now))) :])
        return pieces

    def of_draft(self, tokens: Sequence[int], parents: Sequence[int], before: Sequence[int]) -> list[str]:
        """The text that each node of a draft adds to its path, where `before` are the tokens in front of the draft."""
        paths: list[list[int]] = []
        pieces = []
        for token, parent in zip(tokens, parents):
            path = paths[parent] if parent >= 0 else list(before)[-_BEFORE:]
            told, now = self.text(path), self.text([*path, token])
            pieces.append(now[len(commonprefix((told, now))) :])
            paths.append([*path, token][-_BEFORE:])
        return pieces

    def _settled(self, tokens: list[int], begin: int, end: int) -> str:
        """The text of the tokens from `begin` to `end` that the tokens after them do not change any more."""
        return commonprefix((self.text(tokens[begin:end]), self.text(tokens[begin : end + _AFTER])))

    def _decode(self, tokens: tuple[int, ...]) -> str:
        if self._tokenizer is None:
            return "".join(f" {token}" for token in tokens)
        if not tokens:
            return ""
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)
