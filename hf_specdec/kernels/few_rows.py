"""Matrix products over few rows on a CPU: `y = x W^T + b`, as `torch.nn.functional.linear` computes it.

Reading the weights takes most of the time of such a product, however many rows there are; torch's own takes two to
four times as long over 4 or 8 rows as over one, and longer with weights of 16 bits. Here the weights are read once. A
tile of some outputs and some rows of x is kept in vector registers while it runs along the inner dimension; sums are
in float32, and are rounded once, with the bias in them.

Shapes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..threads import Lock
from ._llvm import (
    HAS_LLVM,
    Emitter,
    compile_entry,
    converts_halves,
    num_vectors,
    run_in_parallel,
    threads_of_torch,
    vector_size,
)


if TYPE_CHECKING or HAS_LLVM:
    from llvmlite import ir

# Beyond them the arithmetic weighs more than the reading, and torch's own product is the better one.
MOST_ROWS = 16

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Bytes of weights that a thread takes at a time, and rows of x of the tiles, the largest first.
_CHUNK_BYTES, _TILE_ROWS = 1 << 16, (4, 3, 2, 1)

# A job is 64-bit integers: these fields, strides in numbers, and then those of each matrix.
_FIELDS = ("x", "rows", "inputs", "x_stride", "y_stride", "chunk", "next", "end")
_MATRIX_FIELDS = ("w", "b", "y", "w_stride", "b_stride", "outputs", "last_chunk")

# Whatever the default device is.
_NO_BIAS = torch.zeros(1, device="cpu")
_compiling = Lock()


def takes_weight(weight: torch.Tensor) -> bool:
    """Tells whether the kernel can read a matrix: plain numbers in the memory of this process, row by row."""
    if not HAS_LLVM or weight.device.type != "cpu" or weight.dtype not in DTYPES or weight.dim() != 2:
        return False
    if weight.layout is not torch.strided or is_traceable_wrapper_subclass(weight):
        return False
    return weight.stride(-1) == 1 and (weight.dtype != torch.float16 or converts_halves())


def takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Tells whether `linear` can compute this product.

    Args:
        x (`torch.Tensor` of shape `(..., I)`): At most 16 rows.
        weight (`torch.Tensor` of shape `(O, I)`): One for which `takes_weight` holds.
        bias (`torch.Tensor` of shape `(O,)`, *optional*): In the dtype of the weights.
    """
    if not takes_weight(weight):
        return False
    if type(x) is not torch.Tensor or x.dtype != weight.dtype or x.device != weight.device:
        return False
    if not 0 < x.numel() <= MOST_ROWS * x.shape[-1] or x.shape[-1] != weight.shape[-1]:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    if bias is not None:
        alike = (bias.shape, bias.dtype, bias.device) == (weight.shape[:1], weight.dtype, weight.device)
        if not alike or bias.stride(0) != 1 or is_traceable_wrapper_subclass(bias):
            return False
    return not torch.is_autocast_enabled("cpu")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + b` of shape `(..., O)`, in the dtype of the weights; the arguments are those of `takes`."""
    return linears(x, [(weight, bias)])


def linears(x: torch.Tensor, matrices: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> torch.Tensor:
    """Products with several matrices of one dtype, side by side.

    Args:
        x (`torch.Tensor` of shape `(..., I)`): As for `takes`.
        matrices (`Sequence[tuple]`): Weights `(O, I)` and bias `(O,)` or `None` of each, as for `takes`.

    Returns:
        `torch.Tensor` of shape `(..., sum of all O)`.
    """
    first = matrices[0][0]
    inputs, size = first.shape[1], first.element_size()
    total = sum([len(weight) for weight, _ in matrices])
    read = x.reshape(-1, inputs).float()
    if read.stride(1) != 1:
        read = read.contiguous()
    result = torch.empty((*x.shape[:-1], total), dtype=first.dtype, device="cpu")
    chunk = max(_CHUNK_BYTES // (inputs * size), 1)
    chunks, written, parts = 0, result.data_ptr(), []
    for weight, bias in matrices:
        outputs = len(weight)
        chunks += -(-outputs // chunk)
        given = _NO_BIAS if bias is None else bias
        parts += (weight.data_ptr(), given.data_ptr(), written, weight.stride(0), bias is not None, outputs, chunks)
        written += outputs * size
    job = array("q", (read.data_ptr(), len(read), inputs, read.stride(0), total, chunk, 0, chunks, *parts))
    run_in_parallel(_entry(first.dtype), job.buffer_info()[0], min(threads_of_torch(), chunks))
    return result


def _entry(dtype: torch.dtype) -> Any:
    with _compiling:
        return _compiled(dtype)


@cache
def _compiled(dtype: torch.dtype) -> Any:
    module = ir.Module(name="few_rows")
    _Product(module, dtype).emit()
    return compile_entry(module, "product")


class _Product:
    """Emits the kernel for weights of a dtype.

    Args:
        module (`ir.Module`): Where it goes.
        dtype (`torch.dtype`): The dtype.
    """

    def __init__(self, module: ir.Module, dtype: torch.dtype):
        self.module, self.lanes = module, vector_size() // 4
        self.long, self.word, self.single = ir.IntType(64), ir.IntType(32), ir.FloatType()
        # llvmlite has no bfloat16: its bits are the upper half of a float32.
        self.stored = {torch.float32: self.single, torch.float16: ir.HalfType()}.get(dtype, ir.IntType(16))
        self.vector = ir.VectorType(self.single, self.lanes)
        # Of 16 registers 12 hold sums and 3 weights; x comes from memory.
        self.most_outputs = 3 * num_vectors() // 16
        kind = f"v{self.lanes}f32"
        self.multiply_add = ir.Function(module, ir.FunctionType(self.vector, [self.vector] * 3), f"llvm.fma.{kind}")
        adds = ir.FunctionType(self.single, [self.single, self.vector])
        self.add_lanes = ir.Function(module, adds, f"llvm.vector.reduce.fadd.{kind}")

    def emit(self) -> None:
        """The entry: takes chunks of outputs until none are left, as other threads do meanwhile."""
        code = Emitter(self.module, "product", [self.long.as_pointer()])
        build, (job,) = code.builder, code.arguments
        places = {name: build.gep(job, [code.long(place)]) for place, name in enumerate(_FIELDS)}
        field = {name: build.load(place) for name, place in places.items() if name != "next"}
        x = build.inttoptr(field["x"], self.single.as_pointer())
        columns = {count: self._columns(count) for count in dict.fromkeys((self.most_outputs, 1))}
        take, search, skip, work, done = (code.function.append_basic_block() for _ in range(5))
        build.branch(take)

        build.position_at_end(take)
        number = build.atomic_rmw("add", places["next"], code.long(1), "monotonic")
        build.cbranch(build.icmp_signed("<", number, field["end"]), search, done)

        build.position_at_end(search)
        place, first_chunk = build.phi(self.long), build.phi(self.long)
        place.add_incoming(code.long(len(_FIELDS)), take)
        first_chunk.add_incoming(code.long(0), take)
        offsets = {name: build.add(place, code.long(offset)) for offset, name in enumerate(_MATRIX_FIELDS)}
        matrix = {name: build.load(build.gep(job, [offset])) for name, offset in offsets.items()}
        build.cbranch(build.icmp_signed("<", number, matrix["last_chunk"]), work, skip)

        build.position_at_end(skip)
        place.add_incoming(build.add(place, code.long(len(_MATRIX_FIELDS))), skip)
        first_chunk.add_incoming(matrix["last_chunk"], skip)
        build.branch(search)

        build.position_at_end(work)
        w, b, y = (build.inttoptr(matrix[name], self.stored.as_pointer()) for name in "wby")
        output = build.mul(build.sub(number, first_chunk), field["chunk"])
        end = build.add(output, field["chunk"])
        end = build.select(build.icmp_signed("<", end, matrix["outputs"]), end, matrix["outputs"])
        strides = [field["x_stride"], matrix["w_stride"], matrix["b_stride"], field["y_stride"]]
        for count, compute in columns.items():

            def body(output: ir.Value, compute: ir.Function = compute) -> None:
                weights = build.gep(w, [build.mul(output, matrix["w_stride"])])
                biases = build.gep(b, [build.mul(output, matrix["b_stride"])])
                sizes = [field["inputs"], field["rows"], *strides]
                build.call(compute, [x, weights, biases, build.gep(y, [output]), *sizes])

            output = code.loop(output, end, count, body)
        build.branch(take)

        build.position_at_end(done)
        build.ret_void()

    def _function(self, name: str, num_sizes: int) -> Emitter:
        """Begins a function of x, w, b, y and so many sizes."""
        pointers = [self.single.as_pointer(), *[self.stored.as_pointer()] * 3]
        code = Emitter(self.module, name, [*pointers, *[self.long] * num_sizes])
        code.function.linkage = "internal"
        return code

    def _columns(self, num_outputs: int) -> ir.Function:
        """Some outputs of all rows."""
        code = self._function(f"columns_{num_outputs}", 6)
        build = code.builder
        x, w, b, y, inputs, rows, x_stride, w_stride, b_stride, y_stride = code.arguments
        row = code.long(0)
        for num_rows in _TILE_ROWS:
            tile = self._tile(num_outputs, num_rows)

            def compute(row: ir.Value, tile: ir.Function = tile) -> None:
                read, written = build.gep(x, [build.mul(row, x_stride)]), build.gep(y, [build.mul(row, y_stride)])
                build.call(tile, [read, w, b, written, inputs, x_stride, w_stride, b_stride, y_stride])

            row = code.loop(row, rows, num_rows, compute)
        build.ret_void()
        return code.function

    def _tile(self, num_outputs: int, num_rows: int) -> ir.Function:
        """Some outputs of some rows: all their sums at once."""
        code = self._function(f"tile_{num_outputs}_{num_rows}", 5)
        build = code.builder
        x, w, b, y, inputs, x_stride, w_stride, b_stride, y_stride = code.arguments
        xs = [build.gep(x, [build.mul(code.long(row), x_stride)]) for row in range(num_rows)]
        ws = [build.gep(w, [build.mul(code.long(output), w_stride)]) for output in range(num_outputs)]
        places = [(output, row) for output in range(num_outputs) for row in range(num_rows)]
        sums = {place: code.variable(ir.Constant(self.vector, None)) for place in places}

        def add_vectors(index: ir.Value) -> None:
            read = [self._load(build, build.gep(values, [index]), self.single) for values in xs]
            for output, values in enumerate(ws):
                weights = self._widened(build, self._load(build, build.gep(values, [index]), self.stored))
                for row in range(num_rows):
                    place = sums[output, row]
                    build.store(build.call(self.multiply_add, [weights, read[row], build.load(place)]), place)

        full = code.loop(code.long(0), inputs, self.lanes, add_vectors)
        zero = ir.Constant(self.single, 0.0)
        totals = {
            place: code.variable(build.call(self.add_lanes, [zero, build.load(sums[place])], fastmath=("reassoc",)))
            for place in places
        }

        def add_one(index: ir.Value) -> None:
            for output, row in places:
                weight = self._widened(build, build.load(build.gep(ws[output], [index])))
                product = build.fmul(weight, build.load(build.gep(xs[row], [index])))
                build.store(build.fadd(build.load(totals[output, row]), product), totals[output, row])

        code.loop(full, inputs, 1, add_one)
        for output, row in places:
            bias = self._widened(build, build.load(build.gep(b, [build.mul(code.long(output), b_stride)])))
            result = self._rounded(build, build.fadd(build.load(totals[output, row]), bias))
            build.store(result, build.gep(y, [build.add(build.mul(code.long(row), y_stride), code.long(output))]))
        build.ret_void()
        return code.function

    def _load(self, build: ir.IRBuilder, place: ir.Value, kind: ir.Type) -> ir.Value:
        """A vector of values from any place in memory."""
        loaded = build.load(build.bitcast(place, ir.VectorType(kind, self.lanes).as_pointer()))
        loaded.align = 4 if kind == self.single else 2
        return loaded

    def _widened(self, build: ir.IRBuilder, stored: ir.Value) -> ir.Value:
        """Stored numbers, one or a vector, as float32."""
        is_vector = isinstance(stored.type, ir.VectorType)
        wide, word = (self.vector, ir.VectorType(self.word, self.lanes)) if is_vector else (self.single, self.word)
        if self.stored == self.single:
            return stored
        if self.stored == ir.HalfType():
            return build.fpext(stored, wide)
        shift = ir.Constant(word, [16] * self.lanes if is_vector else 16)
        return build.bitcast(build.shl(build.zext(stored, word), shift), wide)

    def _rounded(self, build: ir.IRBuilder, value: ir.Value) -> ir.Value:
        """A float32 as it is stored, rounded to the nearest, of two to the even one."""
        if self.stored == self.single:
            return value
        if self.stored == ir.HalfType():
            return build.fptrunc(value, self.stored)
        bits = build.bitcast(value, self.word)
        is_odd = build.and_(build.lshr(bits, ir.Constant(self.word, 16)), ir.Constant(self.word, 1))
        nearest = build.add(bits, build.add(is_odd, ir.Constant(self.word, 0x7FFF)))
        nan = ir.Constant(self.word, 0x7FC00000)
        kept = build.select(build.fcmp_unordered("uno", value, value), nan, nearest)
        return build.trunc(build.lshr(kept, ir.Constant(self.word, 16)), self.stored)
