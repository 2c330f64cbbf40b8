"""Drafts of the target itself at long contexts: what do early exit and sparse keys and values gain?

    python benchmarks/self_speculation.py                              # 4k to 32k tokens, about three minutes
    python benchmarks/self_speculation.py --contexts 4096 --rounds 3 --json self_speculation.json

The target is a Llama of random weights, small enough for attention to take most of a forward at these lengths; its
second half of layers adds little to the first, as LayerSkip trains models to be. The keys and values of the context
are those of its first 1,024 tokens, repeated. In every round all sides continue the same text in turn, greedily;
what is accepted of the drafts is the model's own. Random weights look far back, so that another side accepts each
draft token with a given probability instead (`--rate`; its text is meaningless). Early exit is also timed with
verifications that read all layers again. Process times are of decoding without the first cycle, on one thread, of each
side the least of the rounds; ratios are to plain `generate()`, which copies its cache for every token, and to this
package's loop without drafts.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from unittest.mock import patch

import torch
from common import Sample, prefilled_cache, time_call, without_end
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_specdec import SpeculativeConfig, Speculator, load_speculator, record
from hf_specdec.call.output import CACHE_FIELD
from hf_specdec.candidate_generators.none.generator import NoDrafts
from hf_specdec.machine import describe_environment
from hf_specdec.target.lean import EnteredNodes


REPEATED = 1024
# Early exit whose verifications do not go on from what the first layers have read for the drafts.
AGAIN = "early_exit, again"


@dataclass
class Row:
    """Figures of one side at one context.

    Attributes:
        context (`int`): Tokens of the text.
        side (`str`): What decodes.
        tokens_per_second, tokens_per_cycle (`float`): Of decoding.
        against_plain, against_loop (`float`): Ratios of the speed.
    """

    context: int
    side: str
    tokens_per_second: float
    tokens_per_cycle: float
    against_plain: float
    against_loop: float


def random_target(longest: int, num_layers: int) -> LlamaForCausalLM:
    """The target, whose later layers add little."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=longest,
        initializer_range=0.05,
    )
    model = without_end(LlamaForCausalLM(config).eval())
    with torch.no_grad():
        for layer in model.model.layers[num_layers // 2 :]:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
    return model


def long_cache(model: LlamaForCausalLM, first: torch.LongTensor, context: int) -> DynamicCache:
    """Keys and values of a text of so many tokens but the last: those of its beginning, repeated."""
    beginning, cache = prefilled_cache(model, first), DynamicCache(config=model.config)
    for index, layer in enumerate(beginning.layers):
        times = -(-context // layer.keys.shape[2])
        keys, values = (states.repeat(1, 1, times, 1)[:, :, : context - 1] for states in (layer.keys, layer.values))
        cache.update(keys, values, index)
    return cache


def measure(model: LlamaForCausalLM, context: int, given: argparse.Namespace) -> list[Row]:
    """All sides at one context."""
    generator = torch.Generator().manual_seed(context)
    first = torch.randint(512, (1, REPEATED + 1), generator=generator)
    text = first[:, :-1].repeat(1, -(-context // REPEATED))[:, :context]
    window = {"sparse_kv_window": given.window}
    drafts = {
        "early_exit": {"method": "early_exit", "early_exit_layer": given.layers // 2},
        AGAIN: {"method": "early_exit", "early_exit_layer": given.layers // 2},
        "sparse_kv": {"method": "sparse_kv", **window},
    }
    assistants: dict[str, Speculator | None] = {
        "plain": None,
        "loop": Speculator(SpeculativeConfig(method="none"), NoDrafts, None),
    }
    rates = [given.rate ** (index + 1) for index in range(given.draft_tokens)]
    scripted = f"at {given.rate:.0%}"
    drafts[f"sparse_kv {scripted}"] = {
        **drafts["sparse_kv"],
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }
    for name, settings in drafts.items():
        assistants[name] = load_speculator(model, {**settings, "num_speculative_tokens": given.draft_tokens})
    best: dict[str, Sample] = {}
    per_cycle: dict[str, float] = dict.fromkeys(assistants, 1.0)
    for _ in range(given.rounds):
        texts = {}
        for name, assistant in assistants.items():
            reads_again = patch.object(EnteredNodes, "fits", lambda *_: False) if name == AGAIN else nullcontext()
            with reads_again, record() as recorded:
                sample = time_call(
                    model.generate,
                    model,
                    process_time,
                    input_ids=text,
                    attention_mask=torch.ones_like(text),
                    **{CACHE_FIELD: long_cache(model, first, context)},
                    max_new_tokens=given.new_tokens,
                    do_sample=False,
                    **({} if assistant is None else {"assistant": assistant}),
                )
            for call in recorded.calls:
                per_cycle[name] = call.stats.mean_acceptance_length
            texts[name] = sample.texts[0]
            if texts[name] != texts["plain"] and scripted not in name:
                raise SystemExit(f"{name}: another text than plain generation's at {context} tokens.")
            if name not in best or sample.seconds / sample.tokens < best[name].seconds / best[name].tokens:
                best[name] = sample
    plain, loop = best["plain"].tokens_per_second, best["loop"].tokens_per_second
    return [
        Row(
            context,
            name,
            sample.tokens_per_second,
            per_cycle[name],
            sample.tokens_per_second / plain,
            sample.tokens_per_second / loop,
        )
        for name, sample in best.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--layers", type=int, default=4, help="layers of the target; half of them draft")
    parser.add_argument("--window", type=int, default=512, help="last tokens that sparse drafts see")
    parser.add_argument("--rate", type=float, default=0.9, help="acceptance of a draft token where it is given")
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = random_target(max(given.contexts) + given.new_tokens + given.draft_tokens + 1, given.layers)
    rows = []
    print(f"{'context':>8} {'':>18} {'tokens/s':>9} {'tokens/cycle':>13} {'/ plain':>8} {'/ loop':>7}")
    for context in given.contexts:
        for row in measure(model, context, given):
            rows.append(row)
            print(
                f"{row.context:>8} {row.side:>18} {row.tokens_per_second:>9.1f} {row.tokens_per_cycle:>13.2f} "
                f"{row.against_plain:>8.2f} {row.against_loop:>7.2f}"
            )
    if given.json:
        asked = {name: getattr(given, name) for name in ("layers", "window", "draft_tokens", "new_tokens")}
        figures = {"environment": describe_environment("cpu", torch.float32), **asked}
        figures["rows"] = [asdict(row) for row in rows]
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
