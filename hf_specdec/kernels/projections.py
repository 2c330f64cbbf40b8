"""Linear layers that read the same few tokens, on a GPU, as one launch over all of their weights.

Over the tokens of a draft a layer takes as long as its weights are read, and a matrix of its own does not keep the
memory of a GPU busy. Each program multiplies a few rows of one of the matrices with all tokens. The norm in front of a
product and the residual addition after it, which are as small as the tokens, are fused in.

Shapes: M tokens, K width of what is read, N width of what is written, P programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ._triton import computable, tl, triton
from .gates import activated
from .launching import as_lines, early_launch, launch_next, wait_for_previous
from .norms import Norm
from .tiles import gpu_of


# Weights `(N, K)`, and the bias `(N,)` if there is one.
Linear = tuple[torch.Tensor, "torch.Tensor | None"]

# More have not been measured, and arithmetic begins to count.
MAX_TOKENS = 64

# Programs of a matrix multiply so many of its rows, and so much of the width at a time. 64 rows suit the tensor cores
# of a Hopper GPU, also where half of its processors have no program.
_ROWS, _DEPTHS = (64, 32), (128, 64)

# Rows of a matrix that is alone at least: fewer are too few programs to keep the memory busy.
_LEAST_ALONE = 1024

# Of the pipeline, and the share of the shared memory that they may take.
_MOST_STAGES, _SHARE_OF_MEMORY = 8, 0.75

# Numbers of a tile that a program adds, or norms, at a time: more do not fit into the registers.
_MOST_NUMBERS = 4096

# Lines of 128 bytes of each row of weights that a program asks for before it waits for what it reads.
_LINES_AHEAD = 1


class Unnormed(NamedTuple):
    """A stream whose norm is left to the products that read it."""

    stream: torch.Tensor  # (..., K): before the norm
    squares: torch.Tensor  # (P, M): sums of the squares of parts of the width, in float32
    norm: Norm  # one that [`can_norm`]

    @property
    def shape(self) -> torch.Size:
        """That of the stream."""
        return self.stream.shape


def can_norm(norm: Any) -> bool:
    """Tells whether products compute a norm of what they read."""
    return isinstance(norm, Norm) and norm.weight is not None and not norm.is_centered


def takes_tokens(x: torch.Tensor) -> bool:
    """Tells whether tokens `(..., K)` are few enough, and of a dtype, for the kernel."""
    is_short = x.dtype != torch.float32 and not torch.version.hip
    return is_short and x.numel() <= MAX_TOKENS * x.shape[-1]


def takes_linears(linears: Sequence[Linear]) -> bool:
    """Tells whether up to three linear layers run as one kernel."""
    weights, biases = zip(*linears)
    if len(weights) == 1 and len(weights[0]) < _LEAST_ALONE:
        return False
    return (
        # Quantised and distributed weights are tensors of their own classes, without numbers at their address.
        all(type(weight) in (nn.Parameter, torch.Tensor) for weight in weights)
        and len({bias is None for bias in biases}) == 1
        and all(weight.is_contiguous() and not len(weight) % _ROWS[-1] for weight in weights)
        and not weights[0].shape[1] % _DEPTHS[-1]
        and len({part.dtype for part in (*weights, *biases) if part is not None}) == 1
    )


def products_triton(x: torch.Tensor | Unnormed, linears: Sequence[Linear]) -> Sequence[torch.Tensor]:
    """The products `(..., N)` of up to three linear layers, parts of one tensor."""
    sizes = [len(weight) for weight, _ in linears]
    return _launch(x, linears, sum(sizes))[0].split(sizes, dim=-1)


def gated_product_triton(x: torch.Tensor | Unnormed, gate: Linear, up: Linear, kind: str) -> torch.Tensor:
    """The product `(..., N)` of an activated gate and its other half, see [`~kernels.gates.gated_triton`]."""
    return _launch(x, (gate, up), len(gate[0]), kind)[0]


def added_product_triton(x: torch.Tensor, linear: Linear, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum `(..., N)` of a stream and a product, rounded one after the other, and the squares of [`Unnormed`]."""
    return _launch(x, (linear,), len(linear[0]), None, stream)


def _launch(x, linears, width, kind=None, stream=None) -> tuple[torch.Tensor, torch.Tensor]:
    (weights, biases), size, is_gated = zip(*linears), x.shape[-1], kind is not None
    norm, read_squares = (x.norm, x.squares) if isinstance(x, Unnormed) else (None, None)
    read = as_lines(x.stream if isinstance(x, Unnormed) else x)
    output = read.new_empty((*x.shape[:-1], width))
    gpu = gpu_of(read.device)
    rows = next(rows for rows in _ROWS if not any(len(weight) % rows for weight in weights))
    programs, tokens = triton.cdiv(width, rows), max(16, triton.next_power_of_2(len(read)))
    most = _DEPTHS[0] if norm is None else _MOST_NUMBERS // tokens
    depth = next(depth for depth in _DEPTHS if depth <= most and not size % depth)
    stage = read.element_size() * depth * ((1 + is_gated) * rows + tokens)
    # Where a matrix begins is told by its distance from the first one, which keeps what is known of the alignment.
    begins = [sum(map(len, weights[:place])) if not is_gated else 0 for place in range(len(weights))]
    shifts = [_distance(weight, weights[0]) - begin * size for weight, begin in zip(weights, begins)]
    bias_shifts = [0 if biases[0] is None else _distance(bias, biases[0]) for bias in biases]
    bias_shifts = [shift - begin for shift, begin in zip(bias_shifts, begins)]
    # Nothing of the output belongs to matrices that there are not.
    missing = 3 - len(linears)
    begins, shifts, bias_shifts = begins + [width] * missing, shifts + [0] * missing, bias_shifts + [0] * missing
    stream = None if stream is None else as_lines(stream)
    squares = output if stream is None else read.new_empty((programs, len(read)), dtype=torch.float32)
    parts = 1 if read_squares is None else len(read_squares)
    with torch.cuda.device_of(read):
        _product_kernel[(programs,)](
            read, weights[0], biases[0], output, read_squares, None if norm is None else norm.weight, stream, squares,
            *shifts[1:], *bias_shifts[1:], *begins[1:], len(read), read.stride(0),
            0 if stream is None else stream.stride(0), 0.0 if norm is None else norm.eps,
            SIZE=size, WIDTH=width, BLOCK_M=tokens, BLOCK_N=rows, BLOCK_K=depth, KIND=kind, PARTS=parts,
            BLOCK_P=min(triton.next_power_of_2(parts), _MOST_NUMBERS // tokens),
            OFFSET=0.0 if norm is None else norm.offset, ROUNDS_LAST=norm is not None and norm.rounds_last,
            LINES=min(_LINES_AHEAD, 1 << (size // 64).bit_length() - 1), **early_launch(read), num_warps=4,
            num_stages=min(max(int(gpu.shared_memory * _SHARE_OF_MEMORY) // stage, 2), _MOST_STAGES),
        )  # fmt: skip
    return output, squares


def _distance(tensor: torch.Tensor, first: torch.Tensor) -> int:
    return (tensor.data_ptr() - first.data_ptr()) // tensor.element_size()


@triton.jit(do_not_specialize=["num_tokens"])
def _product_kernel(
    read_ptr,  # [M, K]
    weight_ptr,  # [N, K] of the first matrix
    bias_ptr,  # [N] of the first, or None
    output_ptr,  # [M, WIDTH]
    read_squares_ptr,  # [PARTS, M], or None for no norm
    norm_ptr,  # [K], likewise
    stream_ptr,  # [M, WIDTH], or None
    squares_ptr,  # [P, M], unwritten without a stream
    # From the rows of the first matrix to those of the others, in numbers; and where these begin in the output.
    second_shift, third_shift, second_bias_shift, third_bias_shift, second_begin, third_begin,
    num_tokens, read_stride, stream_stride, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,  # of the activation of the first matrix as the gate of the second, or None
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, OFFSET: tl.constexpr, ROUNDS_LAST: tl.constexpr, LINES: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    # A program: rows of one matrix, or the same rows of both halves, and all tokens.
    IS_GATED: tl.constexpr = KIND is not None
    HAS_NORM: tl.constexpr = norm_ptr is not None
    DTYPE: tl.constexpr = output_ptr.dtype.element_ty
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
    wait_for_previous(IS_EARLY)
    weight_ptr += depth[None, :]
    scale = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    if HAS_NORM:
        # Tokens in front, so that a thread has neighbours of the width, and moves them as vectors.
        read_ptr += token[:, None] * read_stride + depth[None, :]
        scale = 1 / tl.sqrt(_added(read_squares_ptr, token, num_tokens, BLOCK_M, PARTS, BLOCK_P) / SIZE + eps)
        norm_ptr += depth
        # A turn ahead: the pipeline is for what the tensor cores read.
        norm_weight = tl.load(norm_ptr)
    else:
        read_ptr += token[None, :] * read_stride + depth[:, None]
    product = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    other = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for begin in tl.range(0, SIZE, BLOCK_K):
        states = tl.load(read_ptr + begin, mask=is_token[:, None] if HAS_NORM else is_token[None, :], other=0.0)
        if HAS_NORM:
            # Rounded wherever torch rounds.
            normed = states.to(tl.float32) * scale[:, None]
            if not ROUNDS_LAST:
                normed = normed.to(DTYPE).to(tl.float32)
            # Turned before they are rounded: the other way Triton 3.6 fails for compute capability 10.0.
            states = (normed * (norm_weight.to(tl.float32) + OFFSET)[None, :]).trans().to(DTYPE)
            after = begin + BLOCK_K
            norm_weight = tl.load(norm_ptr + after, mask=depth < SIZE - after, other=0.0)
        # Nobody reads them again before all others were read.
        states, weights = computable(states), tl.load(weight_ptr + begin, eviction_policy="evict_first")
        product = tl.dot(computable(weights), states, product, input_precision="ieee")
        if IS_GATED:
            weights = tl.load(weight_ptr + second_shift + begin, eviction_policy="evict_first")
            other = tl.dot(computable(weights), states, other, input_precision="ieee")
    # Not before: programs of the next kernel would crowd where these leave room.
    launch_next(IS_EARLY)
    if bias_ptr is not None:
        product += tl.load(bias_ptr + bias_shift + place).to(tl.float32)[:, None]
        if IS_GATED:
            other += tl.load(bias_ptr + second_bias_shift + place).to(tl.float32)[:, None]
    if IS_GATED:
        gate = activated(product.to(DTYPE).to(tl.float32), KIND).to(DTYPE).to(tl.float32)
        product = gate * other.to(DTYPE).to(tl.float32)
    if stream_ptr is not None:
        stream_ptr += token[None, :].to(tl.int64) * stream_stride + place[:, None]
        stream = tl.load(stream_ptr, mask=is_token[None, :], other=0.0).to(tl.float32)
        product = product.to(DTYPE).to(tl.float32) + stream
        total = product.to(DTYPE).to(tl.float32)
        tl.store(squares_ptr + tl.program_id(0) * num_tokens + token, tl.sum(total * total, axis=0), mask=is_token)
    tl.store(
        output_ptr + token[None, :].to(tl.int64) * WIDTH + place[:, None], product.to(DTYPE), mask=is_token[None, :]
    )


@triton.jit
def _added(
    parts_ptr,  # [PARTS, M]
    token,  # [BLOCK_M]
    num_tokens,
    BLOCK_M: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for first in tl.static_range(0, PARTS, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        is_part = (part < PARTS)[:, None] & (token < num_tokens)[None, :]
        total += tl.sum(
            tl.load(parts_ptr + part[:, None] * num_tokens + token[None, :], mask=is_part, other=0.0), axis=0
        )
    return total


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
