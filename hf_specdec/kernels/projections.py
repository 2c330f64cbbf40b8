"""Linear layers that read the same few tokens, on a GPU, as one launch over all of their weights.

Over the tokens of a draft a layer takes as long as its weights are read, and a matrix of its own does not keep the
memory of a GPU busy. Each program multiplies a few rows of one of the matrices with all tokens. [`~layers.llama`] has
the same in torch.

Shapes: M tokens, K width of what is read, N width of what is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ._triton import fuses, needs_upcast, tl, triton
from .early import begin_early, early_launch, launches_early
from .gates import SILU, activated
from .tiles import gpu_of


# Weights `(N, K)`, and the bias `(N,)` if there is one.
Linear = tuple[torch.Tensor, "torch.Tensor | None"]

# More have not been measured, and arithmetic begins to count.
MAX_TOKENS = 64

# Programs of a matrix multiply so many of its rows, and so much of the width at a time.
_ROWS, _DEPTHS = (64, 32), (128, 64)

_MOST_STAGES = 6

# Lines of 128 bytes of each row of weights that a program asks for before it waits for what it reads.
_LINES_AHEAD = 8


def takes(x: torch.Tensor, linears: Sequence[Linear]) -> bool:
    """Tells whether up to three linear layers run as one kernel over `x` `(..., K)`.

    A single one does where kernels begin early, for torch's products do not.
    """
    size = x.shape[-1]
    if len(linears) == 1 and not launches_early(x):
        return False
    if x.dtype == torch.float32 or x.numel() > MAX_TOKENS * size or size % _DEPTHS[-1] or torch.version.hip:
        return False
    weights, biases = zip(*linears)
    return (
        # Quantised and distributed weights are tensors of their own classes, without numbers at their address.
        all(type(weight) in (nn.Parameter, torch.Tensor) for weight in weights)
        and len({bias is None for bias in biases}) == 1
        and all(weight.is_contiguous() and not len(weight) % _ROWS[-1] for weight in weights)
        and fuses(x, *weights, *biases)
    )


def products(x: torch.Tensor, linears: Sequence[Linear]) -> Sequence[torch.Tensor]:
    """The products `(..., N)` of linear layers, parts of one tensor.

    Args:
        x (`torch.Tensor` of shape `(..., K)`): What they read; bfloat16 or float16.
        linears (`Sequence`): Up to three layers for which `takes` holds.
    """
    sizes = [len(weight) for weight, _ in linears]
    return _launch(x, linears, sum(sizes), None).split(sizes, dim=-1)


def gated_product(x: torch.Tensor, gate: Linear, up: Linear, kind: str) -> torch.Tensor:
    """The product `(..., N)` of an activated gate and its other half, see [`~kernels.gates.gated`].

    Args:
        x (`torch.Tensor` of shape `(..., K)`): What they read; bfloat16 or float16.
        gate, up (`Linear`): Layers of one size for which `takes` holds.
        kind (`str`): The activation.
    """
    return _launch(x, (gate, up), len(gate[0]), kind)


def _launch(x: torch.Tensor, linears: Sequence[Linear], width: int, kind: str | None) -> torch.Tensor:
    (weights, biases), size, is_gated = zip(*linears), x.shape[-1], kind is not None
    read = x.reshape(-1, size)
    read = read if read.stride(-1) == 1 else read.contiguous()
    output = x.new_empty((*x.shape[:-1], width))
    gpu = gpu_of(x.device)
    # Small matrices get a program for fewer rows, so that there are more of them.
    fits = [rows for rows in _ROWS if not any(len(weight) % rows for weight in weights)]
    rows = next((rows for rows in fits if 2 * width >= rows * gpu.processors), fits[-1])
    depth = next(depth for depth in _DEPTHS if not size % depth)
    tokens = max(16, triton.next_power_of_2(len(read)))
    stage = x.element_size() * depth * ((1 + is_gated) * rows + tokens)
    # Where a matrix begins is told by its distance from the first one, which keeps what is known of the alignment.
    begins = [sum(map(len, weights[:place])) if not is_gated else 0 for place in range(len(weights))]
    shifts = [_distance(weight, weights[0]) - begin * size for weight, begin in zip(weights, begins)]
    bias_shifts = [0 if biases[0] is None else _distance(bias, biases[0]) for bias in biases]
    bias_shifts = [shift - begin for shift, begin in zip(bias_shifts, begins)]
    # Nothing of the output belongs to matrices that there are not.
    missing = 3 - len(linears)
    begins, shifts, bias_shifts = begins + [width] * missing, shifts + [0] * missing, bias_shifts + [0] * missing
    with torch.cuda.device_of(x):
        _product_kernel[(triton.cdiv(width, rows),)](
            read, weights[0], biases[0], output, *shifts[1:], *bias_shifts[1:], *begins[1:], len(read), read.stride(0),
            SIZE=size, WIDTH=width, BLOCK_M=tokens, BLOCK_N=rows, BLOCK_K=depth, HAS_BIAS=biases[0] is not None,
            IS_GATED=is_gated, IS_SILU=kind == SILU, UPCAST=needs_upcast(x),
            LINES=min(_LINES_AHEAD, 1 << (size // 64).bit_length() - 1), **early_launch(x),
            num_warps=4, num_stages=min(max(gpu.shared_memory * 2 // 3 // stage, 2), _MOST_STAGES),
        )  # fmt: skip
    return output


def _distance(tensor: torch.Tensor, first: torch.Tensor) -> int:
    return (tensor.data_ptr() - first.data_ptr()) // tensor.element_size()


@triton.jit(do_not_specialize=["num_tokens"])
def _product_kernel(
    read_ptr,  # [M, K]
    weight_ptr,  # [N, K] of the first matrix
    bias_ptr,  # [N] of the first, unread if not HAS_BIAS
    output_ptr,  # [M, WIDTH]
    second_shift,  # from the rows of the first matrix to those of the others, in numbers
    third_shift,
    second_bias_shift,
    third_bias_shift,
    second_begin,  # where the others begin in the output
    third_begin,
    num_tokens,
    read_stride,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_SILU: tl.constexpr,
    UPCAST: tl.constexpr,
    LINES: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    # A program: rows of one matrix, or the same rows of both halves, and all tokens.
    first = tl.program_id(0) * BLOCK_N
    place = first + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    token = tl.arange(0, BLOCK_M)
    is_token = token < num_tokens
    shift, bias_shift = second_shift * 0, second_bias_shift * 0
    if not IS_GATED:
        shift = tl.where(first >= third_begin, third_shift, tl.where(first >= second_begin, second_shift, shift))
        bias_shift = tl.where(
            first >= third_begin, third_bias_shift, tl.where(first >= second_begin, second_bias_shift, bias_shift)
        )
    weight_ptr += shift + place[:, None].to(tl.int64) * SIZE
    if IS_EARLY:
        _fetch_lines(weight_ptr, LINES)
        if IS_GATED:
            _fetch_lines(weight_ptr + second_shift, LINES)
    begin_early(IS_EARLY)
    weight_ptr += depth[None, :]
    read_ptr += token[None, :] * read_stride + depth[:, None]
    product = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    other = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for begin in tl.range(0, SIZE, BLOCK_K):
        states = tl.load(read_ptr + begin, mask=is_token[None, :], other=0.0)
        # Nobody reads them again before all others were read.
        weights = tl.load(weight_ptr + begin, eviction_policy="evict_first")
        if UPCAST:
            states, weights = states.to(tl.float32), weights.to(tl.float32)
        product = tl.dot(weights, states, product, input_precision="ieee")
        if IS_GATED:
            weights = tl.load(weight_ptr + second_shift + begin, eviction_policy="evict_first")
            if UPCAST:
                weights = weights.to(tl.float32)
            other = tl.dot(weights, states, other, input_precision="ieee")
    if HAS_BIAS:
        product += tl.load(bias_ptr + bias_shift + place).to(tl.float32)[:, None]
        if IS_GATED:
            other += tl.load(bias_ptr + second_bias_shift + place).to(tl.float32)[:, None]
    if IS_GATED:
        # Rounded wherever torch rounds.
        gate = product.to(output_ptr.dtype.element_ty).to(tl.float32)
        gate = activated(gate, IS_SILU).to(output_ptr.dtype.element_ty).to(tl.float32)
        product = gate * other.to(output_ptr.dtype.element_ty).to(tl.float32)
    tl.store(
        output_ptr + token[None, :].to(tl.int64) * WIDTH + place[:, None],
        product.to(output_ptr.dtype.element_ty),
        mask=is_token[None, :],
    )


@triton.jit
def _fetch_lines(
    row_ptr,  # [N, 1]
    LINES: tl.constexpr,
):
    """Brings the first lines of rows into the cache that all processors share. Weights depend on no kernel."""
    NUMBERS: tl.constexpr = 128 * 8 // row_ptr.dtype.element_ty.primitive_bitwidth
    address = (row_ptr + tl.arange(0, LINES)[None, :] * NUMBERS).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )
