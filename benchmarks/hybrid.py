"""Compares drafts for targets with recurrent layers with plain `generate()`.

    python benchmarks/hybrid.py                     # --quick makes one round
    python benchmarks/hybrid.py --shapes qwen3_5 mamba2 --batch-size 4 --json hybrid.json

The targets have random weights and layers of the shapes of public models, eight of them. Drafts are scripted chains of
five tokens, each right in four of five places, alone or with second tokens at the first three depths, which are right
at half of the places where the chain is wrong. All sides write the same greedy text, in turn. Times are those of the
thread, decoding alone, without the prompt and the first cycle; a ratio is the median of those of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import thread_time

import torch
from common import Sample, Script, random_prompts, scripted_speculator, time_call, without_end
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_specdec.machine import describe_environment


_COMMON = {"vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": 8, "max_position_embeddings": 4096}
_ATTENTION = {"num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 3072}

# Layer shapes of public models: Qwen3.5-0.8B, Falcon-H1-0.5B, LFM2-350M, Jamba, Nemotron-H, Bamba, Mamba-130M and -2.
SHAPES: dict[str, dict] = {
    "qwen3_5_text": {
        **_ATTENTION,
        "head_dim": 64,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "falcon_h1": {
        **_ATTENTION,
        "head_dim": 64,
        "intermediate_size": 2048,
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
    },
    "lfm2": {**_ATTENTION, "full_attn_idxs": [2, 5]},
    "jamba": {
        **_ATTENTION,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 1,
        "use_mamba_kernels": False,
    },
    "bamba": {
        **_ATTENTION,
        "attn_layer_indices": [3, 7],
        "mamba_n_heads": 32,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
    },
    "mamba": {"intermediate_size": 2048},
    "mamba2": {"num_heads": 32, "head_dim": 64, "state_size": 128, "n_groups": 1},
}

DRAFT_LENGTH, NUM_SIBLINGS = 5, 3


@dataclass
class Row:
    """Throughput of a way of drafting over that of plain generation, as median and range of the rounds.

    Attributes:
        cycle_to_token (`float`): Time of a cycle in units of a plainly decoded token's.
    """

    model: str
    batch_size: int
    draft: str
    tokens_per_cycle: float
    ratio: float
    ratio_range: tuple[float, float]
    cycle_to_token: float
    identical: bool


def random_target(kind: str) -> PreTrainedModel:
    """A model of the shapes of `kind`, with weights large enough that its text varies."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**_COMMON, **SHAPES[kind]}, tie_word_embeddings=False)
    return without_end(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def measure(kind: str, batch_size: int, context: int, new_tokens: int, rounds: int) -> list[Row]:
    """Rows of a model."""
    target = random_target(kind)
    tokens = random_prompts(batch_size, context, target.config.vocab_size)
    arguments = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "max_new_tokens": new_tokens,
        "do_sample": False,
    }
    chain = Script(target.generate(**arguments).tolist(), target.config.vocab_size)
    tree = replace(chain, num_siblings=NUM_SIBLINGS)

    def drafting(script: Script) -> Callable:
        return lambda **given: target.generate(**given, assistant=scripted_speculator(script, DRAFT_LENGTH))

    sides: dict[str, Callable] = {
        "plain": target.generate,
        "none": lambda **given: target.generate(**given, spec_method="none"),
        f"chain of {DRAFT_LENGTH}": drafting(chain),
        f"tree of {DRAFT_LENGTH + NUM_SIBLINGS}": drafting(tree),
    }
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, generate in sides.items():
            sample = time_call(generate, target, thread_time, **arguments)
            if number:  # the first round warms up
                samples[name].append(sample)
    plain = samples.pop("plain")
    return [_row(kind, batch_size, name, found, plain) for name, found in samples.items()]


def _row(kind: str, batch_size: int, name: str, found: list[Sample], plain: list[Sample]) -> Row:
    ratios = [ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in zip(found, plain)]
    cycles = [(ours.seconds / ours.cycles) / (theirs.seconds / theirs.cycles) for ours, theirs in zip(found, plain)]
    return Row(
        kind,
        batch_size,
        name,
        found[0].tokens / found[0].cycles / batch_size,
        statistics.median(ratios),
        (min(ratios), max(ratios)),
        statistics.median(cycles),
        found[0].texts == plain[0].texts,
    )


def show(rows: list[Row]) -> None:
    table = Table("model", "batch", "draft", "tokens a cycle", "to plain", "a cycle / a token", "identical")
    for row in rows:
        low, high = row.ratio_range
        table.add_row(
            row.model,
            str(row.batch_size),
            row.draft,
            f"{row.tokens_per_cycle:.2f}",
            f"{row.ratio:.2f} ({low:.2f}-{high:.2f})",
            f"{row.cycle_to_token:.2f}",
            "yes" if row.identical else "NO",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=tuple(SHAPES), default=tuple(SHAPES))
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for kind in given.shapes:
        rounds = 1 if given.quick else given.rounds
        rows += measure(kind, given.batch_size, given.context, given.new_tokens, rounds)
    show(rows)
    if given.json is not None:
        result = {"environment": describe_environment("cpu", torch.float32), "rows": [asdict(row) for row in rows]}
        given.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
