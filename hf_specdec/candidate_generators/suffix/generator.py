"""Suffix decoding: drafts what followed the longest known suffix of the text, in this request or past responses.

Oliaro et al., "SuffixDecoding" (arXiv 2411.04975): a suffix tree per request over prompt and response, one global tree
over past responses, and drafts, chains or trees, as long as the match and the counts in the suffix tree justify. The
suffix trees are those of the package arctic-inference.
"""

from __future__ import annotations

import importlib.metadata
import os
import weakref
from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from packaging.version import Version
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ...drafting.state import RowState
from ...drafts import DraftTree
from ...drafts.static import MAX_NODES
from ...errors import CheckpointFormatError, MissingDependencyError, SpecConfigError
from ...protocol import Commit, DraftStep, Lookups, Prompt, Session
from ...settings import SpeculativeConfig
from ...settings.checks import Options, setting
from ...settings.spellings import CACHED_TOKENS_PER_REQUEST
from ...threads import Lock
from ..base import CandidateGenerator
from ..row_trees import depth_sums, shallow


if TYPE_CHECKING:
    from arctic_inference.suffix_decoding import SuffixDecodingCache, SuffixDecodingDraft


# The first release whose calls are known to be the ones used here; the oldest have no suffix trees at all.
MIN_LIBRARY_VERSION = "0.1.1"

# Of the trees, for each token of a past response.
_BYTES_PER_TOKEN = 320

# Tokens that one native call adds. The calls hold the interpreter lock, for about 10 ms at this size.
_PIECE = 4096

_MAX_TOKEN_ID = 2**31 - 1

# Of a cache: about 320 GB.
_MOST_CACHED = 10**9

# Draft tokens per token of a match where a controller chooses the lengths.
_ADAPTIVE_SPEC_FACTOR = 2.0


@dataclass(frozen=True)
class SuffixOptions(Options):
    """Options of `spec_method="suffix"`."""

    max_tree_depth: int = setting(
        24,
        "Depth of the suffix trees in tokens, shared by match and draft, from 2 to 1024. 64 drafts longer copies.",
        # A tree of depth 1 has no room for a match and a draft token after it.
        least=2,
        most=MAX_NODES,
        key="suffix_decoding_max_tree_depth",
        published=True,
    )
    max_cached_requests: int = setting(
        10_000,
        f"Past responses in the global tree, and {CACHED_TOKENS_PER_REQUEST} times as many of their tokens, of about "
        "320 bytes each; the oldest leave first. 0: no global tree.",
        least=0,
        most=_MOST_CACHED,
        key="suffix_decoding_max_cached_requests",
    )
    max_spec_factor: float | None = setting(
        None,
        "Draft tokens per token of the match. Default: 2 where lengths adapt, else 1.",
        least=0,
        most=MAX_NODES,
        key="suffix_decoding_max_spec_factor",
        published=True,
    )
    min_token_prob: float = setting(
        0.1,
        "A draft ends before the token whose estimated probability (from counts) is below this.",
        least=0,
        most=1,
        key="suffix_decoding_min_token_prob",
        published=True,
    )
    use_tree_spec: bool = setting(
        False,
        "Draft a tree of the likeliest continuations, of as many tokens as the chain may have.",
        key="suffix_decoding_use_tree_spec",
        published=True,
    )


@dataclass
class _Response:
    born: int  # how old the cache was when it came
    tokens: array[int] = field(default_factory=partial(array, "i"))


class SuffixCache:
    """The suffix trees of active requests and of past responses, shared by all `generate()` calls of a speculator.

    Wraps `arctic_inference.suffix_decoding.SuffixDecodingCache`; the calls have the same names and results. It adds a
    bound by tokens, a lock (any number of threads may use one cache), checks of token ids, and files.
    """

    def __init__(
        self,
        max_tree_depth: int = 24,  # in tokens, at least 2
        max_cached_requests: int = 10_000,  # in the global tree, the oldest leave first; 0: no such tree, -1: all
        max_cached_tokens: int = 2_000_000,  # in the global tree; 0: no such tree
        vocab_size: int | None = None,  # token ids that the target knows; files with other ids are refused
    ):
        self.max_tree_depth = max_tree_depth
        self.max_cached_requests = max_cached_requests
        self.max_cached_tokens = max_cached_tokens
        self.vocab_size = vocab_size
        self._caches_responses = max_cached_requests != 0 and max_cached_tokens != 0
        # Both bounds are kept here, in one place, so the library itself gets none.
        library = _import_library()
        self._library: SuffixDecodingCache = library(max_tree_depth, -1 if self._caches_responses else 0)
        self._responses: dict[Hashable, _Response] = {}  # the oldest first
        self.num_cached_tokens: int = 0
        self._age = 0
        # The garbage collector may stop the requests of a forgotten generator in the thread that holds it.
        self._lock = Lock()

    @property
    def active_requests(self) -> set[Hashable]:
        """Requests that were started and not stopped."""
        with self._lock:
            return set(self._library.active_requests)

    @property
    def cached_requests(self) -> list[Hashable]:
        """Requests whose responses are in the global tree, the next to be evicted first."""
        with self._lock:
            return list(self._responses)

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of memory that the tokens in the global tree take."""
        return _BYTES_PER_TOKEN * self.num_cached_tokens

    def start_request(self, req_id: Hashable, prompt_token_ids: Sequence[int] | np.ndarray) -> None:
        """Makes the tree of a request, of a name that no other active one has, from its prompt without padding."""
        tokens = _token_array(prompt_token_ids)
        # The trees that are extended piece by piece are the library's own: a later one may not have them.
        first, *others = _pieces(tokens) if hasattr(self._library, "_local_trees") else [tokens]
        with self._lock:
            if req_id in self._library.active_requests:
                raise ValueError(f"Request {req_id!r} is already active. Stop it first, or use another id.")
            if req_id in self._responses:
                self.evict_cached_response(req_id)
            self._library.start_request(req_id, first)
            if self._caches_responses:
                self._responses[req_id] = _Response(self._age)
                self._evict_beyond_bounds()
        for piece in others:
            with self._lock:
                # The public call would add the piece to the global tree, where prompts do not belong.
                self._library._local_trees[req_id].extend_ndarray(0, piece)

    def add_active_response(self, req_id: Hashable, token_ids: Sequence[int] | np.ndarray) -> None:
        """Appends tokens to an active request's response, in its own tree and in the global one."""
        for piece in _pieces(_token_array(token_ids)):
            with self._lock:
                self._library.add_active_response(req_id, piece)
                # An evicted response is not resumed: its tokens would continue a text that is gone.
                if req_id in self._responses:
                    self._responses[req_id].tokens.frombytes(piece.tobytes())
                    self.num_cached_tokens += len(piece)
                    self._evict_beyond_bounds()

    def speculate(
        self, req_id: Hashable, context: Sequence[int] | np.ndarray, max_spec_tokens: int, **limits: Any
    ) -> SuffixDecodingDraft:
        """The better draft of a request's own tree and the global one, after the last tokens of its text."""
        # Its `probs` are estimates from counts, and `score` is their sum; `match_len` may be positive without a draft.
        context = _token_array(context)
        with self._lock:
            return self._library.speculate(req_id, context, max_spec_tokens, **limits)

    def stop_request(self, req_id: Hashable) -> None:
        """Drops an active request's own tree; its response stays in the global one."""
        with self._lock:
            self._library.stop_request(req_id)

    def stop_requests(self, req_ids: Iterable[Hashable]) -> None:
        """Stops those of the requests that are active."""
        with self._lock:
            for req_id in req_ids:
                if req_id in self._library.active_requests:
                    self._library.stop_request(req_id)

    def evict_cached_response(self, req_id: Hashable) -> None:
        """Takes a response out of the global tree. An active request goes on with its own tree alone."""
        with self._lock:
            self.num_cached_tokens -= len(self._responses.pop(req_id, _Response(0)).tokens)
            self._library.evict_cached_response(req_id)

    def age_responses(self, most_age: int) -> int:
        """Makes all responses older by one; evicts those older than `most_age`, and returns how many."""
        with self._lock:
            self._age += 1
            old = [req_id for req_id, response in self._responses.items() if self._age - response.born > most_age]
            for req_id in old:
                self.evict_cached_response(req_id)
            return len(old)

    def _evict_beyond_bounds(self) -> None:
        while self.num_cached_tokens > self.max_cached_tokens or 0 < self.max_cached_requests < len(self._responses):
            self.evict_cached_response(next(iter(self._responses)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the global tree's responses to a safetensors file: `tokens` (all, int32) and `lengths` (int64)."""
        with self._lock:
            responses = [np.array(one.tokens, dtype=np.int32) for one in self._responses.values() if one.tokens]
        lengths = np.array([len(response) for response in responses], dtype=np.int64)
        save_file({"tokens": np.concatenate([np.empty(0, np.int32), *responses]), "lengths": lengths}, path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Adds the responses of a file written by `save`, about 3 microseconds per token; the bounds hold as ever."""
        try:
            with safe_open(path, framework="np") as file:
                tokens, lengths = file.get_tensor("tokens"), file.get_tensor("lengths")
        except SafetensorError as error:
            raise CheckpointFormatError(
                f"{path} is no file of past responses: {error}. Use one from `save`."
            ) from error
        if tokens.dtype != np.int32 or tokens.ndim != 1 or lengths.dtype != np.int64 or lengths.ndim != 1:
            raise CheckpointFormatError(
                f"{path} must hold one-dimensional `tokens` (int32) and `lengths` (int64), found {tokens.dtype} of "
                f"shape {tokens.shape} and {lengths.dtype} of shape {lengths.shape}. Use one from `save`."
            )
        if lengths.sum() != len(tokens) or (lengths < 0).any():
            raise CheckpointFormatError(
                f"{path} is damaged: the `lengths` do not add up to its {len(tokens)} `tokens`."
            )
        largest_known = _MAX_TOKEN_ID if self.vocab_size is None else self.vocab_size - 1
        if len(tokens) and (tokens.min() < 0 or tokens.max() > largest_known):
            raise CheckpointFormatError(
                f"{path} holds token ids from {tokens.min()} to {tokens.max()}, the target knows 0 to "
                f"{largest_known}. Load responses that the same model or one with the same tokenizer gave."
            )
        # After the last one nothing is left.
        for response in np.split(tokens, np.cumsum(lengths))[:-1]:
            request = object()
            try:
                self.start_request(request, ())
                self.add_active_response(request, response)
            finally:
                self.stop_requests([request])


class SuffixCandidateGenerator(CandidateGenerator):
    """Drafts the likeliest continuations of the longest known suffix; rows are requests of a [`SuffixCache`]."""

    options_class = SuffixOptions
    default_num_speculative_tokens: ClassVar[int] = SuffixOptions.max_tree_depth
    samples_drafts: bool | None = False
    estimates_acceptance = True
    continues_leads = True
    loaded_by: ClassVar[tuple[str, ...]] = (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
    )

    @classmethod
    def default_length(cls, options: SuffixOptions) -> int:
        """The tree depth: the length of a draft is the match's business, and only the depth bounds it."""
        return options.max_tree_depth

    @classmethod
    def adaptive_settings(cls, options: SuffixOptions) -> dict[str, Any]:
        """Longer continuations of a match than by default: the controller decides how many tokens pay."""
        return {"suffix_decoding_max_spec_factor": _ADAPTIVE_SPEC_FACTOR} if options.max_spec_factor is None else {}

    @classmethod
    def load(cls, config: SpeculativeConfig, target_model: torch.nn.Module) -> SuffixCache:
        """An empty cache, to be kept between calls: without past responses only the request itself is searched."""
        options, vocab_size = config.options, target_model.config.get_text_config(decoder=True).vocab_size
        most_tokens = min(options.max_cached_requests * CACHED_TOKENS_PER_REQUEST, _MOST_CACHED)
        return SuffixCache(options.max_tree_depth, options.max_cached_requests, most_tokens, vocab_size=vocab_size)

    @classmethod
    def age_texts(cls, resources: SuffixCache, most_age: int) -> int:
        return resources.age_responses(most_age)

    @classmethod
    def text_bytes(cls, resources: SuffixCache) -> int:
        return resources.num_bytes

    def __init__(self, config: SpeculativeConfig, resources: SuffixCache, session: Session):
        super().__init__(config, resources, session)
        self.cache = resources
        self.lookups: Lookups = Lookups()
        self.state: RowState = RowState(requests=_Requests(resources), contexts=[])
        # What the cache has found for each row of the last drafts, and how deep the row may draft.
        self._found: list[tuple[SuffixDecodingDraft, int]] = []
        self._drafts_trees = self.options.use_tree_spec and session.supports_trees
        if self.options.use_tree_spec and not session.supports_trees:
            session.notes.append("suffix drafts chains: the target cannot verify trees.")

    def prefill(self, prompt: Prompt) -> None:
        self.state.contexts = [self._tail(tokens) for tokens in prompt.texts]
        self.state.requests.start(prompt.texts)

    def propose(self, step: DraftStep) -> DraftTree:
        most_nodes, rooms = self.shared_length(len(step.rows)), self.draft_depths(step)
        leads = step.leads or [[]] * len(step.rows)
        factor = 1.0 if self.options.max_spec_factor is None else self.options.max_spec_factor
        how = {"min_token_prob": self.options.min_token_prob, "use_tree_spec": self._drafts_trees}
        self._found = []
        for request, context, lead, room in zip(self.state.requests.ids, self.state.contexts, leads, rooms):
            most = most_nodes if self._drafts_trees else min(most_nodes, room)
            # A match has at least one token: a larger factor changes nothing, until it overflows the library's int.
            limits = {"max_spec_tokens": most, "max_spec_factor": min(factor, most), **how}
            self._found.append((self.cache.speculate(request, self._tail(context + lead), **limits), room))
        trees = [shallow(draft.token_ids, draft.parents, room) for draft, room in self._found]
        tokens, parents = map(list, zip(*trees)) if trees else ([], [])
        self.lookups.count(list(map(len, tokens)), rooms, self.cache.num_cached_tokens, self.cache.num_bytes)
        return DraftTree.from_lists(tokens, self.session.device, parents)

    @property
    def acceptance_probs(self) -> list[list[float]]:
        """Sums of the estimated probabilities by depth; all together they are the paper's score."""
        return [depth_sums(draft.probs, draft.parents)[:room] for draft, room in self._found]

    def observe(self, commit: Commit) -> None:
        for request, tokens in zip(self.state.requests.ids, commit.token_lists):
            self.cache.add_active_response(request, tokens)
        self.state.contexts = [self._tail(row + new) for row, new in zip(self.state.contexts, commit.token_lists)]

    def _tail(self, tokens: list[int]) -> list[int]:
        return tokens[-self.options.max_tree_depth :]


class _Requests:
    """The requests of the rows, in their order, which have trees in the cache until they are stopped."""

    def __init__(self, cache: SuffixCache):
        self.ids: list[object] = []
        self._cache = cache
        # Hosts of the stock protocol never call close(); then the garbage collector must not leave trees behind.
        weakref.finalize(self, cache.stop_requests, self.ids).atexit = False

    def start(self, texts: list[list[int]]) -> None:
        for tokens in texts:
            # Listed before the start, so that close() also finds one that was interrupted half way.
            self.ids.append(object())
            self._cache.start_request(self.ids[-1], tokens)

    def select(self, keep: list[int]) -> _Requests:
        kept = [self.ids[position] for position in keep]
        self._cache.stop_requests(set(self.ids).difference(kept))
        # In the list of whoever ends them, as below.
        self.ids[:] = kept
        return self

    def cat(self, other: _Requests) -> _Requests:
        self.ids += other.ids
        other.ids.clear()
        return self

    def close(self) -> None:
        self._cache.stop_requests(self.ids)


def _import_library() -> type[SuffixDecodingCache]:
    try:
        version = importlib.metadata.version("arctic-inference")
        if Version(version) >= Version(MIN_LIBRARY_VERSION):
            from arctic_inference.suffix_decoding import SuffixDecodingCache

            return SuffixDecodingCache
        problem = f"arctic-inference {version} is installed, which is too old"
    except importlib.metadata.PackageNotFoundError:
        problem = "it is not installed"
    except ImportError as error:
        problem = f"arctic-inference {version} cannot be imported ({error})"
    raise MissingDependencyError(
        f"spec_method='suffix' needs the package arctic-inference {MIN_LIBRARY_VERSION} or newer, but {problem}. "
        f"Install it with `pip install 'arctic-inference>={MIN_LIBRARY_VERSION}'`: a source build with a C++20 "
        "compiler and CMake. "
        "spec_method='ngram' drafts from the text of the request alone and needs no such package."
    )


def _token_array(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Token ids as the library wants them: one-dimensional, contiguous, int32. None may be negative."""
    try:
        packed = array("i", tokens.tolist() if isinstance(tokens, np.ndarray) else tokens)
    except (TypeError, OverflowError) as error:
        raise SpecConfigError(f"Token ids must be integers from 0 to {_MAX_TOKEN_ID}: {error}.") from error
    if packed and min(packed) < 0:
        raise SpecConfigError(f"Token ids must be integers from 0 to {_MAX_TOKEN_ID}, found {min(packed)}.")
    return np.array(packed, dtype=np.int32)


def _pieces(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """Slices of at most `_PIECE` tokens; one empty slice of no tokens."""
    for start in range(0, max(len(tokens), 1), _PIECE):
        yield tokens[start : start + _PIECE]
