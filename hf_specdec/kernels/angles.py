"""Angles of rotary position embeddings. Sines have the sign that they have where heads turn, see [`~layers.rope`].

Shapes: R rows, T tokens, A numbers of a head that turn.
"""

from __future__ import annotations

import torch

from ._triton import tl, triton
from .early import begin_early, early_launch


def rotary_angles(
    positions: torch.LongTensor, frequencies: torch.Tensor, factor: float, dtype: torch.dtype, is_interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine `(R, T, 1, A)` on a GPU.

    Args:
        positions (`torch.LongTensor` of shape `(R, T)`): Of the tokens.
        frequencies (`torch.Tensor` of shape `(A / 2,)`): By which they turn from one position to the next.
        factor (`float`): Of both.
        dtype (`torch.dtype`): Of both. They are computed in float32.
        is_interleaved (`bool`): Neighbours turn together, and not halves.
    """
    rows, tokens = positions.shape
    half = len(frequencies)
    cosine, sine = positions.new_empty((2, rows, tokens, 1, 2 * half), dtype=dtype)
    with torch.cuda.device_of(positions):
        _angles_kernel[(tokens, rows)](
            positions, frequencies, cosine, sine, *positions.stride(), factor,
            HALF=half, BLOCK=triton.next_power_of_2(half), IS_INTERLEAVED=is_interleaved,
            num_warps=1, **early_launch(positions),
        )  # fmt: skip
    return cosine, sine


@triton.jit(do_not_specialize=["stride_r", "stride_t"])
def _angles_kernel(
    positions_ptr,  # [R, T]
    frequencies_ptr,  # [HALF]
    cosine_ptr,  # [R, T, 2 HALF]
    sine_ptr,  # [R, T, 2 HALF]
    stride_r,
    stride_t,
    factor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    # A program: a token.
    begin_early(IS_EARLY)
    token, row = tl.program_id(0), tl.program_id(1)
    number = tl.arange(0, BLOCK)
    is_number = number < HALF
    position = tl.load(positions_ptr + row * stride_r + token * stride_t).to(tl.float32)
    turn = position * tl.load(frequencies_ptr + number, mask=is_number, other=0.0).to(tl.float32)
    DTYPE: tl.constexpr = cosine_ptr.dtype.element_ty
    cosine, sine = tl.cos(turn) * factor, tl.sin(turn) * factor
    first = (row.to(tl.int64) * tl.num_programs(0) + token) * (2 * HALF)
    one = first + (2 * number if IS_INTERLEAVED else number)
    other = one + (1 if IS_INTERLEAVED else HALF)
    tl.store(cosine_ptr + one, cosine.to(DTYPE), mask=is_number)
    tl.store(cosine_ptr + other, cosine.to(DTYPE), mask=is_number)
    tl.store(sine_ptr + one, (-sine).to(DTYPE), mask=is_number)
    tl.store(sine_ptr + other, sine.to(DTYPE), mask=is_number)
