"""Angles of rotary position embeddings. Sines have the sign that they have where heads turn, see [`~layers.llama`].

Shapes: R rows, T tokens, A numbers of a head that turn.
"""

from __future__ import annotations

import torch

from ._triton import tl, triton
from .early import begin_early, early_launch


def signed_angles(
    cosine: torch.Tensor, sine: torch.Tensor, is_interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine `(..., T, 1, A)` from those of transformers `(..., T, A)`."""
    half = sine.shape[-1] // 2
    if is_interleaved:
        sine = torch.stack((-sine[..., :half], sine[..., :half]), dim=-1).flatten(-2)
        return cosine[..., :half].repeat_interleave(2, dim=-1)[..., None, :], sine[..., None, :]
    return cosine[..., None, :], torch.cat((-sine[..., :half], sine[..., half:]), dim=-1)[..., None, :]


def rotary_angles_triton(
    positions: torch.LongTensor, frequencies: torch.Tensor, factor: float, dtype: torch.dtype, is_interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine `(R, T, 1, A)` of positions `(R, T)`, by frequencies `(A / 2,)` in float32, on a GPU."""
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
    stride_r, stride_t,
    factor,
    HALF: tl.constexpr, BLOCK: tl.constexpr, IS_INTERLEAVED: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
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
