"""Past responses of suffix decoding: how many are kept, what is refused, and their files."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from hf_specdec.candidate_generators.suffix.generator import SuffixCache
from hf_specdec.errors import CheckpointFormatError, SpecConfigError


pytest.importorskip("arctic_inference")


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


def test_oldest_responses_leave_when_requests_exceed_the_bound():
    cache = SuffixCache(max_cached_requests=3)
    responses = {name: list(range(100 * name, 100 * name + 4)) for name in range(5)}
    for name, tokens in responses.items():
        respond(cache, name, tokens)
    assert cache.cached_requests == [2, 3, 4]
    assert cache.num_cached_tokens == 12
    # The probe itself takes a place.
    assert [recalls(cache, responses[name]) for name in (4, 3, 0, 1, 2)] == [True, True, False, False, False]


def test_oldest_responses_leave_when_tokens_exceed_the_bound():
    cache = SuffixCache(max_cached_tokens=10)
    responses = {name: list(range(100 * name, 100 * name + 4)) for name in range(3)}
    for name, tokens in responses.items():
        respond(cache, name, tokens)
    assert cache.cached_requests == [1, 2]
    assert cache.num_cached_tokens == 8
    assert [recalls(cache, responses[name]) for name in range(3)] == [False, True, True]


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


def test_restarted_request_replaces_its_response():
    cache = SuffixCache()
    respond(cache, "a", [1, 2, 3, 4])
    respond(cache, "b", [5, 6, 7, 8])
    respond(cache, "a", [9, 10])
    assert cache.cached_requests == ["b", "a"]
    assert cache.num_cached_tokens == 6
    assert not recalls(cache, [1, 2, 3, 4])


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


def test_second_start_leaves_the_active_request_alone():
    cache = SuffixCache()
    cache.start_request("a", [1, 2, 3, 1, 2])
    with pytest.raises(ValueError, match="already active"):
        cache.start_request("a", [4])
    assert cache.speculate("a", [1, 2], 4).token_ids == [3]


@pytest.mark.parametrize(
    "tokens",
    [
        [1, -1],
        [2**31],
        [1.0],
        [None],
        "12",
        None,
        np.array([1.0]),
        np.array([[1]]),
        np.array([-5], dtype=np.int32),
        np.array([2**31]),
    ],
)
def test_what_is_no_token_is_refused_before_anything_changes(tokens):
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


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint8])
def test_arrays_of_any_integer_type_and_stride(dtype):
    cache = SuffixCache()
    cache.start_request("a", np.array([1, 0, 2, 0, 3, 0, 1, 0, 2, 0], dtype=dtype)[::2])
    assert cache.speculate("a", np.array([1, 2], dtype=dtype), 4).token_ids == [3]


@pytest.mark.parametrize("arguments", [{"max_tree_depth": 1}, {"max_tree_depth": -1}, {"max_cached_requests": -2}])
def test_cache_refuses_bounds_out_of_range(arguments):
    with pytest.raises(SpecConfigError, match="must be an integer from"):
        SuffixCache(**arguments)


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


def test_empty_cache_can_be_saved(tmp_path):
    SuffixCache().save(tmp_path / "responses.safetensors")
    cache = SuffixCache()
    cache.load(tmp_path / "responses.safetensors")
    assert cache.cached_requests == []


def test_files_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "responses.safetensors"
    cache = SuffixCache(vocab_size=10)
    tokens, lengths = np.array([1, 2, 10], dtype=np.int32), np.array([1, 2])

    save_file({"tokens": tokens, "lengths": lengths}, path)
    with pytest.raises(CheckpointFormatError, match="token ids from 1 to 10, the target knows 0 to 9"):
        cache.load(path)
    save_file({"tokens": tokens, "lengths": lengths + 1}, path)
    with pytest.raises(CheckpointFormatError, match="do not add up to its 3"):
        cache.load(path)
    save_file({"tokens": tokens.astype(np.float32), "lengths": lengths}, path)
    with pytest.raises(CheckpointFormatError, match="found float32"):
        cache.load(path)
    save_file({"tokens": tokens}, path)
    with pytest.raises(CheckpointFormatError, match="is no file of past responses"):
        cache.load(path)
    path.write_bytes(b"not a file of tensors")
    with pytest.raises(CheckpointFormatError, match="is no file of past responses"):
        cache.load(path)
    assert cache.cached_requests == []
