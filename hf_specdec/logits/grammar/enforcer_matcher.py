"""Grammars of lm-format-enforcer: the tokens allowed after a text, by the text alone.

Shapes: W words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .matchers import Grammar, GrammarMatcher, allows, mask_of


class EnforcerMatcher(GrammarMatcher):
    """A row's place in the format of a token enforcer, which remembers all texts that it has seen.

    Args:
        enforcer (`lmformatenforcer.TokenEnforcer`): It must see every text before those that continue it.
        num_words (`int`): W.
        prompt (`Sequence[int]`): The tokens in front of the text.
    """

    accepts_by_mask = False

    def __init__(self, enforcer: Any, num_words: int, prompt: Sequence[int]):
        super().__init__(num_words)
        self._enforcer, self._text = enforcer, list(prompt)
        stops = enforcer.eos_token_id
        self.stop_tokens: frozenset[int] = frozenset(stops if isinstance(stops, list) else [stops])
        self._masks = [self._mask()]

    def _mask(self) -> np.ndarray:
        return mask_of(self._enforcer.get_allowed_tokens(self._text).allowed_tokens, self.num_words)

    def _accept(self, token: int) -> bool:
        has_ended = not self.stop_tokens.isdisjoint(self.tokens)
        if not has_ended and not allows(self._masks[-1], token):
            return False
        self._text.append(token)
        self._masks.append(self._mask())
        return True

    def _rollback(self, count: int) -> None:
        del self._text[-count:], self._masks[-count:]

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = self._masks[-1]


@dataclass(frozen=True, eq=False, kw_only=True)
class EnforcerGrammar(Grammar):
    """The format of a token enforcer.

    Args:
        enforcer (`lmformatenforcer.TokenEnforcer`): The enforcer.
    """

    library: str = "lm-format-enforcer"
    enforcer: Any = None

    def matcher(self, row: int, prompt: Sequence[int]) -> EnforcerMatcher:
        return EnforcerMatcher(self.enforcer, self.num_words, prompt)
