"""Past responses of suffix decoding: how many are kept, what is refused, their files, and a missing library."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import LlamaConfig

from hf_specdec import SpeculativeConfig
from hf_specdec.candidate_generators.suffix.generator import SuffixCache, SuffixCandidateGenerator
from hf_specdec.errors import CheckpointFormatError, MissingDependencyError, SpecConfigError
from tests.helpers.levels import full, in_full
from tests.helpers.methods import needs_library


def respond(cache, name, tokens):
    cache.start_request(name, [])
    cache.add_active_response(name, tokens)
    cache.stop_request(name)


def recalls(cache, tokens):
    """Tells if the global tree knows how `tokens` ends."""
    cache.start_request("probe", [])
    draft = cache.speculate("probe", tokens[:-1], 4)
    cache.stop_request("probe")
    cache.evict_cached_response("probe")
    return draft.token_ids == tokens[-1:]


@needs_library
@pytest.mark.parametrize(
    ("bounds", "kept"), [({"max_cached_requests": 3}, [2, 3, 4]), ({"max_cached_tokens": 10}, [3, 4])]
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


@needs_library
def test_responses_grow_old_and_are_replaced():
    cache = SuffixCache()
    respond(cache, "first", [1, 2, 3, 4])
    assert cache.age_responses(2) == 0
    respond(cache, "second", [11, 12, 13, 14])
    assert [cache.age_responses(2) for _ in range(2)] == [0, 1]
    assert cache.cached_requests == ["second"]
    assert [recalls(cache, tokens) for tokens in ([1, 2, 3, 4], [11, 12, 13, 14])] == [False, True]
    respond(cache, "third", [5, 6, 7, 8])
    respond(cache, "second", [9, 10])
    assert cache.cached_requests == ["third", "second"]
    assert cache.num_cached_tokens == 6
    assert not recalls(cache, [11, 12, 13, 14])
    assert cache.age_responses(0) == 2
    assert cache.num_cached_tokens == 0


@needs_library
def test_response_beyond_the_bound_keeps_its_own_tree():
    cache = SuffixCache(max_cached_tokens=10)
    respond(cache, "old", [1, 2, 3, 4])
    cache.start_request("long", [50])
    for tokens in (list(range(20, 40)), [20, 21, 22]):
        cache.add_active_response("long", tokens)
        assert (cache.cached_requests, cache.num_cached_tokens) == ([], 0)
    assert cache.speculate("long", [20, 21, 22], 2).token_ids == [23, 24]


@full
@needs_library
def test_failed_start_can_be_retried(monkeypatch):
    cache = SuffixCache()
    start = cache._library.start_request
    # The most negative id is one that the native code refuses half way.
    monkeypatch.setattr(cache._library, "start_request", lambda req_id, _: start(req_id, [1, 2, -(2**31)]))
    with pytest.raises(ValueError, match="invalid key"):
        cache.start_request("a", [1, 2, 3])
    assert cache.active_requests == set()
    assert cache.cached_requests == []
    monkeypatch.undo()
    cache.start_request("a", [1, 2, 3, 1, 2])
    assert cache.speculate("a", [1, 2], 4).token_ids == [3]

    with pytest.raises(ValueError, match="already active"):
        cache.start_request("a", [4])
    assert cache.speculate("a", [1, 2], 4).token_ids == [3]


@full
@needs_library
def test_tokens_are_checked_before_anything_changes():
    wrong = [[1, -1], [2**31], [1.0], [None], "12", None, np.array([1.0]), np.array([[1]]), np.array([2**31])]
    for tokens in (*wrong, np.array([-5], dtype=np.int32)):
        cache = SuffixCache()
        cache.start_request("a", [1, 2])
        for call, *more in ((cache.start_request,), (cache.add_active_response,), (cache.speculate, 4)):
            with pytest.raises(SpecConfigError, match="Token ids must be"):
                call("b" if call == cache.start_request else "a", tokens, *more)
        assert cache.active_requests == {"a"}
        assert cache.num_cached_tokens == 0
    # Arrays may have any integer type and stride.
    for dtype in (np.int64, np.int16, np.uint8):
        cache = SuffixCache()
        cache.start_request("a", np.array([1, 0, 2, 0, 3, 0, 1, 0, 2, 0], dtype=dtype)[::2])
        assert cache.speculate("a", np.array([1, 2], dtype=dtype), 4).token_ids == [3]


# Files


@needs_library
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


@needs_library
def test_files_that_do_not_fit_are_refused(tmp_path):
    path, cache = tmp_path / "responses.safetensors", SuffixCache(vocab_size=10)
    tokens, lengths = np.array([1, 2, 10], dtype=np.int32), np.array([1, 2])
    for tensors, message in (
        ({"tokens": tokens, "lengths": lengths}, "token ids from 1 to 10, the target knows 0 to 9"),
        ({"tokens": tokens, "lengths": lengths + 1}, "do not add up to its 3"),
        ({"tokens": tokens.astype(np.float32), "lengths": lengths}, "found float32"),
        ({"tokens": tokens}, "is no file of past responses"),
        (None, "is no file of past responses"),
    ):
        if tensors is None:
            path.write_bytes(b"not a file of tensors")
        else:
            save_file(tensors, path)
        with pytest.raises(CheckpointFormatError, match=message):
            cache.load(path)
    assert cache.cached_requests == []


# Options and the library


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("0.3.0", "arctic-inference 0.3.0 cannot be imported"),
        *in_full((None, "it is not installed"), ("0.0.4", "arctic-inference 0.0.4 is installed, which is too old")),
    ],
)
def test_missing_package(version, found, monkeypatch):
    def find(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    with pytest.raises(MissingDependencyError) as caught:
        SuffixCandidateGenerator.load(SpeculativeConfig("suffix"), SimpleNamespace(config=LlamaConfig()))
    help = "pip install 'arctic-inference>=0.1.1'", "C++20 compiler and CMake", "spec_method='ngram'"
    assert [words for words in (found, *help) if words not in str(caught.value)] == []
