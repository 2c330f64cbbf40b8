"""Which drafts of Medusa heads and of an MLP speculator pay, on the embedded demo target.

    python benchmarks/heads.py                  # about 6 minutes on one core
    python benchmarks/heads.py --json out.json  # the same figures as a file

Every shape of draft takes turns with plain `generate()` on the demo's prompts, greedily, at batch 1; each round begins
with another one, and the fastest round of each prompt counts. In float32 every text is compared with plain generation.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import torch
from rich.console import Console
from rich.table import Table

from hf_specdec import benchmarking, demo
from hf_specdec.candidate_generators.medusa.network import load_medusa
from hf_specdec.config import SpeculativeConfig
from hf_specdec.token_trees import TokenTree


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shapes(target) -> dict[str, dict]:
    """Settings by the name of their row."""
    medusa = {"method": "medusa", "model": demo.medusa_path()}
    speculator = {"method": "mlp_speculator", "model": demo.mlp_speculator_path()}
    accuracies = load_medusa(SpeculativeConfig(**medusa), target).accuracies
    trees = {nodes: TokenTree.from_accuracies(accuracies, nodes) for nodes in (5, 12)}
    return {
        "medusa, chain of 1": {**medusa, "num_speculative_tokens": 1},
        "medusa, chain of 4": {**medusa, "num_speculative_tokens": 4},
        "medusa, default": medusa,
        "medusa, 12 nodes": {**medusa, "medusa_num_nodes": 12},
        "medusa, 63 nodes": {**medusa, "medusa_num_nodes": 63},
        "medusa, published 63 nodes": {**medusa, "speculative_token_tree": "mc_sim_7b_63"},
        "medusa, 12 nodes, measured": {**medusa, "medusa_num_nodes": 12, "medusa_tree": "measured"},
        "mlp_speculator, chain of 2": {**speculator, "num_speculative_tokens": 2},
        "mlp_speculator, default": speculator,
        "mlp_speculator, chain of 4": {**speculator, "num_speculative_tokens": 4},
        "mlp_speculator, static tree of 5": {**speculator, "speculative_token_tree": trees[5]},
        "mlp_speculator, static tree of 12": {**speculator, "speculative_token_tree": trees[12]},
        "mlp_speculator, 8 best nodes": {**speculator, "mlp_speculator_num_nodes": 8},
        "mlp_speculator, 16 best nodes": {**speculator, "mlp_speculator_num_nodes": 16},
        "mlp_speculator, 4 candidates": {**speculator, "num_candidates": 4},
    }


def measure(dtype: torch.dtype, rounds: int, max_new_tokens: int) -> list[benchmarking.Result]:
    target = demo.load_target(dtype)
    batches = benchmarking.make_batches(demo.load_tokenizer(), demo.prompts(), 1, max_new_tokens)
    measured = benchmarking.measure(target, shapes(target), batches, rounds)
    results = benchmarking.summarise(measured, batches)
    different = [result.method for result in results if result.same_texts < result.num_texts]
    if dtype == torch.float32 and different:
        raise SystemExit(f"Texts differ from plain generation: {', '.join(different)}.")
    return results


def show(console: Console, dtype: str, results: list[benchmarking.Result]) -> None:
    kinds = list(results[0].kinds)
    table = Table(title=f"{dtype}: tokens per forward and speed, plain generate() = 1")
    table.add_column("drafts")
    for heading in (*(f"length, {kind}" for kind in kinds), *(f"speed, {kind}" for kind in kinds), "speed", "range"):
        table.add_column(heading, justify="right")
    for result in results:
        low, high = result.speedup_range
        lengths = [f"{result.kinds[kind].mean_acceptance_length:.2f}" for kind in kinds]
        speeds = [f"{result.kinds[kind].speedup:.2f}" for kind in kinds]
        table.add_row(result.method, *lengths, *speeds, f"{result.speedup:.2f}", f"{low:.2f}-{high:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    console, report = Console(width=140), {}
    with benchmarking.num_threads(1):
        for dtype in arguments.dtypes:
            results = measure(DTYPES[dtype], arguments.rounds, arguments.max_new_tokens)
            show(console, dtype, results)
            environment = benchmarking.describe_environment("cpu", DTYPES[dtype])
            report[dtype] = {"environment": environment, "rows": [asdict(result) for result in results]}
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
