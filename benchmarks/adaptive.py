"""Compares `num_speculative_tokens="auto"` with plain `generate()`, to which it must not lose, and fixed lengths.

    python benchmarks/adaptive.py                      # 40 minutes; --quick measures few rounds
    python benchmarks/adaptive.py --cases useless huge --json adaptive.json
    python benchmarks/adaptive.py --target random --sample
    python benchmarks/adaptive.py --target smollm2 --dtype bfloat16

Hostile cases: a draft model of random weights, one as large as the target, drafters on random text, batches of 8 and
32, short outputs, a long prompt, large draft trees. They should reach 0.97 of plain generation; the loop without
drafts ("none") is faster than that on a small model, and shows what drafts lose. Friendly cases: the embedded drafters
on the demo's prompts, all four of a kind one after the other, since the best length for one short text is the luckiest
one. They should reach 0.95 of the best fixed length. All sides of a case generate the same text, in turn, and are
compared within a round, by the time of the process. Each has been warmed up by a call or two, in which the controller
learns; of the texts nothing is remembered.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from time import process_time
from typing import Any

import torch
from common import (
    NONE,
    PLAIN,
    Row,
    beside,
    in_turn,
    random_prompts,
    random_target,
    ratio,
    show,
    without_end,
    write_report,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import SpecDecodingStats, demo, forget_speculators, load_speculator, record
from hf_specdec.bench.prompts import as_chat
from hf_specdec.demo import smollm2
from hf_specdec.machine import describe_environment
from hf_specdec.method import names_without_weights, takes_model


AUTO = "auto"
FIXED_LENGTHS = {"ngram": (4, 8, 16, 24), "draft_model": (1, 3, 5, 8, 12), "eagle3": (1, 2, 3, 4)}

# Of the methods without weights the one that is chosen where no drafter is found.
_PREFERRED = names_without_weights()[0]

# --------------------------------------------------------------------------------------------------------------- cases


@dataclass
class Case:
    """Prompts `(B, P)` of some calls, and what drafts their text; friendly ones are compared with fixed lengths."""

    name: str
    is_friendly: bool
    method: str
    calls: list[dict[str, torch.Tensor]]
    max_new_tokens: int
    settings: dict[str, Any] = field(default_factory=dict)


def random_draft(target: PreTrainedModel, num_layers: int, hidden_size: int) -> dict[str, LlamaForCausalLM]:
    """A draft model of random weights with the target's vocabulary, as a setting."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=target.config.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        max_position_embeddings=target.config.max_position_embeddings,
    )
    return {"draft_model": LlamaForCausalLM(config).eval()}


def noise(target: PreTrainedModel, batch_size: int, length: int = 64) -> list[dict[str, torch.Tensor]]:
    """A call with random prompts."""
    tokens = random_prompts(batch_size, length, target.config.vocab_size)
    return [{"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}]


def encoded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: Any) -> dict[str, torch.Tensor]:
    """A call with these prompts as its rows."""
    tokenizer.padding_side = "left"
    found = tokenizer(texts, return_tensors="pt", padding=True, **options)
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def useless_cases(target: PreTrainedModel) -> list[Case]:
    """Drafts of random weights and on random text, for any target."""
    useless = random_draft(target, 1, 64)
    cases = [Case("useless draft model, long prompt", False, "draft_model", noise(target, 1, 1024), 64, useless)]
    for size in (1, 8, 32):
        text, calls = f"random text, batch {size}", noise(target, size)
        cases.append(Case(f"useless draft model, {text}", False, "draft_model", calls, 64, useless))
        cases += [Case(f"{method}, {text}", False, method, calls, 64) for method in ("ngram", _PREFERRED)]
    return cases


def demo_cases(target: PreTrainedModel) -> list[Case]:
    """The demo's target: with the embedded drafters beside the others."""
    tokenizer, prompts = demo.load_tokenizer(), demo.prompts()
    useless, huge = random_draft(target, 1, 64), random_draft(target, 5, target.config.hidden_size)
    tree = {"draft_tree_depth": 5, "draft_tree_top_k": 8, "num_draft_nodes": 31, "draft_confidence_threshold": 0.0}

    def texts(kind: str) -> list[dict[str, torch.Tensor]]:
        return [encoded(tokenizer, [prompt.text]) for prompt in prompts if prompt.kind == kind]

    cases = [
        Case("useless draft model", False, "draft_model", texts("complete")[:1], 128, useless),
        Case("huge draft model", False, "draft_model", texts("complete")[:1], 128, huge),
        Case("useless draft model, short output", False, "draft_model", texts("complete")[:1], 24, useless),
        *useless_cases(target),
    ]
    for size in (1, 8, 32):
        cases += [
            Case(f"{method}, random text, batch {size}", False, method, noise(target, size), 64)
            for method in ("draft_model", "eagle3")
        ]
    for size in (1, 8):
        calls = [encoded(tokenizer, [prompt.text for prompt in islice(cycle(prompts), size)])]
        cases.append(Case(f"eagle3 with trees of 31 nodes, batch {size}", False, "eagle3", calls, 96, tree))
    for kind in ("edit", "complete"):
        cases += [Case(f"{method}, {kind}", True, method, texts(kind), 128) for method in FIXED_LENGTHS]
    return cases


def smollm2_cases(target: PreTrainedModel) -> list[Case]:
    """A real model: drafts without weights on text that repeats itself, and on text that does not."""
    tokenizer = smollm2.load_tokenizer()
    prompts = as_chat(smollm2.prompts(), tokenizer)

    def texts(kind: str) -> list[dict[str, torch.Tensor]]:
        return [
            encoded(tokenizer, [prompt.text], add_special_tokens=False) for prompt in prompts if prompt.kind == kind
        ]

    cases = [Case(f"ngram, {kind}", True, "ngram", texts(kind), 96) for kind in ("edit", "quote")]
    for method in names_without_weights():
        cases += [Case(f"{method}, {kind}", False, method, texts(kind), 64) for kind in ("chat", "story")]
    return [*cases, *useless_cases(target)]


TARGETS = {
    "demo": (demo.load_target, demo_cases),
    "random": (random_target, useless_cases),
    "smollm2": (smollm2.load_target, smollm2_cases),
}

# ----------------------------------------------------------------------------------------------------------- measuring


def make_sides(target: PreTrainedModel, case: Case) -> dict[str, Callable[[], dict[str, Any]]]:
    """For each way, what makes the arguments of a round of it."""
    settings = dict(case.settings)
    if takes_model(case.method) and "draft_model" not in settings:
        settings["model"] = demo.drafter_path(case.method)

    def ours(length: int | str) -> Callable[[], dict[str, Any]]:
        speculator = load_speculator(target, case.method, num_speculative_tokens=length, **settings)
        # The texts of the last round are the same.
        return lambda: {"assistant": speculator.without_texts(target)}

    sides = {PLAIN: dict, NONE: lambda: {"spec_method": "none"}, AUTO: ours("auto")}
    if len(case.calls[0]["input_ids"]) == 1 and case.method == "ngram":
        sides["transformers: prompt lookup"] = lambda: {"prompt_lookup_num_tokens": 10}
    lengths = FIXED_LENGTHS[case.method] if case.is_friendly else ()
    return sides | {f"k={length}": ours(length) for length in lengths}


def measure(target: PreTrainedModel, case: Case, rounds: int, sample: bool) -> Row:
    """The row of a case."""
    # What the texts of other cases have taught is about those.
    forget_speculators(target)
    sides = make_sides(target, case)
    is_exact = not sample and target.dtype == torch.float32

    def texts_of(name: str) -> tuple[list[list[int]], float]:
        arguments = {"max_new_tokens": case.max_new_tokens, "do_sample": sample, **sides[name]()}
        began = process_time()
        texts = [row for inputs in case.calls for row in target.generate(**inputs, **arguments).tolist()]
        return texts, process_time() - began

    for _ in range(1 if len(case.calls) > 1 else 2):
        for name in sides:
            texts_of(name)
    times: dict[str, list[float]] = {name: [] for name in sides}
    tokens_per_cycle = 0.0
    for number in range(rounds):
        with record() as made:
            found = {name: texts_of(name) for name in in_turn(list(sides), number)}
        for name, (text, spent) in found.items():
            times[name].append(spent)
            if is_exact and text != found[PLAIN][0]:
                raise RuntimeError(f"{case.name}: the text of '{name}' is not that of plain generation.")
        adaptive = [call.stats for call in made.calls if any("adaptive" in note for note in call.stats.notes)]
        tokens_per_cycle = SpecDecodingStats.total(adaptive).mean_acceptance_length
    fixed = [name for name in sides if name.startswith("k=")]
    best = min(fixed, key=lambda name: statistics.median(times[name]), default="")
    return {
        "table": "Friendly cases" if case.is_friendly else "Hostile cases",
        "case": case.name,
        **beside(AUTO, times),
        "best_fixed_length": best.removeprefix("k=") or None,
        "to_best_fixed_length": ratio(AUTO, [best], times) if best else None,
        "tokens_per_cycle": tokens_per_cycle,
        "rounds": len(times[AUTO]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, default="demo")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--sample", action="store_true", help="at temperature 1; texts are not compared then")
    parser.add_argument("--rounds", type=int, default=9, help="how often each side makes its calls")
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--cases", nargs="*", help="only cases whose name has one of these words")
    parser.add_argument("--json", type=Path, help="file for the figures, written after every case")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    load, make_cases = TARGETS[asked.target]
    target = without_end(load(getattr(torch, asked.dtype)))
    cases = make_cases(target)
    if asked.cases:
        cases = [case for case in cases if any(word in case.name for word in asked.cases)]
    rows: list[Row] = []
    environment = describe_environment("cpu", target.dtype)
    for case in cases:
        rows.append(measure(target, case, 3 if asked.quick else asked.rounds, asked.sample))
        show(rows[-1:])
        write_report(asked.json, rows, environment, target=asked.target, sample=asked.sample)
    show(rows)


if __name__ == "__main__":
    main()
