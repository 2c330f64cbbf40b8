"""Processors of the grammar libraries for the demo's target, each in the way in which its users make it."""

from __future__ import annotations

import json
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec import demo
from hf_specdec.logits.grammar.masks import grammar_of
from hf_specdec.logits.grammar.matchers import GrammarMatcher
from tests.helpers.methods import demo_target


PROMPT = [300, 301, 302]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "colour": {"enum": ["red", "green", "blue"]},
        "known": {"type": "boolean"},
    },
    "required": ["name", "colour", "known"],
    "additionalProperties": False,
}


@cache
def tokenizer():
    return demo.load_tokenizer()


def own(backend: str, **grammar) -> hf_specdec.logits.grammar.processor.GrammarLogitsProcessor:
    """A processor of this package, by default for the schema."""
    return hf_specdec.grammar(**(grammar or {"schema": SCHEMA}), tokenizer=tokenizer(), backend=backend)


@cache
def _compiled_by_xgrammar(regex: str | None):
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=demo_target().config.vocab_size)
    compiler = xgrammar.GrammarCompiler(info)
    if regex is not None:
        return compiler.compile_regex(regex)
    return compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)


def _of_xgrammar(regex: str | None):
    import xgrammar.contrib.hf

    return {"logits_processor": [xgrammar.contrib.hf.LogitsProcessor(_compiled_by_xgrammar(regex))]}


@cache
def _outlines_backend(name: str):
    import outlines
    from outlines.backends import _get_backend

    return _get_backend(name, outlines.from_transformers(demo_target(), tokenizer()))


def _of_outlines(name: str, regex: str | None):
    backend = _outlines_backend(name)
    if regex is None:
        return {"logits_processor": [backend.get_json_schema_logits_processor(json.dumps(SCHEMA))]}
    return {"logits_processor": [backend.get_regex_logits_processor(regex)]}


class AllowedTokens:
    """What lm-format-enforcer's `TransformersPrefixAllowedTokensFn` is; its module does not load in transformers 5."""

    def __init__(self, token_enforcer):
        self.token_enforcer = token_enforcer

    def __call__(self, batch_id: int, sent: torch.Tensor) -> list[int]:
        return self.token_enforcer.get_allowed_tokens(sent.tolist()).allowed_tokens


@cache
def _enforcer_data():
    from lmformatenforcer import TokenEnforcerTokenizerData

    known, first = tokenizer(), tokenizer().encode("0")[-1]
    tokens = [
        (token, known.decode([first, token])[1:], len(known.decode([first, token])) > len(known.decode([token])) + 1)
        for token in range(len(known))
        if token not in known.all_special_ids
    ]
    end = known.eos_token_id
    return TokenEnforcerTokenizerData(tokens, lambda ids: known.decode(ids).rstrip("\ufffd"), end, False, len(known))


def _of_enforcer(regex: str | None):
    from lmformatenforcer import JsonSchemaParser, RegexParser, TokenEnforcer

    parser = JsonSchemaParser(SCHEMA) if regex is None else RegexParser(regex)
    return {"prefix_allowed_tokens_fn": AllowedTokens(TokenEnforcer(_enforcer_data(), parser))}


def own_call(backend: str, regex: str | None) -> dict[str, Any]:
    return {"logits_processor": [own(backend, **({} if regex is None else {"regex": regex}))]}


# Those whose JSON has no whitespace to choose.
COMPACT = ("own xgrammar", "own llguidance", "xgrammar")

# By name what makes the arguments of a call anew, of the schema or a regular expression, and the library it needs.
_KNOWN = {
    "own xgrammar": (partial(own_call, "xgrammar"), "xgrammar"),
    "own llguidance": (partial(own_call, "llguidance"), "llguidance"),
    "xgrammar": (_of_xgrammar, "xgrammar"),
    "outlines xgrammar": (partial(_of_outlines, "xgrammar"), "outlines"),
    "outlines llguidance": (partial(_of_outlines, "llguidance"), "outlines"),
}

# Their processors are called along the accepted path.
_WALKED = {
    "outlines": (partial(_of_outlines, "outlines_core"), "outlines"),
    "lm-format-enforcer": (_of_enforcer, "lmformatenforcer"),
}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


LIBRARIES = [pytest.param(name, marks=needs(package), id=name) for name, (_, package) in _KNOWN.items()]
WALKED = [pytest.param(name, marks=needs(package), id=name) for name, (_, package) in _WALKED.items()]
BACKENDS = [pytest.param(name, marks=needs(name)) for name in ("xgrammar", "llguidance")]


def constraint(library: str, regex: str | None = None) -> dict[str, Any]:
    """Arguments of a call whose text has to follow the schema, or a regular expression.

    They are made anew: most processors serve one call.
    """
    return (_KNOWN | _WALKED)[library][0](regex)


def matcher_of(library: str, regex: str | None = None) -> GrammarMatcher:
    """The beginning of the text of such a call."""
    (processor,) = constraint(library, regex)["logits_processor"]
    return grammar_of(processor).matcher(0)
