"""Drawing from distributions by the inverse CDF, one random number a draw.

    y = the smallest id with  sum_{i <= y} w_i > u sum_i w_i  and  w_y > 0

The cumulative sum is taken over blocks of the vocabulary, then inside the block in which it passes the threshold.

Shapes: R rows (all dimensions but the last), V vocabulary, C = ceil(V / `BLOCK_SIZE`) blocks.
"""

from __future__ import annotations

import torch

from ._triton import tl, triton, use_triton
from .indexing import arange, widest_float
from .launching import arrivals, ends_last


# Entries of the vocabulary that are first treated as one.
BLOCK_SIZE = 256

# Blocks that one program sums up.
BLOCKS_PER_PROGRAM = 16


def sample_from_probs(
    probs: torch.FloatTensor, uniform: torch.FloatTensor, proposes: bool = False
) -> torch.LongTensor:
    """Draws one id per distribution `(..., V)` by its inverse CDF, whatever the rows around it are.

    Weights may have any positive sum; an id of weight 0 is never drawn. A row without a positive finite sum gives -1,
    which no embedding accepts; if it `proposes`, id 0, which it makes certain in the distributions, then `(R, V)`.
    Sums are in float64, so that the tail of a vocabulary of any size is drawn with its own probabilities.
    """
    sample = _sample_triton if use_triton(probs, uniform) else sample_torch
    return sample(probs, uniform, proposes)


def sample_torch(probs: torch.FloatTensor, uniform: torch.FloatTensor, proposes: bool = False) -> torch.LongTensor:
    vocab_size = probs.shape[-1]
    precision = widest_float(probs.device)
    # Sums of blocks in float32 or better; the last block may be shorter.
    dtype, (num_whole, num_left) = torch.promote_types(probs.dtype, torch.float32), divmod(vocab_size, BLOCK_SIZE)
    whole, left = probs.split([num_whole * BLOCK_SIZE, num_left], dim=-1)
    masses = whole.unflatten(-1, (num_whole, BLOCK_SIZE)).sum(-1, dtype=dtype)
    if num_left:
        masses = torch.cat([masses, left.sum(-1, keepdim=True, dtype=dtype)], dim=-1)
    masses = masses.to(precision)
    cumulative = masses.cumsum(-1)
    total = cumulative[..., -1]
    threshold = (uniform.to(precision) * total).unsqueeze(-1)
    block = _first_above(masses, cumulative, threshold).unsqueeze(-1)
    rest = threshold - (cumulative - masses).gather(-1, block)

    ids = block * BLOCK_SIZE + arange(min(BLOCK_SIZE, vocab_size), probs.device)
    weights = probs.gather(-1, ids.clamp(max=vocab_size - 1)).to(precision).masked_fill_(ids >= vocab_size, 0.0)
    choice = block.squeeze(-1) * BLOCK_SIZE + _first_above(weights, weights.cumsum(-1), rest)
    is_stuck = ~((total > 0) & (total < torch.inf))
    if not proposes:
        return choice.masked_fill_(is_stuck, -1)
    choice = choice.masked_fill_(is_stuck, 0)
    is_stuck = is_stuck[:, None]
    probs.masked_fill_(is_stuck, 0.0).scatter_add_(1, choice[:, None], is_stuck.to(probs))
    return choice


def _first_above(weights, cumulative, threshold) -> torch.LongTensor:
    """First entry of positive weight whose cumulative sum exceeds the threshold; the largest where none does."""
    # A parallel cumulative sum may grow by rounding at an entry of weight 0.
    is_above = (cumulative > threshold) & (weights > 0)
    return weights.masked_fill(is_above, torch.inf).argmax(-1)


@triton.jit
def find_block(
    sums_ptr,  # [C], the blocks' sums
    uniform,
    C,
    BLOCK_C: tl.constexpr,
):
    """The block that a number falls into, what is left of the threshold in it, and whether any weight is positive."""
    index = tl.arange(0, BLOCK_C)
    sums = tl.load(sums_ptr + index, mask=index < C, other=0.0, cache_modifier=".cg").to(tl.float64)
    cumulative = tl.cumsum(sums, axis=0)
    total = tl.sum(tl.where(index == C - 1, cumulative, 0.0), axis=0)
    threshold = uniform * total
    block = first_above(sums, cumulative, threshold)
    before = tl.sum(tl.where(index == block, cumulative - sums, 0.0), axis=0)
    return block, threshold - before, (total > 0) & (total < float("inf"))


@triton.jit
def first_above(weights, cumulative, threshold):
    """`_first_above` of one vector."""
    is_above = (cumulative > threshold) & (weights > 0)
    # Versions of Triton differ in what they make of NaN; rows that hold it are marked elsewhere.
    numbers = tl.where(weights > 0, weights, 0.0)
    return tl.argmax(tl.where(is_above, float("inf"), numbers), axis=0)


@triton.jit
def _sample_kernel(
    probs_ptr,  # [R, V]
    sums_ptr,  # [R, C]
    uniform_ptr,  # [R]
    arrivals_ptr,  # [R], programs that have ended
    ids_ptr,  # [R], written
    V, C,
    PROPOSES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    # A program: a row, and some blocks of the vocabulary.
    row = tl.program_id(0).to(tl.int64)  # R * V passes 2**31 at 256 x 64 x 152k
    probs_ptr += row * V
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    ids = blocks[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    weights = tl.load(probs_ptr + ids, mask=ids < V, other=0.0).to(sums_ptr.dtype.element_ty)
    tl.store(sums_ptr + row * C + blocks, tl.sum(weights, axis=1), mask=blocks < C)
    if ends_last(arrivals_ptr + row, tl.num_programs(1)):
        uniform = tl.load(uniform_ptr + row).to(tl.float64)
        # A checker takes what only a kernel may call for a function that raises.
        block, rest, has_law = find_block(  # pyright: ignore[reportGeneralTypeIssues]
            sums_ptr + row * C, uniform, C, BLOCK_C
        )
        chosen = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        inside = tl.load(probs_ptr + chosen, mask=chosen < V, other=0.0).to(tl.float64)
        choice = block * BLOCK_SIZE + first_above(inside, tl.cumsum(inside, axis=0), rest)
        if PROPOSES:
            if has_law == 0:
                for first in tl.range(0, V, BLOCK_SIZE):  # pyright: ignore[reportGeneralTypeIssues]
                    every = first + tl.arange(0, BLOCK_SIZE)
                    tl.store(probs_ptr + every, tl.where(every == 0, 1.0, 0.0), mask=every < V)
        tl.store(ids_ptr + row, tl.where(has_law, choice, 0 if PROPOSES else -1))


def _sample_triton(probs: torch.FloatTensor, uniform: torch.FloatTensor, proposes: bool = False) -> torch.LongTensor:
    vocab_size = probs.shape[-1]
    rows = probs.reshape(-1, vocab_size).contiguous()
    num_rows, num_blocks = rows.shape[0], triton.cdiv(vocab_size, BLOCK_SIZE)
    sums = rows.new_empty((num_rows, num_blocks), dtype=torch.promote_types(probs.dtype, torch.float32))
    ids = torch.empty(probs.shape[:-1], dtype=torch.long, device=probs.device)
    if num_rows == 0:
        return ids
    with torch.cuda.device_of(probs):
        _sample_kernel[num_rows, triton.cdiv(num_blocks, BLOCKS_PER_PROGRAM)](
            rows, sums, uniform.expand(probs.shape[:-1]).reshape(-1), arrivals(num_rows, probs.device), ids,
            vocab_size, num_blocks, PROPOSES=proposes, BLOCKS=BLOCKS_PER_PROGRAM,
            BLOCK_C=triton.next_power_of_2(num_blocks), BLOCK_SIZE=BLOCK_SIZE, num_warps=4,
        )  # fmt: skip
    return ids
