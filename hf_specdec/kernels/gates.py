"""The activated gate of an MLP times its other half: `act(gate) * up`.

Shapes: I width of each half; all others are rows.
"""

from __future__ import annotations

import torch

from ._triton import tl, triton
from .launching import as_lines, begin_early, early_launch


# Activations that the kernel knows.
SILU, GELU_TANH = "silu", "gelu_tanh"


def gated_triton(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """The product `(..., I)` on a GPU, rounded to the dtype after the activation and after the product."""
    size = gate.shape[-1]
    halves = [as_lines(half) for half in (gate, up)]
    output = gate.new_empty(gate.shape)
    block = min(1024, triton.next_power_of_2(size))
    with torch.cuda.device_of(gate):
        _gated_kernel[(len(halves[0]), triton.cdiv(size, block))](
            *halves, output, *(half.stride(0) for half in halves),
            SIZE=size, BLOCK=block, KIND=kind, num_warps=4, **early_launch(gate),
        )  # fmt: skip
    return output


@triton.jit
def activated(
    gate,  # float32
    KIND: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    if KIND == "silu":
        slope = gate
    else:
        # (1 + tanh(z)) / 2 is the logistic function of 2 z.
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1 + tl.exp2(-slope * LOG2_E))


@triton.jit
def _gated_kernel(
    gate_ptr,  # [rows, I]
    up_ptr,  # [rows, I]
    output_ptr,  # [rows, I]
    gate_stride, up_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    # A program: a block of a row.
    begin_early(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + place, mask=place < SIZE, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + place, mask=place < SIZE, other=0.0).to(tl.float32)
    active = activated(gate, KIND).to(output_ptr.dtype.element_ty).to(tl.float32)
    tl.store(output_ptr + row * SIZE + place, (active * up).to(output_ptr.dtype.element_ty), mask=place < SIZE)
