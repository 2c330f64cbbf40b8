"""What a cycle costs on targets with recurrent layers, beside plain decoding and beside a second forward.

    python benchmarks/hybrid.py                      # all targets, batch 1 and 4; --batch-sizes 1 --rounds 1 is quick
    python benchmarks/hybrid.py --targets qwen3_5 --batch-sizes 1 --new-tokens 48

Drafts are scripted: k tokens, four of five right. Sides of one comparison, on the same prompts and drafts:

- plain: `generate()`.
- replay N: our loop; a state moves once more than N tokens are replayed (16 is what the loop does).
- second forward: after every verification that rejects something, the state goes back and the whole model reads the
  accepted tokens again, one row after the other.

Models have random weights and the layer shapes of small published ones, with few layers. Their next token follows from
the last one by a wide margin, so that all sides write the same text; a difference is an error in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import process_time

import torch
from common import Script, random_prompts, scripted_speculator, time_call, without_end
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from hf_specdec import generate
from hf_specdec.benchmarking import describe_environment
from hf_specdec.decoding import loop, recurrent
from hf_specdec.decoding.target import SlotModel
from hf_specdec.drafts import chain_topology


DRAFT_LENGTH = 5

_COMMON = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
}
_LINEAR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2

# Layer shapes of Qwen3.5-0.8B, LFM2-350M, Falcon-H1-0.5B, and the last two scaled down to this width.
TARGETS = {
    "qwen3_5": {
        "type": "qwen3_5_text",
        "intermediate_size": 3584,
        "layer_types": _LINEAR,
        "num_hidden_layers": 8,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "lfm2": {
        "type": "lfm2",
        "intermediate_size": 6656,
        "block_auto_adjust_ff_dim": True,
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
        "num_hidden_layers": 8,
    },
    "falcon_h1": {
        "type": "falcon_h1",
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_chunk_size": 128,
    },
    "nemotron_h": {
        "type": "nemotron_h",
        "intermediate_size": 4096,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"] * 2,
        "mamba_num_heads": 32,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "chunk_size": 128,
    },
    "jamba": {
        "type": "jamba",
        "intermediate_size": 3584,
        "num_hidden_layers": 8,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "use_mamba_kernels": False,
    },
}


def build(name: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    values = dict(TARGETS[name])
    config_class: type[PreTrainedConfig] = CONFIG_MAPPING[values.pop("type")]
    known = {*config_class.__dataclass_fields__, *config_class.attribute_map}
    common = {key: value for key, value in _COMMON.items() if key in known}
    model = AutoModelForCausalLM.from_config(config_class(**{**common, **values}))
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight.normal_()
        model.get_output_embeddings().weight[torch.randperm(len(embedding))] = 0.1 * embedding
    return without_end(model.to(dtype).eval())


class SecondForwardModel(SlotModel):
    """Brings recurrent states behind the accepted tokens by reading these again."""

    def forward(self, tokens, topology):
        self._tokens, self._mark = tokens, self.recurrent.mark()
        return super().forward(tokens, topology)

    def commit(self, counts, path=None):
        if min(counts) < self._tokens.shape[1]:
            self.recurrent.return_to(self._mark)
            # Rows of one count together; states of other rows are put back.
            before = self.recurrent.mark()
            behind = {}
            for count in set(counts):
                super().forward(self._tokens[:, :count], chain_topology(count - 1, self._tokens.device))
                self.recurrent.commit([count] * len(counts))
                behind[count] = {layer: state.copy() for layer, state in self.recurrent.states.items()}
                self.recurrent.return_to(before)
            for count, states in behind.items():
                index = torch.tensor([row for row, other in enumerate(counts) if other == count])
                for layer, state in states.items():
                    self.recurrent.states[layer].put(state.rows(index), index)
        else:
            self.recurrent.commit(counts)
        self.cache.commit(counts, path)


@contextmanager
def second_forwards():
    make, loop.slot_model = loop.slot_model, SecondForwardModel
    try:
        yield
    finally:
        loop.slot_model = make


@contextmanager
def replay_of(tokens: int):
    own, recurrent.MAX_REPLAY = recurrent.MAX_REPLAY, tokens
    try:
        yield
    finally:
        recurrent.MAX_REPLAY = own


@dataclass
class Figures:
    """Milliseconds of process time; medians over the rounds."""

    target: str
    batch_size: int
    side: str
    tokens_per_cycle: float
    cycle_ms: float
    cycle_to_plain: float
    speed_to_plain: float


def measure(model: PreTrainedModel, name: str, batch_size: int, args) -> list[Figures]:
    input_ids = random_prompts(batch_size, args.context, model.config.get_text_config().vocab_size)
    call = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "do_sample": False}
    call["max_new_tokens"] = args.new_tokens
    text = model.generate(**call)
    script = Script(text.tolist(), model.config.get_text_config().vocab_size)

    def ours(context: Callable, **arguments):
        with context():
            return generate(model, assistant=scripted_speculator(script, DRAFT_LENGTH), **arguments)

    sides: dict[str, Callable] = {"plain": model.generate}
    sides |= {f"replay {limit}": partial(ours, partial(replay_of, limit)) for limit in args.replays}
    sides["second forward"] = partial(ours, second_forwards)
    samples: dict[str, list] = {side: [] for side in sides}
    for _ in range(args.rounds):
        for side, run in sides.items():
            sample = time_call(run, model, process_time, **call)
            if args.dtype == "float32" and sample.texts != [text.tolist()]:
                raise SystemExit(f"{name}, {side}: another text than that of plain generate().")
            samples[side].append(sample)
    plain = samples["plain"]
    # The same drafts take the same cycles; where there are second forwards, these are none.
    ours = next(rounds[0] for side, rounds in samples.items() if side.startswith("replay"))
    figures = []
    for side, rounds in samples.items():
        cycles = rounds[0].cycles if side == "plain" else ours.cycles
        ms = [1000 * sample.seconds / cycles for sample in rounds]
        speeds = [one.tokens_per_second / other.tokens_per_second for one, other in zip(rounds, plain)]
        ratios = [m / (1000 * other.seconds / other.cycles) for m, other in zip(ms, plain)]
        per_cycle = rounds[0].tokens / cycles / batch_size
        figures.append(Figures(name, batch_size, side, per_cycle, *map(statistics.median, (ms, ratios, speeds))))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--replays", nargs="+", type=int, default=[0, 16])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    table = Table("target", "batch", "side", "tokens/cycle", "cycle ms", "cycle / plain token", "speed / plain")
    figures = []
    for name in args.targets:
        model = build(name, getattr(torch, args.dtype))
        for batch_size in args.batch_sizes:
            figures += measure(model, name, batch_size, args)
    for row in figures:
        numbers = (row.tokens_per_cycle, row.cycle_ms, row.cycle_to_plain, row.speed_to_plain)
        table.add_row(row.target, str(row.batch_size), row.side, *(f"{number:.2f}" for number in numbers))
    Console().print(table)
    if args.json:
        settings = {key: str(value) for key, value in vars(args).items()}
        report = {"environment": describe_environment(), "settings": settings, "rows": [asdict(r) for r in figures]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
