"""Uniform random numbers of given indices, by the counter-based generator Philox-4x64-10.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". A round of the four words c of a counter, with the
two words k of a key and the constants M, is

    c' = (hi(M1 c2) ^ c1 ^ k0,  lo(M1 c2),  hi(M0 c0) ^ c3 ^ k1,  lo(M0 c0)),      k' = k + W

in 64 bits without a sign, hi and lo the halves of the product. Number x of a stream is the upper 53 bits of word
x mod 4 of counter (x div 4 + 1, space, number of the row, 0) under the key (seed, purpose): the bits that
`numpy.random.Philox` gives.

Shapes: R rows, X numbers of each.
"""

from __future__ import annotations

import torch

from ._triton import tl, triton, use_triton


# The largest float32 below 1: a uniform number stays below 1 when it is cast to float32.
LARGEST_UNIFORM = 1.0 - 2.0**-24

_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def uniforms_at(
    seeds: torch.LongTensor, numbers: torch.LongTensor, indices: torch.LongTensor, purpose: int, space: int
) -> torch.DoubleTensor:
    """Numbers `(R, X)` of given indices in the streams that seeds and numbers `(R,)`, purpose and space choose."""
    run = _uniforms_triton if use_triton(seeds, numbers, indices) else _uniforms_torch
    return run(seeds, numbers, indices, purpose, space)


# Torch has no arithmetic without a sign: the bits of sums and products are the same, shifts and halves are made here.


def _uniforms_torch(seeds, numbers, indices, purpose, space):
    zeros = torch.zeros_like(indices)
    counter = [_shifted(indices, 2) + 1, zeros + space, zeros + numbers[:, None], zeros]
    key = [zeros + seeds[:, None], zeros + purpose]
    for _ in range(_ROUNDS):
        low = [counter[word] * _signed(factor) for word, factor in zip((0, 2), _MULTIPLIERS)]
        high = [_high_half(counter[word], factor) for word, factor in zip((0, 2), _MULTIPLIERS)]
        counter = [high[1] ^ counter[1] ^ key[0], low[1], high[0] ^ counter[3] ^ key[1], low[0]]
        key = [word + _signed(step) for word, step in zip(key, _KEY_STEPS)]
    words = torch.stack(counter, dim=-1).gather(-1, (indices & 3)[..., None]).squeeze(-1)
    return (_shifted(words, 11).double() * 2.0**-53).clamp_(max=LARGEST_UNIFORM)


def _signed(word: int) -> int:
    """The number that has the bits of an unsigned one."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(words: torch.LongTensor, bits: int) -> torch.LongTensor:
    """Shifts to the right, with zeros from the left."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _high_half(words: torch.LongTensor, factor: int) -> torch.LongTensor:
    """The upper 64 bits of an unsigned product, from products of 32 bits."""
    low_mask = (1 << 32) - 1
    low, high = words & low_mask, _shifted(words, 32)
    factor_low, factor_high = factor & low_mask, factor >> 32
    middle = high * factor_low + _shifted(low * factor_low, 32)
    carry = low * factor_high + (middle & low_mask)
    return high * factor_high + _shifted(middle, 32) + _shifted(carry, 32)


@triton.jit
def _uniforms_kernel(
    seeds_ptr,  # [R]
    numbers_ptr,  # [R]
    indices_ptr,  # [R, X]
    uniforms_ptr,  # [R, X], written
    X,
    PURPOSE: tl.constexpr, SPACE: tl.constexpr, ROUNDS: tl.constexpr, LARGEST: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)
    index = tl.load(indices_ptr + row * X + place, mask=place < X, other=0).to(tl.uint64)
    zeros = tl.zeros([BLOCK_X], tl.uint64)
    key = zeros + tl.load(seeds_ptr + row).to(tl.uint64)
    number = zeros + tl.load(numbers_ptr + row).to(tl.uint64)
    words = tl.philox_impl((index >> 2) + 1, zeros + SPACE, number, zeros, key, zeros + PURPOSE, ROUNDS)
    part = index & 3
    word = tl.where(part < 2, tl.where(part == 0, words[0], words[1]), tl.where(part == 2, words[2], words[3]))
    # Of 53 bits every number is a float64.
    uniform = (word >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16
    tl.store(uniforms_ptr + row * X + place, tl.minimum(uniform, LARGEST), mask=place < X)


def _uniforms_triton(seeds, numbers, indices, purpose, space):
    (rows, width), indices = indices.shape, indices.contiguous()
    uniforms = torch.empty(indices.shape, dtype=torch.float64, device=indices.device)
    if not uniforms.numel():
        return uniforms
    block = min(triton.next_power_of_2(width), 128)
    with torch.cuda.device_of(indices):
        _uniforms_kernel[rows, triton.cdiv(width, block)](
            seeds.contiguous(), numbers.contiguous(), indices, uniforms, width,
            PURPOSE=purpose, SPACE=space, ROUNDS=_ROUNDS, LARGEST=LARGEST_UNIFORM, BLOCK_X=block, num_warps=1,
        )  # fmt: skip
    return uniforms
