"""The kernel of `few_rows` for bfloat16 on processors with AMX: up to 32 rows take hardly longer than one.

Tiles of 16 rows of weights are read as they lie, and x is packed for them, so that the processor multiplies 16 outputs
by 16 rows at a time, and sums in float32. Only `few_rows` imports this file, which raises an `ImportError` where the
processor or the system has no tiles.

Shapes: R rows in blocks of 16, I inputs, O outputs; x is packed to `(R / 16, I / 32, 16 pairs of inputs, 16 rows, 2)`.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ._few_rows import BFLOAT16, FLOAT32, TARGET, compiled_entry, load, store, taking, zeros


SIZE = 16  # outputs and rows of a tile
DEPTH = 32  # inputs of a tile
OUTPUTS = 2 * SIZE  # of a step
NUM_SUMS = 4 * SIZE * SIZE  # in four tiles, of two blocks of rows

# Linux: the system call that asks for a part of the processor's state, with the code for asking and that of tiles.
_ARCH_PRCTL, _ASK, _TILES = 158, 0x1023, 18

_is_able = sys.platform == "linux" and set(TARGET[2].split(",")).issuperset({"+amx-tile", "+amx-bf16"})
if not _is_able or ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK, _TILES):
    raise ImportError("The processor has no tiles, or the system does not allow them.")

BYTE, NOTHING = ir.IntType(8), ir.VoidType()
# All eight tiles have 16 rows of 64 bytes: palette 1, then the bytes of a row in 16 bits, then the rows.
_PALETTE = bytes([1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [SIZE] * 8 + [0] * 8)


def _instruction(builder, name, *args):
    function_type = ir.FunctionType(NOTHING, [value.type for value in args])
    builder.call(cgutils.get_or_insert_function(builder.module, function_type, f"llvm.x86.{name}"), args)


def _number_of(tile):
    return ir.Constant(BYTE, tile.literal_value)


@intrinsic
def begin_tiles(typingctx):
    """Sets the sizes of all tiles."""

    def codegen(context, builder, signature, args):
        palette = ir.Constant(ir.ArrayType(BYTE, len(_PALETTE)), bytearray(_PALETTE))
        place = cgutils.global_constant(builder.module, "tile_sizes", palette)
        _instruction(builder, "ldtilecfg", builder.bitcast(place, cgutils.voidptr_t))

    return types.void(), codegen


@intrinsic
def end_tiles(typingctx):
    """Frees the tiles, which others set anew."""

    def codegen(context, builder, signature, args):
        _instruction(builder, "tilerelease")

    return types.void(), codegen


@intrinsic(prefer_literal=True)
def clear_tile(typingctx, tile):
    def codegen(context, builder, signature, args):
        _instruction(builder, "tilezero", _number_of(tile))

    return types.void(tile), codegen


def _moving(name):
    """An instruction that moves a tile, whose rows lie `stride` bytes apart in memory."""

    @intrinsic(prefer_literal=True)
    def move(typingctx, tile, numbers, index, stride):
        def codegen(context, builder, signature, args):
            place = builder.bitcast(builder.gep(args[1], [args[2]]), cgutils.voidptr_t)
            _instruction(builder, name, _number_of(tile), place, args[3])

        return types.void(tile, numbers, types.int64, types.int64), codegen

    return move


load_tile, store_tile = _moving("tileloadd64"), _moving("tilestored64")


@intrinsic(prefer_literal=True)
def multiply_add(typingctx, total, weights, x):
    """`total += weights x`."""

    def codegen(context, builder, signature, args):
        _instruction(builder, "tdpbf16ps", *map(_number_of, (total, weights, x)))

    return types.void(total, weights, x), codegen


@njit
def _outputs_of_all_rows(x, w, b, y, sizes, rows, output, stop):
    """The products of all rows with two tiles of outputs, of which the last ones may repeat some."""
    inputs, outputs, w_stride, b_stride, y_stride = sizes
    first, second = min(output, outputs - SIZE), min(output + SIZE, outputs - SIZE)
    sums = zeros(FLOAT32, NUM_SUMS)
    for row in range(0, rows, 2 * SIZE):
        has_two = rows - row > SIZE
        clear_tile(0)
        clear_tile(1)
        clear_tile(2)
        clear_tile(3)
        other = row + SIZE if has_two else row
        for i in range(0, inputs, DEPTH):
            load_tile(6, x, row * inputs + i * SIZE, 64)
            load_tile(4, w, first * w_stride + i, 2 * w_stride)
            multiply_add(0, 4, 6)
            load_tile(5, w, second * w_stride + i, 2 * w_stride)
            multiply_add(1, 5, 6)
            if has_two:
                load_tile(7, x, other * inputs + i * SIZE, 64)
                multiply_add(2, 4, 7)
                multiply_add(3, 5, 7)
        store_tile(0, sums, 0, 64)
        store_tile(1, sums, SIZE * SIZE, 64)
        store_tile(2, sums, 2 * SIZE * SIZE, 64)
        store_tile(3, sums, 3 * SIZE * SIZE, 64)
        for r in range(min(rows - row, 2 * SIZE)):
            place = r // SIZE * 2 * SIZE * SIZE + r % SIZE
            for o in range(SIZE):
                total = load(sums, place + o * SIZE, 1) + load(b, (first + o) * b_stride, 1)
                store(y, (row + r) * y_stride + first + o, total)
                total = load(sums, place + (SIZE + o) * SIZE, 1) + load(b, (second + o) * b_stride, 1)
                store(y, (row + r) * y_stride + second + o, total)


_product = taking(_outputs_of_all_rows, OUTPUTS, 0)


def entry(dtype: None) -> Any:
    """Compiles the kernel, or loads it; it is called with the address of a job, whose x is packed."""

    def product(job):
        begin_tiles()
        _product(job, BFLOAT16, BFLOAT16)
        end_tiles()

    return compiled_entry(product, "tiles", __file__)


def packed(x: torch.Tensor) -> torch.Tensor:
    """Rows `(..., I)` in the order in which tiles read them, with zeros up to a multiple of 16."""
    inputs = x.shape[-1]
    rows = x.reshape(-1, inputs)
    rows = F.pad(rows, (0, 0, 0, -len(rows) % SIZE))
    return rows.view(-1, SIZE, inputs // DEPTH, DEPTH // 2, 2).permute(0, 2, 3, 1, 4).contiguous()
