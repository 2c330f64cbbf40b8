"""How many tokens a verification commits under the lossless acceptance rules, on the embedded demo.

    python benchmarks/acceptance_rules.py                  # about 12 minutes on one core
    python benchmarks/acceptance_rules.py --json out.json  # the same figures as a file

The demo target samples, its draft model draws the drafts, and `standard` and `block` judge them, on all demo prompts
with several rows and seeds each. Both write texts of the same distribution, but not the same texts. A seed's figure is
over all of its prompts and rows; ratios are taken within a seed and given with the standard error of their mean.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import product
from pathlib import Path

import torch
from common import without_end
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from hf_specdec import Speculator, demo, load_speculator
from hf_specdec.benchmarking import total_stats


RULES = ("standard", "block")


def measure_seed(
    target: PreTrainedModel, speculator: Speculator, texts: list[torch.Tensor], seed: int, **settings
) -> tuple[float, float]:
    """Mean acceptance length over all prompts, and milliseconds of the processor per token.

    Args:
        target (`PreTrainedModel`): The target.
        speculator (`Speculator`): Drafter and rule.
        texts (`list[torch.Tensor]`): Of each prompt the rows, all alike, `(B, P)`.
        seed (`int`): Of everything drawn.
        settings: Passed to `generate()`.
    """
    torch.manual_seed(seed)
    calls = []
    began = time.process_time()
    for rows in texts:
        output = target.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=True,
            top_k=0,
            assistant=speculator,
            return_dict_in_generate=True,
            **settings,
        )
        calls.append(output.speculative)
    stats = total_stats(calls)
    return stats.mean_acceptance_length, 1000 * (time.process_time() - began) / stats.num_committed_tokens


def measure(target: PreTrainedModel, texts: list[torch.Tensor], temperature: float, k: int, arguments) -> dict:
    """The figures of one temperature and draft length."""
    lengths: dict[str, list[float]] = {rule: [] for rule in RULES}
    costs: dict[str, list[float]] = {rule: [] for rule in RULES}
    for seed in range(arguments.seeds):
        # The rules take turns in going first.
        for rule in RULES[:: 1 if seed % 2 == 0 else -1]:
            speculator = load_speculator(
                target,
                "draft_model",
                model=demo.draft_path(),
                num_speculative_tokens=k,
                rejection_sample_method=rule,
            )
            length, cost = measure_seed(
                target,
                speculator,
                texts,
                seed,
                temperature=temperature,
                max_new_tokens=arguments.new_tokens,
            )
            lengths[rule].append(length)
            costs[rule].append(cost)
    ratios = [block / standard for standard, block in zip(lengths["standard"], lengths["block"])]
    time_ratios = [block / standard for standard, block in zip(costs["standard"], costs["block"])]
    return {
        "temperature": temperature,
        "k": k,
        **{rule: statistics.mean(values) for rule, values in lengths.items()},
        "ratio": statistics.mean(ratios),
        "standard error": statistics.stdev(ratios) / len(ratios) ** 0.5,
        "lowest ratio": min(ratios),
        "time ratio": statistics.median(time_ratios),
        "lengths": lengths,
    }


def table(rows: list[dict]) -> Table:
    made = Table(title="Mean acceptance length: tokens committed per verification")
    for column in ("temperature", "k", *RULES, "block / standard", "lowest of a seed", "processor time per token"):
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(
            str(row["temperature"]),
            str(row["k"]),
            *(f"{row[rule]:.3f}" for rule in RULES),
            f"{row['ratio']:.3f} ± {row['standard error']:.3f}",
            f"{row['lowest ratio']:.3f}",
            f"{row['time ratio']:.2f}",
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.8])
    parser.add_argument("--k", type=int, nargs="+", default=[4, 8], help="draft tokens per verification")
    parser.add_argument("--rows", type=int, default=16, help="rows of each prompt")
    parser.add_argument("--seeds", type=int, default=6, help="at least 2")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target, tokenizer = without_end(demo.load_target()), demo.load_tokenizer()
    prompts = demo.prompts()
    encoded = [tokenizer(prompt.text, return_tensors="pt")["input_ids"] for prompt in prompts]
    texts = [ids.expand(arguments.rows, -1).contiguous() for ids in encoded]
    console = Console()
    rows = []
    for temperature, k in product(arguments.temperatures, arguments.k):
        rows.append(measure(target, texts, temperature, k, arguments))
    console.print(table(rows))
    if arguments.json:
        settings = {"rows": arguments.rows, "seeds": arguments.seeds, "new_tokens": arguments.new_tokens}
        found = {"prompts": [prompt.name for prompt in prompts], **settings, "results": rows}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
