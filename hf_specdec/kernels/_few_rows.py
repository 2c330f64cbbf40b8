"""The kernel of `few_rows`, compiled by numba, which takes 0.4 s to import: only that file imports this one.

A tile of some outputs and some rows of x is kept in vector registers while it runs along the inner dimension, and asks
for the weights of the next tile meanwhile. The loops are plain ones, over intrinsics for what numba lacks: vectors as
wide as those of the processor, bfloat16, the conversion of float16, and numbers that threads share.

Shapes: R rows, I inputs, O outputs; x is `(R, I)` in float32, w is `(O, I)`, b `(O,)` and y `(R, O)`.
"""

from __future__ import annotations

import ctypes
import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .compiled import kept_on_disk, numba


if numba is None or numba.config.DISABLE_JIT:
    raise ImportError("numba does not compile")

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.registry import cpu_target
from numba.extending import intrinsic, register_model


# What numba compiles for: its environment variables can name less than the processor at hand has.
TARGET = cpu_target.target_context.codegen().magic_tuple()
_triple, _, _features = TARGET
_has = set(_features.split(",")).issuperset
_is_x86 = _triple.startswith(("x86_64", "i386", "i686"))

# Numbers of a vector.
LANES = 16 if _has({"+avx512f"}) else 8 if _has({"+avx2", "+fma"}) else 4
CONVERTS_HALVES = not _is_x86 or LANES == 16 or _has({"+f16c"})

# Outputs of a tile, and its rows at most: of 16 registers 12 hold sums, 3 weights and 1 a part of x.
OUTPUTS = 3 if _is_x86 and LANES < 16 else 6
ROWS = 4

# A job is 64-bit integers: x, rows, inputs, stride of y in numbers, chunk, end, next; and then of each matrix w, b, y,
# strides of w and b, outputs, last chunk.
NUM_FIELDS = NUM_MATRIX_FIELDS = 7
NEXT = LAST_CHUNK = 6

# Numba's integers stand for the types of 16 bits that it cannot compile.
FLOAT32, BFLOAT16, FLOAT16 = types.float32, types.uint16, types.int16
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

SINGLE, HALF, BITS, WORD, LONG = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(SINGLE, LANES)
STORED = {FLOAT32: SINGLE, BFLOAT16: BITS, FLOAT16: HALF}


class Vector(types.Type):
    """Neighbours along the inner dimension, as float32."""


vector = Vector("vector")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, VECTOR)


def _call(builder, name, kind, *args, fastmath=()):
    function_type = ir.FunctionType(kind, [value.type for value in args])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(function, args, fastmath=fastmath)


@intrinsic
def pointer(typingctx, address, kind):
    """An address as that of numbers."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind.instance_type)(types.int64, kind), codegen


@intrinsic(prefer_literal=True)
def zeros(typingctx, kind, count):
    """Room for numbers or vectors: registers, once the loops over them are unrolled."""

    def codegen(context, builder, signature, args):
        element = context.get_value_type(kind.instance_type)
        places = cgutils.alloca_once(builder, element, size=count.literal_value)
        for index in range(count.literal_value):
            zero = ir.Constant(element, None if element == VECTOR else 0.0)
            builder.store(zero, builder.gep(places, [ir.Constant(WORD, index)]))
        return places

    return types.CPointer(kind.instance_type)(kind, count), codegen


@intrinsic(prefer_literal=True)
def load(typingctx, numbers, index, count):
    """Numbers from any place in memory as float32: one, or a vector of them."""
    kind, lanes = numbers.dtype, count.literal_value

    def codegen(context, builder, signature, args):
        stored, wide, word = STORED[kind], SINGLE, WORD
        if lanes > 1:
            stored, wide, word = (ir.VectorType(element, lanes) for element in (stored, wide, word))
        value = builder.load(builder.bitcast(builder.gep(args[0], args[1:2]), stored.as_pointer()))
        value.align = 2
        if kind == FLOAT32:
            return value
        if kind == FLOAT16:
            return builder.fpext(value, wide)
        shift = ir.Constant(word, [16] * lanes if lanes > 1 else 16)
        return builder.bitcast(builder.shl(builder.zext(value, word), shift), wide)

    return (vector if lanes > 1 else types.float32)(numbers, index, count), codegen


def round_to_bfloat16(builder, value):
    """Code for the bits of a float32, or of a vector of them, rounded to 16."""
    lanes = getattr(value.type, "count", 0)

    def constant(number):
        return ir.Constant(ir.VectorType(WORD, lanes), [number] * lanes) if lanes else ir.Constant(WORD, number)

    bits = builder.bitcast(value, constant(0).type)
    is_odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    nearest = builder.add(bits, builder.add(is_odd, constant(0x7FFF)))
    kept = builder.select(builder.fcmp_unordered("uno", value, value), constant(0x7FC00000), nearest)
    return builder.trunc(builder.lshr(kept, constant(16)), ir.VectorType(BITS, lanes) if lanes else BITS)


@intrinsic
def store(typingctx, numbers, index, value):
    """Writes a float32, rounded to the nearest number, of two to the even one."""

    def codegen(context, builder, signature, args):
        value = args[2]
        if numbers.dtype == FLOAT16:
            value = builder.fptrunc(value, HALF)
        elif numbers.dtype == BFLOAT16:
            value = round_to_bfloat16(builder, value)
        place = builder.gep(args[0], [args[1]])
        builder.store(value, builder.bitcast(place, STORED[numbers.dtype].as_pointer()))

    return types.void(numbers, types.int64, types.float32), codegen


@intrinsic
def multiply_add(typingctx, one, other, total):
    """`one * other + total`."""

    def codegen(context, builder, signature, args):
        return _call(builder, f"llvm.fma.v{LANES}f32", VECTOR, *args)

    return vector(vector, vector, vector), codegen


@intrinsic
def add_lanes(typingctx, lanes):
    """The sum of a vector's numbers."""

    def codegen(context, builder, signature, args):
        name, zero = f"llvm.vector.reduce.fadd.v{LANES}f32", ir.Constant(SINGLE, 0.0)
        return _call(builder, name, SINGLE, zero, *args, fastmath=("reassoc",))

    return types.float32(vector), codegen


@intrinsic
def prefetch(typingctx, numbers, index):
    """Asks for a line of memory that is read later, which may be out of bounds."""

    def codegen(context, builder, signature, args):
        place = builder.bitcast(builder.gep(args[0], [args[1]]), cgutils.voidptr_t)
        flags = [ir.Constant(WORD, flag) for flag in (0, 2, 1)]  # to read, into the second cache, of data
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), place, *flags)

    return types.void(numbers, types.int64), codegen


@intrinsic
def take(typingctx, job, index):
    """Adds 1 to a number that threads share; returns what it was."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", builder.gep(args[0], [args[1]]), ir.Constant(LONG, 1), "monotonic")

    return types.int64(job, types.int64), codegen


def _tile(rows):
    """Compiles a tile of so many rows, which moves along the outputs; the last one repeats some of them."""
    size = OUTPUTS * rows

    @numba.njit
    def tile(x, w, b, y, sizes, row, output, stop):
        inputs, outputs, w_stride, b_stride, y_stride = sizes
        whole, last = inputs - inputs % LANES, outputs - 1
        # The first rows ask, and the next ask again, as some requests are dropped.
        following = OUTPUTS * w_stride if row < 2 * ROWS else 0
        while output < stop:
            sums = zeros(vector, size)
            for i in range(0, whole, LANES):
                weights = zeros(vector, OUTPUTS)
                for o in range(OUTPUTS):
                    place = min(output + o, last) * w_stride + i
                    prefetch(w, place + following)
                    weights[o] = load(w, place, LANES)
                # All outputs of a row: so a single register has to hold x.
                for r in range(rows):
                    read = load(x, (row + r) * inputs + i, LANES)
                    for o in range(OUTPUTS):
                        sums[o * rows + r] = multiply_add(weights[o], read, sums[o * rows + r])
            totals = zeros(types.float32, size)
            for s in range(size):
                totals[s] = add_lanes(sums[s])
            for i in range(whole, inputs):
                for o in range(OUTPUTS):
                    weight = load(w, min(output + o, last) * w_stride + i, 1)
                    for r in range(rows):
                        totals[o * rows + r] += weight * load(x, (row + r) * inputs + i, 1)
            for o in range(OUTPUTS):
                place = min(output + o, last)
                for r in range(rows):
                    store(y, (row + r) * y_stride + place, totals[o * rows + r] + load(b, place * b_stride, 1))
            output += OUTPUTS

    return tile


_one, _two, _three, _four = map(_tile, range(1, ROWS + 1))


@numba.njit
def _all_rows(x, w, b, y, sizes, rows, output, stop):
    row = 0
    while rows - row >= ROWS:
        _four(x, w, b, y, sizes, row, output, stop)
        row += ROWS
    if rows - row == 3:
        _three(x, w, b, y, sizes, row, output, stop)
    elif rows - row == 2:
        _two(x, w, b, y, sizes, row, output, stop)
    elif rows - row == 1:
        _one(x, w, b, y, sizes, row, output, stop)


def taking(all_rows, num_outputs, num_rows):
    """Compiles what takes chunks of outputs until none are left, as other threads do meanwhile.

    `all_rows` multiplies all rows with some outputs: any number of them where there are at most `num_rows` rows, else
    `num_outputs`, so that all rows go over the same weights while they are in the cache.
    """

    @numba.njit
    def product(job, x_kind, kind):
        x, rows, inputs, y_stride, chunk, end = pointer(job[0], x_kind), job[1], job[2], job[3], job[4], job[5]
        taken = take(job, NEXT)
        while taken < end:
            matrix, first = NUM_FIELDS, 0
            while taken >= job[matrix + LAST_CHUNK]:
                first = job[matrix + LAST_CHUNK]
                matrix += NUM_MATRIX_FIELDS
            w, b, y = pointer(job[matrix], kind), pointer(job[matrix + 1], kind), pointer(job[matrix + 2], kind)
            w_stride, b_stride, outputs = job[matrix + 3], job[matrix + 4], job[matrix + 5]
            sizes = inputs, outputs, w_stride, b_stride, y_stride
            output = (taken - first) * chunk
            stop = min(output + chunk, outputs)
            step = chunk if rows <= num_rows else num_outputs
            while output < stop:
                all_rows(x, w, b, y, sizes, rows, output, min(output + step, stop))
                output += step
            taken = take(job, NEXT)

    return product


_product = taking(_all_rows, OUTPUTS, ROWS)


def entry(dtype: torch.dtype) -> Any:
    """Compiles the kernel for weights of a dtype, or loads it; it is called with the address of a job."""
    kind = KINDS[dtype]

    def product(job):
        _product(job, FLOAT32, kind)

    return compiled_entry(product, str(dtype).removeprefix("torch."))


def compiled_entry(product: Any, name: str, *files: str) -> Any:
    """A function of a job's address, compiled or loaded; `files` have code of it beside this one."""
    # The name tells all that the code depends on. Numba's own index may be ahead of the code, and of several that
    # are written at once the last one stays.
    key = b"".join(Path(file).read_bytes() for file in (__file__, *files)) + repr((numba.__version__, TARGET)).encode()
    product.__qualname__ = f"{name}_{hashlib.sha256(key).hexdigest()[:16]}"
    compiled = kept_on_disk(partial(numba.cfunc, types.void(types.CPointer(types.int64))), product)
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)
