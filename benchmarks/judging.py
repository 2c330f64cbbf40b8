"""Judges a draft of a sampled call: all nodes with transformers' warpers, all nodes, and the nodes of the path alone.

    python benchmarks/judging.py                                   # 152k tokens of vocabulary, a minute
    python benchmarks/judging.py --vocabulary 32000 --json out.json

In one run the three take turns on the same logits; four of the draft's tokens are accepted. Times are of one thread's
CPU, the least of several rounds; the last columns are ratios to the first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import thread_time
from types import SimpleNamespace

import torch
from common import least_seconds
from rich.console import Console
from rich.table import Table
from transformers import MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import logits_process as hf
from transformers.generation.logits_process import LogitsProcessorList

from hf_specdec.drafts import DraftTree
from hf_specdec.logits.processors import ProcessorStack
from hf_specdec.logits.randomness import RowUniforms
from hf_specdec.logits.rules import StandardRule
from hf_specdec.loop.judging import Verifier
from hf_specdec.loop.rows import Group, Rows
from hf_specdec.machine import describe_environment
from hf_specdec.target.forward import SlotOutput


NUM_ACCEPTED = 4
WARPERS = {
    "none": list,
    "temperature, top-p": lambda: [hf.TemperatureLogitsWarper(0.8), hf.TopPLogitsWarper(0.9)],
    "top-k, top-p": lambda: [hf.TopKLogitsWarper(50), hf.TopPLogitsWarper(0.9)],
    "typical": lambda: [hf.TypicalLogitsWarper(0.9)],
    "temperature, min-p": lambda: [hf.TemperatureLogitsWarper(0.8), hf.MinPLogitsWarper(0.05)],
}


def parents_of_tree(size: int) -> list[int]:
    """A tree whose nodes have four children each in the first level, two in the others, down to six levels."""
    parents, level = [], [-1]
    for children in (4, 2, 2, 2, 1, 1):
        parents += (new := [parent for parent in level for _ in range(children)])
        level = list(range(len(parents) - len(new), len(parents)))
    return parents[:size]


DRAFTS = {"chain of 5": [-1, 0, 1, 2, 3], "tree of 60": parents_of_tree(60)}


def likely_path(logits: torch.Tensor, tokens: torch.LongTensor, parents: list[int]) -> None:
    """Makes the target choose the first child of each node, down to some depth, and nothing of the draft after it."""
    node = 0
    for _ in range(NUM_ACCEPTED):
        child = parents.index(node - 1)
        logits[0, node, tokens[0, child]] += 60
        node = child + 1


class Judge:
    """One verification of a call of one row, again and again.

    Args:
        warpers (`list`): Those of the call.
        with_transformers (`bool`): Warpers run as transformers has them.
        along_path (`bool`): The path is walked; otherwise all nodes are judged.
    """

    def __init__(self, warpers: list, with_transformers: bool, along_path: bool):
        self.stack = ProcessorStack(LogitsProcessorList(warpers))
        if with_transformers:
            self.stack._run = self.stack.processors
        self.along_path = along_path

    def __call__(self, parents: list[int], tokens: torch.LongTensor, logits: torch.Tensor) -> list[int]:
        judge = self._verifier()
        judge._saves_by_walking = lambda draft, logits: self.along_path
        return judge.begin(_draft(parents, tokens), SlotOutput(logits), [0], [4], False).wait().token_lists[0]

    def would_walk(self, parents: list[int], tokens: torch.LongTensor, logits: torch.Tensor) -> bool:
        """The choice of the package."""
        return self._verifier()._saves_by_walking(_draft(parents, tokens), logits)

    def _verifier(self) -> Verifier:
        request = SimpleNamespace(
            input_ids=torch.zeros((1, 4), dtype=torch.long),
            pad_token=0,
            stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(100)]),
            generation_config=SimpleNamespace(do_sample=True),
            processor_stack=lambda ends: self.stack,
        )
        rows = Rows(1)
        rows.enter(Group(request), [0])
        return Verifier(self.stack, rows, StandardRule(RowUniforms(1, torch.device("cpu"))))


def _draft(parents: list[int], tokens: torch.LongTensor) -> DraftTree:
    return DraftTree(tokens, torch.tensor(parents), [len(parents)])


def measure(vocabulary: int, rounds: int) -> list[dict]:
    rows = []
    for draft, parents in DRAFTS.items():
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn((1, len(parents) + 1, vocabulary), generator=generator) * 4
        tokens = torch.randperm(vocabulary, generator=generator)[None, : len(parents)]
        likely_path(logits, tokens, parents)
        for name, make in WARPERS.items():
            found = measure_one(make, (parents, tokens, logits), rounds)
            rows.append({"draft": draft, "warpers": name, **found})
    return rows


def measure_one(make: Callable[[], list], drafted: tuple, rounds: int) -> dict:
    """The three ways on one draft and its logits."""
    judges = [Judge(make(), True, False), Judge(make(), False, False), Judge(make(), False, True)]
    texts = [judge(*drafted) for judge in judges]
    assert texts[1] == texts[2]
    assert len(texts[2]) == NUM_ACCEPTED + 1
    first, every, path = least_seconds(rounds, [partial(judge, *drafted) for judge in judges], thread_time)
    return {
        "milliseconds_with_transformers": round(first * 1e3, 2),
        "all_nodes": round(every / first, 3),
        "path": round(path / first, 3),
        "chosen": "path" if judges[1].would_walk(*drafted) else "all nodes",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="File for the figures.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.vocabulary, options.rounds)
    table = Table("draft", "warpers", "ms, transformers'", "all nodes", "path", "chosen")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if options.json is not None:
        environment = describe_environment("cpu", torch.float32)
        content = {"environment": environment, "vocabulary": options.vocabulary, "rows": rows}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
