"""The text of a row, where the kernels can read it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class RowText:
    """The tokens of one row, in a buffer that grows.

    Args:
        tokens (`Sequence[int]`): The text to begin with.
        most (`int`): Most tokens to keep. When there are more, the newest three quarters of as many remain.
    """

    def __init__(self, tokens: Sequence[int], most: int):
        self._most = most
        self._buffer = np.empty(0, dtype=np.int32)
        self._size = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return self._size

    @property
    def tokens(self) -> np.ndarray:
        """The text, int32; valid until it is extended."""
        return self._buffer[: self._size]

    @property
    def num_bytes(self) -> int:
        return self._buffer.nbytes

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Adds tokens at the end."""
        if self._size + len(tokens) > self._most:
            kept = self._most - self._most // 4
            tokens, self._size = np.concatenate((self.tokens, tokens))[-kept:], 0
        size = self._size + len(tokens)
        if size > len(self._buffer):
            buffer = np.empty(min(2 * size, self._most), dtype=np.int32)
            buffer[: self._size] = self.tokens
            self._buffer = buffer
        self._buffer[self._size : size] = tokens
        self._size = size

    def followed_by(self, tokens: Sequence[int]) -> np.ndarray:
        """The text with others after it; nothing where it may not become as long."""
        if self._size + len(tokens) > self._most:
            return self._buffer[:0]
        return np.concatenate((self.tokens, np.array(tokens, dtype=np.int32))) if tokens else self.tokens
