"""Products of linear layers on a CPU: torch's, or for few rows the kernel's where a measurement has found it faster.

Which of them is faster depends on the processor (some multiply bfloat16 matrices themselves), on the threads and on
the shape. So a model's own weights are multiplied with a few rows once; the outcome is kept in the profile folder, for
all models with matrices of this shape on this machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import logging

from ..folders import profile_folder
from ..threads import Lock
from ._llvm import HAS_LLVM, machine_name
from ._triton import CHOICE
from .few_rows import DTYPES, MOST_ROWS, linear, takes, takes_weight


logger = logging.get_logger(__name__)

# Whether anything is measured. The environment variable HF_SPECDEC_KERNELS=torch leaves all products to torch.
measures = HAS_LLVM and CHOICE != "torch"

# Bytes of a matrix below which calls cost more than arithmetic, and of the matrices that are read in turn: more than
# caches hold, where the model has so many.
_LEAST_BYTES, _MOST_BYTES = 400_000, 32 << 20

# Rows of x for which both are timed; numbers between them count as the next larger one.
_MEASURED_ROWS = (1, 2, 3, 4, 8, MOST_ROWS)
_ROUNDS = 2

# The kernel must gain so much.
_LEAST_RATIO = 0.97

_FORMAT = 1


class Shape(NamedTuple):
    """All that the choice depends on, on a machine."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    threads: int

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.outputs}x{self.inputs} {self.threads}"


# For each shape at which the kernel is ever faster: for each number of rows, whether it is.
wins_of_shapes: dict[tuple, tuple[bool, ...]] = {}
# For each shape that has been measured, the same as text.
_known: dict[str, str] = {}
_prepared: WeakKeyDictionary[nn.Module, tuple] = WeakKeyDictionary()
_lock = Lock()


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + b`, as `torch.nn.functional.linear` computes it, by the faster of the two.

    Args:
        x (`torch.Tensor` of shape `(..., I)`): Any number of rows.
        weight (`torch.Tensor` of shape `(O, I)`): The weights.
        bias (`torch.Tensor` of shape `(O,)`, *optional*): The bias.
    """
    if wins_of_shapes:
        wins = wins_of_shapes.get((*weight.shape, weight.dtype, torch.get_num_threads()))
        if wins is not None and takes(x, weight, bias) and wins[x.numel() // x.shape[-1]]:
            return linear(x, weight, bias)
    return F.linear(x, weight, bias)


def prepare_products(model: nn.Module) -> None:
    """Finds out which products of a model's linear layers the kernel computes faster, unless it is known.

    Args:
        model (`nn.Module`): A target or a draft. Nothing of it is changed.
    """
    if not measures:
        return
    weight = next(model.parameters(), None)
    if weight is None or weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return
    state = weight.dtype, torch.get_num_threads()
    if _prepared.get(model) == state:
        return
    with _lock:
        weights = _weights_by_shape(model)
        missing = {shape: found for shape, found in weights.items() if str(shape) not in _known}
        if missing:
            _measure_all(missing)
        for shape in weights:
            wins = tuple(digit == "1" for digit in _known[str(shape)])
            if any(wins):
                wins_of_shapes[shape] = wins
        _prepared[model] = state


def count_wins(model: nn.Module) -> tuple[int, int]:
    """Shapes of a model's linear layers at which the kernel is ever the faster one, and all that it could compute."""
    shapes = _weights_by_shape(model)
    return len(shapes.keys() & wins_of_shapes.keys()), len(shapes)


def _weights_by_shape(model: nn.Module) -> dict[Shape, list[torch.Tensor]]:
    found: dict[Shape, list[torch.Tensor]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight") if type(module) is nn.Linear else None
        if weight is not None and takes_weight(weight) and weight.nbytes >= _LEAST_BYTES:
            found.setdefault(Shape(*weight.shape, weight.dtype, torch.get_num_threads()), []).append(weight.detach())
    return found


def _measure_all(missing: dict[Shape, list[torch.Tensor]]) -> None:
    """Learns of these shapes, from the file of this machine where that has them."""
    file = _file()
    _known.update(_read(file))
    measured = [shape for shape in missing if str(shape) not in _known]
    for shape in measured:
        _known[str(shape)] = "".join(map(str, map(int, _measure(missing[shape]))))
    if measured:
        _write(file)


def _measure(weights: Sequence[torch.Tensor]) -> list[bool]:
    """For 0 to 16 rows whether the kernel is faster over these matrices of one shape."""
    most_outputs = max(_MOST_BYTES // (weights[0].shape[1] * weights[0].element_size()), 1)
    weights = [weight[:most_outputs] for weight in weights[: max(_MOST_BYTES // weights[0].nbytes, 1)]]
    ways = (linear, F.linear)
    wins = [False]
    with torch.inference_mode():
        for rows in _MEASURED_ROWS:
            x = torch.ones((rows, weights[0].shape[1]), dtype=weights[0].dtype, device="cpu")
            seconds = [float("inf"), float("inf")]
            # The first round compiles and fills caches.
            for turn in range(_ROUNDS + 1):
                for index, way in enumerate(ways):
                    began = perf_counter()
                    for weight in weights:
                        way(x, weight)
                    took = perf_counter() - began
                    seconds[index] = min(seconds[index], took) if turn else float("inf")
            wins += [seconds[0] < _LEAST_RATIO * seconds[1]] * (rows + 1 - len(wins))
    return wins


def _file() -> Path:
    name = f"{machine_name()}, torch {torch.__version__}, {os.cpu_count()} cores"
    return profile_folder() / f"products-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"


def _read(file: Path) -> dict[str, str]:
    """What is known of this machine; nothing where the file is missing or damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        wins = dict(content["wins"]) if content["format"] == _FORMAT else {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
    return {
        str(shape): digits
        for shape, digits in wins.items()
        if isinstance(digits, str) and len(digits) == MOST_ROWS + 1 and set(digits) <= {"0", "1"}
    }


def _write(file: Path) -> None:
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps({"format": _FORMAT, "wins": _known}, indent=2) + "\n", encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        logger.info(f"The speed of matrix products is measured again by the next process: {error}.")
