"""Grammars of the libraries behind one contract, masks on scores, and the processor of this package."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor, TemperatureLogitsWarper

import hf_specdec
from hf_specdec import MissingDependencyError, SpecConfigError, SpecDecError
from hf_specdec.candidate_generators.grammar.generator import foreseen
from hf_specdec.logits.grammar.masks import GrammarMask, grammar_of
from hf_specdec.logits.grammar.matchers import NodeMasks, allowed_tokens, allows
from hf_specdec.settings.checks import MOST_DRAFT_TOKENS
from tests.helpers.grammars import BACKENDS, LIBRARIES, PROMPT, SCHEMA, matcher_of, own, tokenizer
from tests.helpers.levels import in_full, split
from tests.helpers.methods import demo_target


every_library = pytest.mark.parametrize("library", split(LIBRARIES, LIBRARIES[:1]))
one_backend = pytest.mark.parametrize("backend", [BACKENDS[0], *in_full(BACKENDS[1])])


def mask(matcher) -> np.ndarray:
    filled = np.empty(matcher.num_words, dtype=np.int32)
    matcher.fill(filled)
    return filled


def masks_of(matcher, tokens, parents=None) -> np.ndarray:
    """The masks after the tokens of a tree, or a chain."""
    return NodeMasks.padded(
        [NodeMasks(matcher, tokens, parents or list(range(-1, len(tokens) - 1)))], len(tokens) + 1, matcher.num_words
    )[0]


def followed(matcher, tokens) -> np.ndarray | None:
    """The mask after some more tokens, one by one; `None` where one of them is forbidden."""
    count = 0
    while count < len(tokens) and allows(mask(matcher), tokens[count]) and matcher.accept(tokens[count]):
        count += 1
    found = mask(matcher) if count == len(tokens) else None
    matcher.rollback(count)
    return found


def mask_of(tokens, num_words: int) -> np.ndarray:
    """A mask that allows the given tokens alone."""
    bits = np.zeros(num_words * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def ids(text: str, known=None) -> list[int]:
    return [(known or tokenizer()).convert_tokens_to_ids(letter) for letter in text]


@every_library
@given(data=st.data())
@settings(max_examples=10)
def test_masks_of_a_tree_are_those_of_its_paths(library, data):
    matcher = matcher_of(library)
    for _ in range(data.draw(st.integers(0, 12))):
        allowed = allowed_tokens(mask(matcher), 4096)
        if not matcher.accept(data.draw(st.sampled_from(allowed))):
            break
    before, text = mask(matcher), list(matcher.tokens)
    tokens, parents, paths = [], [], []
    for node in range(data.draw(st.integers(1, 7))):
        parent = data.draw(st.integers(-1, node - 1))
        path = [] if parent < 0 else paths[parent]
        here = followed(matcher, path)
        choices = [5, 9] if here is None else [5, *allowed_tokens(here, 4096)[:40]]
        tokens.append(data.draw(st.sampled_from(choices)))
        parents.append(parent)
        paths.append([*path, tokens[-1]])
    masks = masks_of(matcher, tokens, parents)
    assert np.array_equal(masks[0], before)
    assert matcher.tokens == text
    for path, filled in zip(paths, masks[1:]):
        # After the end of a text nothing is asked any more.
        if not matcher.stop_tokens.intersection([*text, *path]):
            alone = followed(matcher, path)
            assert alone is None or np.array_equal(filled, alone)


@every_library
def test_a_place_is_reached_from_everywhere_and_forced_tokens_lead_to_the_end(library):
    matcher, fresh = matcher_of(library), matcher_of(library)
    path, total = [], 0
    # Where whitespace is free the text need not end.
    while len(path) < 40 and not fresh.stop_tokens.intersection(path):
        forced = fresh.forced()
        assert followed(fresh, forced) is not None
        total += len(forced)
        for token in forced or allowed_tokens(mask(fresh), 4096)[-1:]:
            assert fresh.accept(token)
            path.append(token)
    assert total > 0
    start = path[:3]
    others = [token for token in allowed_tokens(followed(matcher, start), 4096) if token != path[3]]
    for text in (path[:-1], [*start, *others[:1]], [], path[:2], path[:-1]):
        matcher.move_to(text)
        assert matcher.tokens == text
    fresh = matcher_of(library)
    fresh.move_to(path[:-1])
    for _ in range(2):
        assert np.array_equal(mask(matcher), mask(fresh))
        assert matcher.accept(path[-1])
        assert matcher.accept(7) or not matcher.is_at_end
        matcher.move_to(path[:-1])
    here = followed(matcher_of(library), path[:2])
    forbidden = next(token for token in range(4096) if not allows(here, token))
    with pytest.raises(SpecDecError, match=f"does not allow token {forbidden}, generated token 3"):
        matcher.move_to([*path[:2], forbidden])


@one_backend
def test_masks_are_made_once_as_long_as_the_text_goes_on(backend):
    compiled = hf_specdec.grammar(choices=["abcd", "abxy"], tokenizer=tokenizer(), backend=backend).grammar
    matcher, made = compiled.matcher(0), []
    fill = matcher.fill
    matcher.fill = lambda filled: [made.append(list(matcher.tokens)), fill(filled)]

    def look(begin: list[int], *paths: list[int]) -> list[list[int]]:
        """The places whose masks are made for those after a text and some paths from there."""
        made.clear()
        matcher.begin_at(begin)
        for path, found in zip([[], *paths], [matcher.mask(), *matcher.masks_after(paths)]):
            assert np.array_equal(found, followed(compiled.matcher(0), [*begin, *path]))
        return list(made)

    a, b, c, x = ids("abcx")
    assert look([], [a], [a, b]) == [[], [a], [a, b]]
    assert look([a], [b], [b, c]) == [[a, b, c]]
    assert look([a, b], [c], [x]) == [[a, b, x]]
    # A text of another call.
    assert look([], [a]) == [[], [a]]


@one_backend
def test_drafts_may_be_long_and_have_tokens_that_the_grammar_does_not_know(backend):
    larger = copy.deepcopy(tokenizer())
    larger.add_tokens("<one more>")
    matcher = hf_specdec.grammar(choices=["ab", "cd"], tokenizer=larger, backend=backend).grammar.matcher(0)
    a, b, c = ids("abc", larger)
    # The library has a bit for the first of them, but no text.
    for unknown in (len(larger), 1 << 16):
        for tokens in ([unknown], [a, unknown, b], [unknown, larger.eos_token_id]):
            masks = masks_of(matcher, tokens)
            assert [allows(masks[0], token) for token in (a, b, c, unknown)] == [True, False, True, False]
        assert not matcher.accept(unknown)
    assert matcher.accept(a)
    assert matcher.accept(b)
    matcher, end = own(backend, regex="a*").grammar.matcher(0), tokenizer().eos_token_id
    # An end is beyond what the libraries fill at once.
    masks = masks_of(matcher, ids("a") * (MOST_DRAFT_TOKENS - 1) + [end])
    assert (masks[:-1] == masks[0]).all()
    assert allows(masks[-2], end)
    assert matcher.tokens == []


@one_backend
def test_alternatives_are_drafted_side_by_side(backend):
    texts = {"it is red now", "it is blue now", "it is too early"}
    matcher = own(backend, choices=sorted(texts)).grammar.matcher(0)
    for most, found in ((3, texts), (2, set())):
        tokens, parents, log_probs = foreseen(matcher, 16, 40, most)
        paths, log_probs = [[]], [0.0, *log_probs]
        for node, (token, parent) in enumerate(zip(tokens, parents)):
            paths.append([*paths[parent + 1], token])
            assert log_probs[node + 1] <= log_probs[parent + 1]
        assert texts.intersection(map(tokenizer().decode, paths)) == found
        assert matcher.tokens == []
    assert len(foreseen(matcher, 2, 40, 3)[0]) <= 2 * 3
    assert len(foreseen(matcher, 16, 5, 3)[0]) == 5


@given(tokens=st.sets(st.integers(0, 99), min_size=1), width=st.sampled_from([90, 100, 128, 140]), rest=st.booleans())
def test_masks_on_scores(tokens, width, rest):
    scores, masks = torch.randn(2, width), np.stack([mask_of(tokens, 4), mask_of([3], 4)])
    masked = GrammarMask(masks, rest)(None, scores.clone())
    for row, allowed in enumerate((tokens, {3})):
        for token in range(width):
            kept = token in allowed or (rest and token >= 128)
            assert masked[row, token] == (scores[row, token] if kept else -torch.inf)
    assert allowed_tokens(masks[0], 100) == sorted(tokens)
    assert allowed_tokens(masks[0], len(tokens) - 1) == []


@one_backend
def test_the_processor_follows_texts_and_begins_new_ones(backend):
    processor, (a, b, c, d) = own(backend, choices=["ab", "cd"]), ids("abcd")

    def allowed(*rows, by=processor):
        scores = by(torch.tensor(rows), torch.zeros(len(rows), 4096))
        return ["".join(name for name, token in zip("abc", (a, b, c)) if row[token] == 0) for row in scores]

    assert allowed(PROMPT, PROMPT) == ["ac", "ac"]
    assert allowed([*PROMPT, a], [*PROMPT, c]) == ["b", ""]
    # The first row has left the batch, and the other goes on.
    assert allowed([*PROMPT, c, d]) == [""]
    assert allowed([1, 2]) == ["ac"]
    copied = copy.deepcopy(processor)
    assert copied.grammar is processor.grammar
    assert allowed([1, 2, a], by=copied) == ["ac"]


@one_backend
@pytest.mark.parametrize(
    "settings", [{"prompt_lookup_num_tokens": 4}, *in_full({"num_beams": 3})], ids=["prompt lookup", "beams"]
)
def test_plain_generation_where_it_goes_back(backend, settings):
    """Beams go on from one of them, and transformers' own assisted decoding gives tokens up again."""
    texts, prompt = ["abc abd", "abd abc", "blue"], tokenizer()(["abc abd abd abc blue ab"], return_tensors="pt")
    call = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": tokenizer().eos_token_id, "pad_token_id": 0}
    output = demo_target().generate(**prompt, **call, **settings, logits_processor=[own(backend, choices=texts)])
    assert tokenizer().decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True) in texts


BAD_GRAMMARS = [
    ({"regex": "(["}, "cannot read the grammar `regex`"),
    ({"schema": {"type": "nonsense"}}, "cannot read the grammar `schema`"),
    ({"schema": "{"}, "`schema` is no JSON"),
    ({"regex": 5}, "`regex` must be a text, got 5"),
    ({"choices": "yes"}, "`choices` must be texts"),
    ({"regex": "a", "choices": ["a"]}, "takes one of .* got `regex`, `choices`"),
]


@one_backend
def test_ways_to_write_a_schema_and_bad_grammars(backend):
    said_by_pydantic = type("Model", (), {"model_json_schema": classmethod(lambda cls: SCHEMA)})
    schemas = SCHEMA, json.dumps(SCHEMA), said_by_pydantic
    first, *others = [mask(own(backend, schema=schema).grammar.matcher(0)) for schema in schemas]
    assert all(np.array_equal(first, other) for other in others)
    (opened,), (line,) = (tokenizer().encode(text, add_special_tokens=False) for text in "{\n")
    for is_free in (False, True):
        matcher = own(backend, schema=SCHEMA, flexible_whitespace=is_free).grammar.matcher(0)
        assert allows(mask(matcher), opened)
        assert allows(followed(matcher, [opened]), line) == is_free
    for grammar, words in BAD_GRAMMARS:
        with pytest.raises(SpecConfigError, match=words):
            own(backend, **grammar)


def test_bad_arguments_and_other_processors(monkeypatch):
    for arguments, words in (
        ({"schema": SCHEMA}, "fast tokenizer as `tokenizer`, got None"),
        ({"schema": SCHEMA, "tokenizer": tokenizer(), "backend": "other"}, "one of xgrammar, llguidance, got 'other'"),
    ):
        with pytest.raises(SpecConfigError, match=words):
            hf_specdec.grammar(**arguments)
    no_grammar = PrefixConstrainedLogitsProcessor(lambda row, tokens: [1], 1)
    for other in (TemperatureLogitsWarper(0.5), no_grammar, object()):
        assert grammar_of(other) is None
    monkeypatch.setattr("hf_specdec.logits.grammar.processor.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="xgrammar or llguidance.*pip install xgrammar"):
        hf_specdec.grammar(SCHEMA, tokenizer())
