"""What draft trees are worth to the retrieval methods: `ngram` and `suffix` as trees beside their own chains.

    python benchmarks/retrieval_trees.py                  # all tables
    python benchmarks/retrieval_trees.py --quick          # one round of every case
    python benchmarks/retrieval_trees.py --json out.json  # the same figures as a file

The embedded target continues three kinds of text: the demo's prompts for edits and for new code, and refactorings:
functions of sources that it was not trained on, edited several times in a row, with the heading of one more edit.
Every side has the same prompts and the same seed, so all write the same text and differ in their cycles alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

import torch
from common import Sample, time_call
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from hf_specdec import demo, forget_speculators, generate, load_speculator, record
from hf_specdec.benchmarking import describe_environment
from hf_specdec.training.data import EditDocuments, collect_snippets, python_sources


# Settings of each side, and the chain it is held against.
SIDES = {
    "ngram": ({"method": "ngram", "prompt_lookup_num_matches": 1}, "ngram"),
    "ngram, 2 matches": ({"method": "ngram", "prompt_lookup_num_matches": 2}, "ngram"),
    "ngram, 4 matches": ({"method": "ngram", "prompt_lookup_num_matches": 4}, "ngram"),
    "ngram, 8 matches": ({"method": "ngram", "prompt_lookup_num_matches": 8}, "ngram"),
    "suffix, chain": ({"method": "suffix", "suffix_decoding_use_tree_spec": False}, "suffix, chain"),
    "suffix, tree": ({"method": "suffix", "suffix_decoding_use_tree_spec": True}, "suffix, chain"),
    "suffix, factor 4, chain": (
        {"method": "suffix", "suffix_decoding_max_spec_factor": 4.0, "suffix_decoding_use_tree_spec": False},
        "suffix, factor 4, chain",
    ),
    "suffix, factor 4, tree": (
        {"method": "suffix", "suffix_decoding_max_spec_factor": 4.0, "suffix_decoding_use_tree_spec": True},
        "suffix, factor 4, chain",
    ),
}

DECODING = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 0}}

CLOCKS = {"wall": perf_counter, "cpu": process_time}

# A prompt of about 900 tokens, so that one more version fits behind it.
REFACTORING_CHARS = 3000
REFACTORING_EDITS = 3
REFACTORING_TOKENS = 448


@dataclass
class Text:
    """One prompt."""

    prompt: str
    max_new_tokens: int


@dataclass
class Run:
    """All texts of a case, decoded once by one side."""

    sample: Sample
    row_cycles: int
    committed: int
    nodes: int


def refactorings(count: int, seed: int = 0) -> list[Text]:
    """Prompts that show a function in several versions and name the next edit."""
    documents = EditDocuments(collect_snippets(python_sources().validation), seed)
    found = []
    while len(found) < count:
        versions = documents.draw(REFACTORING_CHARS).split("\n# ")
        if len(versions) > REFACTORING_EDITS:
            heading = versions[REFACTORING_EDITS].splitlines()[0]
            prompt = "\n# ".join([*versions[:REFACTORING_EDITS], heading]) + "\n"
            if len(prompt) > 1000:
                found.append(Text(prompt, REFACTORING_TOKENS))
    return found


def texts(num_refactorings: int) -> dict[str, list[Text]]:
    prompts = demo.prompts()
    by_kind = {
        f"demo, {kind}": [Text(prompt.text, prompt.max_new_tokens) for prompt in prompts if prompt.kind == kind]
        for kind in ("edit", "complete")
    }
    return {**by_kind, "refactoring": refactorings(num_refactorings)}


class Bench:
    """The target and the texts.

    Args:
        clock (`str`): A key of `CLOCKS`.
    """

    def __init__(self, clock: str):
        self.model: PreTrainedModel = demo.load_target()
        self.tokenizer: PreTrainedTokenizerBase = demo.load_tokenizer()
        self.tokenizer.padding_side = "left"
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.model.generation_config.pad_token_id = self.tokenizer.pad_token_id
        self.clock = CLOCKS[clock]

    def measure(self, kind_texts: list[Text], batch_size: int, decoding: str, rounds: int) -> dict[str, list[Run]]:
        """Runs of every side; each round begins with another one."""
        runs: dict[str, list[Run]] = {side: [] for side in SIDES}
        names = list(SIDES)
        for number in range(rounds):
            begin = number % len(names)
            for side in names[begin:] + names[:begin]:
                runs[side].append(self.run(side, kind_texts, batch_size, decoding))
        written = {side: side_runs[0].sample.texts for side, side_runs in runs.items()}
        if any(output != written["ngram"] for output in written.values()):
            raise SystemExit(f"The sides have written different texts ({decoding}, batch {batch_size}).")
        return runs

    def run(self, side: str, kind_texts: list[Text], batch_size: int, decoding: str) -> Run:
        # What earlier texts leave behind belongs to the method, what earlier rounds do would be cheating.
        forget_speculators(self.model)
        speculator = load_speculator(self.model, SIDES[side][0])
        total = Sample()
        # Else a collection falls into whichever run comes next.
        gc.collect()
        with record() as recorded:
            for number, inputs in enumerate(self.batches(kind_texts, batch_size)):
                set_seed(number)
                call = {**inputs, **DECODING[decoding], "assistant": speculator}
                total = total + time_call(self.generate, self.model, self.clock, **call)
        stats = [call.stats for call in recorded.calls]
        return Run(
            total,
            sum(call.num_row_cycles for call in stats),
            sum(call.num_committed_tokens - call.batch_size for call in stats),
            sum(call.num_draft_tokens for call in stats),
        )

    def generate(self, **arguments) -> torch.LongTensor:
        return generate(self.model, **arguments)

    def batches(self, kind_texts: list[Text], batch_size: int) -> Iterator[dict]:
        for begin in range(0, len(kind_texts), batch_size):
            batch = kind_texts[begin : begin + batch_size]
            inputs = self.tokenizer([text.prompt for text in batch], return_tensors="pt", padding=True)
            yield {
                "input_ids": inputs["input_ids"],
                "attention_mask": inputs["attention_mask"],
                "max_new_tokens": max(text.max_new_tokens for text in batch),
            }


def summary(runs: dict[str, list[Run]]) -> list[dict]:
    """One row a side: its cycles, the speed of its fastest round, and the ratios to its chain within each round."""
    rows = []
    for side, (_, chain) in SIDES.items():
        pairs = zip(runs[side], runs[chain])
        ratios = [ours.sample.tokens_per_second / theirs.sample.tokens_per_second for ours, theirs in pairs]
        first = runs[side][0]
        rows.append(
            {
                "side": side,
                "tokens_per_cycle": first.committed / first.row_cycles,
                "nodes_per_cycle": first.nodes / first.row_cycles,
                "forwards": first.sample.cycles,
                "tokens_per_second": max(run.sample.tokens_per_second for run in runs[side]),
                "ratio": statistics.median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
            }
        )
    return rows


def table(case: dict) -> Table:
    found = Table(title=f"{case['text']}, {case['decoding']}, batch {case['batch_size']}")
    found.add_column("side")
    for column in ("tokens/cycle", "nodes/cycle", "forwards", "tokens/s", "to its chain"):
        found.add_column(column, justify="right")
    for row in case["sides"]:
        low, high = row["ratio_range"]
        found.add_row(
            row["side"],
            f"{row['tokens_per_cycle']:.2f}",
            f"{row['nodes_per_cycle']:.1f}",
            str(row["forwards"]),
            f"{row['tokens_per_second']:.0f}",
            f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})",
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of every case")
    parser.add_argument("--refactorings", type=int, default=8, help="texts of the third kind")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--decoding", choices=DECODING, nargs="+", default=list(DECODING))
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="cpu: the process's own time")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    console, bench, cases = Console(), Bench(arguments.clock), []
    for kind, kind_texts in texts(arguments.refactorings).items():
        for decoding in arguments.decoding:
            for batch_size in arguments.batch_sizes:
                runs = bench.measure(kind_texts, batch_size, decoding, 1 if arguments.quick else arguments.rounds)
                case = {"text": kind, "decoding": decoding, "batch_size": batch_size, "sides": summary(runs)}
                cases.append(case)
                console.print(table(case))
    if arguments.json:
        report = {"environment": describe_environment("cpu", torch.float32), "clock": arguments.clock, "cases": cases}
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
