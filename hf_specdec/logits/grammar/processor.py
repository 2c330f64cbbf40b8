"""`hf_specdec.grammar()`: a logits processor that keeps a text within a JSON schema, a regex, a grammar or choices.

Shapes: B rows, L tokens so far, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast
from transformers.generation.logits_process import LogitsProcessor

from ...errors import MissingDependencyError, SpecConfigError, shown
from .libraries import LLGuidanceGrammar, XGrammar
from .masks import GrammarMask, RowGrammars
from .matchers import Grammar


# With one blank after commas and colons, and no other one between tokens of JSON: the text then has no free choice.
_SEPARATORS = (", ", ": ")

_BACKENDS = ("xgrammar", "llguidance")


class GrammarLogitsProcessor(LogitsProcessor):
    """Keeps generated text within a grammar. Made by [`grammar`].

    Plain `generate()` takes it, too, one call at a time, also with beams and transformers' own assisted decoding. It
    can be used again: tokens that are not a part of what it was shown last and one more begin a new text.
    """

    def __init__(self, grammar: Grammar):
        self.grammar = grammar
        self._shown: list[list[int]] = []
        self._places = RowGrammars(grammar, 0)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores `(B, V)` of which those of tokens that the grammar forbids after `input_ids` `(B, L)` are -inf.

        A row that the grammar does not follow, as one that is padded after its end, is left as it is.
        """
        rows = input_ids.tolist()
        # Rows may have left the batch, beams go on from one of them, and assisted decoding goes back.
        num_before = input_ids.shape[1] - 1
        shown = {tuple(row[:num_before]) for row in self._shown}
        goes_on = num_before >= self._places.prompt_length and all(tuple(row[:num_before]) in shown for row in rows)
        if not goes_on:
            self._places = RowGrammars(self.grammar, input_ids.shape[1])
        self._shown = rows
        masks = np.stack([self._places.mask_after(index, row) for index, row in enumerate(rows)])
        return GrammarMask(masks, self.grammar.allows_rest)(input_ids, scores.clone())

    def __deepcopy__(self, memo: dict) -> GrammarLogitsProcessor:
        """A processor of the same grammar that has seen nothing."""
        return GrammarLogitsProcessor(self.grammar)


def grammar(
    schema: Any = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    regex: str | None = None,
    lark: str | None = None,
    choices: Sequence[str] | None = None,
    backend: Literal["xgrammar", "llguidance"] | None = None,
    flexible_whitespace: bool = False,
) -> GrammarLogitsProcessor:
    """Makes a logits processor that keeps generated text within a grammar, for `generate(logits_processor=[...])`.

    Plain `generate()` takes it as well as speculative calls, with the same text. One processor serves any number of
    calls, one after the other, and batches of any size.

    Args:
        schema (`dict`, `str` or pydantic model): A JSON schema, as an object, as JSON, or by what has a
            `model_json_schema()`. Give one of `schema`, `regex`, `lark` and `choices`.
        tokenizer (`PreTrainedTokenizerFast`): The target's tokenizer.
        regex (`str`, *optional*): A regular expression for the whole text.
        lark (`str`, *optional*): A context-free grammar in Lark's notation, from `start`.
        choices (`Sequence[str]`, *optional*): The texts of which one is generated.
        backend (`str`, *optional*): Library: "xgrammar" or "llguidance". Default: the first that is installed.
        flexible_whitespace (`bool`): Any whitespace between the tokens of JSON. If not, one blank after commas and
            colons, which leaves fewer tokens to the target, and so more to drafts.

    Raises:
        SpecConfigError: No grammar or more than one is given, it cannot be read, admits nothing, or the tokenizer is
            not a fast one.
        MissingDependencyError: The library is not installed.
    """
    choice = {"schema": schema, "regex": regex, "lark": lark, "choices": choices}
    choice = {kind: value for kind, value in choice.items() if value is not None}
    if len(choice) != 1:
        names = ", ".join(f"`{kind}`" for kind in choice) or "none of them"
        raise SpecConfigError(f"grammar() takes one of `schema`, `regex`, `lark` and `choices`, got {names}.")
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise SpecConfigError(
            f"grammar() needs the target's fast tokenizer as `tokenizer`, got {shown(tokenizer)}. Load it with "
            "AutoTokenizer.from_pretrained()."
        )
    ((kind, value),) = choice.items()
    if kind == "schema":
        value = _schema(value)
    elif kind == "choices":
        is_sized = isinstance(value, Collection) and not isinstance(value, str)
        if not is_sized or not value or not all(isinstance(text, str) and text for text in value):
            raise SpecConfigError(f"`choices` must be texts, none of them empty, got {shown(value)}.")
        kind, value = "lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
    elif not isinstance(value, str):
        raise SpecConfigError(f"`{kind}` must be a text, got {shown(value)}.")
    if backend is not None and backend not in _BACKENDS:
        raise SpecConfigError(f"`backend` must be one of {', '.join(_BACKENDS)}, got {shown(backend)}.")
    library = next((name for name in ([backend] if backend else _BACKENDS) if find_spec(name) is not None), None)
    if library is None:
        raise MissingDependencyError(
            f"grammar() needs the package {backend or ' or '.join(_BACKENDS)}, which is not installed. Install it "
            f"with `pip install {backend or _BACKENDS[0]}`."
        )
    compile_grammar = _compile_xgrammar if library == "xgrammar" else _compile_llguidance
    try:
        compiled = compile_grammar(kind, value, tokenizer, flexible_whitespace)
    except (RuntimeError, ValueError) as error:
        raise SpecConfigError(f"{library} cannot read the grammar `{kind}`: {str(error).strip()}") from error
    if not compiled.matcher(0).mask().any():
        raise SpecConfigError(
            f"The grammar `{kind}` admits nothing. Look for a pattern or schema that no text fits, and for characters "
            "that the tokenizer lacks."
        )
    return GrammarLogitsProcessor(compiled)


def _schema(value: Any) -> str:
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    elif hasattr(value, "json_schema"):
        value = value.json_schema()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise SpecConfigError(f"`schema` is no JSON: {error}. Pass a JSON schema, or its object.") from error
    if not isinstance(value, dict):
        raise SpecConfigError(
            f"`schema` must be a JSON schema (an object or JSON) or a pydantic model, got {shown(value)}."
        )
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise SpecConfigError(f"`schema` cannot be written as JSON: {error}. Pass a JSON schema.") from error


def _compile_xgrammar(kind: str, value: str, tokenizer: PreTrainedTokenizerFast, is_flexible: bool) -> Grammar:
    import xgrammar

    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer)))
    if kind == "schema":
        compiled = compiler.compile_json_schema(value, any_whitespace=is_flexible, separators=_SEPARATORS)
    else:
        compiled = (compiler.compile_regex if kind == "regex" else compiler.compile_lark)(value)

    def tokenize(text: str, after: int | None) -> list[int]:
        if after is not None:
            # As the tokenizer would have written both.
            both = tokenizer.encode(f"{tokenizer.decode([after])}{text}", add_special_tokens=False)
            if both[:1] == [after]:
                return both[1:]
        return tokenizer.encode(text, add_special_tokens=False)

    return XGrammar(vocab_size=len(tokenizer), compiled=(compiled,), tokenize=tokenize)


def _compile_llguidance(kind: str, value: str, tokenizer: PreTrainedTokenizerFast, is_flexible: bool) -> Grammar:
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    if kind == "schema":
        item, key = _SEPARATORS
        compact = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
        source = LLMatcher.grammar_from_json_schema(value, overrides=None if is_flexible else compact)
    else:
        source = (LLMatcher.grammar_from_regex if kind == "regex" else LLMatcher.grammar_from_lark)(value)
    # Ids that no token has are between those of the tokenizer and the end of the vocabulary.
    made = from_tokenizer(tokenizer, n_vocab=len(tokenizer))
    if problem := LLMatcher(made, source).get_error():
        raise ValueError(problem)
    return LLGuidanceGrammar(vocab_size=len(tokenizer), tokenizer=made, source=source)
