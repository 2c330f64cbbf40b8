"""Recognises the processors of grammar libraries, from what `generate()` was given to what a grammar is here.

No library is imported for it: a processor whose library is not loaded cannot be one of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from .enforcer_matcher import EnforcerGrammar
from .llguidance_matcher import LLGuidanceGrammar
from .matchers import Grammar
from .outlines_matcher import OutlinesGrammar
from .processor import GrammarLogitsProcessor
from .xgrammar_matcher import XGrammar


# What was found in processors that are still there.
_found: WeakKeyDictionary[Any, tuple[int, Grammar]] = WeakKeyDictionary()


def grammar_of(processor: Any, vocab_size: int) -> Grammar | None:
    """The grammar of a logits processor; `None` for one that is of no grammar, or of an unknown library.

    Args:
        processor (`Any`): A processor of a call.
        vocab_size (`int`): V, the width of the target's logits.
    """
    if type(processor) is GrammarLogitsProcessor:
        return processor.grammar
    if type(processor) is PrefixConstrainedLogitsProcessor:
        enforcer = getattr(processor._prefix_allowed_tokens_fn, "token_enforcer", None)
        is_enforcer = _is_a(enforcer, "lmformatenforcer.tokenenforcer", "TokenEnforcer")
        processor, read = enforcer, _enforcer if is_enforcer else None
    else:
        read = next((read for module, name, read in _PROCESSORS if _is_a(processor, module, name)), None)
    if read is None:
        return None
    # Tables of a vocabulary are made once for a processor.
    known = _found.get(processor)
    if known is None or known[0] != vocab_size:
        known = _found[processor] = vocab_size, read(processor, vocab_size)
    return known[1]


def _is_a(value: Any, module: str, name: str) -> bool:
    """Tells whether a value is of exactly this class, of a module that is loaded."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and type(value) is kind


def _enforcer(enforcer: Any, vocab_size: int) -> Grammar:
    # Its own number is that of the tokenizer it was given, which need not be that of the tokens.
    largest = max((token for token, *_ in enforcer.regular_tokens), default=0)
    return EnforcerGrammar(vocab_size=max(vocab_size, largest + 1), enforcer=enforcer)


def _xgrammar(processor: Any, vocab_size: int) -> Grammar:
    compiled = processor.compiled_grammars
    # A used processor has one for each row of that call.
    is_shared = all(one is compiled[0] for one in compiled)
    return XGrammar(
        vocab_size=processor.full_vocab_size, allows_rest=True, compiled=tuple(compiled[:1] if is_shared else compiled)
    )


def _outlines_xgrammar(processor: Any, vocab_size: int) -> Grammar:
    compiled = processor.compiled_grammar
    return XGrammar(vocab_size=compiled.tokenizer_info.vocab_size, allows_rest=True, compiled=(compiled,))


def _outlines_llguidance(processor: Any, vocab_size: int) -> Grammar:
    tokenizer = processor.llg_tokenizer
    return LLGuidanceGrammar(vocab_size=tokenizer.vocab_size, tokenizer=tokenizer, source=processor.grammar)


def _outlines(processor: Any, vocab_size: int) -> Grammar:
    return OutlinesGrammar.of_index(processor.index, vocab_size)


# Module, class, and what reads the grammar out of a processor of this class.
_PROCESSORS: tuple[tuple[str, str, Callable[[Any, int], Grammar]], ...] = (
    ("xgrammar.contrib.hf", "LogitsProcessor", _xgrammar),
    ("outlines.backends.xgrammar", "XGrammarLogitsProcessor", _outlines_xgrammar),
    ("outlines.backends.llguidance", "LLGuidanceLogitsProcessor", _outlines_llguidance),
    ("outlines.backends.outlines_core", "OutlinesCoreLogitsProcessor", _outlines),
)
