"""Matrix products over few rows on a CPU: `y = x W^T + b`, as `torch.nn.functional.linear` computes it.

Reading the weights takes most of the time of such a product, however many rows there are; torch's own takes two to
four times as long over 4 or 8 rows as over one, and longer with weights of 16 bits. Here the weights are read once;
sums are in float32, and are rounded once, with the bias in them. Numba compiles the kernel (`_few_rows`, or `_amx` for
bfloat16 where the processor has AMX) once for each dtype, when it is first needed, and keeps it on disk.

Shapes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..threads import Lock
from ._triton import DTYPES


# Bytes of weights that a thread takes at a time.
_CHUNK_BYTES = 1 << 16

# Whatever the default device is.
_NO_BIAS = torch.zeros(1, device="cpu")

# Entries and outputs of their tiles, by dtype; `None` for that of AMX.
_kernels: dict[torch.dtype | None, tuple[Any, int]] = {}
_compiling = Lock()

if hasattr(os, "register_at_fork"):
    # A child could not go on with what another thread has begun to compile.
    os.register_at_fork(
        before=_compiling.acquire, after_in_parent=_compiling.release, after_in_child=_compiling.release
    )


@cache
def has_kernel(dtype: torch.dtype = torch.float32) -> bool:
    """Tells whether there is a kernel for weights of a dtype, for which numba is imported."""
    module = _module()
    return module is not None and (dtype != torch.float16 or module.CONVERTS_HALVES)


@cache
def _module() -> ModuleType | None:
    """The kernel's module; `None` where numba does not compile."""
    try:
        from . import _few_rows
    except ImportError:
        return None
    return _few_rows


@cache
def _amx() -> ModuleType | None:
    """The module of the kernel that uses AMX; `None` where the processor has none."""
    try:
        from . import _amx
    except ImportError:
        return None
    return _amx


def _kernel(dtype: torch.dtype | None) -> tuple[Any, int]:
    with _compiling:
        if dtype not in _kernels:
            module = _amx() if dtype is None else _module()
            _kernels[dtype] = module.entry(dtype), module.OUTPUTS
        return _kernels[dtype]


def fits_tiles(matrices: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> bool:
    """Tells whether the kernel that uses AMX multiplies with these matrices, which `takes` has found to fit."""
    weight, amx = matrices[0][0], _amx()
    if weight.dtype != torch.bfloat16 or amx is None or weight.shape[1] % amx.DEPTH:
        return False
    return all([len(weight) >= amx.SIZE for weight, _ in matrices])


def takes_weight(weight: torch.Tensor) -> bool:
    """Tells whether the kernel can read a matrix: plain numbers in the memory of this process, row by row."""
    if not weight.is_cpu or weight.dtype not in DTYPES or weight.dim() != 2:
        return False
    if weight.layout is not torch.strided or _is_wrapper(weight):
        return False
    return weight.stride(-1) == 1 and has_kernel(weight.dtype)


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter) and is_traceable_wrapper_subclass(tensor)


def takes(x: torch.Tensor, matrices: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> bool:
    """Tells whether the kernel can multiply at least one row `(..., I)` with weights `(O, I)` and biases `(O,)`."""
    if type(x) is not torch.Tensor or not x.is_cpu or not x.numel() or torch.is_autocast_enabled("cpu"):
        return False
    dtype, inputs, tracks = x.dtype, x.shape[-1], torch.is_grad_enabled()
    for weight, bias in matrices:
        if weight.dtype != dtype or not takes_weight(weight) or weight.shape[1] != inputs:
            return False
        if tracks and (x.requires_grad or weight.requires_grad):
            return False
        if bias is not None:
            is_alike = bias.shape == weight.shape[:1] and bias.dtype == dtype and bias.is_cpu
            if not is_alike or bias.stride(0) != 1 or _is_wrapper(bias):
                return False
    return True


def linears(
    x: torch.Tensor, matrices: Sequence[tuple[torch.Tensor, torch.Tensor | None]], in_tiles: bool = False
) -> torch.Tensor:
    """Products `(..., sum of all O)` with matrices of one dtype, side by side; the arguments are those of `takes`.

    `in_tiles` takes the kernel that uses AMX, for matrices that `fits_tiles` has found to fit.
    """
    first = matrices[0][0]
    inputs, size = first.shape[1], first.element_size()
    rows = x.numel() // inputs
    read = _amx().packed(x) if in_tiles else x.float().contiguous()
    kind = None if in_tiles else first.dtype
    kernel, tile_outputs = _kernels.get(kind) or _kernel(kind)
    result = x.new_empty((*x.shape[:-1], sum([weight.shape[0] for weight, _ in matrices])))
    chunk = max(_CHUNK_BYTES // (inputs * size * tile_outputs), 1) * tile_outputs
    chunks, written, parts = 0, result.data_ptr(), []
    for weight, bias in matrices:
        outputs = weight.shape[0]
        chunks += -(-outputs // chunk)
        given = _NO_BIAS if bias is None else bias
        parts += (weight.data_ptr(), given.data_ptr(), written, weight.stride(0), bias is not None, outputs, chunks)
        written += outputs * size
    job = array("q", (read.data_ptr(), rows, inputs, result.shape[-1], chunk, chunks, 0, *parts))
    parallel, num_threads = _parallel_region(), min(torch.get_num_threads(), chunks)
    if parallel is None or num_threads == 1:
        kernel(job.buffer_info()[0])
    else:
        parallel(kernel, job.buffer_info()[0], num_threads, 0)
    return result


@cache
def _parallel_region() -> Any | None:
    """OpenMP's entry to torch's own threads, with which a second pool would compete; `None` where it has no such."""
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
