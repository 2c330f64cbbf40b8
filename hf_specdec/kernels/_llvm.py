"""Machine code for the CPU that runs it, from LLVM (package `llvmlite`, extra `fast`).

A kernel is a function that emits instructions. Compiling one takes a fraction of a second in the process that uses
it: there is nothing to build beforehand, and nothing is kept on disk.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch


try:
    import llvmlite.binding as llvm
    from llvmlite import ir

    HAS_LLVM = True
except ImportError:
    HAS_LLVM = False

# Kernels take one argument: the address of 64-bit integers, addresses of tensors among them.
_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# Engines own the code that they have compiled.
_engines: list[Any] = []


class Emitter:
    """Emits the instructions of one function.

    Args:
        module (`ir.Module`): Where the function goes.
        name (`str`): Its name.
        arguments (`list[ir.Type]`): Types of its arguments; it returns nothing.
    """

    def __init__(self, module: ir.Module, name: str, arguments: list[ir.Type]):
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
        self.builder = ir.IRBuilder(self.function.append_basic_block())

    @property
    def arguments(self) -> tuple[ir.Value, ...]:
        return self.function.args

    def long(self, value: int) -> ir.Constant:
        """A constant of 64 bits."""
        return ir.Constant(ir.IntType(64), value)

    def loop(self, begin: ir.Value, end: ir.Value, step: int, body: Callable[[ir.Value], None]) -> ir.Value:
        """Emits `body(i)` for whole steps from `begin` that end at or before `end`; returns the `i` after the last."""
        builder = self.builder
        before, head, inner, after = builder.block, *(self.function.append_basic_block() for _ in range(3))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(begin.type)
        index.add_incoming(begin, before)
        following = builder.add(index, ir.Constant(begin.type, step))
        builder.cbranch(builder.icmp_signed("<=", following, end), inner, after)
        builder.position_at_end(inner)
        body(index)
        index.add_incoming(following, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        return index

    def variable(self, value: ir.Value) -> ir.Value:
        """Memory for a value that changes, which becomes a register."""
        place = self.builder.alloca(value.type)
        self.builder.store(value, place)
        return place


@cache
def machine_name() -> str:
    """The CPU and its features, as LLVM names them."""
    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


@cache
def vector_size() -> int:
    """Bytes of the widest vectors of this CPU: 64, 32 or 16."""
    features = llvm.get_host_cpu_features()
    return 64 if features.get("avx512f") else 32 if features.get("avx2") and features.get("fma") else 16


@cache
def converts_halves() -> bool:
    """Tells whether the CPU itself converts between float16 and float32."""
    features = llvm.get_host_cpu_features()
    return not _is_x86() or bool(features.get("f16c") or features.get("avx512f"))


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64", "i686")


@cache
def num_vectors() -> int:
    """Vector registers of this CPU."""
    return 16 if _is_x86() and vector_size() < 64 else 32


def compile_entries(module: ir.Module, names: Sequence[str]) -> list[Any]:
    """Compiles a module for this CPU; returns the functions of these names, to be called with an address."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3
    )
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    _engines.append((engine, machine))
    return [_ENTRY(engine.get_function_address(name)) for name in names]


def run_in_parallel(entry: Any, address: int, num_threads: int) -> None:
    """Calls a kernel in as many of torch's own threads; it returns when all have returned."""
    parallel = _openmp()
    if num_threads > 1 and parallel is not None:
        parallel(entry, address, num_threads, 0)
    else:
        entry(address)


@cache
def _openmp() -> Any | None:
    """OpenMP's entry to a parallel region, from the library that torch has loaded; `None` where it has no such."""
    folder = Path(torch.__file__).parent
    libraries = [*folder.glob("lib/lib*omp*.so*"), *folder.parent.glob("torch.libs/lib*omp*.so*")]
    for library in libraries:
        try:
            parallel = ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return parallel
    return None


def threads_of_torch() -> int:
    """Threads that a kernel may use: torch's setting, where its threads can be had."""
    return 1 if _openmp() is None else torch.get_num_threads()
