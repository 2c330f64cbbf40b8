"""Heads on their way to attention: queries and keys are normed and turned, keys and values written to their slots.

    turned[i] = x[i] * cosine[i] + x[partner(i)] * sine[i]      for the first A of a head's D numbers

Partners are the two halves of the turned part, or its neighbours. Sines of angles have the sign that they have there,
see [`~layers.llama`].

Shapes: R rows, T tokens, Q query heads, K key/value heads, D head size, A numbers that turn, B allocated rows, C slots
of a buffer, S slots that are seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ._triton import tl, triton
from .cache import WritePlan
from .launching import begin_early, early_launch
from .norms import Norm


Angles = tuple[torch.Tensor, torch.Tensor]


class KeyValueCache(Protocol):
    """Storage of keys and values, such as a [`SlotCache`]."""

    plan: WritePlan | None  # where the next keys and values go, and the layers that have room for them

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `(R, K, S, D)` that a layer sees once the new ones `(R, K, T, D)` are stored."""


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


def place_heads_triton(
    heads: Sequence[torch.Tensor],
    angles: Angles,
    norms: tuple[Norm, Norm] | None,
    cache: KeyValueCache,
    layer_idx: int,
    is_interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norms and turns queries and keys, and writes keys and values to their slots, on a GPU.

    Heads are `(R, T, Q, D)` and twice `(R, T, K, D)`; angles broadcast to `(R, T, 1, A)`. Returns the queries
    `(R, Q, T, D)`, and the keys and values `(R, K, S, D)` that they see.
    """
    plan = cache.plan
    slots, seen = plan.layers[layer_idx], slice(plan.columns)
    # Heads lie side by side.
    query, key, value = (part if part.stride()[2:] == (part.shape[3], 1) else part.contiguous() for part in heads)
    rows, tokens, query_heads, size = query.shape
    cosine, sine = (angle.expand(rows, tokens, 1, -1) for angle in angles)
    cosine, sine = (angle if angle.stride(-1) == 1 else angle.contiguous() for angle in (cosine, sine))
    if cosine.stride() != sine.stride():
        cosine, sine = cosine.contiguous(), sine.contiguous()
    turned = query.new_empty((rows, query_heads, tokens, size))
    query_norm, key_norm = norms or (Norm(None, 0.0),) * 2
    kv_heads, block_t = key.shape[2], min(4, triton.next_power_of_2(tokens))
    with torch.cuda.device_of(query):
        _place_kernel[(rows, triton.cdiv(tokens, block_t), query_heads + 2 * kv_heads)](
            query, key, value, cosine, sine, query_norm.weight, key_norm.weight,
            plan.starts(query.device), turned, slots.keys, slots.values,
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *cosine.stride()[:2],
            query_norm.eps, key_norm.eps, tokens, slots.keys.shape[2],
            QUERY_HEADS=query_heads, KV_HEADS=kv_heads, SIZE=size, TURNED_SIZE=cosine.shape[-1],
            BLOCK_T=block_t, BLOCK_D=triton.next_power_of_2(size),
            OFFSET=query_norm.offset, ROUNDS_LAST=query_norm.rounds_last,
            IS_INTERLEAVED=is_interleaved, num_warps=2, **early_launch(query),
        )  # fmt: skip
    return turned, slots.keys[:rows, :, seen], slots.values[:rows, :, seen]


@triton.jit(do_not_specialize=["num_tokens", "angles_stride_b"])
def _place_kernel(
    query_ptr,  # [R, T, Q, D]
    key_ptr,  # [R, T, K, D]
    value_ptr,  # [R, T, K, D]
    cosine_ptr,  # [R, T, A]
    sine_ptr,  # [R, T, A]
    query_weight_ptr,  # [D], or None for no norms
    key_weight_ptr,  # [D], likewise
    starts_ptr,  # [R]
    turned_ptr,  # [R, Q, T, D]
    keys_ptr,  # [B, K, C, D]
    values_ptr,  # [B, K, C, D]
    query_stride_b, query_stride_t, key_stride_b, key_stride_t, value_stride_b, value_stride_t, angles_stride_b,
    angles_stride_t,
    query_eps, key_eps, num_tokens, capacity,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, TURNED_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, OFFSET: tl.constexpr, ROUNDS_LAST: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    # A program: a block of tokens of one row, and one head of queries, keys or values.
    begin_early(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(2).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    place = tl.arange(0, BLOCK_D)
    is_place = (tokens < num_tokens)[:, None] & (place < SIZE)[None, :]
    angles = row * angles_stride_b + tokens[:, None] * angles_stride_t + place[None, :]
    if head < QUERY_HEADS:
        _turn_block(
            query_ptr + row * query_stride_b + head * SIZE,
            query_stride_t, tokens, is_place, query_weight_ptr, query_eps, cosine_ptr, sine_ptr, angles,
            turned_ptr + ((row * QUERY_HEADS + head) * num_tokens) * SIZE,
            SIZE, TURNED_SIZE, BLOCK_D, OFFSET, ROUNDS_LAST, IS_INTERLEAVED,
        )  # fmt: skip
    else:
        start = tl.load(starts_ptr + row)
        if head < QUERY_HEADS + KV_HEADS:
            kv_head = head - QUERY_HEADS
            _turn_block(
                key_ptr + row * key_stride_b + kv_head * SIZE,
                key_stride_t, tokens, is_place, key_weight_ptr, key_eps, cosine_ptr, sine_ptr, angles,
                keys_ptr + ((row * KV_HEADS + kv_head) * capacity + start) * SIZE,
                SIZE, TURNED_SIZE, BLOCK_D, OFFSET, ROUNDS_LAST, IS_INTERLEAVED,
            )  # fmt: skip
        else:
            kv_head = head - QUERY_HEADS - KV_HEADS
            read = value_ptr + row * value_stride_b + kv_head * SIZE + tokens[:, None] * value_stride_t
            written = values_ptr + ((row * KV_HEADS + kv_head) * capacity + start + tokens[:, None]) * SIZE
            tl.store(written + place[None, :], tl.load(read + place[None, :], mask=is_place), mask=is_place)


@triton.jit
def _turn_block(
    read_ptr,  # [T, D], of the row and head
    stride,
    tokens,  # [N]
    is_place,  # [N, BLOCK_D]
    weight_ptr,  # [D], or None for no norm
    eps, cosine_ptr, sine_ptr,
    angles,  # [N, BLOCK_D], where the angles are
    written_ptr,  # [T, D], of the row and head
    SIZE: tl.constexpr, TURNED_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, OFFSET: tl.constexpr,
    ROUNDS_LAST: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = read_ptr.dtype.element_ty
    place = tl.arange(0, BLOCK_D)
    turns = place < TURNED_SIZE
    if IS_INTERLEAVED:
        partner = place ^ 1
    else:
        partner = tl.where(place < TURNED_SIZE // 2, place + TURNED_SIZE // 2, place - TURNED_SIZE // 2)
    has_partner = is_place & turns[None, :]
    read_ptr += tokens[:, None] * stride
    own = tl.load(read_ptr + place[None, :], mask=is_place, other=0.0).to(tl.float32)
    other = tl.load(read_ptr + partner[None, :], mask=has_partner, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        scale = 1 / tl.sqrt(tl.sum(own * own, axis=1) / SIZE + eps)
        weight = tl.load(weight_ptr + place, mask=place < SIZE, other=0.0).to(tl.float32) + OFFSET
        other_weight = tl.load(weight_ptr + partner, mask=turns, other=0.0).to(tl.float32) + OFFSET
        own, other = own * scale[:, None], other * scale[:, None]
        if not ROUNDS_LAST:
            own, other = own.to(DTYPE).to(tl.float32), other.to(DTYPE).to(tl.float32)
        own, other = own * weight[None, :], other * other_weight[None, :]
        own, other = own.to(DTYPE).to(tl.float32), other.to(DTYPE).to(tl.float32)
    cosine = tl.load(cosine_ptr + angles, mask=has_partner, other=1.0).to(tl.float32)
    sine = tl.load(sine_ptr + angles, mask=has_partner, other=0.0).to(tl.float32)
    turned = own * cosine + other * sine
    tl.store(written_ptr + tokens[:, None] * SIZE + place[None, :], turned.to(DTYPE), mask=is_place)
