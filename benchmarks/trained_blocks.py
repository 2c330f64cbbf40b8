"""Block drafts of several kinds that were trained alike: of which are the most tokens accepted, by kind of prompt?

    python benchmarks/trained_blocks.py dflash=FOLDER causal=FOLDER dflash2=FOLDER
    python benchmarks/trained_blocks.py dflash=FOLDER --target demo --nodes 8 16 --json trained_blocks.json

`docs/dflash.md` has commands that train them. The prompts are those of `hf-specdec demo`, continued greedily,
SmolLM2's as chats; those of a kind are one batch. A figure is the mean of the tokens that a verification commits,
which does not depend on the machine. Texts are compared with plain generation's.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common  # noqa: F401 - fixes lengths
import torch
from rich.console import Console
from rich.table import Table

from hf_specdec import demo
from hf_specdec.bench.prompts import as_chat
from hf_specdec.demo import smollm2
from hf_specdec.machine import describe_environment


TARGETS = {"smollm2": smollm2, "demo": demo}


@dataclass
class Row:
    """One draft in one shape.

    Attributes:
        draft, shape (`str`): Its name, and "chain" or the size of the tree.
        lengths (`dict[str, float]`): Tokens of a cycle by kind of prompt, and of all.
        identical (`bool`): The texts are those of plain generation.
    """

    draft: str
    shape: str
    lengths: dict[str, float] = field(default_factory=dict)
    identical: bool = True

    def to_dict(self) -> dict[str, Any]:
        return {"draft": self.draft, "shape": self.shape, **self.lengths, "identical": self.identical}


def batches(target: str) -> dict[str, dict[str, torch.Tensor]]:
    """The prompts of each kind, left-padded."""
    source, is_chat = TARGETS[target], target == "smollm2"
    tokenizer = source.load_tokenizer()
    tokenizer.padding_side = "left"
    prompts = as_chat(source.prompts(), tokenizer) if is_chat else source.prompts()
    kinds = dict.fromkeys(prompt.kind for prompt in prompts)
    texts = {kind: [prompt.text for prompt in prompts if prompt.kind == kind] for kind in kinds}
    given = {"return_tensors": "pt", "padding": True, "add_special_tokens": not is_chat}
    return {kind: dict(tokenizer(of_kind, **given)) for kind, of_kind in texts.items()}


def measure(name: str, drafts: dict[str, str], shapes: dict[str, dict[str, Any]], max_new_tokens: int) -> list[Row]:
    """All drafts in all shapes."""
    target, inputs = TARGETS[name].load_target(torch.float32), batches(name)
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False}
    plain = {kind: target.generate(**batch, **settings, spec_method="off") for kind, batch in inputs.items()}
    rows = []
    for draft, folder in drafts.items():
        for shape, nodes in shapes.items():
            row, num_accepted, num_drafts = Row(draft, shape), 0, 0
            for kind, batch in inputs.items():
                speculative = {"method": "dflash", "model": folder, "num_speculative_tokens": "fixed", **nodes}
                output = target.generate(**batch, **settings, speculative=speculative, return_dict_in_generate=True)
                stats = output.speculative
                row.lengths[kind] = stats.mean_acceptance_length
                row.identical &= torch.equal(output.sequences, plain[kind])
                num_accepted, num_drafts = num_accepted + stats.num_accepted_tokens, num_drafts + stats.num_drafts
            row.lengths["all"] = 1 + num_accepted / max(num_drafts, 1)
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafts", nargs="+", help="NAME=FOLDER of each draft")
    parser.add_argument("--target", choices=TARGETS, default="smollm2")
    parser.add_argument("--nodes", type=int, nargs="+", default=[16], help="sizes of the trees beside the chain")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    drafts = dict(draft.split("=", 1) for draft in given.drafts)
    shapes = {"chain": {"num_draft_nodes": 0}} | {f"tree of {n}": {"num_draft_nodes": n} for n in given.nodes}
    rows = [row.to_dict() for row in measure(given.target, drafts, shapes, given.max_new_tokens)]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    if given.json is not None:
        environment = describe_environment("cpu", torch.float32)
        asked = {"target": given.target, "max_new_tokens": given.max_new_tokens}
        figures = {"environment": environment, **asked, "rows": rows}
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
