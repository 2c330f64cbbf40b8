"""Grammars of the libraries: xgrammar, with masks of a whole tree in one call, and text that must come next; and
llguidance, with masks of the chains of many rows in parallel, and forced tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, takewhile
from typing import Any

import numpy as np
import torch

from ...errors import SpecConfigError, SpecDecError
from ...threads import cached_property
from .matchers import Grammar, GrammarMatcher, NodeMasks


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
        longest = max(map(len, ids), default=0)

        def longest_tokens(text: str, after: int | None) -> list[int]:
            # The longest token that fits, again and again.
            rest, tokens = text.encode(), []
            while rest:
                size = next((size for size in range(min(longest, len(rest)), 0, -1) if rest[:size] in ids), None)
                if size is None:
                    break
                tokens.append(ids[rest[:size]])
                rest = rest[size:]
            return tokens

        return longest_tokens

    def matcher(self, row: int) -> XGrammarMatcher:
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self.compiled[row if len(self.compiled) > 1 else 0])
        return XGrammarMatcher(matcher, self)


class LLGuidanceMatcher(GrammarMatcher):
    """A row's place in a grammar of llguidance, from an `LLMatcher` at its beginning and an `LLTokenizer`."""

    def __init__(self, matcher: Any, num_words: int, tokenizer: Any):
        super().__init__(num_words)
        self.matcher: Any = matcher
        self._tokenizer = tokenizer
        self.stop_tokens: frozenset[int] = frozenset(tokenizer.eos_tokens)
        self._num_uncounted = 0

    @property
    def is_at_end(self) -> bool:
        # The library says that it has stopped as soon as only a stop token is left.
        return bool(self.tokens) and (self._num_after_end > 0 or self.tokens[-1] in self.stop_tokens)

    def _accept(self, token: int) -> bool:
        if self.matcher.is_stopped():
            # Only a stop token is left, which the library does not count.
            self._num_uncounted = int(token in self.stop_tokens)
            return token in self.stop_tokens
        return token < self._tokenizer.vocab_size and self.matcher.try_consume_tokens([token]) == 1

    def within_vocabulary(self, tokens: Sequence[int]) -> list[int]:
        """The tokens before the first that the library's vocabulary lacks, from which it would never recover."""
        return list(takewhile(self._tokenizer.vocab_size.__gt__, tokens))

    def _rollback(self, count: int) -> None:
        self.matcher.rollback(count - self._num_uncounted)
        self._num_uncounted = 0

    def fill(self, mask: np.ndarray) -> None:
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def _refusal(self, token: int) -> SpecDecError:
        if not self.matcher.is_error():
            return super()._refusal(token)
        problem = self.matcher.get_error().partition("\n")[0]
        return SpecConfigError(f"The grammar is more than llguidance can follow ({problem}). Make it simpler.")

    @classmethod
    def fill_drafts(cls, drafts: list[NodeMasks]) -> None:
        """Fills the masks of chains in one parallel call; those of trees, and of texts that end, node by node."""
        chains = []
        for draft in drafts:
            matcher = draft.matcher
            is_chain = list(draft.parents) == list(range(-1, len(draft.parents) - 1))
            is_open = not matcher.is_at_end and matcher.stop_tokens.isdisjoint(draft.tokens)
            if is_chain and is_open and not matcher.knows_masks and matcher.within_vocabulary(draft.tokens):
                chains.append(draft)
            else:
                matcher.fill_nodes(draft.tokens, draft.parents, draft.masks)
        if not chains:
            return
        from llguidance.torch import fill_next_token_bitmask_par_with_draft_tokens

        ends = list(accumulate(len(chain.tokens) + 1 for chain in chains))
        begins = [0, *ends[:-1]]
        masks = np.concatenate([chain.masks for chain in chains])
        jobs = [
            (chain.matcher.matcher, begin, chain.matcher.within_vocabulary(chain.tokens))
            for chain, begin in zip(chains, begins)
        ]
        fill_next_token_bitmask_par_with_draft_tokens(_executor(), jobs, torch.from_numpy(masks))
        for chain, begin, end in zip(chains, begins, ends):
            chain.masks = masks[begin:end]

    def tokenized(self, text: str) -> list[int]:
        return self._tokenizer.tokenize_str(text)

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        return [self._tokenizer.decode_bytes([token]) for token in tokens]

    def _foreseen(self) -> list[int]:
        # The library keeps back tokens that could be longer if more text came.
        return self.matcher.compute_ff_tokens() or self._tokenizer.tokenize_bytes(self.matcher.compute_ff_bytes())


@dataclass(frozen=True, eq=False, kw_only=True)
class LLGuidanceGrammar(Grammar):
    """A grammar of llguidance."""

    library: str = "llguidance"
    tokenizer: Any = None  # llguidance.LLTokenizer of the target
    source: str = ""  # the grammar, as the library's `grammar_from` returns it

    def matcher(self, row: int) -> LLGuidanceMatcher:
        import llguidance

        return LLGuidanceMatcher(llguidance.LLMatcher(self.tokenizer, self.source), self.num_words, self.tokenizer)


@lru_cache(maxsize=1)
def _executor() -> Any:
    import llguidance

    return llguidance.LLExecutor()
