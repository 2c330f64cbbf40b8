"""Times the lookup of an n-gram: our cycle beside transformers' prompt lookup.

    python benchmarks/lookups.py                                # 1k to 128k tokens, half a minute
    python benchmarks/lookups.py --contexts 4096 --json out.json

The text is Python's standard library in tokens of the demo's model. In one run all sides take turns at the same place
of it. Ours takes two committed tokens, finds the four longest matches of any length and drafts a tree of what followed
them; transformers' finds the first match of at most two tokens. Times are medians of one thread.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_specdec import SpeculativeConfig, demo
from hf_specdec.candidate_generators.ngram.generator import NgramCandidateGenerator
from hf_specdec.machine import describe_environment
from hf_specdec.protocol import Commit, DraftStep, Prompt, Session


def tokens_of_library(count: int) -> list[int]:
    tokenizer, tokens = demo.load_tokenizer(), []
    tokenizer.model_max_length = count
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tokens += tokenizer(path.read_text(encoding="utf-8", errors="ignore"), add_special_tokens=False).input_ids
        if len(tokens) >= count:
            break
    return tokens[:count]


def measure(text: list[int], context: int, rounds: int) -> dict[str, float]:
    device = torch.device("cpu")
    generator = NgramCandidateGenerator(SpeculativeConfig(method="ngram"), None, Session(1, 2**20, device))
    generator.prefill(Prompt(torch.tensor([text[:context]]), [0]))
    theirs = PromptLookupCandidateGenerator(max_length=2**20, vocab_size=2**20)
    ids = torch.tensor([text])

    def cycle(length: int) -> None:
        new = text[length - 2 : length]
        generator.observe(Commit([0], ids[:, length - 2 : length], [new], [1]))
        generator.propose(DraftStep([0], ids[0, length - 1 : length], [length], [1000]))

    sides = {
        "cycle": cycle,
        "transformers": lambda length: theirs.get_candidates(ids[:, :length]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for length in range(context + 2, context + 2 * rounds + 2, 2):
        for name, side in sides.items():
            began = perf_counter()
            side(length)
            seconds[name].append(perf_counter() - began)
    found = {name: 1e6 * median(times) for name, times in seconds.items()}
    ratio = found["transformers"] / found["cycle"]
    return {"context": context, **found, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", nargs="+", type=int, default=[1000, 8000, 32_000, 128_000])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path, help="File for the figures.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = tokens_of_library(max(options.contexts) + 2 * options.rounds)
    rows = [measure(text, context, options.rounds) for context in options.contexts]
    table = Table("context", "ours, us", "transformers', us", "transformers' / ours")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    if options.json is not None:
        content = {"environment": describe_environment("cpu", torch.float32), "rows": rows}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
