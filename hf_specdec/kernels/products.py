"""Products of linear layers on a CPU, each in one of three ways: torch's, that of few rows, or with widened weights.

Torch's own takes two to four times as long over 4 or 8 rows as over one, and on processors that cannot multiply 16-bit
numbers themselves all of its products with such weights are slow. So few rows go through the kernel of
[`~kernels.few_rows`], and many rows with 16-bit weights there through torch's float32 product. The rule goes by dtype,
rows and processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ..machine import is_intel, multiplies
from ..target_facts import computing_device
from ..threads import Lock, OwnForwards, is_of_class
from ._triton import CHOICE, DTYPES
from .few_rows import fits_tiles, linears, takes, takes_weight


# Whether other ways than torch's are taken. The environment variable HF_SPECDEC_KERNELS=torch leaves all to torch.
is_used: bool = CHOICE != "torch"

# Bytes of a matrix below which calls cost more than arithmetic.
LEAST_BYTES = 400_000

# Bytes of weights that are widened at a time: they stay in the cache until they are multiplied.
_WIDENED_BYTES = 1 << 20

# Where accelerate's hooks keep the forward that a module had.
_KEPT_BY_HOOK = "_old_forward"


class Rule(NamedTuple):
    """Which products go another way than torch's."""

    rows: range  # of x, that the kernel multiplies
    tiled: range = range(0)  # of those, and of others, that it multiplies in tiles where the processor has AMX
    widens: bool = False  # more rows go through widened weights
    least: int = 1  # how many times LEAST_BYTES matrices must have that are multiplied together


@cache
def rule_of(dtype: torch.dtype) -> Rule:
    """The rule of this processor for weights of a dtype, from an EPYC with AVX-512 and a Xeon with AMX.

    Time of the kernel to that of torch, over matrices of models from 135M to 1B:

        float32     EPYC 0.6 over one row, 0.5 over 8, 0.7 over 32; Xeon 1.1 over one row, 1.1 over 3, 0.5 over 8, 1.0
                    over 32, and more for matrices of less than 2 MB
        bfloat16    EPYC 0.5 over one row, 0.7 over 8, 0.9 over 12; Xeon 0.6 over one row, 0.95 over 5, 1.2 over 8
        float16     Xeon 0.7 over one row, 0.6 over 8, 0.95 over 32
        in tiles    Xeon (1.5B) 0.65 over 8 rows, 0.6 over 16 and 32, 0.75 over 64, 0.95 over 128, 1.15 over 256

    Beside widened weights the kernel is the faster one up to 128 rows.
    """
    if dtype == torch.float32:
        return Rule(range(4, 33), least=5) if is_intel() else Rule(range(1, 33))
    if multiplies(dtype) is False:
        return Rule(range(1, 129), widens=True)
    if dtype == torch.bfloat16:
        return Rule(range(1, 6 if is_intel() else 9), range(4, 129))
    return Rule(range(1, 33))


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + b` for any number of rows, as `torch.nn.functional.linear` computes it."""
    return products(x, [(weight, bias)])[0]


def products(x: torch.Tensor, matrices: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> Sequence[torch.Tensor]:
    """Products of the same rows with several matrices, in one call of the kernel where it takes them."""
    if are_large([weight for weight, _ in matrices]) and takes(x, matrices):
        rows, rule = x.numel() // x.shape[-1], rule_of(x.dtype)
        in_tiles = rows in rule.tiled and fits_tiles(matrices)
        if in_tiles or rows in rule.rows:
            joined = linears(x, matrices, in_tiles)
            if len(matrices) == 1:
                return [joined]
            return joined.split_with_sizes([len(weight) for weight, _ in matrices], -1)
        if rule.widens:
            return [_widened_linear(x, *matrix) for matrix in matrices]
    return [F.linear(x, weight, bias) for weight, bias in matrices]


def are_large(weights: Sequence[torch.Tensor]) -> bool:
    """Tells whether matrices that are multiplied together are worth another way than torch's."""
    if not is_used or weights[0].dtype not in DTYPES:
        return False
    return sum([weight.nbytes for weight in weights]) >= rule_of(weights[0].dtype).least * LEAST_BYTES


def _widened_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + b` with weights of 16 bits, multiplied in float32 and rounded once."""
    read = x.reshape(-1, x.shape[-1]).float()
    result = torch.empty((len(read), len(weight)), dtype=weight.dtype, device="cpu")
    size = max(_WIDENED_BYTES // (4 * weight.shape[1]), 1)
    for begin in range(0, len(weight), size):
        rows = slice(begin, begin + size)
        wide = weight[rows].float().t()
        result[:, rows] = read @ wide if bias is None else torch.addmm(bias[rows].float(), read, wide)
    return result.view(*x.shape[:-1], len(weight))


# Of models whose own forward runs: forwards of modules with large matrices, as these were.
_own_forwards: WeakKeyDictionary[nn.Module, tuple[Any, list[OwnForwards]]] = WeakKeyDictionary()
_lock = Lock()


def has_large_matrices(module: nn.Module) -> bool:
    """Tells a linear layer, or the experts of a mixture, whose products may go another way than torch's."""
    for name, weight in module._parameters.items():
        if weight is not None and (weight.dim() == 3 or (name == "weight" and type(module) is nn.Linear)):
            matrix = weight.detach() if weight.dim() == 2 else weight.detach()[0]
            if not are_large([matrix]):
                continue
            if matrix.is_meta and computing_device(module).type == "cpu":
                # Offloaded: the kernel can read it once it is where its module computes.
                matrix = torch.empty((1, 1), dtype=matrix.dtype, device="cpu")
            if takes_weight(matrix):
                return True
    return False


class OwnForward:
    """Replaces the forward of a linear layer, or of a module with the weights of experts."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weight = self.module._parameters.get("weight")
        if type(self.module) is nn.Linear and weight is not None and len(args) == 1 and not kwargs:
            return product(args[0], weight, self.module._parameters["bias"])
        with _FasterFunctions():
            return type(self.module).forward(self.module, *args, **kwargs)


class _FasterFunctions(TorchFunctionMode):
    """Mode in which torch's functions for products go the ways of this file, at some cost for every call of torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear and not kwargs:
            return product(*args)
        if func is _grouped_mm and len(args) == 2 and _is_grouped(*args, **kwargs):
            return _grouped_product(*args, kwargs["offs"])
        return func(*args, **kwargs)


# Absent from the oldest torch.
_grouped_mm = getattr(torch, "_grouped_mm", None)


def _is_grouped(x: torch.Tensor, weights: torch.Tensor, offs=None, bias=None, out_dtype=None) -> bool:
    """Tells whether rows are multiplied each with the matrix of its expert, whose outputs lie row by row."""
    is_plain = offs is not None and bias is None and out_dtype in (None, weights.dtype)
    return is_plain and x.dim() == 2 and weights.dim() == 3 and weights.stride(1) == 1


def _grouped_product(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Products of groups of rows `(R, I)`, of which each ends where `ends` says, with matrices `(E, I, O)`."""
    result = x.new_zeros(len(x), weights.shape[2])
    begin = 0
    for weight, end in zip(weights.transpose(1, 2), ends.tolist()):
        if end > begin:
            result[begin:end] = product(x[begin:end], weight)
        begin = end
    return result


@contextmanager
def fast_products(model: nn.Module) -> Iterator[None]:
    """Lets a model's own forward go the ways of this file; replaced forwards stay as they are."""
    weight = next(model.parameters(), None) if is_used else None
    if weight is None or weight.dtype not in DTYPES or computing_device(model).type != "cpu":
        yield
        return
    state = weight.dtype, weight.device
    with _lock:
        kept = _own_forwards.get(model)
        if kept is None or kept[0] != state:
            _own_forwards[model] = kept = state, _forwards_of(model)
    with ExitStack() as stack:
        for forwards in kept[1]:
            stack.enter_context(forwards.in_place())
        yield


def _forwards_of(model: nn.Module) -> list[OwnForwards]:
    """Forwards of the modules within a model that have large matrices and forwards of their class."""
    pairs: dict[str, list[tuple[nn.Module, OwnForward]]] = {"forward": [], _KEPT_BY_HOOK: []}
    for module in model.modules():
        if module is not model and has_large_matrices(module):
            if vars(module).get("forward") is None or is_of_class(vars(module)["forward"], module):
                pairs["forward"].append((module, OwnForward(module)))
            elif is_of_class(vars(module).get(_KEPT_BY_HOOK), module):
                pairs[_KEPT_BY_HOOK].append((module, OwnForward(module)))
    return [OwnForwards(own, name) for name, own in pairs.items() if own]
