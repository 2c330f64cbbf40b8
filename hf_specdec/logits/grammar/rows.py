"""The grammar of a call's rows: masks in the place of the user's processor, and drafts that stay within them.

Processors of grammar libraries are recognised without importing these: one whose library is not loaded cannot be its
own. Processors of other libraries (lm-format-enforcer, outlines' own automata) are called along the accepted path like
any unknown one.

Shapes: R rows, P tokens of a prompt, W words of a mask (see `matchers.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ...drafts import DraftTree
from ...errors import SpecConfigError, SpecDecError
from ...transfers import upload
from .llguidance_matcher import LLGuidanceGrammar
from .matchers import Grammar, GrammarMatcher, NodeMasks
from .xgrammar_matcher import XGrammar


class RowGrammars:
    """The places of rows in a grammar, that of the user's `processor`, after prompts of `prompt_length` columns."""

    def __init__(self, grammar: Grammar, prompt_length: int, processor: Any = None):
        self.grammar: Grammar = grammar
        self.prompt_length: int = prompt_length
        self.processor = processor
        self._matchers: dict[int, GrammarMatcher] = {}

    def at(self, row: int, tokens: Sequence[int], is_drafted: bool = False) -> GrammarMatcher:
        """The place of a row after its tokens; a `SpecDecError` where one of them is forbidden."""
        if row not in self._matchers:
            self._matchers[row] = self.grammar.matcher(row)
        matcher = self._matchers[row]
        go = matcher.move_to if is_drafted else matcher.begin_at
        go(tokens[self.prompt_length :])
        return matcher

    def mask_after(self, row: int, tokens: Sequence[int], is_drafted: bool = False) -> np.ndarray:
        """Tokens that may follow, int32 `(W,)`: all of them where the row has left its grammar, as after its end."""
        try:
            return self.at(row, tokens, is_drafted).mask()
        except SpecDecError:
            return np.full(self.grammar.num_words, -1, dtype=np.int32)

    @classmethod
    def of_call(
        cls, processors: Sequence[Any], prompts: torch.LongTensor, vocab_size: int, ends: Collection[int]
    ) -> RowGrammars | None:
        """The grammar among a call's processors, if it is one; prompts are `(R, P)`, and `ends` may end a row."""
        grammars = [(processor, grammar_of(processor)) for processor in processors]
        grammars = [(processor, grammar) for processor, grammar in grammars if grammar is not None]
        if len(grammars) != 1:
            return None
        ((processor, grammar),) = grammars
        if grammar.vocab_size > vocab_size:
            raise SpecConfigError(
                f"The grammar of {grammar.library} was made for a vocabulary of {grammar.vocab_size} tokens, and the "
                f"target has {vocab_size}. Make it with the target's own tokenizer."
            )
        if grammar.num_grammars not in (1, len(prompts)):
            raise SpecConfigError(
                f"The logits processor of {grammar.library} has {grammar.num_grammars} grammars, and the batch "
                f"{len(prompts)} rows. Give it one grammar for all rows, or one for each."
            )
        rows = cls(grammar, prompts.shape[1], processor)
        for row, prompt in enumerate(prompts.tolist()):
            if not rows.mask_after(row, prompt).any():
                raise SpecConfigError(
                    f"The grammar of {grammar.library} admits nothing, so row {row} cannot begin. Look for a pattern "
                    "or schema that no text fits, and for characters that the tokenizer lacks."
                )
        stop_tokens = rows.at(0, prompts[0].tolist()).stop_tokens
        if ends and stop_tokens and stop_tokens.isdisjoint(ends):
            raise SpecConfigError(
                f"The grammar of {grammar.library} ends texts with token {_listed(stop_tokens)}, and this call ends "
                f"at {_listed(ends)}, so that no text would end. Make the grammar with the tokenizer whose "
                "`eos_token_id` the call has, or pass `eos_token_id` to generate()."
            )
        return rows


def _listed(tokens: Collection[int]) -> str:
    return " or ".join(map(str, sorted(tokens)))


def constrained(draft: DraftTree, matchers: Sequence[GrammarMatcher | None]) -> DraftTree:
    """Cuts drafts where the grammars of their rows forbid them, and gives them the masks after all their nodes.

    Of tokens that were drawn a forbidden one stays, without what follows it: who has drawn it may not do without its
    rejection, which the distribution of the next token depends on.
    """
    token_lists, parent_lists = draft.token_lists(), draft.parent_lists()
    nodes = [
        list(range(len(tokens))) if matcher is None else _kept(matcher, tokens, parents, draft.probs is not None)
        for matcher, tokens, parents in zip(matchers, token_lists, parent_lists)
    ]
    if any(len(kept) < len(tokens) for kept, tokens in zip(nodes, token_lists)):
        draft = _cut(draft, nodes)
        token_lists, parent_lists = draft.token_lists(), draft.parent_lists()
    draft.masks = [
        None if matcher is None else NodeMasks(matcher, tokens, parents)
        for matcher, tokens, parents in zip(matchers, token_lists, parent_lists)
    ]
    return draft


def _kept(matcher: GrammarMatcher, tokens: list[int], parents: list[int], keeps_first_forbidden: bool) -> list[int]:
    """The nodes of a row's draft that stay."""
    allowed = set(matcher.allowed_nodes(tokens, parents))
    # The verified nodes whose children can be accepted.
    goes_on = {node for node in allowed if node == 0 or tokens[node - 1] not in matcher.stop_tokens}
    return [
        node
        for node, parent in enumerate(parents)
        if node + 1 in allowed or (keeps_first_forbidden and parent + 1 in goes_on)
    ]


def _cut(draft: DraftTree, nodes: list[list[int]]) -> DraftTree:
    """These nodes of each row, in their order."""
    device = draft.tokens.device
    tokens = [[row[node] for node in kept] for row, kept in zip(draft.token_lists(), nodes)]
    parents = []
    for row, kept in zip(draft.parent_lists(), nodes):
        places = {node: place for place, node in enumerate(kept)}
        parents.append([places.get(row[node], -1) for node in kept])
    fewer = DraftTree.from_lists(tokens, device, parents)
    if draft.probs is not None and fewer.size == 0:
        fewer.probs = draft.probs[:, :0]
    elif draft.probs is not None:
        index = upload([kept + [0] * (fewer.size - len(kept)) for kept in nodes], device)
        fewer.probs = draft.probs[torch.arange(len(nodes), device=device)[:, None], index]
    fewer.drafters = draft.drafters
    fewer.why_empty = draft.why_empty
    return fewer


# Grammars by processor: tables of a vocabulary are made once.
_grammars: WeakKeyDictionary[Any, Grammar] = WeakKeyDictionary()


def grammar_of(processor: Any) -> Grammar | None:
    """The grammar of a logits processor; `None` for one that is of no grammar, or of an unknown library."""
    for module, name, read in _READERS:
        if type(processor) is getattr(sys.modules.get(module), name, None):
            if processor not in _grammars:
                _grammars[processor] = read(processor)
            return _grammars[processor]
    return None


def _xgrammar(processor: Any) -> Grammar:
    # A used processor has one compiled grammar for each row of that call.
    compiled = processor.compiled_grammars
    if all(one is compiled[0] for one in compiled):
        compiled = compiled[:1]
    return XGrammar(vocab_size=processor.full_vocab_size, allows_rest=True, compiled=tuple(compiled))


def _outlines_xgrammar(processor: Any) -> Grammar:
    compiled = processor.compiled_grammar
    return XGrammar(vocab_size=compiled.tokenizer_info.vocab_size, allows_rest=True, compiled=(compiled,))


def _outlines_llguidance(processor: Any) -> Grammar:
    tokenizer = processor.llg_tokenizer
    return LLGuidanceGrammar(vocab_size=tokenizer.vocab_size, tokenizer=tokenizer, source=processor.grammar)


# Module, class, and what reads the grammar out of a processor of this class.
_READERS: tuple[tuple[str, str, Callable[[Any], Grammar]], ...] = (
    ("hf_specdec.logits.grammar.processor", "GrammarLogitsProcessor", lambda processor: processor.grammar),
    ("xgrammar.contrib.hf", "LogitsProcessor", _xgrammar),
    ("outlines.backends.xgrammar", "XGrammarLogitsProcessor", _outlines_xgrammar),
    ("outlines.backends.llguidance", "LLGuidanceLogitsProcessor", _outlines_llguidance),
)
