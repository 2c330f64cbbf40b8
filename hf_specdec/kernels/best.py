"""The tokens of the highest scores.

The vocabulary is split among several programs of a row, since a draft has few rows; the one that ends last compares
what the others have found.

Shapes: R rows, V vocabulary, S splits, K best tokens.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from . import _triton
from ._triton import DTYPES, tl, triton, use_triton
from .launching import MOST_PARTS, arrivals, as_lines, ends_last, parts_of_lines


# Scores that a program reads at a time, and how often at least.
_BLOCK, _LEAST_BLOCKS = 2048, 2

# Best tokens of a row that are found one after the other.
MOST_BEST = 32


def best_tokens(scores: torch.Tensor) -> torch.LongTensor:
    """The id of the highest score, the first of equal ones: scores of shape `(..., V)` to ids of shape `(...)`."""
    # Asked first, because drafts on a CPU ask for every token.
    is_plain = scores.is_cpu and _triton.CHOICE != "triton"
    if not is_plain and scores.dtype in DTYPES and use_triton(scores):
        return _best_triton(scores)
    if not scores.is_cpu:
        return scores.argmax(-1)
    # torch's own is not vectorised there: 0.11 ms for 6 x 32k in float32, 0.64 in bfloat16, against 0.01 and 0.02.
    return torch.from_numpy(np.asarray(scores.float().numpy().argmax(-1)))


def best_log_probs(logits: torch.Tensor, count: int) -> tuple[torch.FloatTensor, torch.LongTensor]:
    """The K best tokens `(..., K)` of logits `(..., V)`, best first, after their log-probabilities in float32."""
    if count <= MOST_BEST and logits.dtype in DTYPES and use_triton(logits):
        return _ranked_triton(logits, count)
    values, tokens = F.log_softmax(logits, -1, dtype=torch.float32).topk(count)
    return values, tokens


def with_successors(tokens: torch.LongTensor, logits: torch.Tensor, count: int) -> torch.LongTensor:
    """Each node's token `(B, T)`, and after it the ids of the `count` largest logits there: `(B, T, 1 + count)`.

    The best come first; -1 where nothing else is possible.
    """
    best = logits.topk(count)
    return torch.cat([tokens[..., None], best.indices.masked_fill(best.values == -torch.inf, -1)], dim=-1)


def _best_triton(scores: torch.Tensor) -> torch.LongTensor:
    rows, vocab_size = as_lines(scores), scores.shape[-1]
    count = len(rows)
    part, splits = parts_of_lines(count, vocab_size, _BLOCK, rows.device, _LEAST_BLOCKS)
    output = torch.empty(count, dtype=torch.long, device=rows.device)
    highest = torch.empty((count, splits), dtype=torch.float32, device=rows.device)
    places = torch.empty((count, splits), dtype=torch.int32, device=rows.device)
    with torch.cuda.device_of(rows):
        _best_kernel[(count, splits)](
            rows, highest, places, arrivals(count, rows.device), output,
            rows.stride(0), vocab_size, part, splits,
            BLOCK=_BLOCK, SPLITS=triton.next_power_of_2(splits), num_warps=4,
        )  # fmt: skip
    return output.view(scores.shape[:-1])


def _ranked_triton(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocab_size = as_lines(logits), logits.shape[-1]
    block = max(_BLOCK, triton.next_power_of_2(triton.cdiv(vocab_size, MOST_PARTS)))
    splits = triton.cdiv(vocab_size, block)
    empty = {"device": rows.device, "dtype": torch.float32}
    values = torch.empty((len(rows), count), **empty)
    tokens = torch.empty((len(rows), count), dtype=torch.long, device=rows.device)
    parts = torch.empty((len(rows), splits, count), **empty)
    places = torch.empty((len(rows), splits, count), dtype=torch.int32, device=rows.device)
    masses = torch.empty((len(rows), splits), **empty)
    with torch.cuda.device_of(rows):
        _ranked_kernel[(len(rows), splits)](
            rows, parts, places, masses, arrivals(len(rows), rows.device),
            values, tokens, rows.stride(0), vocab_size, splits,
            COUNT=count, BLOCK=block, SPLITS=triton.next_power_of_2(splits), BLOCK_C=triton.next_power_of_2(count),
            num_warps=4 if block == _BLOCK else 8,
        )  # fmt: skip
    return values.view(*logits.shape[:-1], count), tokens.view(*logits.shape[:-1], count)


@triton.jit(do_not_specialize=["num_splits"])
def _best_kernel(
    scores_ptr,  # [R, V]
    highest_ptr,  # [R, S]
    places_ptr,  # [R, S]
    arrivals_ptr,  # [R], parts that have ended
    output_ptr,  # [R]
    stride,
    vocab_size, part, num_splits,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    # A program: a row, and one part of the vocabulary.
    row = tl.program_id(0)
    split = tl.program_id(1)
    scores_ptr += row.to(tl.int64) * stride
    begin = split * part
    end = tl.minimum(begin + part, vocab_size)
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    best_token = begin + tl.arange(0, BLOCK)
    for first in tl.range(begin, end, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
        token = first + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + token, mask=token < end, other=float("-inf")).to(tl.float32)
        # Like torch's, which finds what is not a number.
        score = tl.where(score != score, float("inf"), score)
        best_token = tl.where(score > best, token, best_token)
        best = tl.maximum(best, score)
    highest = tl.max(best, axis=0)
    tl.store(highest_ptr + row * num_splits + split, highest)
    tl.store(places_ptr + row * num_splits + split, tl.min(tl.where(best == highest, best_token, vocab_size), axis=0))
    if ends_last(arrivals_ptr + row, num_splits):
        splits = row * num_splits + tl.arange(0, SPLITS)
        is_split = tl.arange(0, SPLITS) < num_splits
        found = tl.load(highest_ptr + splits, mask=is_split, other=float("-inf"), cache_modifier=".cg")
        tokens = tl.load(places_ptr + splits, mask=is_split, other=vocab_size, cache_modifier=".cg")
        token = tl.min(tl.where(found == tl.max(found, axis=0), tokens, vocab_size), axis=0)
        tl.store(output_ptr + row, token.to(tl.int64))


@triton.jit
def _next_best(
    scores,  # [N]
    tokens,  # [N]
    is_left,  # [N], those that have not been taken
    vocab_size,
):
    """The highest score, its token, `vocab_size` where nothing is left, and what is left without it."""
    highest = tl.max(tl.where(is_left, scores, float("-inf")), axis=0)
    token = tl.min(tl.where(is_left & (scores == highest), tokens, vocab_size), axis=0)
    return highest, token, is_left & (tokens != token)


@triton.jit(do_not_specialize=["num_splits"])
def _ranked_kernel(
    logits_ptr,  # [R, V]
    parts_ptr,  # [R, S, K], best logits of each part
    places_ptr,  # [R, S, K], their tokens
    masses_ptr,  # [R, S], logarithm of the sum of the weights of each part
    arrivals_ptr,  # [R], parts that have ended
    values_ptr,  # [R, K]
    tokens_ptr,  # [R, K]
    stride,
    vocab_size, num_splits,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # A program: a row, and one part of the vocabulary.
    row = tl.program_id(0)
    split = tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    is_left = token < vocab_size
    logits_ptr += row.to(tl.int64) * stride
    logits = tl.load(logits_ptr + token, mask=is_left, other=float("-inf")).to(tl.float32)
    # Whatever is not a number is never the best.
    logits = tl.where(logits == logits, logits, float("-inf"))
    part = row * num_splits + split
    highest = tl.max(logits, axis=0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(masses_ptr + part, shift + tl.log(tl.sum(tl.exp(logits - shift), axis=0)))
    for rank in tl.static_range(COUNT):
        best, place, is_left = _next_best(logits, token, is_left, vocab_size)
        tl.store(parts_ptr + part * COUNT + rank, best)
        tl.store(places_ptr + part * COUNT + rank, place)
    if ends_last(arrivals_ptr + row, num_splits):
        # It ranks the best tokens of all parts of the row.
        splits, ranks = tl.arange(0, SPLITS), tl.arange(0, BLOCK_C)
        masses = tl.load(
            masses_ptr + row * num_splits + splits, mask=splits < num_splits, other=float("-inf"), cache_modifier=".cg"
        )
        heaviest = tl.max(masses, axis=0)
        mass = heaviest + tl.log(tl.sum(tl.exp(masses - heaviest), axis=0))
        ranked = (row * num_splits + splits)[:, None] * COUNT + ranks[None, :]
        is_part = (splits < num_splits)[:, None] & (ranks < COUNT)[None, :]
        scores = tl.load(parts_ptr + ranked, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        tokens = tl.load(places_ptr + ranked, mask=is_part, other=vocab_size, cache_modifier=".cg")
        scores = tl.reshape(scores, [SPLITS * BLOCK_C])
        tokens = tl.reshape(tokens, [SPLITS * BLOCK_C])
        is_open = tokens < vocab_size
        for rank in tl.static_range(COUNT):
            score, found, is_open = _next_best(scores, tokens, is_open, vocab_size)
            tl.store(values_ptr + row * COUNT + rank, score - mass)
            tl.store(tokens_ptr + row * COUNT + rank, found.to(tl.int64))
