"""The contract with a grammar library: a grammar, and a row's place in it.

Shapes: N draft nodes of a row, T = N + 1 verified nodes (node 0 is the anchor), P paths, W = ceil(V / 32) words of a
mask over V tokens. Bit i of word w says whether token 32 w + i may come next, which is the libraries' own format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import SpecDecError


# Allowed tokens that are looked through for alternatives.
_MOST_ALLOWED = 128

# Tokens that are foreseen one by one; an automaton may say "end" for ever.
_MOST_FORCED = 64


class GrammarMatcher(ABC):
    """A row's place in a grammar, after the tokens that it has accepted."""

    stop_tokens: frozenset[int] = frozenset()  # tokens after which the text has ended

    def __init__(self, num_words: int):
        self.num_words = num_words
        self.tokens: list[int] = []
        self._num_after_end = 0
        self._num_begun = 0  # tokens of the text that drafts begin with
        # Masks cost more than all else, so each is made once: after that text, and after tokens drafted for it.
        self._masks: dict[tuple[int, ...], np.ndarray] = {}

    @abstractmethod
    def _accept(self, token: int) -> bool:
        """Goes on with a token that the mask allows; `False`, and stays, with another one."""

    @abstractmethod
    def _rollback(self, count: int) -> None:
        """Takes back the last tokens."""

    @abstractmethod
    def fill(self, mask: np.ndarray) -> None:
        """Writes which tokens may come next, int32 `(W,)`; after the end what the library's users see there."""

    @property
    def is_at_end(self) -> bool:
        """The library takes no more tokens."""
        return False

    def accept(self, token: int) -> bool:
        """Goes on with a token; `False`, and stays, where the grammar forbids it. After the end any token will do."""
        if self.is_at_end:
            self._num_after_end += 1
        elif not self._accept(token):
            return False
        self.tokens.append(token)
        return True

    def rollback(self, count: int) -> None:
        """Takes back the last tokens."""
        del self.tokens[len(self.tokens) - count :]
        if len(self.tokens) < self._num_begun:
            self._num_begun = len(self.tokens)
            self._masks.clear()
        after_end = min(count, self._num_after_end)
        self._num_after_end -= after_end
        if count > after_end:
            self._rollback(count - after_end)

    def follow(self, tokens: Sequence[int], begin: int = 0) -> bool:
        """Goes to the place after the first `begin` tokens and these; `False`, and stops, where one is forbidden."""
        own = self.tokens[begin:]
        num_shared = min(len(own), len(tokens))
        if own[:num_shared] != tokens[:num_shared]:
            places = (place for place in range(num_shared) if own[place] != tokens[place])
            num_shared = next(places, num_shared)  # a list and a tuple may have the same tokens
        self.rollback(len(self.tokens) - begin - num_shared)
        return all(map(self.accept, tokens[num_shared:]))

    def move_to(self, tokens: Sequence[int]) -> None:
        """Goes to the place after these tokens, from wherever it is; a `SpecDecError` if one of them is forbidden."""
        if not self.follow(tokens):
            raise self._refusal(tokens[len(self.tokens)])

    def _refusal(self, token: int) -> SpecDecError:
        """The error that a token of the text is not accepted."""
        return SpecDecError(
            f"The grammar does not allow token {token}, generated token {len(self.tokens) + 1} of its row: something "
            "after the grammar has chosen it. Look at the processors that follow the grammar's, and at forced tokens."
        )

    def begin_at(self, tokens: Sequence[int]) -> None:
        """Goes to the place after a text that drafts begin with, and forgets the masks before it."""
        self.move_to(tokens)
        new = tuple(tokens[self._num_begun :])
        self._masks = {path[len(new) :]: mask for path, mask in self._masks.items() if path[: len(new)] == new}
        self._num_begun = len(tokens)

    def mask(self) -> np.ndarray:
        """Tokens that may come next, int32 `(W,)`, as `fill` writes them; not to be changed."""
        path = tuple(self.tokens[self._num_begun :])
        if path not in self._masks:
            mask = np.empty(self.num_words, dtype=np.int32)
            self.fill(mask)
            self._masks[path] = mask
        return self._masks[path]

    @property
    def knows_masks(self) -> bool:
        """Masks after drafted tokens have been made."""
        return any(self._masks)

    def masks_after(self, paths: Sequence[Sequence[int]]) -> np.ndarray:
        """Masks int32 `(P, W)` after paths from here; zeros where the grammar forbids a path, and after its end."""
        begin = len(self.tokens)
        masks = np.zeros((len(paths), self.num_words), dtype=np.int32)
        # One after the other, so that paths with a common beginning share its steps.
        for place in sorted(range(len(paths)), key=paths.__getitem__):
            if self.stop_tokens.isdisjoint(paths[place]) and self.follow(paths[place], begin):
                masks[place] = self.mask()
        self.rollback(len(self.tokens) - begin)
        return masks

    def allowed_nodes(self, tokens: Sequence[int], parents: Sequence[int]) -> Iterator[int]:
        """Goes to all verified nodes of a draft that the grammar allows, parents first, and back; yields each."""
        children: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
        for node, parent in enumerate(parents):
            children[parent + 1].append(node + 1)
        begin = len(self.tokens)
        # Nodes to be tried, depth first, and the number of tokens up to their parents.
        ahead = [(0, begin)]
        while ahead:
            node, num_before = ahead.pop()
            self.rollback(len(self.tokens) - num_before)
            if node > 0:
                token = tokens[node - 1]
                if (self.is_at_end and not allows(self.mask(), token)) or not self.accept(token):
                    continue
            yield node
            if node == 0 or tokens[node - 1] not in self.stop_tokens:
                ahead += [(child, len(self.tokens)) for child in reversed(children[node])]
        self.rollback(len(self.tokens) - begin)

    @classmethod
    def fill_drafts(cls, drafts: list[NodeMasks]) -> None:
        """Fills the masks of the drafts of several rows, whose matchers are of this class and at their anchors."""
        for draft in drafts:
            draft.matcher.fill_nodes(draft.tokens, draft.parents, draft.masks)

    def fill_nodes(self, tokens: Sequence[int], parents: Sequence[int], masks: np.ndarray) -> None:
        """Writes masks `(T, W)` after the anchor and all allowed nodes of a draft; the others stay as they are."""
        for node in self.allowed_nodes(tokens, parents):
            masks[node] = self.mask()

    def forced(self) -> list[int]:
        """Tokens that come next as far as can be foreseen. The target may still write their text in other tokens."""
        begin = len(self.tokens)
        while len(self.tokens) - begin < _MOST_FORCED and not self.is_at_end:
            tokens = self._foreseen() or allowed_tokens(self.mask(), most=1)
            if not tokens or not all(map(self.accept, tokens)) or tokens[-1] in self.stop_tokens:
                break
        forced = self.tokens[begin:]
        self.rollback(len(forced))
        return forced

    @abstractmethod
    def _foreseen(self) -> list[int]:
        """Tokens of text that has to come next, as far as the library knows it."""

    @abstractmethod
    def tokenized(self, text: str) -> list[int]:
        """Tokens in which a text may come next."""

    @abstractmethod
    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """The text of each token."""


class NodeMasks:
    """The masks after the anchor, where the row's matcher is now, and the nodes of its draft, made when asked for."""

    def __init__(self, matcher: GrammarMatcher, tokens: Sequence[int], parents: Sequence[int]):
        self.matcher = matcher
        self.tokens = tokens
        self.parents = parents
        self.masks: np.ndarray | None = None  # int32 (T, W); all ones after nodes that cannot be accepted
        self._begin = list(matcher.tokens)

    def __getitem__(self, node: int) -> np.ndarray:
        """The mask int32 `(W,)` after a verified node; everything is allowed after one that cannot be accepted."""
        if self.masks is not None:
            return self.masks[node]
        path: list[int] = []
        while node > 0:
            path.append(self.tokens[node - 1])
            node = self.parents[node - 1] + 1
        begin = len(self._begin)
        if self.matcher.tokens[:begin] != self._begin:
            self.matcher.move_to(self._begin)
        is_reached = self.matcher.follow(path[::-1], begin)
        return self.matcher.mask() if is_reached else np.full(self.matcher.num_words, -1, dtype=np.int32)

    @staticmethod
    def padded(rows: Sequence[NodeMasks | None], num_nodes: int, num_words: int) -> np.ndarray:
        """All masks of rows, int32 `(R, T, W)`; anything may follow padding, and in rows without a grammar."""
        by_kind: dict[type[GrammarMatcher], list[NodeMasks]] = {}
        for row in rows:
            if row is not None and row.masks is None:
                row.matcher.move_to(row._begin)
                row.masks = np.full((len(row.tokens) + 1, row.matcher.num_words), -1, dtype=np.int32)
                by_kind.setdefault(type(row.matcher), []).append(row)
        for kind, drafts in by_kind.items():
            kind.fill_drafts(drafts)
        table = np.full((len(rows), num_nodes, num_words), -1, dtype=np.int32)
        for places, row in zip(table, rows):
            if row is not None:
                places[: len(row.masks)] = 0
                places[: len(row.masks), : row.masks.shape[1]] = row.masks
        return table


@dataclass(frozen=True, eq=False)
class Grammar(ABC):
    """A compiled grammar."""

    library: str  # as users know it
    vocab_size: int  # tokens of the vocabulary that it was compiled for
    allows_rest: bool = False  # tokens without a bit in its masks are left as they are; else they are forbidden
    num_grammars: int = 1  # one for all rows of a call, or as many as it must have rows

    @property
    def num_words(self) -> int:
        """W."""
        return -(-self.vocab_size // 32)

    @abstractmethod
    def matcher(self, row: int) -> GrammarMatcher:
        """The beginning of the grammar, for a row of a call."""


def allows(mask: np.ndarray, token: int) -> bool:
    """Whether a mask int32 `(W,)` allows a token."""
    word = token >> 5
    return word < len(mask) and bool(int(mask[word]) >> (token & 31) & 1)


def allowed_tokens(mask: np.ndarray, most: int) -> list[int]:
    """The tokens that a mask int32 `(W,)` allows; none where there are more than `most`."""
    (words,) = mask.nonzero()
    if len(words) == 0 or len(words) > most:
        return []
    bits = np.unpackbits(mask[words].view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    places, offsets = bits.nonzero()
    return [] if len(places) > most else (words[places] * 32 + offsets).tolist()


def alternatives(matcher: GrammarMatcher, mask: np.ndarray, most: int) -> list[int]:
    """The tokens, 2 to `most`, between which a mask leaves the choice, without beginnings of others among them."""
    tokens = allowed_tokens(mask, _MOST_ALLOWED)
    by_text = sorted(zip(matcher.pieces(tokens), tokens))
    # What begins others stands right in front of them.
    following = [text for text, _ in by_text[1:]] + [b""]
    tokens = [token for (text, token), after in zip(by_text, following) if text and not after.startswith(text)]
    return tokens if 1 < len(tokens) <= most else []
