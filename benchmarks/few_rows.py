"""Matrix products over few rows on a CPU: the kernel of this package beside torch's.

    python benchmarks/few_rows.py                                  # a few minutes
    python benchmarks/few_rows.py --quick                          # one matrix, one thread
    python benchmarks/few_rows.py --threads 1 2 --json out.json

In one run both sides multiply the same rows with the same matrices in turn, as many different matrices as do not fit
into a cache: the weights of a model come from memory. Ratios are of the least of several rounds. `to_bandwidth` is the
time that reading the weights alone would take, at the speed at which torch adds numbers up, divided by the kernel's.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from common import least_seconds
from rich.console import Console
from rich.table import Table

from hf_specdec.kernels import few_rows
from hf_specdec.machine import describe_environment


# Matrices (outputs, inputs) of models: queries, gate and down projections, lm_head.
SHAPES = {
    "SmolLM2-135M": ((576, 576), (1536, 576), (576, 1536), (49152, 576)),
    "Qwen3-0.6B": ((2048, 1024), (3072, 1024), (1024, 3072), (151936, 1024)),
    "Llama-3.2-1B": ((2048, 2048), (8192, 2048), (2048, 8192)),
}
QUICK = {"Qwen3-0.6B": ((3072, 1024),)}

# Bytes of different matrices that are read in turn, and of memory whose reading is timed.
_WORKING_SET, _LARGE = 160 << 20, 256 << 20


@dataclass
class Row:
    """Ratios of times, below 1 where the kernel is faster.

    Attributes:
        rows (`int`): Rows of x.
        to_torch (`float`): To torch's product over as many rows.
        to_single_row_of_torch (`float`): To torch's product over one row.
        to_bandwidth (`float`): Share of the memory bandwidth that the kernel reaches, at most about 1.
    """

    model: str
    shape: tuple[int, int]
    dtype: str
    threads: int
    rows: int
    to_torch: float
    to_single_row_of_torch: float
    to_bandwidth: float


def measure(model: str, shape: tuple[int, int], dtype: torch.dtype, counts: list[int], rounds: int) -> list[Row]:
    """The kernel beside torch on matrices of one shape and dtype."""
    outputs, inputs = shape
    num_matrices = max(_WORKING_SET // (outputs * inputs * dtype.itemsize), 1)
    matrices = [torch.randn(shape).div_(inputs**0.5).to(dtype) for _ in range(num_matrices)]
    numbers = torch.ones(_LARGE // 4)
    single, found = None, []
    for count in sorted({1, *counts}):
        x = torch.randn(count, inputs).to(dtype)
        with torch.inference_mode():
            sides = [
                lambda x=x: [few_rows.linear(x, weight) for weight in matrices],
                lambda x=x: [F.linear(x, weight) for weight in matrices],
                lambda: torch.dot(numbers, numbers),
            ]
            ours, torchs, summing = least_seconds(rounds, sides)
        single = single or torchs
        reading = summing * num_matrices * outputs * inputs * dtype.itemsize / _LARGE
        if count in counts:
            ratios = (round(value, 3) for value in (ours / torchs, ours / single, reading / ours))
            found.append(Row(model, shape, str(dtype).removeprefix("torch."), torch.get_num_threads(), count, *ratios))
    return found


def print_rows(console: Console, rows: list[Row]) -> None:
    names = ("model", "shape", "dtype", "threads", "rows", "to torch", "to its single row", "of bandwidth")
    table = Table(*names, title="Time of the kernel")
    for row in rows:
        values = asdict(row)
        values["shape"] = " x ".join(map(str, row.shape))
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="One matrix, one thread.")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
    parser.add_argument("--threads", nargs="+", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="File for the figures.")
    options = parser.parse_args()
    console = Console()
    if not few_rows.HAS_LLVM:
        parser.error("The kernel needs llvmlite: pip install 'hf-specdec[fast]'.")
    shapes = QUICK if options.quick else {name: SHAPES[name] for name in options.models}
    dtypes = options.dtypes or (["float32"] if options.quick else ["float32", "bfloat16"])
    before = torch.get_num_threads()
    rows = []
    for threads in options.threads or ([1] if options.quick else sorted({1, before})):
        torch.set_num_threads(threads)
        for model, shape, name in [(m, s, n) for m, found in shapes.items() for s in found for n in dtypes]:
            rows += measure(model, shape, getattr(torch, name), options.rows, options.rounds)
    print_rows(console, rows)
    if options.json is not None:
        content = {"environment": describe_environment("cpu", torch.float32), "rows": list(map(asdict, rows))}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
