"""Targets whose weights wait in memory or on a disk: plain generation beside drafts, where every forward reads them.

    python benchmarks/offload.py                            # SmolLM2-135M, on the "cpu", in "memory" and on a "disk"
    python benchmarks/offload.py --rounds 3 --json offload.json

With `cpu_offload` and `disk_offload` of accelerate each layer's weights are copied, or read from files, in every
forward. The files of such a small model stay in the page cache of the operating system: a real disk is slower, and
drafts gain more. In every round each prompt is continued by all sides in turn, and all texts must be equal; nothing is
remembered of earlier ones. Times are of the process, which copies from that cache itself; speed-ups are medians of the
rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from itertools import product
from operator import truediv
from pathlib import Path
from statistics import median
from time import process_time

import accelerate
import torch
from transformers import PreTrainedModel

from hf_specdec import Speculator, load_speculator, record
from hf_specdec.bench.prompts import as_chat
from hf_specdec.demo import smollm2
from hf_specdec.machine import describe_environment


CPU = torch.device("cpu")
PLACES: dict[str, Callable[[PreTrainedModel, str], PreTrainedModel]] = {
    "cpu": lambda target, folder: target,
    "memory": lambda target, folder: accelerate.cpu_offload(target, execution_device=CPU),
    "disk": lambda target, folder: accelerate.disk_offload(target, folder, execution_device=CPU),
}
PLAIN, METHODS = "plain", ("none", "ngram", "suffix+recycling")
KINDS = ("edit", "chat")


def measure(
    targets: dict[str, PreTrainedModel],
    speculators: dict[tuple[str, str], Speculator],
    prompts: list[tuple[str, torch.LongTensor]],
    rounds: int,
    new_tokens: int,
) -> list[dict]:
    """A row of figures for each place, kind of prompt and method.

    Raises:
        SystemExit: A text is not that of plain generation.
    """
    sides = list(product(targets, (PLAIN, *METHODS)))
    seconds = {(place, method, kind): [0.0] * rounds for (place, method), kind in product(sides, KINDS)}
    tokens, forwards = dict.fromkeys(seconds, 0), dict.fromkeys(seconds, 0)
    for number in range(rounds):
        for kind, input_ids in prompts:
            texts = []
            for place, method in sides:
                target, speculator = targets[place], speculators.get((place, method))
                # The controller has learnt in earlier calls; of their texts nothing is remembered.
                drafting = {} if speculator is None else {"assistant": speculator.without_texts(target)}
                settings = {"max_new_tokens": new_tokens, "do_sample": False}
                settings["attention_mask"] = torch.ones_like(input_ids)
                with record() as made:
                    began = process_time()
                    texts.append(target.generate(input_ids, **settings, **drafting))
                    seconds[place, method, kind][number] += process_time() - began
                if not torch.equal(texts[-1], texts[0]):
                    raise SystemExit(f"{place}, {method}: another text than plain generation's.")
                count = texts[-1].shape[1] - input_ids.shape[1]
                tokens[place, method, kind] += count
                forwards[place, method, kind] += made.calls[0].stats.num_target_forwards if drafting else count

    def faster(place: str, method: str, kind: str, beside: str) -> float:
        return median(map(truediv, seconds[beside, PLAIN, kind], seconds[place, method, kind]))

    return [
        {
            "place": place,
            "kind": kind,
            "method": method,
            "speed_up": faster(place, method, kind, place),
            "to_plain_on_cpu": faster(place, method, kind, "cpu"),
            "tokens_per_forward": tokens[place, method, kind] / forwards[place, method, kind],
        }
        for (place, method), kind in product(sides, KINDS)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=2, help="of each kind")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()

    tokenizer = smollm2.load_tokenizer()
    chats = as_chat(smollm2.prompts(), tokenizer)
    texts = [(kind, prompt.text) for kind in KINDS for prompt in [p for p in chats if p.kind == kind][: given.prompts]]
    prompts = [
        (kind, tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids) for kind, text in texts
    ]
    with tempfile.TemporaryDirectory() as folder:
        targets = {place: put(smollm2.load_target(torch.float32), folder) for place, put in PLACES.items()}
        speculators = {
            (place, method): load_speculator(target, method) for place, target in targets.items() for method in METHODS
        }
        measure(targets, speculators, prompts[:: given.prompts], 1, given.new_tokens)
        rows = measure(targets, speculators, prompts, given.rounds, given.new_tokens)
    print(f"{'weights':>8} {'prompts':>8} {'method':>17} {'speed-up':>9} {'to plain, cpu':>14} {'tokens/forward':>15}")
    for row in rows:
        print(
            f"{row['place']:>8} {row['kind']:>8} {row['method']:>17} {row['speed_up']:>9.2f} "
            f"{row['to_plain_on_cpu']:>14.2f} {row['tokens_per_forward']:>15.2f}"
        )
    if given.json:
        environment = describe_environment("cpu", torch.float32)
        given.json.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
