"""Real text on a real target with a real draft model: how fast is each way, in a first call and in later ones?

    python benchmarks/real_models.py --kinds edit chat --sides none ngram draft_model      # some minutes a kind
    python benchmarks/real_models.py --dtypes float32 bfloat16 --decoding greedy sampled --batch-sizes 1 4 8 \
        --new-tokens 256 --rounds 3 --json real.json --chart real.png                      # a day

The pair is Qwen2.5-Coder-1.5B-Instruct and 0.5B, which `hf-specdec bench qwen2.5-coder` downloads; `--model
smollm2` has no draft model. Sides take turns on every prompt. A first call knows nothing of costs and texts; later
ones (`--calls`) generate the same again without a memory of texts. Times are those of the process, in one thread.
Ratios are medians over the rounds, beside plain generate(), transformers' fastest way, and this package's loop without
drafts. Where economize is installed, its prompt lookup and its draft model take part, with greedy decoding.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any


# As users have it: lengths that pay.
os.environ.setdefault("HF_SPECDEC_ADAPTIVE", "1")

import torch
from common import NONE, PLAIN, Row, in_turn, ratio, show, write_report
from transformers import PreTrainedModel

from hf_specdec import demo, forget_speculators, load_speculator, record
from hf_specdec.bench.prompts import Batch, as_chat, first_of_kinds, make_batches
from hf_specdec.demo.shared import loaded_model
from hf_specdec.machine import describe_environment
from hf_specdec.method import is_language_model


MODELS = {"qwen2.5-coder": demo.qwen2_5_coder, "smollm2": demo.smollm2}

# Arguments of transformers' own ways. Those that draft take one row.
LOOKUP, ASSISTANT = "transformers' prompt lookup", "transformers' assistant model"
STOCK: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "plain, static cache": {"cache_implementation": "static"},
    LOOKUP: {"prompt_lookup_num_tokens": 10},
    ASSISTANT: {},
}
# Those of economize, with the most drafts of a cycle: as many as transformers' lookup has, and its own default.
PEERS = {"economize's prompt lookup": 10, "economize's draft model": 3} if find_spec("economize") else {}
ONE_ROW = (LOOKUP, ASSISTANT, *PEERS)


def fresh(side: str, target: PreTrainedModel, draft: PreTrainedModel | None) -> dict[str, Any]:
    """Arguments of `generate()` of a side that knows nothing yet, not even the texts of the sides before it."""
    if side in PEERS:
        return {}
    if side in STOCK:
        assistant = {"assistant_model": draft} if side == ASSISTANT else {}
        return {"spec_method": "off", **STOCK[side], **assistant}
    forget_speculators()
    with_draft = {"draft_model": draft} if is_language_model(side) else {}
    return {"assistant": load_speculator(target, side, **with_draft)}


def generate_of(side: str, target: PreTrainedModel, draft_folder: Path | None) -> Callable[..., torch.Tensor]:
    """`generate()` of a side. That of economize 0.3.2 does not know transformers 5.24; its `decode()` runs."""
    if side not in PEERS:
        return target.generate
    import economize
    from economize.techniques.draft_model import DraftModelConfig
    from economize.techniques.lookup import LookupConfig

    model = economize.apply(target, DraftModelConfig(str(draft_folder)) if "draft" in side else LookupConfig())
    settings = economize.DecodeConfig(cycle_length=PEERS[side] + 1)

    def generate(
        input_ids: torch.Tensor, attention_mask: torch.Tensor, do_sample: bool, max_new_tokens: int
    ) -> torch.Tensor:
        """Takes one row without padding, and decodes greedily."""
        ends = target.generation_config.eos_token_id
        new = model.decode(input_ids[0], max_new_tokens, decoding=settings, stop=ends).tokens
        return torch.cat((input_ids, new[None]), dim=1)

    return generate


def timed_call(
    generate: Callable[..., torch.Tensor], batch: Batch, arguments: dict[str, Any], pad: int | None, seed: int
) -> dict[str, Any]:
    torch.manual_seed(seed)
    began = process_time()
    with record() as recorded:
        texts = generate(**batch.inputs, **arguments, max_new_tokens=batch.max_new_tokens)
    seconds = process_time() - began
    new = texts[:, batch.inputs["input_ids"].shape[1] :]
    # What transformers' own ways accept is not known.
    tokens_per_cycle = recorded.calls[0].stats.mean_acceptance_length if recorded.calls else None
    tokens = int((new != pad).sum())
    return {"seconds": seconds, "tokens": tokens, "cycle": tokens_per_cycle, "text": new.tolist()}


def measure(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    generates: dict[str, Callable[..., torch.Tensor]],
    batch: Batch,
    size: int,
    sample: bool,
    asked: Any,
) -> list[Row]:
    """Rows of one batch: of each side in the first call and in later ones."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    runs = [side for side in asked.sides if (size == 1 or side not in ONE_ROW) and not (sample and side in PEERS)]
    arguments: dict[str, dict[str, Any]] = {}
    for number in range(asked.rounds):
        for index in range(asked.calls):
            for side in in_turn(runs, number):
                if not index:
                    arguments[side] = fresh(side, target, draft)
                elif side not in (*STOCK, *PEERS):
                    arguments[side] = {"assistant": arguments[side]["assistant"].without_texts(target)}
                pad = target.generation_config.pad_token_id
                call = timed_call(generates[side], batch, {"do_sample": sample, **arguments[side]}, pad, number)
                found.setdefault(("later" if index else "first", side), []).append(call)
    # Seconds of a token in each round, of first calls and of later ones.
    seconds: dict[str, dict[str, list[float]]] = {}
    for (which, side), calls in found.items():
        seconds.setdefault(which, {})[side] = [call["seconds"] / call["tokens"] for call in calls]
    baselines = {"to_plain": [PLAIN], "to_fastest_of_transformers": [*STOCK], "to_none": [NONE]}
    rows = []
    for (which, side), calls in found.items():
        ratios = {name: ratio(side, others, seconds[which]) for name, others in baselines.items()}
        same = [call["text"] == other["text"] for call, other in zip(calls, found[which, runs[0]])]
        rows.append(
            {
                "prompt": batch.names[0],
                "kind": batch.kind,
                "batch_size": size,
                "decoding": "sampled" if sample else "greedy",
                "call": which,
                "side": side,
                "ms_per_token": 1000 * median(seconds[which][side]),
                "tokens_per_cycle": None if side in (*STOCK, *PEERS) else median(call["cycle"] for call in calls),
                **{name: found and found[0] for name, found in ratios.items()},
                "same_texts": None if sample else f"{sum(same)} of {len(same)}",
            }
        )
    return rows


def draw(rows: list[Row], path: Path) -> None:
    """Bars of the speed-ups over plain generate() (or over none), a panel for each kind of prompt."""
    import matplotlib.pyplot as plt

    beside = "to_plain" if rows[0]["to_plain"] else "to_none"
    kinds, sides = (list(dict.fromkeys(row[key] for row in rows)) for key in ("kind", "side"))
    figure, panels = plt.subplots(
        1, len(kinds), sharex=True, sharey=True, squeeze=False, figsize=(2 * len(kinds) + 2, 3), layout="constrained"
    )
    for panel, kind in zip(panels[0], kinds):
        speeds = [median(row[beside] for row in rows if (row["kind"], row["side"]) == (kind, side)) for side in sides]
        panel.bar_label(panel.barh(sides, speeds), fmt="%.2f", padding=2)
        panel.margins(x=0.25)
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set_title(kind)
    panels[0][0].invert_yaxis()
    figure.supxlabel(f"speed compared with {'plain generate()' if beside == 'to_plain' else 'none'}")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-coder")
    parser.add_argument("--sides", nargs="+", help="Left out: plain, transformers' own ways, none, every method.")
    parser.add_argument("--kinds", nargs="+", help="Left out: all kinds of prompts.")
    parser.add_argument("--num-prompts", type=int, default=1, help="Of each kind.")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--decoding", nargs="+", choices=("greedy", "sampled"), default=["greedy"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--calls", type=int, default=1, help="Calls with what was learnt in those before.")
    parser.add_argument("--json", type=Path, help="File for the figures, written after every prompt.")
    parser.add_argument("--chart", type=Path)
    asked = parser.parse_args()
    place = MODELS[asked.model]
    stock = [side for side in STOCK if place.draft or side != ASSISTANT]
    peers = [side for side in PEERS if place.draft or "draft" not in side]
    asked.sides = asked.sides or [*stock, *peers, NONE, *place.settings()]
    torch.set_num_threads(1)
    tokenizer = place.load_tokenizer()
    tokenizer.padding_side = "left"
    prompts = [prompt for prompt in place.prompts() if asked.kinds is None or prompt.kind in asked.kinds]
    prompts = as_chat(first_of_kinds(prompts, asked.new_tokens, asked.num_prompts), tokenizer)
    rows: list[Row] = []
    for name in asked.dtypes:
        dtype = getattr(torch, name)
        target = place.load_target(dtype)
        draft = loaded_model(str(place.draft.folder), dtype) if place.draft else None
        folder = place.draft.folder if place.draft else None
        generates = {side: generate_of(side, target, folder) for side in asked.sides}
        for size, decoding in itertools.product(asked.batch_sizes, asked.decoding):
            for batch in make_batches(tokenizer, prompts, size, fill=True, add_special_tokens=False):
                found = measure(target, draft, generates, batch, size, decoding == "sampled", asked)
                rows += [{"dtype": name, **row} for row in found]
                show(rows[-len(found) :])
                write_report(asked.json, rows, describe_environment("cpu", dtype))
        # The next pair may not fit beside this one.
        del target, draft, generates
        forget_speculators()
    if asked.chart is not None:
        draw(rows, asked.chart)


if __name__ == "__main__":
    main()
