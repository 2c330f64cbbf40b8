"""A text that grows and finds the longest earlier occurrence of its own end.

All prefixes of the text are kept in the order in which they compare when read backwards from their last token. The
prefixes that share the longest suffix with the whole text are then its neighbours in that order. A new token c costs
one binary search: prefixes that end in c are ordered as what stands before their c, and that order is known. (This is
the balanced indexing structure of Amir, Kopelowitz, Lewenstein and Lewenstein, SPIRE 2005, on sorted arrays. The bulk
construction is the prefix doubling of Manber and Myers, in steps of three.)

Names: a position is the index of a token in the text; the place of a position is where the prefix before that token
stands in the order.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np


# Sort keys of three ranks must fit in 63 bits.
MAX_TOKEN_ID = 2**21 - 3
MAX_TEXT_LENGTH = 2**21 - 3

# Places are `token << _PLACE_BITS` plus the place among the prefixes that end in this token.
_PLACE_BITS = 40
_FIRST_STEP = 1 << 20

# Measured: a bulk build costs as much as adding these many tokens one by one, and as a sixth of those it sorts.
_BULK_OVERHEAD = 200
_BULK_RATIO = 6


class NgramIndex:
    """The tokens of one row, indexed by what they end with.

    Memory per token: 4 bytes of text, 8 of places, 4 shared between copies and up to 4 for the occurrences, beside
    about 250 bytes for every distinct token that occurs after the bulk part.

    Args:
        tokens (`Sequence[int]`): The text to begin with.
        max_tokens (`int`, defaults to 1,048,576):
            Most tokens in the index. When they are exceeded, the oldest leave and the newest three quarters remain,
            so that the cost of rebuilding, spread over the tokens that were added, does not grow.

    Raises:
        ValueError: A token id is negative or above `MAX_TOKEN_ID`, or `max_tokens` is not in 1..`MAX_TEXT_LENGTH`.
    """

    def __init__(self, tokens: Sequence[int] = (), max_tokens: int = 2**20):
        if not 1 <= max_tokens <= MAX_TEXT_LENGTH:
            raise ValueError(f"`max_tokens` must be between 1 and {MAX_TEXT_LENGTH}, got {max_tokens}.")
        self.max_tokens = max_tokens
        self._build(array("i"))
        self.extend(tokens)

    def __len__(self) -> int:
        """Tokens in the index."""
        return len(self._text)

    @property
    def text(self) -> Sequence[int]:
        """The tokens in the index."""
        return self._text

    def copy(self) -> NgramIndex:
        """An independent index of the same text; the sorted bulk part is shared."""
        other = object.__new__(NgramIndex)
        other.__dict__.update(self.__dict__)
        other._text, other._places = self._text[:], self._places[:]
        other._buckets = {token: bucket[:] for token, bucket in self._buckets.items()}
        other._newest = None
        return other

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens at the end, one by one or, if they are many, by sorting the text anew."""
        if not tokens:
            return
        if not (0 <= min(tokens) and max(tokens) <= MAX_TOKEN_ID):
            raise ValueError(f"Token ids must be between 0 and {MAX_TOKEN_ID}, got {min(tokens)} to {max(tokens)}.")
        length = len(self._text) + len(tokens)
        if length > self.max_tokens:
            kept = self.max_tokens - self.max_tokens // 4
            self._build((self._text + array("i", tokens))[-kept:])
        elif len(tokens) > _BULK_OVERHEAD + length // _BULK_RATIO:
            self._build(self._text + array("i", tokens))
        else:
            self._append(tokens)

    @contextmanager
    def after(self, tokens: Sequence[int]) -> Iterator[bool]:
        """Lets the text end with these tokens for a while; `False`, and leaves it, where the index has no room."""
        has_room = len(self._text) + len(tokens) <= self.max_tokens
        state = self._newest, self._last_match
        if has_room and tokens:
            self._append(tokens)
        try:
            yield has_room
        finally:
            if has_room and tokens:
                self._retract(len(tokens))
                self._newest, self._last_match = state

    def continuation(self, end: int, count: int) -> list[int]:
        """Up to `count` tokens of the text from position `end` on."""
        return self._text[end : end + count].tolist()

    def longest_match(self, limit: int | None = None, first: bool = False) -> tuple[int, int]:
        """Finds the longest match of the end of the text with an earlier place.

        Args:
            limit (`int`, *optional*): Longest match to look for, at least 1.
            first (`bool`): Take the first of the occurrences of the longest match, not the last.

        Returns:
            `tuple[int, int]`: Length of the match and position of the token that followed it; `(0, 0)` without one.
        """
        length = len(self._text)
        if length < 2:
            return 0, 0
        match, end = self._continued_match(limit, first)
        if not match:
            match, end = self._search(length, limit, first)
        # A match that the limit cut short says nothing about the matches after more tokens.
        is_whole = match > 0 and (limit is None or match < limit)
        self._last_match = (length, match, end, first) if is_whole else None
        return match, end

    def matches(self, count: int, limit: int | None = None, first: bool = False) -> list[tuple[int, int]]:
        """The best of the places where the end of the text occurred before, each with the longest match it allows.

        Args:
            count (`int`): Most places to return.
            limit (`int`, *optional*): Longest match to look for, at least 1; longer ones count as this long.
            first (`bool`): Of equally long matches the first are the best, not the last.

        Returns:
            `list[tuple[int, int]]`: Length of the match and position of the token that followed it, the best first.
        """
        found: list[tuple[int, int]] = []
        if len(self._text) < 2:
            return found
        for match, positions in self._ties(len(self._text), limit):
            found += [(match, position + 1) for position in _outermost(positions, count - len(found), first)]
            if len(found) == count:
                break
        return found

    def _ties(self, length: int, limit: int | None) -> Iterator[tuple[int, array]]:
        """Lengths of match in falling order and the positions that match so long and no longer.

        They are neighbours of the end of the text in the order, the longer the match the closer.
        """
        bucket, here = self._newest or self._find_newest()
        begin, end = here, here + 1
        while match := self._match_around(bucket, begin, end, length, limit):
            outer_begin = self._last_tie(bucket, begin, match, -1)
            outer_end = self._last_tie(bucket, end - 1, match, 1) + 1
            yield match, bucket[outer_begin:begin] + bucket[end:outer_end]
            begin, end = outer_begin, outer_end

    def _match_around(self, bucket: array, begin: int, end: int, length: int, limit: int | None) -> int:
        """The longest match of the end of the text with what stands next to `bucket[begin:end]`, 0 without one."""
        before = self._common_suffix(bucket[begin - 1] + 1, length) if begin else 0
        after = self._common_suffix(bucket[end] + 1, length) if end < len(bucket) else 0
        match = max(before, after)
        return match if limit is None else min(match, limit)

    def _continued_match(self, limit: int | None, first: bool) -> tuple[int, int]:
        """The last match prolonged by all tokens added since, if they followed there too; else `(0, 0)`.

        The occurrences of the longer suffix are among those of the shorter, so the prolonged match is the longest, and
        the first or last occurrence remains so.
        """
        if self._last_match is None:
            return 0, 0
        seen, match, end, was_first = self._last_match
        text, added = self._text, len(self._text) - seen
        if was_first != first or (limit is not None and match + added > limit):
            return 0, 0
        if text[end : end + added] != text[seen:]:
            return 0, 0
        return match + added, end + added

    def _search(self, length: int, limit: int | None, first: bool) -> tuple[int, int]:
        bucket, here = self._newest or self._find_newest()
        match = self._match_around(bucket, here, here + 1, length, limit)
        if not match:
            return 0, 0
        begin = self._last_tie(bucket, here, match, -1)
        end = self._last_tie(bucket, here, match, 1) + 1
        return match, self._pick(bucket, begin, here, end, first) + 1

    def _find_newest(self) -> tuple[array, int]:
        """The bucket of the last token, and where in it the end of the text stands."""
        bucket = self._bucket(self._text[-1])
        return bucket, bisect_left(bucket, self._places[-2], key=self._places.__getitem__)

    # ------------------------------------------------------------------------------------------------------ the order

    def _append(self, tokens: Sequence[int]) -> None:
        text, places = self._text, self._places
        place_of = places.__getitem__
        for token in tokens:
            bucket = self._buckets.get(token)
            if bucket is None:
                bucket = self._bucket(token)
            index = bisect_left(bucket, places[-1], key=place_of)
            low, high = self._gap(token, bucket, index)
            if high - low < 2:
                self._spread(token, bucket)
                low, high = self._gap(token, bucket, index)
            bucket.insert(index, len(text))
            text.append(token)
            # Runs grow at the upper end of a bucket; a fixed step there leaves room for long ones.
            places.append(low + min((high - low) // 2, _FIRST_STEP) if index + 1 == len(bucket) else (low + high) // 2)
        self._newest = bucket, index

    def _retract(self, count: int) -> None:
        """Takes back the last tokens that were appended."""
        for _ in range(count):
            self._places.pop()
            self._buckets[self._text.pop()].remove(len(self._text))

    def _gap(self, token: int, bucket: array, index: int) -> tuple[int, int]:
        """The free places between the prefixes that end with the tokens at `bucket[index - 1]` and `bucket[index]`."""
        low = self._places[bucket[index - 1] + 1] if index else token << _PLACE_BITS
        high = self._places[bucket[index] + 1] if index < len(bucket) else (token + 1) << _PLACE_BITS
        return low, high

    def _spread(self, token: int, bucket: array) -> None:
        """Spaces the prefixes that end in this token evenly, because the gap that is needed has been used up."""
        step = (1 << _PLACE_BITS - 1) // (len(bucket) + 1)
        places = np.frombuffer(self._places, dtype=np.int64)
        ends = np.frombuffer(bucket, dtype=np.int32) + 1
        places[ends] = (token << _PLACE_BITS) + step * np.arange(1, len(ends) + 1)

    def _bucket(self, token: int) -> array:
        """The positions of a token, ordered by their places; cut out of the bulk part when first asked for."""
        bucket = self._buckets.get(token)
        if bucket is None:
            index = int(self._bulk_tokens.searchsorted(token))
            bucket = array("i")
            if index < len(self._bulk_tokens) and self._bulk_tokens[index] == token:
                begin, end = self._bulk_starts[index : index + 2].tolist()
                bucket.frombytes(self._bulk_order[begin:end].tobytes())
            self._buckets[token] = bucket
        return bucket

    def _build(self, text: array) -> None:
        tokens = np.array(text, dtype=np.int64)
        # The empty prefix comes first; the others by their last token.
        order = sort_prefixes(tokens)[1:] - 1
        last = tokens[order]
        starts = np.flatnonzero(np.diff(last, prepend=-1))
        sizes = np.diff(starts, append=len(order))
        steps = (1 << _PLACE_BITS - 1) // (sizes + 1)
        places = np.zeros(len(text) + 1, dtype=np.int64)
        index_in_bucket = np.arange(len(order)) - np.repeat(starts, sizes)
        places[order + 1] = (last << _PLACE_BITS) + np.repeat(steps, sizes) * (index_in_bucket + 1)
        self._text = text
        self._places = array("q", places.tobytes())
        self._buckets: dict[int, array] = {}
        self._bulk_order = order.astype(np.int32)
        self._bulk_tokens = last[starts]
        self._bulk_starts = np.append(starts, len(order))
        self._newest: tuple[array, int] | None = None
        self._last_match: tuple[int, int, int, bool] | None = None

    # ----------------------------------------------------------------------------------------------------- the matches

    def _common_suffix(self, shorter: int, longer: int) -> int:
        """Number of last tokens that the prefixes of these two lengths share."""
        text = self._text
        for count in range(min(shorter, 8)):
            if text[shorter - count - 1] != text[longer - count - 1]:
                return count
        if shorter <= 8:
            return shorter
        count, step = 8, 8
        while shorter - count >= step and _equal(text, shorter - count, longer - count, step):
            count += step
            step *= 2
        while step > 1:
            step //= 2
            if shorter - count >= step and _equal(text, shorter - count, longer - count, step):
                count += step
        return count

    def _last_tie(self, bucket: array, here: int, match: int, direction: int) -> int:
        """The farthest index in one direction (1 or -1) whose prefix ends with the last `match` tokens of the text."""
        if match == 1:
            return 0 if direction < 0 else len(bucket) - 1
        text, suffix = self._text, self._text[-match:]

        def is_tie(index: int) -> bool:
            if not 0 <= index < len(bucket):
                return False
            end = bucket[index] + 1
            return text[max(end - match, 0) : end] == suffix

        # Steps double until one leaves the ties, then halve: long matches have few ties, short ones many.
        step = direction
        while is_tie(here + step):
            here += step
            step *= 2
        while abs(step) > 1:
            step = step // 2 if step > 0 else -(-step // 2)
            if is_tie(here + step):
                here += step
        return here

    def _pick(self, bucket: array, begin: int, here: int, end: int, first: bool) -> int:
        """The first or last position among `bucket[begin:end]`, without the end of the text itself at `here`."""
        if end - begin <= 16:
            positions = bucket[begin:here] + bucket[here + 1 : end]
            return min(positions) if first else max(positions)
        positions = np.frombuffer(bucket, dtype=np.int32)[begin:end]
        if first:
            return int(positions.min())
        # The end of the text is the largest position, so the last occurrence is the second largest.
        newest = here - begin
        return int(max(positions[:newest].max(initial=-1), positions[newest + 1 :].max(initial=-1)))


def _outermost(positions: array, count: int, first: bool) -> list[int]:
    """The smallest `count` positions in rising order, or the largest in falling order."""
    if len(positions) > 64 and count < len(positions):
        # A common token has thousands of occurrences; only few of them need sorting.
        kth = count - 1 if first else len(positions) - count
        parted = np.partition(np.frombuffer(positions, dtype=np.int32), kth)
        positions = (parted[:count] if first else parted[-count:]).tolist()
    return sorted(positions, reverse=not first)[:count]


def _equal(text: array, end: int, other_end: int, size: int) -> bool:
    return text[end - size : end] == text[other_end - size : other_end]


def sort_prefixes(tokens: np.ndarray) -> np.ndarray:
    """Lengths 0..n of the prefixes of a text, ordered by the prefixes read backwards.

    Each round knows the order by the last `span` tokens and sorts those that still tie by three times as many.

    Args:
        tokens (`np.ndarray` of shape `(n,)`): Token ids, int64, at most `MAX_TOKEN_ID`; n at most `MAX_TEXT_LENGTH`.
    """
    size = len(tokens) + 1
    rank = np.zeros(size, dtype=np.int64)
    rank[1:] = tokens + 1
    base = max(size, int(rank.max()) + 1)
    order = np.empty(size, dtype=np.int64)
    tied, slots, span = np.arange(size), np.arange(size), 1
    while len(tied):
        key = rank[tied] * base + rank[np.maximum(tied - span, 0)]
        key = key * base + rank[np.maximum(tied - 2 * span, 0)]
        sorting = np.argsort(key)
        tied, key = tied[sorting], key[sorting]
        leads = np.diff(key, prepend=-1) != 0
        order[slots] = tied
        rank[tied] = np.maximum.accumulate(np.where(leads, slots, 0))
        alone = leads & np.append(leads[1:], True)
        tied, slots = tied[~alone], slots[~alone]
        span *= 3
    return order
