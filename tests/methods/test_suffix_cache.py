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

import hf_specdec.candidate_generators.suffix as suffix_package
from hf_specdec import SpeculativeConfig
from hf_specdec.candidate_generators.suffix import generator as suffix
from hf_specdec.candidate_generators.suffix.generator import SuffixCache, SuffixCandidateGenerator, SuffixOptions
from hf_specdec.errors import CheckpointFormatError, MissingDependencyError, SpecConfigError
from tests.helpers.levels import full, in_full
from tests.helpers.methods import needs_library
from tests.helpers.paths import DOCS


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
def test_responses_grow_old():
    cache = SuffixCache()
    respond(cache, "first", [1, 2, 3, 4])
    assert cache.age_responses(2) == 0
    respond(cache, "second", [11, 12, 13, 14])
    assert cache.age_responses(2) == 0
    assert cache.age_responses(2) == 1
    assert cache.cached_requests == ["second"]
    assert [recalls(cache, tokens) for tokens in ([1, 2, 3, 4], [11, 12, 13, 14])] == [False, True]
    assert cache.age_responses(0) == 1
    assert cache.num_cached_tokens == 0


@needs_library
def test_response_beyond_the_bound_keeps_its_own_tree():
    cache = SuffixCache(max_cached_tokens=10)
    respond(cache, "old", [1, 2, 3, 4])
    cache.start_request("long", [50])
    cache.add_active_response("long", list(range(20, 40)))
    assert cache.cached_requests == []
    assert cache.num_cached_tokens == 0
    cache.add_active_response("long", [20, 21, 22])
    assert cache.speculate("long", [20, 21, 22], 2).token_ids == [23, 24]
    assert cache.num_cached_tokens == 0


@needs_library
def test_restarted_request_replaces_its_response():
    cache = SuffixCache()
    respond(cache, "a", [1, 2, 3, 4])
    respond(cache, "b", [5, 6, 7, 8])
    respond(cache, "a", [9, 10])
    assert cache.cached_requests == ["b", "a"]
    assert cache.num_cached_tokens == 6
    assert not recalls(cache, [1, 2, 3, 4])


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
        with pytest.raises(SpecConfigError, match="Token ids must be"):
            cache.start_request("a", tokens)
        assert cache.active_requests == set()
        cache.start_request("a", [1, 2])
        with pytest.raises(SpecConfigError, match="Token ids must be"):
            cache.add_active_response("a", tokens)
        with pytest.raises(SpecConfigError, match="Token ids must be"):
            cache.speculate("a", tokens, 4)
        assert cache.num_cached_tokens == 0
    # Arrays may have any integer type and stride.
    for dtype in (np.int64, np.int16, np.uint8):
        cache = SuffixCache()
        cache.start_request("a", np.array([1, 0, 2, 0, 3, 0, 1, 0, 2, 0], dtype=dtype)[::2])
        assert cache.speculate("a", np.array([1, 2], dtype=dtype), 4).token_ids == [3]


# Files


@needs_library
def test_saved_responses_can_be_loaded(tmp_path):
    cache = SuffixCache()
    respond(cache, "a", [1, 2, 3, 4])
    respond(cache, "empty", [])
    respond(cache, "b", [5, 6, 7, 8, 9])
    cache.save(tmp_path / "responses.safetensors")

    other = SuffixCache(vocab_size=10)
    respond(other, "c", [0, 5, 0])
    other.load(tmp_path / "responses.safetensors")
    assert other.num_cached_tokens == 12
    assert len(other.cached_requests) == 3
    assert other.active_requests == set()
    assert recalls(other, [1, 2, 3, 4])
    assert recalls(other, [6, 7, 8, 9])
    assert not recalls(other, [4, 5, 6])

    small = SuffixCache(max_cached_tokens=5)
    small.load(tmp_path / "responses.safetensors")
    assert small.num_cached_tokens == 5
    assert recalls(small, [7, 8, 9])

    SuffixCache().save(tmp_path / "empty.safetensors")
    small.load(tmp_path / "empty.safetensors")
    assert small.num_cached_tokens == 5


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


@full
def test_bounds_of_options():
    SuffixOptions(max_tree_depth=2, max_cached_requests=0, max_spec_factor=0, min_token_prob=0, max_cached_tokens=0)
    SuffixOptions(max_spec_factor=np.float32(2), min_token_prob=1, max_cached_tokens=np.int64(10**9))
    for arguments in ({"max_tree_depth": 1}, {"max_tree_depth": -1}, {"max_cached_requests": -2}):
        with pytest.raises(SpecConfigError, match="must be an integer from"):
            SuffixCache(**arguments)


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
    assert found in str(caught.value)
    assert "pip install 'arctic-inference>=0.1.1'" in str(caught.value)
    assert "C++20 compiler and CMake" in str(caught.value)
    assert "spec_method='ngram'" in str(caught.value)


@full
def test_import_does_not_need_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "arctic_inference", None)
    monkeypatch.delitem(sys.modules, suffix.__name__)
    # The import binds the new module in its package; this restores the old one.
    monkeypatch.setattr(suffix_package, "generator", suffix)
    again = importlib.import_module(suffix.__name__)
    assert again is not suffix
    assert again.SuffixOptions().max_tree_depth == 24


@full
def test_documented_defaults():
    page = (DOCS / "suffix.md").read_text(encoding="utf-8")
    keys = {field.metadata["key"]: field.default for field in SuffixOptions.__dataclass_fields__.values()}
    assert len(keys) == 6
    for key, default in keys.items():
        assert key.startswith("suffix_decoding_")
        assert f"| `{key}` | `{default!r}` |" in page
