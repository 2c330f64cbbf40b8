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

from ._few_rows import (
    BFLOAT16,
    FLOAT32,
    LANES,
    LONG,
    TARGET,
    VECTOR,
    WORD,
    compiled_entry,
    load,
    round_to_bfloat16,
    taking,
)


SIZE = 16  # outputs and rows of a tile
DEPTH = 32  # inputs of a tile
AREA = SIZE * SIZE
OUTPUTS = 2 * SIZE  # of a step
MOST_ROWS = 256  # of a step
NUM_SUMS = MOST_ROWS * OUTPUTS
PART = 256  # of the inputs of many rows

# Linux: the system call that asks for a part of the processor's state, with the code for asking and that of tiles.
_ARCH_PRCTL, _ASK, _TILES = 158, 0x1023, 18

_is_able = (
    sys.platform == "linux" and LANES == SIZE and set(TARGET[2].split(",")).issuperset({"+amx-tile", "+amx-bf16"})
)
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


@intrinsic(prefer_literal=True)
def room(typingctx, kind, count):
    """Room for numbers, which hold anything."""

    def codegen(context, builder, signature, args):
        return cgutils.alloca_once(builder, context.get_value_type(kind.instance_type), size=count.literal_value)

    return types.CPointer(kind.instance_type)(kind, count), codegen


@intrinsic
def write_block(typingctx, sums, place, biases, bias_place, y, y_place, y_stride, rows):
    """Writes so many rows of 16 outputs, of which memory has the sums output by output, with their biases, rounded."""

    def codegen(context, builder, signature, args):
        sums, place, biases, bias_place, y, y_place, y_stride, rows = args
        biases = builder.load(builder.bitcast(builder.gep(biases, [bias_place]), VECTOR.as_pointer()), align=4)
        lines = []
        for output in range(SIZE):
            at = builder.gep(sums, [builder.add(place, ir.Constant(LONG, output * SIZE))])
            lines.append(builder.load(builder.bitcast(at, VECTOR.as_pointer()), align=4))
        # A transposition in four steps, which exchange halves, quarters, ... of pairs of lines.
        for step in (8, 4, 2, 1):
            first = [lane if not lane & step else SIZE + lane - step for lane in range(SIZE)]
            second = [lane + step if not lane & step else SIZE + lane for lane in range(SIZE)]
            for line in range(SIZE):
                if not line & step:
                    pair = lines[line], lines[line + step]
                    for index, lanes in ((line, first), (line + step, second)):
                        mask = ir.Constant(ir.VectorType(WORD, SIZE), lanes)
                        lines[index] = builder.shuffle_vector(*pair, mask)
        halves = ir.VectorType(ir.IntType(16), SIZE)
        for row, line in enumerate(lines):
            with builder.if_then(builder.icmp_signed("<", ir.Constant(LONG, row), rows)):
                rounded = round_to_bfloat16(builder, builder.fadd(line, biases))
                at = builder.gep(y, [builder.add(y_place, builder.mul(y_stride, ir.Constant(LONG, row)))])
                builder.store(rounded, builder.bitcast(at, halves.as_pointer()), align=2)

    return types.void(sums, types.int64, biases, types.int64, y, types.int64, types.int64, types.int64), codegen


@njit
def _outputs_of_all_rows(x, w, b, y, sizes, rows, output, stop):
    """The products of all rows with two tiles of outputs, of which the last ones may repeat some.

    Many rows go through parts of the inputs, so that weights and x are read from the first cache.
    """
    inputs, outputs, w_stride, b_stride, y_stride = sizes
    first, second = min(output, outputs - SIZE), min(output + SIZE, outputs - SIZE)
    sums, biases = room(FLOAT32, NUM_SUMS), room(FLOAT32, OUTPUTS)
    for o in range(SIZE):
        biases[o] = load(b, (first + o) * b_stride, 1)
        biases[SIZE + o] = load(b, (second + o) * b_stride, 1)
    part = inputs if rows <= 2 * SIZE else min(inputs, PART)
    for begin in range(0, rows, MOST_ROWS):
        end = min(begin + MOST_ROWS, rows)
        for start in range(0, inputs, part):
            last = min(start + part, inputs)
            for row in range(begin, end, 2 * SIZE):
                place, has_two = (row - begin) * OUTPUTS, end - row > SIZE
                if start:
                    load_tile(0, sums, place, 64)
                    load_tile(1, sums, place + AREA, 64)
                    load_tile(2, sums, place + 2 * AREA, 64)
                    load_tile(3, sums, place + 3 * AREA, 64)
                else:
                    clear_tile(0)
                    clear_tile(1)
                    clear_tile(2)
                    clear_tile(3)
                for i in range(start, last, DEPTH):
                    load_tile(6, x, row * inputs + i * SIZE, 64)
                    load_tile(4, w, first * w_stride + i, 2 * w_stride)
                    multiply_add(0, 4, 6)
                    load_tile(5, w, second * w_stride + i, 2 * w_stride)
                    multiply_add(1, 5, 6)
                    if has_two:
                        load_tile(7, x, (row + SIZE) * inputs + i * SIZE, 64)
                        multiply_add(2, 4, 7)
                        multiply_add(3, 5, 7)
                store_tile(0, sums, place, 64)
                store_tile(1, sums, place + AREA, 64)
                store_tile(2, sums, place + 2 * AREA, 64)
                store_tile(3, sums, place + 3 * AREA, 64)
        for row in range(begin, end, SIZE):
            place = ((row - begin) // OUTPUTS * 4 + (row - begin) // SIZE % 2 * 2) * AREA
            write_block(sums, place, biases, 0, y, row * y_stride + first, y_stride, end - row)
            write_block(sums, place + AREA, biases, SIZE, y, row * y_stride + second, y_stride, end - row)


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
    pairs = F.pad(rows, (0, 0, 0, -len(rows) % SIZE)).view(torch.int32)
    return pairs.view(-1, SIZE, inputs // DEPTH, DEPTH // 2).permute(0, 2, 3, 1).contiguous()
