"""What an n-gram proposal costs and what it is worth, on Python's own standard library.

    python benchmarks/ngram.py                  # all tables, about a minute
    python benchmarks/ngram.py --json out.json  # the same figures as a file

Cost: cycles of three committed tokens (`observe`, then `propose`), beside calls of transformers'
`PromptLookupCandidateGenerator` on the same tokens, in blocks of ten cycles of each in turn. Cold: before each call a
pass over 32 MB, since a target model on the same processor leaves nothing of the drafter in the caches.

Worth: the text is known beforehand and plays the target model; a step commits the drafted tokens that agree and one
more. Human text, not model output.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sysconfig
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from keyword import iskeyword
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import ByteLevelBPETokenizer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_specdec.candidate_generators.base import Commit, DraftStep, Prompt, Session
from hf_specdec.candidate_generators.ngram.generator import NgramCandidateGenerator
from hf_specdec.candidate_generators.ngram.index import NgramIndex
from hf_specdec.config import SpeculativeConfig


CONTEXTS = (1_000, 8_000, 32_000, 128_000)
COMMITTED = 3
BATCH_SIZE = 16
CACHE_FILLER = torch.ones(8 * 2**20)

RULES = {
    "default": {},
    "default, 1 match": {"prompt_lookup_num_matches": 1},
    "default, 8 matches": {"prompt_lookup_num_matches": 8},
    "default, first occurrence": {"prompt_lookup_match": "first"},
    "default, k = 10": {"num_speculative_tokens": 10},
    "default, k = 64": {"num_speculative_tokens": 64},
    "unlimited n, always k = 24": {"prompt_lookup_min": 1, "prompt_lookup_max": 10**6, "prompt_lookup_match": "last"},
    "vLLM: n = 5, k = 5": {"prompt_lookup_max": 5, "num_speculative_tokens": 5},
    "transformers: n = 1..2, k = 10": {"prompt_lookup_min": 1, "prompt_lookup_max": 2, "num_speculative_tokens": 10},
}


def make_generator(batch_size: int, **settings) -> NgramCandidateGenerator:
    config = SpeculativeConfig(method="ngram", **settings)
    return NgramCandidateGenerator(config, None, Session(batch_size, 10**9, torch.device("cpu")))


def read_corpus(vocab_size: int = 8000) -> tuple[ByteLevelBPETokenizer, list[str]]:
    """A tokenizer trained on every other file of the standard library, and the files it has not seen."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts[::2], vocab_size=vocab_size, show_progress=False)
    return tokenizer, [text for text in texts[1::2] if len(text) > 2000]


# ---------------------------------------------------------------------------------------------------------------- cost


def microseconds(call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def one_cycle(generator: NgramCandidateGenerator, rows: list[int], tokens: list[int], length: int) -> None:
    """What the loop asks of the method in a cycle, its own preparation of the arguments included."""
    lists = [tokens] * len(rows)
    new = torch.tensor(lists)
    generator.observe(Commit(rows, new, lists, [COMMITTED - 1] * len(rows)))
    generator.propose(DraftStep(rows, new[:, -1], [length] * len(rows), [1000] * len(rows)))


def index_cycle(index: NgramIndex, tokens: list[int]) -> None:
    index.extend(tokens)
    match, end = index.longest_match()
    index.continuation(end, min(24, 2 * match))


class Contestants:
    """The same text in the index alone, in generators of one and of many rows, and in transformers' generator."""

    def __init__(self, tokens: list[int], context: int):
        self.tokens, self.ids = tokens, torch.tensor([tokens])
        self.index = NgramIndex(tokens[:context])
        self.single, self.batch = make_generator(1), make_generator(BATCH_SIZE)
        self.single.prefill(Prompt(self.ids[:, :context], [0]))
        self.batch.prefill(Prompt(self.ids[:, :context].expand(BATCH_SIZE, -1), [0] * BATCH_SIZE))
        self.theirs = PromptLookupCandidateGenerator(num_output_tokens=10, max_matching_ngram_size=2, max_length=10**9)

    def calls(self, start: int) -> dict[str, Callable]:
        """One cycle of each, in which the tokens from `start` on are committed."""
        end = start + COMMITTED
        new = self.tokens[start:end]
        return {
            "index": lambda: index_cycle(self.index, new),
            "one row": lambda: one_cycle(self.single, [0], new, end),
            "batch": lambda: one_cycle(self.batch, list(range(BATCH_SIZE)), new, end),
            "transformers": lambda: self.theirs.get_candidates(self.ids[:, :end]),
        }


def measure_cycles(tokens: list[int], context: int, cycles: int, cold: bool) -> dict[str, float]:
    """Median microseconds of a cycle of each contestant."""
    contestants = Contestants(tokens, context)
    starts = list(range(context, context + cycles * COMMITTED, COMMITTED))
    times: dict[str, list[float]] = {name: [] for name in contestants.calls(context)}
    block = 1 if cold else 10
    for first in range(0, cycles, block):
        for name, found in times.items():
            for start in starts[first : first + block]:
                call = contestants.calls(start)[name]
                if cold:
                    CACHE_FILLER.sum()
                found.append(microseconds(call))
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {**medians, "batch": medians["batch"] / BATCH_SIZE}


def measure_cost(tokens: list[int], context: int, cycles: int) -> dict:
    prompt = tokens[:context]
    index = NgramIndex(prompt)
    warm = measure_cycles(tokens, context, cycles, cold=False)
    cold = measure_cycles(tokens, context, cycles // 2, cold=True)
    return {
        "context": context,
        "index": warm["index"],
        "one row": warm["one row"],
        f"row of {BATCH_SIZE}": warm["batch"],
        "transformers": warm["transformers"],
        "ratio": warm["transformers"] / warm["one row"],
        "cold row": cold["one row"],
        "cold transformers": cold["transformers"],
        "cold ratio": cold["transformers"] / cold["one row"],
        "build ms": statistics.median(microseconds(lambda: NgramIndex(prompt)) for _ in range(5)) / 1000,
        "copy ms": statistics.median(microseconds(index.copy) for _ in range(5)) / 1000,
        "bytes/token": measure_memory(prompt, tokens[context : context + 1000]),
    }


def measure_memory(prompt: list[int], added: list[int]) -> float:
    tracemalloc.start()
    index = NgramIndex(prompt)
    for token in added:
        index.extend([token])
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / len(index)


# --------------------------------------------------------------------------------------------------------------- worth


def edited(text: str) -> str:
    """A refactoring: every 20th line is gone and the most used name is another one."""
    lines = [line for number, line in enumerate(text.splitlines(keepends=True)) if number % 20 != 10]
    names = Counter(name for name in re.findall(r"[a-z_]{4,}", text) if not iskeyword(name))
    name = names.most_common(1)[0][0]
    return re.sub(rf"\b{name}\b", f"{name}_item", "".join(lines))


def cases(tokenizer: ByteLevelBPETokenizer, texts: list[str]) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Prompts and the answers that the target would give."""
    encode = lambda text: tokenizer.encode(text).ids  # noqa: E731
    edit = [(encode(text), encode(edited(text))) for text in texts]
    code = [(encode(text[: len(text) // 2]), encode(text[len(text) // 2 :])) for text in texts]
    return {"edit": edit, "code": code}


def count_steps(prompt: list[int], answer: list[int], settings: dict) -> tuple[int, int]:
    """Steps and drafted tokens to write the answer."""
    generator = make_generator(1, **settings)
    generator.prefill(Prompt(torch.tensor([prompt]), [0]))
    done, steps, drafted = 0, 0, 0
    while done < len(answer):
        length = len(prompt) + done
        # The draft alone, without the tensors around it, which do not change the count.
        step = DraftStep([0], torch.empty(0), [length], [len(answer) - done])
        tree = generator.propose(step)
        draft, node, accepted = tree.token_lists()[0], -1, 0
        for index, parent in enumerate(tree.parent_lists()[0]):
            if parent == node and draft[index] == answer[done + accepted]:
                node, accepted = index, accepted + 1
        new = answer[done : done + accepted + 1]
        generator.observe(Commit([0], torch.empty(0), [new], [accepted]))
        done, steps, drafted = done + len(new), steps + 1, drafted + len(draft)
    return steps, drafted


def measure_worth(pairs: list[tuple[list[int], list[int]]], settings: dict) -> tuple[float, float]:
    """Committed and drafted tokens per step."""
    counts = [count_steps(prompt, answer, settings) for prompt, answer in pairs]
    steps = sum(count[0] for count in counts)
    return sum(len(answer) for _, answer in pairs) / steps, sum(count[1] for count in counts) / steps


# -------------------------------------------------------------------------------------------------------------- output


def cost_table(rows: list[dict]) -> Table:
    table = Table(title=f"Microseconds of a cycle with {COMMITTED} committed tokens (medians)")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else f"{value:.3g}" for value in row.values()))
    return table


def worth_table(rows: list[dict]) -> Table:
    table = Table(title="Tokens per step (drafted per step)")
    table.add_column("rule")
    kinds = [name for name in rows[0] if name != "rule"]
    for kind in kinds:
        table.add_column(kind, justify="right")
    for row in rows:
        table.add_row(row["rule"], *(f"{row[kind][0]:.2f} ({row[kind][1]:.1f})" for kind in kinds))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=200, help="cycles timed per context")
    parser.add_argument("--files", type=int, default=20, help="files of the tokens-per-step table; 0 leaves it out")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    tokenizer, texts = read_corpus()
    tokens = [token for encoding in tokenizer.encode_batch(texts) for token in encoding.ids]
    cost = [measure_cost(tokens, context, arguments.cycles) for context in CONTEXTS]
    console.print(cost_table(cost))
    worth = []
    if arguments.files:
        # Files spread over the alphabet; very long ones would decide the mean alone.
        short = [text for text in texts if len(text) < 30_000]
        by_kind = cases(tokenizer, short[:: max(len(short) // arguments.files, 1)][: arguments.files])
        for rule, settings in RULES.items():
            worth.append({"rule": rule, **{kind: measure_worth(pairs, settings) for kind, pairs in by_kind.items()}})
        console.print(worth_table(worth))
    if arguments.json:
        arguments.json.write_text(json.dumps({"cost": cost, "tokens_per_step": worth}, indent=2))


if __name__ == "__main__":
    main()
