"""Settings with several spellings, each brought into the one form that is kept.

Every function takes what a user has written for one setting, and returns its value. What is none of the spellings
raises a [`SpecConfigError`] with an example.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..errors import SpecConfigError, shown
from .checks import MOST_DRAFT_TOKENS, MOST_INTEGER, is_int


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
