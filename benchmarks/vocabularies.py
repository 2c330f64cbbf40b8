"""Drafts of a model with another tokenizer: ours beside transformers' universal assisted decoding, in one run.

    python benchmarks/vocabularies.py                                  # the demo, and the draft model of the tests
    python benchmarks/vocabularies.py --batch-size 4 --sample          # transformers' own takes one row
    python benchmarks/vocabularies.py --target TARGET --draft DRAFT --json vocabularies.json

In every round each prompt is continued by all sides in turn, with the same number of draft tokens. Greedy texts must
be equal. Times are of the process, sums over prompts, of each side the least of the rounds; speed-ups are ratios to
plain generation's. Tokens per forward are those of ours, the prompt's forward included.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import common  # noqa: F401 - fixes lengths
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from hf_specdec import demo, load_speculator
from hf_specdec.machine import describe_environment


DRAFT = Path(__file__).parents[1] / "tests" / "fixtures" / "other_tokenizer"
MAPPINGS = ("shared_tokens", "text")


@dataclass
class Side:
    """One way of decoding.

    Attributes:
        generate (`Callable`): Takes the inputs of a call and its seed, returns the text and how many forwards the
            target has made, if that is known.
        seconds (`float`): Of the fastest round.
        tokens, forwards (`int`): Of the last round.
    """

    generate: Callable[[dict[str, torch.Tensor], int], tuple[torch.LongTensor, int]]
    seconds: float = float("inf")
    tokens: int = 0
    forwards: int = 0


def sides_of(target: Any, draft: Any, tokenizers: tuple[Any, Any], given: argparse.Namespace) -> dict[str, Side]:
    """All sides, with the first one to compare with."""
    settings = {"max_new_tokens": given.new_tokens, "min_new_tokens": given.new_tokens, "do_sample": given.sample}

    def plain(inputs: dict[str, torch.Tensor], seed: int, **more: Any) -> tuple[torch.LongTensor, int]:
        set_seed(seed)
        return target.generate(**inputs, **settings, **more), 0

    # Where transformers samples, it prunes the output embeddings of the model that it is given.
    pruned, (own, other) = copy.deepcopy(draft), tokenizers
    pruned.generation_config.num_assistant_tokens = given.draft_tokens
    pruned.generation_config.num_assistant_tokens_schedule = "constant"
    pruned.generation_config.assistant_confidence_threshold = 0.0

    def universal(inputs: dict[str, torch.Tensor], seed: int) -> tuple[torch.LongTensor, int]:
        return plain(inputs, seed, assistant_model=pruned, tokenizer=own, assistant_tokenizer=other)

    def ours(mapping: str) -> Side:
        speculator = load_speculator(
            target,
            {"method": "draft_model", "draft_vocabulary": mapping, "num_speculative_tokens": given.draft_tokens},
            draft_model=draft,
            tokenizers=tokenizers,
        )

        def generate(inputs: dict[str, torch.Tensor], seed: int) -> tuple[torch.LongTensor, int]:
            output, _ = plain(inputs, seed, assistant=speculator, return_dict_in_generate=True)
            return output.sequences, output.speculative.num_target_forwards

        return Side(generate)

    def undrafted(inputs: dict[str, torch.Tensor], seed: int) -> tuple[torch.LongTensor, int]:
        output, _ = plain(inputs, seed, spec_method="none", return_dict_in_generate=True)
        return output.sequences, output.speculative.num_target_forwards

    sides = {"plain": Side(plain), "none": Side(undrafted)}
    if given.batch_size == 1:
        sides["transformers"] = Side(universal)
    return sides | {mapping: ours(mapping) for mapping in MAPPINGS}


def run(sides: dict[str, Side], batches: list[dict[str, torch.Tensor]], rounds: int, sample: bool) -> None:
    """Measures all sides in turn.

    Raises:
        SystemExit: A greedy text is not that of plain generation.
    """
    for seed in range(rounds):
        seconds = dict.fromkeys(sides, 0.0)
        for side in sides.values():
            side.tokens = side.forwards = 0
        for number, inputs in enumerate(batches):
            plain = None
            for name, side in sides.items():
                began = process_time()
                text, forwards = side.generate(inputs, seed)
                seconds[name] += process_time() - began
                side.tokens += text.numel() - inputs["input_ids"].numel()
                side.forwards += forwards * len(text)
                plain = text if plain is None else plain
                if not (sample or torch.equal(text, plain)):
                    raise SystemExit(f"{name}: another text than plain generation's for prompt {number}.")
        for name, side in sides.items():
            side.seconds = min(side.seconds, seconds[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default=demo.target_path(), help="folder or repo id of the target")
    parser.add_argument("--draft", default=str(DRAFT), help="folder or repo id of a draft model with its tokenizer")
    parser.add_argument("--draft-tokens", type=int, default=5, help="tokens that the draft model writes in a cycle")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sample", action="store_true", help="sample at temperature 1")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()

    names = given.target, given.draft
    target, draft = (AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in names)
    own, other = map(AutoTokenizer.from_pretrained, names)
    own.padding_side = "left"
    texts = [prompt.text for prompt in demo.prompts()][: given.prompts]
    firsts = range(0, len(texts), given.batch_size)
    batches = [dict(own(texts[i : i + given.batch_size], return_tensors="pt", padding=True)) for i in firsts]
    sides = sides_of(target.eval(), draft.eval(), (own, other), given)
    run(sides, batches, given.rounds, given.sample)
    plain = sides["plain"]
    figures = {
        name: {
            "tokens_per_second": side.tokens / side.seconds,
            "speed_up": plain.seconds / side.seconds,
            "tokens_per_forward": side.tokens / side.forwards if side.forwards else None,
        }
        for name, side in sides.items()
    }
    print(f"{'':>14} {'tokens/s':>9} {'speed-up':>9} {'tokens/forward':>15}")
    for name, figure in figures.items():
        per_forward = figure["tokens_per_forward"]
        shown = "-" if per_forward is None else f"{per_forward:.2f}"
        print(f"{name:>14} {figure['tokens_per_second']:>9.1f} {figure['speed_up']:>9.2f} {shown:>15}")
    if given.json:
        environment = describe_environment("cpu", torch.float32)
        asked = {name: getattr(given, name) for name in ("batch_size", "draft_tokens", "new_tokens", "sample")}
        rows = [{"side": name, **figure} for name, figure in figures.items()]
        given.json.write_text(json.dumps({"environment": environment, **asked, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
