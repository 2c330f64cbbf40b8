"""Block drafts as chains and as trees of several budgets, beside plain `generate()`: which budget pays?

    python benchmarks/blocks.py                                     # the published pairs of the tests; a few minutes
    python benchmarks/blocks.py --rounds 3 --json out.json
    python benchmarks/blocks.py --pairs jetspec_b8 --num-tokens 48

A pair is a folder of `tests/fixtures/dflash`: a draft, its target, and the prompts that the published implementation
ran on. In one run every side generates every prompt in turn, greedily, on one thread; the speed is the ratio of plain
generation's process time to the side's, each the least of several rounds. Trees are of the most probable prefixes, or
JetSpec's (`w`: children that a node gets at once).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import process_time

import torch
from common import least_seconds
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_specdec import record
from hf_specdec.machine import describe_environment


PAIRS = ("jetspec_b8", "trained_b8", "dflash2_full_b8", "dflash2_sliding_b5")
_FOLDER = Path(__file__).parents[1] / "tests" / "fixtures" / "dflash"

SHAPES = {
    "chain": {},
    **{f"tree of {nodes}": {"num_draft_nodes": nodes} for nodes in (4, 7, 12, 20, 32, 64)},
    **{
        f"tree of {nodes}, w = {width}": {"num_draft_nodes": nodes, "draft_tree_top_k": width}
        for nodes, width in ((12, 4), (32, 4), (64, 7))
    },
}


@dataclass
class Row:
    """Figures of one side.

    Attributes:
        tokens_per_cycle (`float`): Committed tokens of a verification.
        speed (`float`): Plain generation's time by that of the side.
    """

    pair: str
    shape: str
    tokens_per_cycle: float
    speed: float


def measure(pair: str, num_tokens: int, rounds: int) -> list[Row]:
    """All shapes of a pair beside plain generation."""
    folder = _FOLDER / pair
    target = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    expected = load_file(folder / "expected.safetensors")
    prompts = [
        expected[name] for name in sorted(expected) if name.endswith(".input_ids") and name.startswith("prompt")
    ]
    greedy = {"do_sample": False, "max_new_tokens": num_tokens, "eos_token_id": None, "pad_token_id": 0}

    def generate(**arguments) -> None:
        for prompt in prompts:
            target.generate(prompt, attention_mask=torch.ones_like(prompt), **greedy, **arguments)

    sides = {"plain": partial(generate, spec_method="off"), "none": partial(generate, spec_method="none")}
    settings = {"model": str(folder), "num_speculative_tokens": "fixed"}
    sides |= {name: partial(generate, speculative={**settings, **shape}) for name, shape in SHAPES.items()}
    lengths = {}
    for name, side in sides.items():
        with record() as made:
            side()
        calls = [call.stats for call in made.calls]
        num_accepted, num_drafts = (
            sum(getattr(call, f"num_{of}") for call in calls) for of in ("accepted_tokens", "drafts")
        )
        lengths[name] = 1 + num_accepted / max(num_drafts, 1)
    plain, *seconds = least_seconds(rounds, list(sides.values()), process_time)
    return [Row(pair, name, lengths[name], plain / time) for name, time in zip(("none", *SHAPES), seconds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=PAIRS)
    parser.add_argument("--num-tokens", type=int, default=56)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = [row for pair in arguments.pairs for row in measure(pair, arguments.num_tokens, arguments.rounds)]
    table = Table("draft", *(column for pair in arguments.pairs for column in (pair, "speed")))
    for shape in SHAPES:
        rows = [row for row in found if row.shape == shape]
        table.add_row(shape, *(f"{value:.2f}" for row in rows for value in (row.tokens_per_cycle, row.speed)))
    Console().print(table)
    if arguments.json is not None:
        figures = {"environment": describe_environment("cpu", torch.float32), "rows": [asdict(row) for row in found]}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
