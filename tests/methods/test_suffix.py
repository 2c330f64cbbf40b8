"""Suffix decoding: drafts are those of the library and follow its texts; past responses, their bounds and files."""

from __future__ import annotations

import gc
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from transformers import LlamaConfig

from hf_specdec.candidate_generators.suffix import generator as suffix
from hf_specdec.candidate_generators.suffix.generator import SuffixCache, SuffixCandidateGenerator, SuffixOptions
from hf_specdec.errors import CheckpointFormatError, SpecConfigError
from hf_specdec.loader import age_texts
from hf_specdec.protocol import DraftStep, Session
from hf_specdec.settings import SpeculativeConfig
from tests.helpers.by_hand import commit_of, paths_of, prompt_of
from tests.helpers.levels import full, in_full
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.paths import FIXTURES


pytest.importorskip("arctic_inference")

VOCAB_SIZE = 1000
FILES = "script.json", "expected.json"
CALLS = {
    **{"start": "start_request", "stop": "stop_request", "add": "add_active_response"},
    **{"evict": "evict_cached_response", "spec": "speculate"},
}


def make_config(num_speculative_tokens=None, max_model_len=None, **options):
    given = {"num_speculative_tokens": num_speculative_tokens, "max_model_len": max_model_len}
    return SpeculativeConfig("suffix", **given, options=SuffixOptions(**options))


def make_cache(config):
    return SuffixCandidateGenerator.load(config, SimpleNamespace(config=LlamaConfig(vocab_size=VOCAB_SIZE)))


def make_generator(cache, config=None, batch_size=1, max_length=10_000):
    session = Session(batch_size, max_length, torch.device("cpu"))
    return SuffixCandidateGenerator(config or make_config(max_tree_depth=cache.max_tree_depth), cache, session)


def started(*prompts, cache=None, **options):
    """A generator of these options that has read the prompts."""
    config = make_config(**options)
    generator = make_generator(cache or make_cache(config), config, len(prompts))
    generator.prefill(prompt_of(prompts))
    return generator


def observe(generator, *token_lists, rows=None):
    generator.observe(commit_of(rows or list(range(len(token_lists))), list(map(list, token_lists))))


def propose(generator, *lengths, room=100):
    rooms = [room] * len(lengths) if isinstance(room, int) else room
    anchors = torch.zeros(len(lengths), dtype=torch.long)
    return generator.propose(DraftStep(list(range(len(lengths))), anchors, list(lengths), rooms))


def respond(cache, name, tokens):
    cache.start_request(name, [])
    cache.add_active_response(name, tokens)
    cache.stop_request(name)


def read_fixture(name):
    script, expected = (json.loads((FIXTURES / "suffix" / name / file).read_text()) for file in FILES)
    assert len(script["ops"]) == len(expected) > 100
    return script, expected


def play(cache, op):
    op = dict(op)
    kind, req_id = op.pop("op"), op.pop("id")
    tokens = [np.array(op.pop(key), dtype=np.int32) for key in ("tokens", "context") if key in op]
    return getattr(cache, CALLS[kind])(req_id, *tokens, **op)


@pytest.mark.parametrize("name", ["vllm_pattern", *in_full("mixed_unbounded", "mixed_cap3", "no_global")])
def test_scripted_calls(name, monkeypatch):
    monkeypatch.setattr(suffix, "_PIECE", 5)
    script, expected = read_fixture(name)
    cache = SuffixCache(script["max_tree_depth"], script["max_cached_requests"])
    num_drafted = 0
    for op, answer in zip(script["ops"], expected):
        if answer.get("error"):
            assert answer["error"] == "ValueError"
            with pytest.raises(ValueError, match="is not"):
                play(cache, op)
        else:
            draft = play(cache, op)
            if op["op"] == "spec":
                assert draft.token_ids == answer["token_ids"]
                assert draft.parents == answer["parents"]
                assert draft.match_len == answer["match_len"]
                assert draft.probs == pytest.approx(answer["probs"], rel=1e-6)
                assert draft.score == pytest.approx(answer["score"], rel=1e-6)
                num_drafted += len(draft.token_ids)
        assert sorted(cache.active_requests) == answer["active"]
        assert cache.cached_requests == answer["cached"]
    assert num_drafted > 100


@pytest.mark.parametrize("use_tree_spec", [True, *in_full(False)])
def test_generator_gives_the_scripted_drafts(use_tree_spec):
    script, expected = read_fixture("vllm_pattern")
    config = make_config(max_tree_depth=24, use_tree_spec=use_tree_spec)
    cache, generators, lengths, num_compared = make_cache(config), {}, {}, 0
    for op, answer in zip(script["ops"], expected):
        name = op["id"]
        if op["op"] == "start":
            generators[name], lengths[name] = make_generator(cache, config), len(op["tokens"])
            generators[name].prefill(prompt_of([op["tokens"]]))
        elif op["op"] == "add":
            lengths[name] += len(op["tokens"])
            observe(generators[name], op["tokens"])
        elif op["op"] == "stop":
            generators[name].close()
        elif op["use_tree_spec"] == use_tree_spec:
            draft = propose(generators[name], lengths[name])
            assert draft.token_lists() == [answer["token_ids"]]
            assert draft.parent_lists() == [answer["parents"]]
            num_compared += 1
        assert len(cache.active_requests) == len(answer["active"])
    assert num_compared > 50


@pytest.mark.parametrize("limits", [{}, *in_full({"max_cached_requests": 0})], ids=str)
def test_responses_are_shared_and_prompts_are_not(limits):
    cache = make_cache(make_config(**limits))
    first = started(list(range(20)) * 3, cache=cache)
    observe(first, [30, 31, 32, 33, 34, 35, 36, 37])
    assert cache.num_cached_tokens == (0 if limits else 8)
    first.close()
    second = started([3, 4, 5], cache=cache)
    assert propose(second, 3).token_lists() == [[]]
    observe(second, [30, 31, 32])
    assert propose(second, 6).token_lists() == [[] if limits else [33, 34, 35]]
    assert len(cache.cached_requests) == (0 if limits else 2)


def test_rows_are_separate_requests_without_their_padding():
    prompt = [1, 2, 3, 4, 5, 6, 1, 2]
    generator = started(prompt, prompt, [7], max_cached_requests=0)
    assert propose(generator, 8, 8, 1).token_lists() == [[3, 4], [3, 4], []]
    observe(generator, [3, 4], [8, 9, 8], [7])
    assert propose(generator, 10, 11, 2).token_lists() == [[5, 6, 1, 2], [9], [7]]
    # Finished ones are stopped.
    generator = started([1, 2, 3, 1, 2], [4, 5, 6, 4, 5], [7, 8, 9, 7, 8], max_cached_requests=0)
    cache = generator.cache
    generator.keep_rows([0, 2])
    assert len(cache.active_requests) == 2
    observe(generator, [3, 1], [9, 7], rows=[0, 2])
    assert propose(generator, 7, 7).token_lists() == [[2, 3, 1], [8, 9, 7]]
    generator.keep_rows([1])
    assert propose(generator, 7).token_lists() == [[8, 9, 7]]
    generator.keep_rows([])
    assert cache.active_requests == set()
    assert propose(generator).token_lists() == []


few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=50)


@given(
    rows=st.lists(st.tuples(few_tokens, st.integers(0, 12)), min_size=1, max_size=4),
    past=few_tokens,
    k=st.none() | st.integers(1, 12),
    max_model_len=st.none() | st.integers(1, 60),
    depth=st.integers(2, 30),
    factor=st.floats(0, 100) | st.just(1024.0),
    least=st.floats(0, 1),
    is_tree=st.booleans(),
)
def test_drafts_never_exceed_the_caps(rows, past, k, max_model_len, depth, factor, least, is_tree):
    options = {"max_spec_factor": factor, "min_token_prob": least, "use_tree_spec": is_tree}
    config = make_config(k, max_model_len, max_tree_depth=depth, **options)
    cache = make_cache(config)
    respond(cache, "past", past)
    generator = make_generator(cache, config, batch_size=len(rows))
    generator.prefill(prompt_of([prompt for prompt, _ in rows]))
    lengths = [len(prompt) for prompt, _ in rows]
    draft = propose(generator, *lengths, room=[room for _, room in rows])
    trees = zip(rows, draft.token_lists(), draft.parent_lists(), paths_of(draft))
    for (prompt, room), tokens, parents, paths in trees:
        if max_model_len is not None:
            room = min(room, max(max_model_len - len(prompt) - 1, 0))
        assert len(tokens) <= min(factor * (depth - 1), generator.num_draft_nodes)
        assert max(map(len, paths), default=0) <= min(depth - 1, room, generator.num_speculative_tokens)
        assert all(parent < node for node, parent in enumerate(parents))
        assert len(set(paths)) == len(paths)
        assert is_tree or parents == list(range(-1, len(tokens) - 1))
        # What is drafted after the last token has stood after it, here or in the past response.
        for path in paths:
            piece = [prompt[-1], *path]
            assert any(text[i : i + len(piece)] == piece for text in (prompt, past) for i in range(len(text)))


def test_calls_leave_no_active_requests():
    generator = started([1, 2], [3, 4])
    cache = generator.cache
    with pytest.raises(SpecConfigError, match="Token ids"):
        observe(generator, [5], [-5])
    generator.close()
    generator.close()
    assert cache.active_requests == set()
    generator = started([1, 2, 3], cache=cache)
    assert len(cache.active_requests) == 1
    # Also where nobody closes it.
    del generator
    gc.collect()
    assert cache.active_requests == set()


def recalls(cache, tokens):
    cache.start_request("probe", [])
    draft = cache.speculate("probe", tokens[:-1], 4)
    cache.stop_request("probe")
    cache.evict_cached_response("probe")
    return draft.token_ids == tokens[-1:]


@pytest.mark.parametrize(
    ("bounds", "kept"), [({"max_cached_tokens": 10}, [3, 4]), *in_full(({"max_cached_requests": 3}, [2, 3, 4]))]
)
def test_oldest_responses_leave(bounds, kept):
    cache = SuffixCache(**bounds)
    responses = {name: list(range(100 * name, 100 * name + 4)) for name in range(5)}
    for name, tokens in responses.items():
        respond(cache, name, tokens)
    assert cache.cached_requests == kept
    assert cache.num_cached_tokens == 4 * len(kept)
    # The probe itself takes a place.
    assert [recalls(cache, responses[name]) for name in (4, 3, 0, 1)] == [True, True, False, False]
    if "max_cached_tokens" in bounds:
        # One beyond the bound keeps a tree of its own.
        cache.start_request("long", [50])
        for tokens in (list(range(20, 40)), [20, 21, 22]):
            cache.add_active_response("long", tokens)
            assert (cache.cached_requests, cache.num_cached_tokens) == ([], 0)
        assert cache.speculate("long", [20, 21, 22], 2).token_ids == [23, 24]


@full
def test_responses_grow_old_and_are_replaced():
    cache = SuffixCache()
    respond(cache, "first", [1, 2, 3, 4])
    assert cache.age_responses(2) == 0
    respond(cache, "second", [11, 12, 13, 14])
    assert [cache.age_responses(2) for _ in range(2)] == [0, 1]
    assert cache.cached_requests == ["second"]
    assert [recalls(cache, tokens) for tokens in ([1, 2, 3, 4], [11, 12, 13, 14])] == [False, True]
    respond(cache, "second", [9, 10])
    assert (cache.cached_requests, cache.num_cached_tokens) == (["second"], 2)
    assert not recalls(cache, [11, 12, 13, 14])


@pytest.mark.parametrize("method", ["suffix+recycling", *in_full("suffix")])
def test_responses_to_a_target_grow_old(method):
    model = tiny_llama()
    model.generate(**prompts(3), max_new_tokens=4, spec_method=method)
    assert [age_texts(model, most_age) for most_age in (1, 1, 0)] == [0, 3, 0]


@full
def test_tokens_are_checked_before_anything_changes():
    cache = SuffixCache()
    cache.start_request("a", [1, 2])
    for tokens in ([1, -1], [2**31], [1.0], "12", None, np.array([1.0]), np.array([[1]])):
        for call, name in ((cache.start_request, "b"), (cache.add_active_response, "a")):
            with pytest.raises(SpecConfigError, match="Token ids must be"):
                call(name, tokens)
    assert (cache.active_requests, cache.num_cached_tokens) == ({"a"}, 0)
    # Arrays may have any integer type and stride.
    cache.start_request("c", np.array([1, 0, 2, 0, 3, 0, 1, 0, 2, 0], dtype=np.uint8)[::2])
    assert cache.speculate("c", np.array([1, 2]), 4).token_ids == [3]


def test_saved_responses_can_be_loaded(tmp_path):
    cache, path = SuffixCache(), tmp_path / "responses.safetensors"
    for name, tokens in (("a", [1, 2, 3, 4]), ("empty", []), ("b", [5, 6, 7, 8, 9])):
        respond(cache, name, tokens)
    cache.save(path)
    other = SuffixCache(vocab_size=10)
    respond(other, "c", [0, 5, 0])
    other.load(path)
    assert (other.num_cached_tokens, len(other.cached_requests), other.active_requests) == (12, 3, set())
    texts = [1, 2, 3, 4], [6, 7, 8, 9], [4, 5, 6]
    assert [recalls(other, tokens) for tokens in texts] == [True, True, False]
    small = SuffixCache(max_cached_tokens=5)
    small.load(path)
    SuffixCache().save(path)
    small.load(path)
    assert small.num_cached_tokens == 5
    assert recalls(small, [7, 8, 9])


@full
def test_files_that_do_not_fit_are_refused(tmp_path):
    path, cache = tmp_path / "responses.safetensors", SuffixCache(vocab_size=10)
    tokens, lengths = np.array([1, 2, 10], dtype=np.int32), np.array([1, 2])
    for tensors, message in (
        ({"tokens": tokens, "lengths": lengths}, "token ids from 1 to 10, the target knows 0 to 9"),
        ({"tokens": tokens, "lengths": lengths + 1}, "do not add up to its 3"),
        ({"tokens": tokens.astype(np.float32), "lengths": lengths}, "found float32"),
        ({"tokens": tokens}, "is no file of past responses"),
    ):
        save_file(tensors, path)
        with pytest.raises(CheckpointFormatError, match=message):
            cache.load(path)
    path.write_bytes(b"not a file of tensors")
    with pytest.raises(CheckpointFormatError, match="is no file of past responses"):
        cache.load(path)
    assert cache.cached_requests == []
