"""Grammars of xgrammar: masks of a whole tree in one call, and text that must come next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ...threads import cached_property
from .matchers import Grammar, GrammarMatcher


class XGrammarMatcher(GrammarMatcher):
    """A row's place in a grammar of xgrammar, from an `xgrammar.GrammarMatcher` at its beginning."""

    def __init__(self, matcher: Any, grammar: XGrammar):
        super().__init__(grammar.num_words)
        self._matcher = matcher
        self._grammar = grammar
        self.stop_tokens: frozenset[int] = frozenset(matcher.stop_token_ids)

    @property
    def is_at_end(self) -> bool:
        return self._matcher.is_terminated()

    def _accept(self, token: int) -> bool:
        # The library writes a warning for each token that its vocabulary lacks.
        return token < self._grammar.vocab_size and self._matcher.accept_token(token)

    def _rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def fill(self, mask: np.ndarray) -> None:
        # The library's processor leaves the mask as it is when the text has ended.
        at_end = self.is_at_end
        if at_end:
            self._matcher.rollback(1)
        self._matcher.fill_next_token_bitmask(torch.from_numpy(mask)[None])
        if at_end:
            self._matcher.accept_token(self.tokens[-self._num_after_end - 1])

    def fill_nodes(self, tokens: Sequence[int], parents: Sequence[int], masks: np.ndarray) -> None:
        # The library does not go past an end, and would make known masks again.
        if self.is_at_end or self.knows_masks or not self.stop_tokens.isdisjoint(tokens):
            super().fill_nodes(tokens, parents, masks)
            return
        # First child and next sibling of the anchor (0) and of each node (from 1 on), -1 for none.
        child = [-1] * (len(tokens) + 1)
        sibling = list(child)
        # Backwards, so that the first of siblings comes last and is the parent's child.
        for node in range(len(tokens), 0, -1):
            parent = parents[node - 1] + 1
            child[parent], sibling[node] = node, child[parent]
        tree = torch.tensor([child, sibling, [0, *tokens]], device="cpu")
        self._matcher.traverse_draft_tree(tree[0], tree[1], tree[2], torch.from_numpy(masks))

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        return [self._grammar.vocabulary[token] for token in tokens]

    def _foreseen(self) -> list[int]:
        text = self._matcher.find_jump_forward_string()
        return self.tokenized(text) if text else []

    def tokenized(self, text: str) -> list[int]:
        return self._grammar.tokenizing(text, self.tokens[-1] if self.tokens else None)


@dataclass(frozen=True, eq=False, kw_only=True)
class XGrammar(Grammar):
    """A grammar of xgrammar, or one for each row."""

    library: str = "xgrammar"
    compiled: Sequence[Any] = ()  # xgrammar.CompiledGrammar: one for all rows, or one for each
    # Token ids of a text after a token; left out, the longest tokens that fit.
    tokenize: Callable[[str, int | None], list[int]] | None = None

    @property
    def num_grammars(self) -> int:
        return len(self.compiled)

    @cached_property
    def vocabulary(self) -> list[bytes]:
        """The text of each token."""
        pieces = self.compiled[0].tokenizer_info.decoded_vocab
        texts = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
        return texts + [b""] * (self.vocab_size - len(texts))

    @cached_property
    def tokenizing(self) -> Callable[[str, int | None], list[int]]:
        """The tokenizer, or what the vocabulary alone makes of a text."""
        if self.tokenize is not None:
            return self.tokenize
        special = set(self.compiled[0].tokenizer_info.special_token_ids)
        ids = {piece: token for token, piece in enumerate(self.vocabulary) if piece and token not in special}
        return partial(longest_tokens, ids)

    def matcher(self, row: int) -> XGrammarMatcher:
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self.compiled[row if len(self.compiled) > 1 else 0])
        return XGrammarMatcher(matcher, self)


def longest_tokens(ids: dict[bytes, int], text: str, after: int | None) -> list[int]:
    """Token ids of a text by a vocabulary alone: the longest token that fits, again and again."""
    rest = text.encode()
    longest = max(map(len, ids), default=0)
    tokens = []
    while rest:
        size = next((size for size in range(min(longest, len(rest)), 0, -1) if rest[:size] in ids), None)
        if size is None:
            break
        tokens.append(ids[rest[:size]])
        rest = rest[size:]
    return tokens
