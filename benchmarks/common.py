"""What the programs of this folder share: baselines, reports, models that write known texts, prompts, and a streamer.

A report is the JSON of a run: its command, the machine, and flat rows, which are printed as tables, too.

Shapes: B rows of a batch, P prompt length, V vocabulary.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_specdec import demo
from hf_specdec.metrics.records import Record


T = TypeVar("T")

# Scripts of this folder are started by their paths; `tools` lies beside it.
sys.path.append(str(Path(__file__).parents[1]))

# Sides that name no length have the method's own in every cycle, so that all rounds of a case do the same.
os.environ.setdefault("HF_SPECDEC_ADAPTIVE", "0")

CONSOLE = Console(width=190)

# ----------------------------------------------------------------------------------------------- baselines and reports

# Sides that others are compared with. Names of transformers' own ways begin with its name.
PLAIN, NONE, TRANSFORMERS = "plain", "none", "transformers"

Row = dict[str, Any]


def beside(side: str, seconds: Mapping[str, Sequence[float]]) -> Row:
    """How many times as fast a side is as plain generate(), the fastest way of transformers, and our loop alone.

    From the seconds of every side in each round, for the same work; `None` where a baseline was not measured.
    """
    theirs = [name for name in seconds if name == PLAIN or name.startswith(TRANSFORMERS)]
    baselines = {"to_plain": [PLAIN], "to_fastest_of_transformers": theirs, "to_none": [NONE]}
    return {name: ratio(side, others, seconds) for name, others in baselines.items()}


def ratio(side: str, others: Sequence[str], seconds: Mapping[str, Sequence[float]]) -> list[float] | None:
    """Median, least and greatest of what the fastest of `others` takes over what a side takes, round by round."""
    times = [seconds[other] for other in others if other in seconds]
    ratios = [min(together) / own for *together, own in zip(*times, seconds[side])] if times else []
    return [median(ratios), min(ratios), max(ratios)] if ratios else None


def in_turn(sides: Sequence[T], number: int) -> list[T]:
    """The sides in the order of a round: another one begins each time."""
    turn = number % len(sides)
    return [*sides[turn:], *sides[:turn]]


def show(rows: Sequence[Row]) -> None:
    """Prints rows as tables, one for each value of "table" in them."""
    from tools.benchmark_pages import cells_of, tables_of

    for title, heads, of_table in tables_of(rows):
        table = Table(*heads, title=title, title_justify="left")
        for row in of_table:
            table.add_row(*cells_of(row, heads))
        CONSOLE.print(table)


def write_report(path: Path | None, rows: Sequence[Row], environment: Row, **facts: Any) -> None:
    """Writes a report, if a file was asked for; a run that is cut off leaves the old one or the new one."""
    if path is None:
        return
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    content = {"command": command, "environment": environment, **facts, "rows": rows}
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


class MarkingStreamer(BaseStreamer, Generic[T]):
    """Leaves a mark at every delivery: a reading of a clock, and the tokens that the call has committed by then.

    Rows of a batch that are ahead of others are delivered later than committed, so calls of ours are asked, by the
    records of the block in which the call runs.
    """

    def __init__(self, recorded: Record, read: Callable[[], T]):
        self.recorded, self.read = recorded, read
        self.marks: list[tuple[T, int]] = []
        self._delivered: int | None = None  # None: not even the prompt

    def put(self, value: torch.Tensor) -> None:
        if self._delivered is None:
            self._delivered = 0
            return
        self._delivered += value.numel()
        calls = self.recorded.calls
        self.marks.append((self.read(), calls[-1].stats.num_committed_tokens if calls else self._delivered))

    def end(self) -> None:
        """Nothing: the last delivery is the end."""


# ------------------------------------------------------------------------------------- models that write a known text


def model_sizes(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int
) -> dict[str, int]:
    """Sizes as arguments of a config."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


# The layer shapes of Qwen3-0.6B; with 8 layers about 190 M parameters.
RANDOM_SIZES = model_sizes(32000, 1024, 3072, 8, 16, 8, 128)


def random_ring(vocab_size: int, seed: int = 0) -> torch.LongTensor:
    """All tokens `(V,)` in the order of the text: each is followed by the next one, the last by the first."""
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def random_model(
    kind: str,
    sizes: Mapping[str, int],
    ring: torch.LongTensor,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    accuracy: float = 1.0,
) -> PreTrainedModel:
    """A model of random weights that writes the ring: its head has the rows of its embedding in another order.

    It writes the right token after a share `accuracy` of them. Embedding and head are two matrices also where the
    public model of this type ties them: what a forward reads is the same.
    """
    torch.manual_seed(0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model(kind, **sizes, **ends, max_position_embeddings=32768, tie_word_embeddings=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for layer in model.get_decoder().layers:
        # What the layers add must not drown the embedding.
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.mul_((2 * config.num_hidden_layers) ** -0.5)
    successors = torch.empty_like(ring).scatter_(0, ring, ring.roll(-1))
    wrong = ring[torch.rand(len(ring), generator=torch.Generator().manual_seed(1)) >= accuracy]
    successors[wrong] = successors[wrong.roll(1)]
    embedding = model.get_input_embeddings().weight.normal_()
    model.get_output_embeddings().weight[successors.to(device)] = 0.1 * embedding
    return without_end(model.eval().requires_grad_(False))


def random_target(dtype: torch.dtype) -> PreTrainedModel:
    """A target in whose forwards our loop has little advantage of its own."""
    return random_model("llama", RANDOM_SIZES, random_ring(RANDOM_SIZES["vocab_size"]), dtype)


def without_end(model: PreTrainedModel) -> PreTrainedModel:
    """The model without an end-of-sequence token, so that all texts have the length asked for."""
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


# ------------------------------------------------------------------------------------------------------------- prompts


def random_prompts(batch_size: int, context: int, vocab_size: int, seed: int = 0) -> torch.LongTensor:
    """Prompts `(B, context)` that differ in their last token only, so that the same cache serves all rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (context - 1 + batch_size,), generator=generator)
    return torch.cat([tokens[: context - 1].expand(batch_size, -1), tokens[context - 1 :, None]], dim=1)


def demo_prompts(count: int, context: int, seed: int = 0) -> torch.LongTensor:
    """Windows `(count, context)` of Python sources that the embedded models were not trained on."""
    from tools.build_demo.data import python_sources

    tokenizer = demo.load_tokenizer()
    encoded = [tokenizer(text, verbose=False)["input_ids"] for text in python_sources().validation]
    windows = [
        tokens[start : start + context] for tokens in encoded for start in range(0, len(tokens) - context + 1, context)
    ]
    if len(windows) < count:
        raise SystemExit(f"The held-out sources have {len(windows)} windows of {context} tokens, {count} are needed.")
    return torch.tensor(random.Random(seed).sample(windows, count))
