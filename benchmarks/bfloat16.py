"""What bfloat16 costs on a CPU beside float32: steps of training, and a prompt that a target reads.

    python benchmarks/bfloat16.py                # a minute
    python benchmarks/bfloat16.py --rounds 1

In one run both types take turns on the embedded target: steps that train Medusa heads, with autocast and without, and
one forward over a prompt by the target in either type. Times are of one thread's CPU, the least of several rounds; the
last column is the ratio to float32. Recipes train in the type that the CPU computes in.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import repeat
from time import process_time
from unittest.mock import patch

import torch
from common import least_seconds
from rich.console import Console
from rich.table import Table

from hf_specdec import demo
from hf_specdec.candidate_generators.medusa.recipe import MedusaRecipe
from hf_specdec.machine import multiplies_bfloat16
from hf_specdec.training import trainer
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.reading import TargetReader


def training(tokens: torch.LongTensor, steps: int) -> list[Callable[[], object]]:
    """Steps of training in float32, and in bfloat16 whatever the CPU computes in."""
    target, recipe = demo.load_target(), MedusaRecipe(num_heads=3)
    network = recipe.build(target)
    objective = recipe.objective(network, TargetReader(target, recipe.states_for(network)))

    def train(bf16: bool) -> None:
        options = TrainingOptions(steps=steps, warmup_steps=1, bf16=bf16)
        with patch.object(trainer, "multiplies_bfloat16", lambda: True):
            trainer.train(network, repeat(tokens), objective, options)

    return [partial(train, False), partial(train, True)]


def reading(tokens: torch.LongTensor) -> list[Callable[[], object]]:
    """A forward of the target over a prompt in float32 and in bfloat16."""
    return [
        partial(torch.no_grad()(demo.load_target().to(dtype)), tokens) for dtype in (torch.float32, torch.bfloat16)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="Steps of training in a round.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens = torch.randint(4096, (8, 96), generator=torch.Generator().manual_seed(0))
    title = f"The CPU multiplies bfloat16: {multiplies_bfloat16()}"
    table = Table("what", "float32, ms", "bfloat16, ms", "ratio", title=title)
    cases = {
        "training": training(tokens, options.steps),
        "a prompt of 512 tokens": reading(tokens.view(1, -1)[:, :512]),
    }
    for name, sides in cases.items():
        first, second = least_seconds(options.rounds, sides, process_time)
        table.add_row(name, f"{first * 1e3:.0f}", f"{second * 1e3:.0f}", f"{second / first:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
