"""Products of linear layers on a CPU, each by the fastest of three ways.

Torch's own takes two to four times as long over 4 or 8 rows as over one, and on processors that cannot multiply 16-bit
numbers themselves all of its products with such weights are slow. So few rows go through the kernel of
[`~kernels.few_rows`], and many rows with 16-bit weights through torch's float32 product, wherever that has been found
to be faster. It depends on the processor, on the threads and on the shape: a model's own weights are multiplied once
for each number of rows; the outcome is kept in the profile folder, for all models with matrices of this shape on this
machine. Offloaded weights are in memory while they are multiplied; others of their shape are measured for them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.utils import logging

from ..folders import profile_folder
from ..target_facts import computing_device
from ..threads import Lock, OwnForwards, is_of_class
from ._triton import CHOICE
from .few_rows import DTYPES, linear, linears, machine_name, takes, takes_weight


logger = logging.get_logger(__name__)

# Switch of all measurements. The environment variable HF_SPECDEC_KERNELS=torch leaves all products to torch.
measures: bool = CHOICE != "torch"

# Bytes of a matrix below which calls cost more than arithmetic, and of the matrices that are read in turn: more than
# caches hold, where the model has so many. Beyond 16 rows arithmetic weighs more, and fewer tell as much.
_LEAST_BYTES, _MOST_BYTES, _ROWS_OF_ARITHMETIC = 400_000, 32 << 20, 16

# Rows of x that are timed. Numbers between them count as the next larger one, larger ones as the last.
_MEASURED_ROWS = (1, 2, 3, 4, 8, 12, 16, 24, 32, 64, 128, 256)
_ROUNDS = 2

# Another way than torch's must gain so much.
_LEAST_RATIO = 0.97

# Bytes of weights that are widened at a time: they stay in the cache until they are multiplied.
_WIDENED_BYTES = 1 << 20

_FORMAT = 4

# Where accelerate's hooks keep the forward that a module had.
_KEPT_BY_HOOK = "_old_forward"

# For each measured number of rows the numbers that count as it; 0 belongs to the first.
_RANGES = [range(least, most + 1) for least, most in zip((0, *(n + 1 for n in _MEASURED_ROWS)), _MEASURED_ROWS)]


def widened_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + b` with weights of 16 bits, multiplied in float32 and rounded once; arguments as for `takes`."""
    read = x.reshape(-1, x.shape[-1]).float()
    result = torch.empty((len(read), len(weight)), dtype=weight.dtype, device="cpu")
    size = max(_WIDENED_BYTES // (4 * weight.shape[1]), 1)
    for begin in range(0, len(weight), size):
        rows = slice(begin, begin + size)
        wide = weight[rows].float().t()
        result[:, rows] = read @ wide if bias is None else torch.addmm(bias[rows].float(), read, wide)
    return result.view(*x.shape[:-1], len(weight))


# By the digits of the file. The kernel would read float32 weights as torch does.
_WAYS: tuple[Callable[..., torch.Tensor], ...] = (F.linear, linear, widened_linear)


class Shape(NamedTuple):
    """All that the choice depends on, on a machine."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    threads: int

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.outputs}x{self.inputs} {self.threads}"


# For each shape at which torch's way is not always the fastest: the fastest for each number of rows.
ways_of_shapes: dict[tuple[Any, ...], tuple[Callable[..., torch.Tensor], ...]] = {}
# For each shape that has been measured, a digit for each measured number of rows.
_known: dict[str, str] = {}
_prepared: WeakKeyDictionary[nn.Module, Prepared] = WeakKeyDictionary()
_lock = Lock()


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + b`, as `torch.nn.functional.linear` computes it, by the fastest way.

    Args:
        x (`torch.Tensor` of shape `(..., I)`): Any number of rows.
        weight (`torch.Tensor` of shape `(O, I)`): The weights.
        bias (`torch.Tensor` of shape `(O,)`, *optional*): The bias.
    """
    return _way(x, weight, bias)(x, weight, bias)


def products(x: torch.Tensor, matrices: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> Sequence[torch.Tensor]:
    """Products of the same rows with several matrices, in one call of the kernel where that is the way of all.

    Args:
        x (`torch.Tensor` of shape `(..., I)`): As for `product`.
        matrices (`Sequence[tuple]`): Weights `(O, I)` and bias `(O,)` or `None` of each.
    """
    ways = [_way(x, weight, bias) for weight, bias in matrices]
    if all(way is linear for way in ways):
        return linears(x, matrices).split([weight.shape[0] for weight, _ in matrices], -1)
    return [way(x, weight, bias) for way, (weight, bias) in zip(ways, matrices)]


def _way(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """The fastest way for a product."""
    ways = ways_of_shapes.get((*weight.shape, weight.dtype, torch.get_num_threads()))
    if ways is None or not takes(x, weight, bias):
        return F.linear
    return ways[min(x.numel() // x.shape[-1], _MEASURED_ROWS[-1])]


class Prepared(NamedTuple):
    """A model whose shapes are known, as its weights were, for a number of threads.

    Attributes:
        forwards (`list[OwnForwards]`): Those of its modules with other ways than torch's.
    """

    dtype: torch.dtype
    device: torch.device
    threads: int
    forwards: list[OwnForwards]


def prepare_products(model: nn.Module) -> None:
    """Finds out the fastest ways for a model's products, unless they are known.

    Args:
        model (`nn.Module`): A target or a draft. Nothing of it is changed.
    """
    if not measures:
        return
    weight = next(model.parameters(), None)
    if weight is None or computing_device(model).type != "cpu" or weight.dtype not in DTYPES:
        return
    prepared, state = _prepared.get(model), (weight.dtype, weight.device, torch.get_num_threads())
    if prepared is not None and prepared[:-1] == state:
        return
    with _lock:
        weights = _weights_by_shape(model)
        missing = {shape: found for shape, found in weights.items() if str(shape) not in _known}
        if missing:
            _measure_all(missing)
        for shape in weights:
            ways = [_WAYS[int(digit)] for digit in _known[str(shape)]]
            if set(ways) != {F.linear}:
                ways_of_shapes[shape] = tuple(way for rows, way in zip(_RANGES, ways) for _ in rows)
        _prepared[model] = Prepared(*state, _own_forwards(model))


def count_wins(model: nn.Module) -> tuple[int, int]:
    """Shapes of a model's linear layers with other ways than torch's, and all that have been measured."""
    shapes = _weights_by_shape(model)
    return len(shapes.keys() & ways_of_shapes.keys()), len(shapes)


def _weights_by_shape(model: nn.Module) -> dict[Shape, list[torch.Tensor]]:
    found: dict[Shape, list[torch.Tensor]] = {}
    for module in model.modules():
        for weight in _matrices(module):
            found.setdefault(_shape(weight), []).append(weight)
    return found


def _shape(weight: torch.Tensor) -> Shape:
    return Shape(*weight.shape, weight.dtype, torch.get_num_threads())


def _matrices(module: nn.Module) -> Iterator[torch.Tensor]:
    """The weights of a linear layer, or of all experts of a module."""
    for name, weight in module._parameters.items():
        if weight is not None and (weight.dim() == 3 or (name == "weight" and type(module) is nn.Linear)):
            for matrix in [weight.detach()] if weight.dim() == 2 else weight.detach():
                if matrix.nbytes >= _LEAST_BYTES and (takes_weight(matrix) or _is_offloaded(matrix, module)):
                    yield matrix


def _is_offloaded(matrix: torch.Tensor, module: nn.Module) -> bool:
    """Tells a matrix that the kernel can read once it is where its module computes."""
    if not matrix.is_meta or computing_device(module).type != "cpu":
        return False
    return takes_weight(torch.empty((1, 1), dtype=matrix.dtype, device="cpu"))


def _measure_all(missing: dict[Shape, list[torch.Tensor]]) -> None:
    """Learns of these shapes, from the file of this machine where that has them."""
    file = _file()
    _known.update(_read(file))
    measured = [shape for shape in missing if str(shape) not in _known]
    for shape in measured:
        _known[str(shape)] = _measure(missing[shape])
    if measured:
        _write(file)


def _measure(weights: Sequence[torch.Tensor]) -> str:
    """The fastest ways over these matrices of one shape, as digits."""
    weights = [
        torch.ones(weight.shape, dtype=weight.dtype, device="cpu") if weight.is_meta else weight
        for weight in weights[: -(-_MOST_BYTES // weights[0].nbytes)]
    ]
    # The widened product has no use for float32 weights.
    ways = _WAYS[: 2 if weights[0].dtype == torch.float32 else 3]
    digits = ""
    with torch.inference_mode():
        for rows in _MEASURED_ROWS:
            most_bytes = _MOST_BYTES * _ROWS_OF_ARITHMETIC // max(rows, _ROWS_OF_ARITHMETIC)
            most_outputs = max(most_bytes // (weights[0].shape[1] * weights[0].element_size()), 1)
            read = [weight[:most_outputs] for weight in weights[: max(most_bytes // weights[0].nbytes, 1)]]
            x = torch.ones((rows, weights[0].shape[1]), dtype=weights[0].dtype, device="cpu")
            seconds = [float("inf")] * len(ways)
            # The first round compiles and fills caches.
            for turn in range(_ROUNDS + 1):
                for index, way in enumerate(ways):
                    began = perf_counter()
                    for weight in read:
                        way(x, weight)
                    took = perf_counter() - began
                    seconds[index] = min(seconds[index], took) if turn else float("inf")
            fastest = min(range(len(ways)), key=seconds.__getitem__)
            digits += str(fastest if seconds[fastest] < _LEAST_RATIO * seconds[0] else 0)
    return digits


def _file() -> Path:
    name = f"{machine_name()}, torch {torch.__version__}, {os.cpu_count()} cores"
    return profile_folder() / f"products-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"


def _read(file: Path) -> dict[str, str]:
    """Ways known for this machine; nothing where the file is missing or damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        ways = dict(content["ways"]) if content["format"] == _FORMAT else {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
    return {
        str(shape): digits
        for shape, digits in ways.items()
        if isinstance(digits, str) and len(digits) == len(_MEASURED_ROWS) and set(digits) <= set("012")
    }


def _write(file: Path) -> None:
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps({"format": _FORMAT, "ways": _known}, indent=2) + "\n", encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        logger.info(f"The speed of matrix products is measured again by the next process: {error}.")


class OwnForward:
    """Replaces the forward of a module for whose shapes another product than its class's own is the fastest.

    Args:
        module (`nn.Module`): A linear layer, or one with the weights of experts.
    """

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weight = self.module._parameters.get("weight")
        if type(self.module) is nn.Linear and weight is not None and len(args) == 1 and not kwargs:
            return product(args[0], weight, self.module._parameters["bias"])
        with _FasterFunctions():
            return type(self.module).forward(self.module, *args, **kwargs)


class _FasterFunctions(TorchFunctionMode):
    """Mode in which torch's functions for products take the fastest way, at some cost for every call of torch."""

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


def _own_forwards(model: nn.Module) -> list[OwnForwards]:
    """Forwards of the modules within a model whose products have other ways than torch's."""
    pairs: dict[str, list[tuple[nn.Module, OwnForward]]] = {"forward": [], _KEPT_BY_HOOK: []}
    for module in model.modules():
        if module is not model and any(_shape(weight) in ways_of_shapes for weight in _matrices(module)):
            if vars(module).get("forward") is None or is_of_class(vars(module)["forward"], module):
                pairs["forward"].append((module, OwnForward(module)))
            elif is_of_class(vars(module).get(_KEPT_BY_HOOK), module):
                pairs[_KEPT_BY_HOOK].append((module, OwnForward(module)))
    return [OwnForwards(own, name) for name, own in pairs.items() if own]


@contextmanager
def fast_products(model: nn.Module) -> Iterator[None]:
    """Lets a model's own forward take the fastest ways; replaced forwards stay as they are.

    Args:
        model (`nn.Module`): A model for which `prepare_products` was called; else nothing changes.
    """
    prepared = _prepared.get(model)
    if prepared is None or not prepared.forwards:
        yield
        return
    with ExitStack() as stack:
        for forwards in prepared.forwards:
            stack.enter_context(forwards.in_place())
        yield
