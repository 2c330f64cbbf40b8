"""Matrix products over few rows on a CPU: `y = x W^T + b`, as `torch.nn.functional.linear` computes it.

Reading the weights takes most of the time of such a product, however many rows there are; torch's own takes two to
four times as long over 4 or 8 rows as over one, and longer with weights of 16 bits. Here the weights are read once. A
tile of some outputs and some rows of x is kept in vector registers while it runs along the inner dimension; sums are
in float32, and are rounded once, with the bias in them. The lanes of a vector are neighbours along the inner dimension
for few rows, and are rows of x for more: there is nothing to add up at the end then, and x is transposed once.

Shapes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..threads import Lock
from ._llvm import (
    HAS_LLVM,
    Emitter,
    compile_entries,
    converts_halves,
    num_vectors,
    run_in_parallel,
    threads_of_torch,
    vector_size,
)


if TYPE_CHECKING or HAS_LLVM:
    from llvmlite import ir

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Bytes of weights that a thread takes at a time.
_CHUNK_BYTES = 1 << 16

# Rows up to which lanes are neighbours along the inner dimension, and rows of the tiles, the largest first.
_MOST_ROWS_OF_INNER_LANES, _TILE_ROWS = 12, (4, 3, 2, 1)

# With rows as lanes, weights that are widened at a time along the inner dimension.
_DEPTH = 128

# A job is 64-bit integers: these fields, strides in numbers, and then those of each matrix.
_FIELDS = ("given", "x", "rows", "inputs", "x_stride", "y_stride", "chunk", "next", "end")
_MATRIX_FIELDS = ("w", "b", "y", "w_stride", "b_stride", "outputs", "last_chunk")

# Whatever the default device is.
_NO_BIAS = torch.zeros(1, device="cpu")
_compiling = Lock()


def takes_weight(weight: torch.Tensor) -> bool:
    """Tells whether the kernel can read a matrix: plain numbers in the memory of this process, row by row."""
    if not HAS_LLVM or weight.device.type != "cpu" or weight.dtype not in DTYPES or weight.dim() != 2:
        return False
    if weight.layout is not torch.strided or _is_wrapper(weight):
        return False
    return weight.stride(-1) == 1 and (weight.dtype != torch.float16 or converts_halves())


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter) and is_traceable_wrapper_subclass(tensor)


def takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Tells whether `linear` can compute this product.

    Args:
        x (`torch.Tensor` of shape `(..., I)`): At least one row.
        weight (`torch.Tensor` of shape `(O, I)`): One for which `takes_weight` holds.
        bias (`torch.Tensor` of shape `(O,)`, *optional*): In the dtype of the weights.
    """
    if not takes_weight(weight):
        return False
    if type(x) is not torch.Tensor or x.dtype != weight.dtype or x.device != weight.device:
        return False
    if not x.numel() or x.shape[-1] != weight.shape[-1]:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    if bias is not None:
        alike = (bias.shape, bias.dtype, bias.device) == (weight.shape[:1], weight.dtype, weight.device)
        if not alike or bias.stride(0) != 1 or _is_wrapper(bias):
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
    rows = x.numel() // inputs
    read = x.float()
    if not read.is_contiguous():
        read = read.contiguous()
    kernel = (_kernels.get(first.dtype) or _compiled(first.dtype))[rows > _MOST_ROWS_OF_INNER_LANES]
    stride = inputs if kernel.transpose is None else rows + -rows % kernel.row_multiple
    packed = read if kernel.transpose is None else read.new_empty(inputs * stride)
    result = x.new_empty((*x.shape[:-1], sum([weight.shape[0] for weight, _ in matrices])))
    chunk = max(_CHUNK_BYTES // (inputs * size * kernel.outputs), 1) * kernel.outputs
    chunks, written, parts = 0, result.data_ptr(), []
    for weight, bias in matrices:
        outputs = weight.shape[0]
        chunks += -(-outputs // chunk)
        given = _NO_BIAS if bias is None else bias
        parts += (weight.data_ptr(), given.data_ptr(), written, weight.stride(0), bias is not None, outputs, chunks)
        written += outputs * size
    sizes = rows, inputs, stride, result.shape[-1], chunk, 0, chunks
    job = array("q", (read.data_ptr(), packed.data_ptr(), *sizes, *parts))
    address = job.buffer_info()[0]
    if kernel.transpose is not None:
        kernel.transpose(address)
    run_in_parallel(kernel.product, address, min(threads_of_torch(), chunks))
    return result


class _Kernel(NamedTuple):
    """Entries for weights of a dtype.

    Args:
        product: Multiplies.
        transpose: Called before; `None` where x is read as it is.
        outputs (`int`): Outputs of a tile.
        row_multiple (`int`): Transposed rows are padded to a multiple of it.
    """

    product: Any
    transpose: Any | None
    outputs: int
    row_multiple: int


# By dtype: for few rows and for more.
_kernels: dict[torch.dtype, tuple[_Kernel, _Kernel]] = {}


def _compiled(dtype: torch.dtype) -> tuple[_Kernel, _Kernel]:
    with _compiling:
        if dtype not in _kernels:
            modules = []
            for kind in (_InnerLanes, _RowLanes):
                emitter = kind(ir.Module(name=kind.__name__), dtype)
                emitter.emit()
                names = ("product", "transpose")[: 1 + emitter.transposes]
                entries = compile_entries(emitter.module, names)
                transpose = entries[1] if emitter.transposes else None
                modules.append(_Kernel(entries[0], transpose, emitter.outputs[0], emitter.row_multiple))
            _kernels[dtype] = modules[0], modules[1]
        return _kernels[dtype]


class _Product:
    """Emits a kernel for weights of a dtype.

    Args:
        module (`ir.Module`): Where it goes.
        dtype (`torch.dtype`): The dtype.

    Attributes:
        outputs (`tuple[int, ...]`): Outputs of the tiles, the most first, 1 last.
        transposes (`bool`): Reads x transposed, and emits an entry for that.
        row_multiple (`int`): Rows of x are padded to a multiple of it.
    """

    outputs: tuple[int, ...]
    transposes = False
    row_multiple = 1

    def __init__(self, module: ir.Module, dtype: torch.dtype):
        self.module, self.lanes = module, vector_size() // 4
        self.long, self.word, self.single = ir.IntType(64), ir.IntType(32), ir.FloatType()
        # llvmlite has no bfloat16: its bits are the upper half of a float32.
        self.stored = {torch.float32: self.single, torch.float16: ir.HalfType()}.get(dtype, ir.IntType(16))
        self.vector = ir.VectorType(self.single, self.lanes)
        self.byte = ir.IntType(8).as_pointer()
        fetches = ir.FunctionType(ir.VoidType(), [self.byte, *[self.word] * 3])
        self.fetch_line = module.declare_intrinsic("llvm.prefetch", [self.byte], fetches)

    def emit(self) -> None:
        """The entry: takes chunks of outputs until none are left, as other threads do meanwhile."""
        code, places, field = self._entry("product")
        build, (job,) = code.builder, code.arguments
        x = build.inttoptr(field["x"], self.single.as_pointer())
        columns = {count: self._columns(count) for count in dict.fromkeys(self.outputs)}
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

    def _entry(self, name: str) -> tuple[Emitter, dict[str, ir.Value], dict[str, ir.Value]]:
        """Begins a function of a job: where its fields are, and their values but for that which threads change."""
        code = Emitter(self.module, name, [self.long.as_pointer()])
        build, (job,) = code.builder, code.arguments
        places = {field: build.gep(job, [code.long(place)]) for place, field in enumerate(_FIELDS)}
        return code, places, {field: build.load(place) for field, place in places.items() if field != "next"}

    def _function(self, name: str, num_sizes: int) -> Emitter:
        """Begins a function of x, w, b, y and so many sizes."""
        pointers = [self.single.as_pointer(), *[self.stored.as_pointer()] * 3]
        code = Emitter(self.module, name, [*pointers, *[self.long] * num_sizes])
        code.function.linkage = "internal"
        return code

    def _columns(self, num_outputs: int) -> ir.Function:
        """Some outputs of all rows."""
        raise NotImplementedError

    def _fetch(self, build: ir.IRBuilder, place: ir.Value) -> None:
        """Asks for a line of memory that is read later, which may be out of bounds."""
        flags = [ir.Constant(self.word, flag) for flag in (0, 2, 1)]  # to read, into the second cache, of data
        build.call(self.fetch_line, [build.bitcast(place, self.byte), *flags])

    def _multiply_add(self, build: ir.IRBuilder, one: ir.Value, other: ir.Value, total: ir.Value) -> ir.Value:
        """Products of two vectors, added to a third."""
        kind = ir.FunctionType(one.type, [one.type] * 3)
        name = f"llvm.fma.v{one.type.count}f32"
        return build.call(self.module.globals.get(name) or ir.Function(self.module, kind, name), [one, other, total])

    def _load(self, build: ir.IRBuilder, place: ir.Value, kind: ir.Type, lanes: int | None = None) -> ir.Value:
        """A vector of values from any place in memory, by default of the widest."""
        loaded = build.load(build.bitcast(place, ir.VectorType(kind, lanes or self.lanes).as_pointer()))
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


class _InnerLanes(_Product):
    """The kernel for few rows: the lanes of a vector are neighbours along the inner dimension."""

    def __init__(self, module: ir.Module, dtype: torch.dtype):
        super().__init__(module, dtype)
        # Of 16 registers 12 hold sums and 3 weights; x comes from memory.
        self.outputs = 3 * num_vectors() // 16, 1
        adds = ir.FunctionType(self.single, [self.single, self.vector])
        self.add_lanes = ir.Function(module, adds, f"llvm.vector.reduce.fadd.v{self.lanes}f32")

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
        following = build.mul(code.long(num_outputs), w_stride)
        places = [(output, row) for output in range(num_outputs) for row in range(num_rows)]
        sums = {place: code.variable(ir.Constant(self.vector, None)) for place in places}

        def add_vectors(index: ir.Value) -> None:
            read = [self._load(build, build.gep(values, [index]), self.single) for values in xs]
            for output, values in enumerate(ws):
                self._fetch(build, build.gep(values, [build.add(index, following)]))
                weights = self._widened(build, self._load(build, build.gep(values, [index]), self.stored))
                for row in range(num_rows):
                    place = sums[output, row]
                    build.store(self._multiply_add(build, weights, read[row], build.load(place)), place)

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


class _RowLanes(_Product):
    """The kernel for more rows: the lanes of a vector are rows of x, which is transposed, `(I, R)`.

    A tile copies its weights a piece at a time, widened, to where every number of them can be read into all lanes.
    """

    transposes = True

    def __init__(self, module: ir.Module, dtype: torch.dtype):
        super().__init__(module, dtype)
        # Times 2 vectors, of 16 registers 12 hold sums.
        most = 3 * num_vectors() // 8
        self.outputs = most, most // 3, 1
        # Vectors of half the width take as few rows as are left.
        self.row_multiple = max(self.lanes // 2, 4)

    def emit(self) -> None:
        """The entry of the product, and the one that transposes x, with zeros for the rows of padding."""
        super().emit()
        code, _, field = self._entry("transpose")
        build = code.builder
        given, x = (build.inttoptr(field[name], self.single.as_pointer()) for name in ("given", "x"))
        zero = code.long(0)

        def read_row(row: ir.Value) -> None:
            numbers = build.gep(given, [build.mul(row, field["inputs"])])
            code.loop(zero, field["inputs"], 1, lambda i: write(i, row, build.load(build.gep(numbers, [i]))))

        def write(index: ir.Value, row: ir.Value, number: ir.Value) -> None:
            build.store(number, build.gep(x, [build.add(build.mul(index, field["x_stride"]), row)]))

        def pad_row(row: ir.Value) -> None:
            code.loop(zero, field["inputs"], 1, lambda i: write(i, row, ir.Constant(self.single, 0.0)))

        code.loop(code.loop(zero, field["rows"], 1, read_row), field["x_stride"], 1, pad_row)
        build.ret_void()

    def _columns(self, num_outputs: int) -> ir.Function:
        """Some outputs of all rows."""
        code = self._function(f"columns_{num_outputs}", 6)
        build = code.builder
        x, w, b, y, inputs, rows, x_stride, w_stride, b_stride, y_stride = code.arguments
        row = code.long(0)
        for lanes in dict.fromkeys([(self.lanes, self.lanes), (self.lanes,), (self.row_multiple,)]):
            tile, num_rows = self._tile(num_outputs, lanes), sum(lanes)

            def compute(row: ir.Value, tile: ir.Function = tile, num_rows: int = num_rows) -> None:
                left = build.sub(rows, row)
                used = build.select(build.icmp_signed("<", left, code.long(num_rows)), left, code.long(num_rows))
                read, written = build.gep(x, [row]), build.gep(y, [build.mul(row, y_stride)])
                build.call(tile, [read, w, b, written, inputs, used, x_stride, w_stride, b_stride, y_stride])

            # Up to the end of the padding, as x is stored.
            row = code.loop(row, x_stride, num_rows, compute)
        build.ret_void()
        return code.function

    def _tile(self, num_outputs: int, lanes: tuple[int, ...]) -> ir.Function:
        """Some outputs of vectors of so many rows: all their sums at once."""
        code = self._function(f"tile_{num_outputs}_{'_'.join(map(str, lanes))}", 6)
        build = code.builder
        x, w, b, y, inputs, rows, x_stride, w_stride, b_stride, y_stride = code.arguments
        outputs, size = range(num_outputs), sum(lanes)
        firsts = list(accumulate(lanes[:-1], initial=0))
        ws = [build.gep(w, [build.mul(code.long(output), w_stride)]) for output in outputs]
        wide = self._memory(code, num_outputs * _DEPTH)
        vectors = [ir.VectorType(self.single, count) for count in lanes]
        sums = {
            (output, first): code.variable(ir.Constant(vector, None))
            for output in outputs
            for first, vector in zip(firsts, vectors)
        }
        depth, ahead = code.long(_DEPTH), code.long(self.lanes)
        following = build.mul(code.long(num_outputs), w_stride)

        def add_piece(begin: ir.Value) -> None:
            left = build.sub(inputs, begin)
            length = build.select(build.icmp_signed("<", left, depth), left, depth)

            def widen(index: ir.Value, is_vector: bool) -> None:
                for output, values in enumerate(ws):
                    place = build.gep(values, [build.add(begin, index)])
                    stored = self._load(build, place, self.stored) if is_vector else build.load(place)
                    written = build.gep(wide, [build.add(code.long(output * _DEPTH), index)])
                    self._store(build, self._widened(build, stored), written)

            full = code.loop(code.long(0), length, self.lanes, lambda index: widen(index, True))
            code.loop(full, length, 1, lambda index: widen(index, False))

            def multiply(index: ir.Value) -> None:
                place = build.mul(build.add(begin, index), x_stride)
                places = [build.gep(x, [build.add(place, code.long(first))]) for first in firsts]
                read = [self._load(build, place, self.single, count) for place, count in zip(places, lanes)]
                for output in outputs:
                    number = build.load(build.gep(wide, [build.add(code.long(output * _DEPTH), index)]))
                    for first, numbers in zip(firsts, read):
                        weight, total = self._in_all_lanes(build, number, numbers.type), sums[output, first]
                        build.store(self._multiply_add(build, weight, numbers, build.load(total)), total)

            def fetch_and_multiply(index: ir.Value) -> None:
                for values in ws:
                    self._fetch(build, build.gep(values, [build.add(build.add(begin, index), following)]))
                code.loop(index, build.add(index, ahead), 1, multiply)

            full = code.loop(code.long(0), length, self.lanes, fetch_and_multiply)
            code.loop(full, length, 1, multiply)

        pieces = build.sdiv(build.add(inputs, code.long(_DEPTH - 1)), depth)
        code.loop(code.long(0), build.mul(pieces, depth), _DEPTH, add_piece)
        totals = self._memory(code, num_outputs * size)
        for (output, first), place in sums.items():
            written = build.gep(totals, [code.long(output * size + first)])
            self._store(build, build.load(place), written)

        def write(row: ir.Value) -> None:
            for output in outputs:
                bias = self._widened(build, build.load(build.gep(b, [build.mul(code.long(output), b_stride)])))
                total = build.load(build.gep(totals, [build.add(code.long(output * size), row)]))
                result = self._rounded(build, build.fadd(total, bias))
                build.store(result, build.gep(y, [build.add(build.mul(row, y_stride), code.long(output))]))

        code.loop(code.long(0), rows, 1, write)
        build.ret_void()
        return code.function

    def _memory(self, code: Emitter, size: int) -> ir.Value:
        """Room for so many float32."""
        place = code.builder.alloca(self.single, size)
        place.align = 64
        return place

    def _store(self, build: ir.IRBuilder, value: ir.Value, place: ir.Value) -> None:
        """Writes a float32 or a vector of them to any place in memory."""
        build.store(value, build.bitcast(place, value.type.as_pointer())).align = 4

    def _in_all_lanes(self, build: ir.IRBuilder, number: ir.Value, vector: ir.VectorType) -> ir.Value:
        undefined = ir.Constant(vector, ir.Undefined)
        first = build.insert_element(undefined, number, ir.Constant(self.word, 0))
        return build.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(self.word, vector.count), None))
