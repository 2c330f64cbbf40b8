"""Grammars of outlines-core: automata over tokens, whose states are kept here.

Shapes: W words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .matchers import Grammar, GrammarMatcher, mask_of


class OutlinesMatcher(GrammarMatcher):
    """A row's place in an automaton.

    Args:
        index (`outlines_core.Index`): The automaton.
        num_words (`int`): W.
        masks (`dict[int, np.ndarray]`): Masks of states, shared by all rows.
        stop_tokens (`frozenset[int]`): Tokens that end the text, as far as they are known.
    """

    # A text that may end has ended with any token.
    accepts_by_mask = False

    def __init__(self, index: Any, num_words: int, masks: dict[int, np.ndarray], stop_tokens: frozenset[int]):
        super().__init__(num_words)
        self.stop_tokens = stop_tokens
        self._index, self._masks = index, masks
        self._states = [index.get_initial_state()]

    def _accept(self, token: int) -> bool:
        state = self._states[-1]
        following = self._index.get_next_state(state, token)
        if following is None:
            # A text that may end here has ended, whatever follows.
            if not self._index.is_final_state(state):
                return False
            following = state
        self._states.append(following)
        return True

    def _rollback(self, count: int) -> None:
        del self._states[-count:]

    def fill(self, mask: np.ndarray) -> None:
        state = self._states[-1]
        if state not in self._masks:
            # The library's processor passes over tokens that the scores have no place for.
            allowed = np.asarray(self._index.get_allowed_tokens(state) or (), dtype=np.int64)
            self._masks[state] = mask_of(allowed[allowed < self.num_words * 32], self.num_words)
        mask[:] = self._masks[state]


@dataclass(frozen=True, eq=False, kw_only=True)
class OutlinesGrammar(Grammar):
    """An automaton of outlines-core.

    Args:
        index (`outlines_core.Index`): The automaton.
        stop_tokens (`frozenset[int]`): Tokens that end a text, as far as they are known.
    """

    library: str = "outlines"
    index: Any = None
    stop_tokens: frozenset[int] = frozenset()
    masks: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    @classmethod
    def of_index(cls, index: Any, vocab_size: int) -> OutlinesGrammar:
        """The grammar of an automaton, which does not tell its vocabulary.

        Args:
            index (`outlines_core.Index`): The automaton.
            vocab_size (`int`): V of the target. That of the grammar is larger where a text must begin or end with
                other tokens.
        """
        allowed = [frozenset(index.get_allowed_tokens(state) or ()) for state in index.get_final_states()]
        common = frozenset.intersection(*allowed) if allowed else frozenset()
        # All final states allow the token that ends the text.
        stop_tokens = common if len(common) == 1 else frozenset()
        first = index.get_allowed_tokens(index.get_initial_state()) or ()
        largest = max((*first, *stop_tokens), default=0)
        return cls(vocab_size=max(vocab_size, largest + 1), index=index, stop_tokens=stop_tokens)

    def matcher(self, row: int, prompt: Sequence[int]) -> OutlinesMatcher:
        return OutlinesMatcher(self.index, self.num_words, self.masks, self.stop_tokens)
