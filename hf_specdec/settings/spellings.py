"""Settings with several spellings: values, each brought into the one form that is kept, and names used elsewhere.

Functions of one value take what a user has written; what is none of its spellings raises a [`SpecConfigError`] with an
example. [`respelled`] brings `FORMER_NAMES` into today's form; `OTHER_NAMES` are refused with the name used here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Set
from typing import Any

from ..errors import SpecConfigError, shown
from .checks import MOST_DRAFT_TOKENS, MOST_INTEGER, is_int


# Names that other engines, older versions of them, and transformers have for a setting.
_NAMES_ELSEWHERE = {
    "method": "speculative_method speculative_algorithm speculative_decoding_mode decoding_type spec_method spec_type",
    "model": "speculative_model speculative_draft_model_path speculative_model_dir draft_model_path draft_model "
    "assistant_model spec_model",
    "num_speculative_tokens": "speculative_num_steps num_speculative_steps speculative_tokens max_draft_len draft_max "
    "num_assistant_tokens prompt_lookup_num_tokens max_verification_set_size",
    "num_speculative_tokens_per_batch_size": "speculative_disable_by_batch_size",
    "speculative_token_tree": "medusa_choices eagle_choices",
    "quantization": "speculative_model_quantization speculative_draft_model_quantization",
    "max_model_len": "speculative_max_model_len",
    "revision": "speculative_model_revision speculative_draft_model_revision",
    "rejection_sample_method": "spec_decoding_acceptance_method acceptance_method",
    "rejection_sample_options": "typical_acceptance_sampler_posterior_threshold "
    "typical_acceptance_sampler_posterior_alpha",
    "prompt_lookup_max": "ngram_prompt_lookup_max speculative_ngram_max_match_window_size max_matching_ngram_size",
    "prompt_lookup_min": "ngram_prompt_lookup_min speculative_ngram_min_match_window_size",
    "draft_confidence_threshold": "assistant_confidence_threshold",
    "token": "use_auth_token hf_token",
}
OTHER_NAMES = {other: name for name, others in _NAMES_ELSEWHERE.items() for other in others.split()}

# Accepted, though they change nothing: the value that says so, and why. The first two are vLLM's.
_WITHOUT_EFFECT = {
    "disable_padded_drafter_batch": (False, "rows are not padded to each other here"),
    "draft_tensor_parallel_size": (1, "a draft model lies in as many processes as it was loaded into"),
    "prompt_lookup_max_indexed_tokens": (2**20, "the last million tokens of each row are searched"),
    "max_indexed_tokens": (2**20, "the last million tokens of each row are searched"),
}

TYPICAL_ACCEPTANCE = _EPSILON, _DELTA = (0.09, 0.3)
SPARSE_KV_WINDOW = (4, 512)
# Of a past response that `suffix` keeps, on average at most.
CACHED_TOKENS_PER_REQUEST = 200

Flat = dict[str, Any]


def _taken(flat: Flat, name: str, default: Any = None) -> Any:
    """A setting that stands in the same as another, out of the flat ones."""
    value = flat.pop(name, None)
    return default if value is None else value


def _lengths_up_to(most_rows: Any, flat: Flat) -> Any:
    """Lengths by the number of rows, as they are given, and 0 above so many rows."""
    given = lengths_by_batch_size(_taken(flat, "num_speculative_tokens_per_batch_size", [(1, None)]))
    return [*((first, length) for first, length in given if first <= most_rows), (most_rows + 1, 0)]


def _fewer_requests(num_tokens: Any, flat: Flat) -> Any:
    most = num_tokens // CACHED_TOKENS_PER_REQUEST
    return min(_taken(flat, "suffix_decoding_max_cached_requests", most), most)


def _window(sinks: Any, flat: Flat) -> Any:
    return sinks, flat.pop("sparse_kv_window") if is_int(flat.get("sparse_kv_window")) else SPARSE_KV_WINDOW[1]


def _alternatives(guesses_ends: Any, flat: Flat) -> Any:
    given = _taken(flat, "grammar_most_alternatives")
    return given if guesses_ends else 0


def _matches(which: Any, flat: Flat) -> Any:
    is_as_in_vllm = flat.get("prompt_lookup_min") is not None or flat.get("prompt_lookup_max") is not None
    given = _taken(flat, "prompt_lookup_num_matches", 1 if is_as_in_vllm else None)
    return given if which == "last" else which


def _thresholds(epsilon: Any, flat: Flat, delta: Any = _DELTA) -> Any:
    pair = epsilon, _taken(flat, "posterior_alpha", delta)
    return None if pair == TYPICAL_ACCEPTANCE else pair


# Today's name of each, vLLM's among them, and its value by the given one and the other settings.
_REPLACED: dict[str, tuple[str, Callable[[Any, Flat], Any]]] = {
    "disable_by_batch_size": ("num_speculative_tokens_per_batch_size", _lengths_up_to),
    "draft_min_path_prob": ("draft_confidence_threshold", lambda value, flat: value),
    "grammar_guesses_ends": ("grammar_most_alternatives", _alternatives),
    "guesses_ends": ("grammar_most_alternatives", _alternatives),
    "match": ("prompt_lookup_num_matches", _matches),
    "max_cached_tokens": ("suffix_decoding_max_cached_requests", _fewer_requests),
    "posterior_threshold": ("rejection_sample_options", _thresholds),
    "posterior_alpha": ("rejection_sample_options", lambda value, flat: _thresholds(_EPSILON, flat, value)),
    "prompt_lookup_match": ("prompt_lookup_num_matches", _matches),
    "same_tokenizer": ("draft_vocabulary", lambda value, flat: "same" if value else None),
    "sparse_kv_sinks": ("sparse_kv_window", _window),
    "suffix_decoding_max_cached_tokens": ("suffix_decoding_max_cached_requests", _fewer_requests),
    "synthetic_acceptance_length": ("rejection_sample_options", lambda value, flat: value),
    "synthetic_acceptance_rates": ("rejection_sample_options", lambda value, flat: value),
    "top_k_tokens_per_head": ("draft_tree_top_k", lambda value, flat: value),
}
FORMER_NAMES = _WITHOUT_EFFECT.keys() | _REPLACED.keys()


def respelled(flat: Flat, former: Set[str]) -> Flat:
    """Flat settings with `former` names, of [`FORMER_NAMES`], replaced by today's; `None` is the default."""
    flat = dict(flat)
    for name, (neutral, why) in _WITHOUT_EFFECT.items():
        if name in former and _taken(flat, name, neutral) != neutral:
            from transformers.utils import logging

            logging.get_logger(__name__).warning_once(f"`{name}` changes nothing: {why}.")
    replaced: dict[str, str] = {}
    # One may have been taken together with another before its turn.
    for name in (name for name in _REPLACED if name in former & flat.keys()):
        (today, value_of), given = _REPLACED[name], flat.pop(name)
        try:
            value = None if given is None else value_of(given, flat)
        except TypeError:
            raise SpecConfigError(f"`{name}` must be a number, got {shown(given)}.") from None
        if value is None:
            flat.setdefault(today, None)
        elif flat.get(today) is None:
            flat[today], replaced[today] = value, name
        else:
            raise SpecConfigError(f"`{replaced.get(today, today)}` and `{name}` are one setting. Keep one.")
    return flat


# ------------------------------------------------------------------------------------------------------------ values

QUANTIZATION_ALIASES = {
    "bitsandbytes": "bitsandbytes_4bit",
    "4bit": "bitsandbytes_4bit",
    "nf4": "bitsandbytes_4bit",
    "fp4": "bitsandbytes_fp4",
    "8bit": "bitsandbytes_8bit",
    "int8": "bitsandbytes_8bit",
}


def plain_path(value: Any) -> Any:
    """A path as text; anything else as it is."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def torch_name(value: Any) -> Any:
    """`torch.bfloat16` -> "bfloat16", `torch.device("cuda", 0)` -> "cuda:0"; anything else as it is."""
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


def token_tree(value: Any) -> Any:
    """A static tree as paths of child ranks, as [`~drafts.parse_token_tree`] reads it."""
    from ..drafts import parse_token_tree

    return parse_token_tree(value)


def lengths_by_batch_size(value: Any) -> Any:
    """Pairs of a number of rows and the length from there on, from 1 row on; neighbours differ in length."""
    entries = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(entries, (list, tuple)) or not entries:
        raise _wrong_lengths(value)
    ranges: list[tuple[int, int, int | None]] = []
    for entry in entries:
        if not isinstance(entry, (list, tuple)) or len(entry) not in (2, 3):
            raise _wrong_lengths(value)
        # JSON has only strings for the keys of a mapping.
        numbers: list[Any] = [int(item) if isinstance(item, str) and item.isdecimal() else item for item in entry]
        length = numbers.pop()
        if not all(map(is_int, numbers)) or not (length is None or is_int(length)):
            raise _wrong_lengths(value)
        first, last = numbers[0], numbers[-1]
        if not 1 <= first <= last <= MOST_INTEGER or not 0 <= (length or 0) <= MOST_DRAFT_TOKENS:
            raise _wrong_lengths(value)
        ranges.append((int(first), int(last), None if length is None else int(length)))
    last = 0
    pairs: list[tuple[int, int | None]] = []
    for first, end, length in sorted(ranges, key=lambda item: item[:2]):
        if first <= last:
            raise SpecConfigError(
                f"`num_speculative_tokens_per_batch_size` says twice what holds for {first} rows, got {shown(value)}. "
                "Let its ranges not overlap."
            )
        last = end
        if not pairs or pairs[-1][1] != length:
            pairs.append((first, length))
    return tuple(pairs if pairs[0][0] == 1 else [(1, None), *pairs])


def _wrong_lengths(value: Any) -> SpecConfigError:
    return SpecConfigError(
        "`num_speculative_tokens_per_batch_size` must be a list of [first, last, k], such as [[1, 8, 5], [9, 32, 2], "
        "[33, 128, 0]] for numbers of rows and the draft tokens there, or a mapping from the number of rows from "
        f"which on a k holds, {{1: 5, 9: 2, 33: 0}}; rows are at least 1, k is from 0 to {MOST_DRAFT_TOKENS} or None. "
        f"Got {shown(value)}."
    )


def owners(value: Any) -> Any:
    """Names on the Hub, from a list or a text with commas."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise SpecConfigError(f"`trusted_owners` must be a list of users and organisations, got {shown(value)}.")
    return tuple(filter(None, map(str.strip, names)))
