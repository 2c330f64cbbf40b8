"""The sum of a residual stream and of what a layer adds to it, and the root mean square norm of the sum.

    sum    = stream + update                                  update may be normed itself before it is added
    normed = (w + offset) * sum / sqrt(mean(sum^2) + eps)

Shapes: H size of the last dimension; all others are rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ._triton import tl, triton
from .launching import as_lines, begin_early, early_launch


class Norm(NamedTuple):
    """A root mean square norm (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32."""

    weight: torch.Tensor | None  # (H,): w
    eps: float  # added to the mean square
    offset: float = 0.0  # added to the weights: 1 in Gemma, whose weights are stored as what they differ from it
    rounds_last: bool = False  # the weights are multiplied in float32 as well, in front of the rounding to the dtype
    is_centered: bool = False  # it is a layer norm without weights: the mean is subtracted first

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """The normed `hidden` `(..., H)`, in torch."""
        if self.is_centered:
            return F.layer_norm(hidden.float(), hidden.shape[-1:], None, None, self.eps).to(hidden.dtype)
        weight, shape = self.weight, hidden.shape[-1:]
        assert weight is not None, "only layer norms have no weights"
        if self.rounds_last:
            wide = weight.float() + self.offset if self.offset else weight.float()
            return (torch.rms_norm(hidden.float(), shape, None, self.eps) * wide).to(hidden.dtype)
        if hidden.dtype == torch.float32:
            return torch.rms_norm(hidden, shape, weight, self.eps)
        return weight * torch.rms_norm(hidden, shape, None, self.eps)


class Scale(NamedTuple):
    """A factor of the update in the place of a norm; the product is rounded before it is added."""

    factor: float

    weight = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.factor


def add_norm_triton(
    stream: torch.Tensor, update: torch.Tensor | None, update_norm: Norm | Scale | None, norm: Norm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds an update, normed itself or not, to the stream, and norms the sum, on a GPU; returns the sum and that."""
    size = stream.shape[-1]
    rows = as_lines(stream)
    updates = None if update is None else as_lines(update)
    total = stream if update is None else torch.empty_like(rows, memory_format=torch.contiguous_format)
    normed = total if norm is None else torch.empty_like(rows, memory_format=torch.contiguous_format)
    unread = Norm(None, 0.0)
    ours, others = norm or unread, update_norm if isinstance(update_norm, Norm) else unread
    block = triton.next_power_of_2(size)
    with torch.cuda.device_of(rows):
        _add_norm_kernel[(len(rows),)](
            rows, updates, others.weight, ours.weight, total, normed,
            rows.stride(0), 0 if updates is None else updates.stride(0),
            None if others is unread else others.eps, None if norm is None else norm.eps,
            update_norm.factor if isinstance(update_norm, Scale) else None,
            UPDATE_OFFSET=others.offset, UPDATE_ROUNDS_LAST=others.rounds_last, UPDATE_IS_CENTERED=others.is_centered,
            OFFSET=ours.offset, ROUNDS_LAST=ours.rounds_last, IS_CENTERED=ours.is_centered, SIZE=size, BLOCK=block,
            num_warps=min(max(block // 512, 1), 8), **early_launch(rows),
        )  # fmt: skip
    return total.view(stream.shape), normed.view(stream.shape)


@triton.jit
def _normed(
    hidden,  # [BLOCK], float32
    weight_ptr,  # [H]
    eps,
    OFFSET: tl.constexpr, ROUNDS_LAST: tl.constexpr, IS_CENTERED: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, BLOCK)
    if IS_CENTERED:
        hidden = tl.where(place < SIZE, hidden - tl.sum(hidden, axis=0) / SIZE, 0.0)
    normed = hidden * (1 / tl.sqrt(tl.sum(hidden * hidden, axis=0) / SIZE + eps))
    if not IS_CENTERED:
        weight = tl.load(weight_ptr + place, mask=place < SIZE, other=0.0).to(tl.float32) + OFFSET
        if not ROUNDS_LAST:
            normed = normed.to(DTYPE).to(tl.float32)
        normed = normed * weight
    return normed.to(DTYPE)


@triton.jit
def _add_norm_kernel(
    stream_ptr,  # [rows, H]
    update_ptr,  # [rows, H], or None
    update_weight_ptr,  # [H], or None
    weight_ptr,  # [H], or None
    sum_ptr,  # [rows, H], unwritten without an update
    normed_ptr,  # [rows, H], unwritten without a norm
    stream_stride, update_stride,
    update_eps,  # None: the update is not normed
    eps,  # None: there is no norm
    factor,  # of the update, or None
    UPDATE_OFFSET: tl.constexpr, UPDATE_ROUNDS_LAST: tl.constexpr, UPDATE_IS_CENTERED: tl.constexpr,
    OFFSET: tl.constexpr, ROUNDS_LAST: tl.constexpr, IS_CENTERED: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    # A program: one row.
    begin_early(IS_EARLY)
    DTYPE: tl.constexpr = stream_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    is_place = place < SIZE
    total = tl.load(stream_ptr + row * stream_stride + place, mask=is_place, other=0.0).to(tl.float32)
    if update_ptr is not None:
        update = tl.load(update_ptr + row * update_stride + place, mask=is_place, other=0.0).to(tl.float32)
        if update_eps is not None:
            update = _normed(
                update, update_weight_ptr, update_eps, UPDATE_OFFSET, UPDATE_ROUNDS_LAST, UPDATE_IS_CENTERED,
                SIZE, BLOCK, DTYPE,
            ).to(tl.float32)  # fmt: skip
        if factor is not None:
            update = (update * factor).to(DTYPE).to(tl.float32)
        rounded = (total + update).to(DTYPE)
        tl.store(sum_ptr + row * SIZE + place, rounded, mask=is_place)
        total = rounded.to(tl.float32)
    if eps is not None:
        normed = _normed(total, weight_ptr, eps, OFFSET, ROUNDS_LAST, IS_CENTERED, SIZE, BLOCK, DTYPE)
        tl.store(normed_ptr + row * SIZE + place, normed, mask=is_place)
