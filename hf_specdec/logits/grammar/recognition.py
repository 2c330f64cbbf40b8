"""Recognises the processors of grammar libraries, from what `generate()` was given to what a grammar is here.

No library is imported for it: a processor whose library is not loaded cannot be one of its own. Processors of other
libraries (lm-format-enforcer, outlines' own automata) are called along the accepted path like any unknown one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from .llguidance_matcher import LLGuidanceGrammar
from .matchers import Grammar
from .processor import GrammarLogitsProcessor
from .xgrammar_matcher import XGrammar


# Grammars by processor: tables of a vocabulary are made once.
_grammars: WeakKeyDictionary[Any, Grammar] = WeakKeyDictionary()


def grammar_of(processor: Any) -> Grammar | None:
    """The grammar of a logits processor; `None` for one that is of no grammar, or of an unknown library."""
    if type(processor) is GrammarLogitsProcessor:
        return processor.grammar
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
    ("xgrammar.contrib.hf", "LogitsProcessor", _xgrammar),
    ("outlines.backends.xgrammar", "XGrammarLogitsProcessor", _outlines_xgrammar),
    ("outlines.backends.llguidance", "LLGuidanceLogitsProcessor", _outlines_llguidance),
)
