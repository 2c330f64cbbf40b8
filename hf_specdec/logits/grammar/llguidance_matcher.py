"""Grammars of llguidance: masks of the chains of many rows in parallel, and forced tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, takewhile
from typing import Any

import numpy as np
import torch

from ...errors import SpecConfigError, SpecDecError
from .matchers import Grammar, GrammarMatcher, NodeMasks


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
