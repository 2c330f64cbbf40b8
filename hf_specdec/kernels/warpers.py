"""Temperature, top-k, top-p and min-p in a few launches, without sorting the vocabulary.

A logit has a rank, an integer of as many bits as its dtype can tell numbers apart by, in the order of the numbers. The
rank at which top-k or top-p ends is found by 4 bits at a time, the leading ones first: tokens whose rank begins with
what is known fall into 16 buckets, by their number or by their probability. Of bfloat16 that takes 4 launches for each
of the two, and one more writes the scores.

    top-k keeps  x_i >= the k-th largest x
    top-p keeps  all but the least probable whose probabilities add up to at most 1 - p; among equal ones, as a stable
                 sort has it, those of smaller ids go first
    min-p keeps  p_i >= min_p max p

Shapes: R rows, V vocabulary, S parts of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._triton import DTYPES, tl, triton, use_triton
from .launching import arrivals, as_lines, ends_last, parts_of_lines


# Logits that a program sorts into buckets at a time, and those that it reads where it does nothing else.
_BLOCK, _READ_BLOCK = 256, 1024

# By dtype, the last bits of a float32 that its numbers do not have, and the bits of a rank in steps of 4.
_RANKS = {torch.bfloat16: (16, 16), torch.float16: (13, 20), torch.float32: (0, 32)}


class Warping(NamedTuple):
    """What is done to logits before a token is drawn, in this order; `None` leaves a step out."""

    temperature: float = 1.0  # divides them. 1 leaves them as they are
    top_k: int | None = None  # tokens that are kept, and all that are as probable as the last of them
    top_p: float | None = None  # probability of the tokens that are kept, below 1
    min_p: float | None = None  # part of the highest probability that a token must have


def can_warp(logits: torch.Tensor) -> bool:
    """Tells whether there are kernels for such logits."""
    return logits.dtype in DTYPES and use_triton(logits)


def warped_triton(logits: torch.Tensor, warping: Warping) -> torch.FloatTensor:
    """Scores `(..., V)` in float32 of logits `(..., V)`, -inf for tokens that are not kept, by each row alone."""
    temperature, top_k, top_p, min_p = warping
    rows, vocab_size = as_lines(logits), logits.shape[-1]
    count, device = len(rows), rows.device
    scores = torch.empty(rows.shape, dtype=torch.float32, device=device)
    if count == 0:
        return scores.view(logits.shape)
    part, splits = parts_of_lines(count, vocab_size, _READ_BLOCK, device)
    dropped, num_bits = _RANKS[rows.dtype]
    counts = torch.empty((count, splits, 16), dtype=torch.int32, device=device)
    masses = torch.empty(counts.shape, dtype=torch.float32, device=device)
    highest = torch.empty((count, splits), dtype=torch.float32, device=device)
    removed = torch.empty(count, dtype=torch.int64, device=device)
    passed, limit = torch.empty((2, count), dtype=torch.float64, device=device)
    sizes = rows.stride(0), vocab_size, part, splits
    padded = {"SPLITS": triton.next_power_of_2(splits), "DROPPED": dropped, "num_warps": 8}

    def narrowed(wanted: float, masses: torch.Tensor | None = None, least: torch.Tensor | None = None) -> torch.Tensor:
        border = torch.empty(count, dtype=torch.int64, device=device)
        for shift in range(num_bits - 4, -4, -4):
            _narrow_kernel[(count, splits)](
                rows, counts, masses, highest, arrivals(count, device), least, border, passed, limit, removed,
                *sizes, temperature, wanted, shift, int(shift == num_bits - 4), BLOCK=_BLOCK, **padded,
            )  # fmt: skip
        return border

    border = None
    with torch.cuda.device_of(rows):
        if top_k is not None:
            border = narrowed(float(min(top_k, vocab_size)))
        if top_p is not None:
            border = narrowed(1 - top_p, masses, border)
        elif min_p is not None:
            _highest_kernel[(count, splits)](rows, highest, *sizes, BLOCK=_READ_BLOCK, num_warps=4)
        _write_kernel[(count, splits)](
            rows, scores, counts, highest, border, None if top_p is None else removed,
            *sizes, temperature, min_p, BLOCK=_READ_BLOCK, **padded,
        )  # fmt: skip
    return scores.view(logits.shape)


@triton.jit
def _rank_of(logits, DROPPED: tl.constexpr):
    """Ranks: integers without a sign, in the order of the logits."""
    # Both zeros are one number.
    bits = tl.where(logits == 0, 0.0, logits).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000) >> DROPPED


@triton.jit
def _weight_of(
    logits,
    highest,  # of those that they are compared with
    temperature,
):
    """Probabilities, as parts of that of the highest logit."""
    top = tl.where(highest == float("-inf"), 0.0, highest)
    return tl.exp(tl.div_rn(logits, temperature) - tl.div_rn(top, temperature))


@triton.jit
def _highest_of(
    logits_ptr,  # [V]
    begin,
    end,
    BLOCK: tl.constexpr,
):
    highest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for first in tl.range(begin, end, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
        token = first + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + token, mask=token < end, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, logits)
    return tl.max(highest, axis=0)


@triton.jit(do_not_specialize=["vocab_size", "part", "num_splits"])
def _highest_kernel(
    logits_ptr,  # [R, V]
    highest_ptr,  # [R, S]
    stride,
    vocab_size, part, num_splits,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # A program: a row, and one part of the vocabulary.
    row, split = tl.program_id(0), tl.program_id(1)
    begin = split * part
    highest = _highest_of(logits_ptr + row.to(tl.int64) * stride, begin, tl.minimum(begin + part, vocab_size), BLOCK)
    tl.store(highest_ptr + row * num_splits + split, highest)


@triton.jit(do_not_specialize=["vocab_size", "part", "num_splits", "shift", "is_first"])
def _narrow_kernel(
    logits_ptr,  # [R, V]
    counts_ptr,  # [R, S, 16], tokens in each bucket
    # [R, S, 16], their probability, as a multiple of that of the part's highest logit; None: buckets go by numbers
    masses_ptr,
    highest_ptr,  # [R, S]
    arrivals_ptr,  # [R], parts that have ended
    least_ptr,  # [R], the least rank that is kept, or None
    known_ptr,  # [R], leading bits of the rank that is looked for: 4 more than before
    passed_ptr,  # [R], tokens above the rank, or the probability below it
    limit_ptr,  # [R], of the probability below
    removed_ptr,  # [R], tokens of the bucket that top-p does not keep, if they are equally probable
    stride,
    vocab_size, part, num_splits, temperature, wanted, shift, is_first,
    DROPPED: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    # A program: a row, and one part of the vocabulary.
    row, split = tl.program_id(0), tl.program_id(1)
    logits_ptr += row.to(tl.int64) * stride
    begin = tl.multiple_of(split * part, BLOCK)
    end = tl.minimum(begin + part, vocab_size)
    if masses_ptr is not None:
        highest = _highest_of(logits_ptr, begin, end, BLOCK)
        tl.store(highest_ptr + row * num_splits + split, highest)
    if least_ptr is not None:
        least = tl.load(least_ptr + row).to(tl.uint32)
    known = tl.load(known_ptr + row, mask=is_first == 0, other=0)
    bucket = tl.arange(0, 16)
    count = tl.zeros([16, BLOCK], dtype=tl.int32)
    mass = tl.zeros([16, BLOCK], dtype=tl.float32)
    for first in tl.range(begin, end, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
        token = first + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + token, mask=token < end, other=float("-inf")).to(tl.float32)
        rank = _rank_of(logits, DROPPED)
        digits = rank >> shift.to(tl.uint32)
        is_in = (token < end) & (digits >> 4 == known.to(tl.uint32))
        if least_ptr is not None:
            is_in &= rank >= least
        place = tl.where(is_in, digits & 15, 16).to(tl.int32)
        is_there = place[None, :] == bucket[:, None]
        count += is_there.to(tl.int32)
        if masses_ptr is not None:
            mass += tl.where(is_there, _weight_of(logits, highest, temperature)[None, :], 0.0)
    places = (row * num_splits + split) * 16 + bucket
    tl.store(counts_ptr + places, tl.sum(count, axis=1))
    if masses_ptr is not None:
        tl.store(masses_ptr + places, tl.sum(mass, axis=1))
    if ends_last(arrivals_ptr + row, num_splits):
        # It adds the bucket that it chooses to what is known of the rank.
        splits, is_split = row * num_splits + tl.arange(0, SPLITS), tl.arange(0, SPLITS) < num_splits
        every_place = splits[:, None] * 16 + bucket[None, :]
        counts = tl.load(counts_ptr + every_place, mask=is_split[:, None], other=0, cache_modifier=".cg")
        counts = tl.sum(counts, axis=0)
        passed = tl.load(passed_ptr + row, mask=is_first == 0, other=0.0)
        if masses_ptr is not None:
            parts = tl.load(highest_ptr + splits, mask=is_split, other=float("-inf"), cache_modifier=".cg")
            masses = tl.load(masses_ptr + every_place, mask=is_split[:, None], other=0.0, cache_modifier=".cg")
            masses *= _weight_of(parts, tl.max(parts, axis=0), temperature)[:, None]
            masses = tl.sum(masses, axis=0).to(tl.float64)
            # As transformers compares them.
            limit = (wanted * tl.sum(masses, axis=0).to(tl.float32)).to(tl.float64)
            limit = tl.where(is_first != 0, limit, tl.load(limit_ptr + row, mask=is_first == 0, other=0.0))
            tl.store(limit_ptr + row, limit)
            is_above = (counts > 0) & (passed + tl.cumsum(masses, axis=0) > limit)
            # Where rounding leaves none, the most probable.
            last = tl.max(tl.where(counts > 0, bucket, 0), axis=0)
            chosen = tl.min(tl.where(is_above, bucket, last), axis=0)
            passed += tl.sum(tl.where(bucket < chosen, masses, 0.0), axis=0)
            number = tl.sum(tl.where(bucket == chosen, counts, 0), axis=0)
            weight = tl.sum(tl.where(bucket == chosen, masses, 0.0), axis=0).to(tl.float32)
            fitting = tl.div_rn(((limit - passed) * number).to(tl.float32), tl.where(weight > 0, weight, 1.0))
            fitting = tl.where(weight > 0, fitting, number.to(tl.float32))
            fitting = tl.minimum(tl.maximum(fitting, 0.0), (number - 1).to(tl.float32))
            tl.store(removed_ptr + row, fitting.to(tl.int64))
        else:
            above = passed + (tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)).to(tl.float64)
            chosen = tl.max(tl.where(above + counts.to(tl.float64) >= wanted, bucket, 0), axis=0)
            passed = tl.sum(tl.where(bucket == chosen, above, 0.0), axis=0)
        tl.store(known_ptr + row, known * 16 + chosen)
        tl.store(passed_ptr + row, passed)


@triton.jit(do_not_specialize=["vocab_size", "part", "num_splits"])
def _write_kernel(
    logits_ptr,  # [R, V]
    scores_ptr,  # [R, V], written
    counts_ptr,  # [R, S, 16], by the last bits of a rank that begins as the border does
    highest_ptr,  # [R, S]
    border_ptr,  # [R], the least rank that is kept, or None for any
    removed_ptr,  # [R], tokens of it that are not kept, or None for none
    stride,
    vocab_size, part, num_splits, temperature,
    min_p,  # or None
    DROPPED: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    # A program: a row, and one part of the vocabulary.
    row, split = tl.program_id(0), tl.program_id(1)
    logits_ptr += row.to(tl.int64) * stride
    scores_ptr += row.to(tl.int64) * vocab_size
    begin = tl.multiple_of(split * part, BLOCK)
    end = tl.minimum(begin + part, vocab_size)
    splits = tl.arange(0, SPLITS)
    border, num_before, removed, highest = 0, 0, 0, 0.0
    if border_ptr is not None:
        border = tl.load(border_ptr + row)
    if removed_ptr is not None:
        # Tokens of this rank that belong to earlier parts.
        places = (row * num_splits + splits) * 16 + (border & 15)
        num_before = tl.sum(tl.load(counts_ptr + places, mask=splits < split, other=0), axis=0)
        removed = tl.load(removed_ptr + row)
    if min_p is not None:
        parts = tl.load(highest_ptr + row * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
        highest = tl.max(parts, axis=0)
    for first in tl.range(begin, end, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
        token = first + tl.arange(0, BLOCK)
        is_in = token < end
        logits = tl.load(logits_ptr + token, mask=is_in, other=float("-inf")).to(tl.float32)
        is_kept = is_in
        rank = _rank_of(logits, DROPPED).to(tl.int64)
        if border_ptr is not None:
            is_kept = rank >= border
        if removed_ptr is not None:
            is_tied = is_in & (rank == border)
            number = num_before + tl.cumsum(is_tied.to(tl.int32), axis=0)
            is_kept &= (rank > border) | (number > removed)
            num_before += tl.sum(is_tied.to(tl.int32), axis=0)
        if min_p is not None:
            is_kept &= _weight_of(logits, highest, temperature) >= min_p
        # Nothing hides what is not a number.
        is_kept |= logits != logits
        scores = tl.where(is_kept, tl.div_rn(logits, temperature), float("-inf"))
        tl.store(scores_ptr + token, scores, mask=is_in)
