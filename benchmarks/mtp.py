"""MTP drafting beside transformers' own `use_mtp=True`, with the same layers, prompts and texts.

    python benchmarks/mtp.py                     # --quick takes about half a minute
    python benchmarks/mtp.py --targets deepseek_v3 --contexts 2048 --dtype bfloat16 --json out.json

Targets are tiny checkpoints of random weights in the layout of public ones, from `tests/fixtures/mtp`, with three
layers, and again with 24: the further ones add nothing to the stream, so the text and the drafts stay the same, and an
MTP layer costs what it costs beside a target of usual depth. Sides of one comparison:

- plain: `generate()`.
- transformers: `generate(use_mtp=True)`, which drafts one token with each layer and has one row at most. It reads the
  layers from the checkpoint in every call; the time of that is shown apart.
- chain: ours with the same drafts, one token with each layer.
- reuse N: ours with the first layer alone, N times.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from time import process_time

import torch
from common import Sample, time_call, without_end
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from hf_specdec import load_speculator
from hf_specdec.benchmarking import describe_environment


FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures" / "mtp"
TARGETS = ("deepseek_v3", "glm4_moe", "glm4_moe_k3")


def load_target(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A target that transformers finds the MTP layers of: it looks for the layer numbers of the public checkpoints."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    first, count = model.config.num_hidden_layers, model.config.num_nextn_predict_layers
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{first + j}\..*" for j in range(count)]
    return without_end(model)


def write_deeper(name: str, num_layers: int, folder: Path) -> None:
    """Writes a fixture's checkpoint with copies of its last layer inserted behind it, which add nothing."""
    source = FIXTURES / name / "target"
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    own, config["num_hidden_layers"] = config["num_hidden_layers"], num_layers
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        found = re.match(r"model\.layers\.(\d+)\.", key)
        number = int(found[1]) if found else -1
        rest = key[found.end() :] if found else ""
        if number >= own:
            key = f"model.layers.{number + num_layers - own}.{rest}"
        elif number == own - 1:
            adds = rest.endswith(("o_proj.weight", "down_proj.weight"))
            for further in range(own, num_layers):
                tensors[f"model.layers.{further}.{rest}"] = torch.zeros_like(tensor) if adds else tensor.clone()
        tensors[key] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@dataclass
class Call:
    """One call: its decoding part, its whole time, and the time in it that MTP layers were loaded."""

    sample: Sample
    seconds: float
    load_seconds: float

    def __add__(self, other: Call) -> Call:
        return Call(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@contextmanager
def timed_loading(spent: list[float]) -> Iterator[None]:
    """Notes how long transformers takes to load MTP layers."""
    from transformers.modeling_layers import MtpModel

    own = MtpModel.from_pretrained

    def timed(*args, **kwargs):
        began = process_time()
        model = own(*args, **kwargs)
        spent.append(process_time() - began)
        return model

    MtpModel.from_pretrained = timed
    try:
        yield
    finally:
        MtpModel.from_pretrained = own


def time_whole_call(generate: Callable, model: PreTrainedModel, **arguments) -> Call:
    spent: list[float] = []
    with timed_loading(spent):
        began = process_time()
        sample = time_call(generate, model, process_time, **arguments)
        return Call(sample, process_time() - began, sum(spent))


@dataclass
class Figures:
    """Medians over the rounds, milliseconds of process time; ratios are taken within a round.

    Attributes:
        cycles (`int`): Target forwards behind the first cycle, of all prompts.
        tokens_per_cycle (`float`): Of a row.
        load_ms (`float`): Time to load the layers in one call.
        to_stock, to_plain (`tuple[float, float, float]`, *optional*): Tokens a second relative to another side's,
            while decoding (without loading, prefill and first cycle): median, lowest and highest of the rounds.
        call_to_stock (`tuple`, *optional*): Speed of whole calls, loading and prefill included, likewise.
    """

    target: str
    layers: int
    context: int
    batch_size: int
    side: str
    tokens_per_cycle: float
    cycles: int
    cycle_ms: float
    load_ms: float
    to_plain: tuple[float, float, float]
    to_stock: tuple[float, float, float] | None
    call_to_stock: tuple[float, float, float] | None


def measure(
    model: PreTrainedModel, name: str, context: int, batch_size: int, first_load: float, args
) -> list[Figures]:
    vocab_size = model.config.vocab_size
    tokens = torch.randint(1, vocab_size, (args.prompts, context), generator=torch.Generator().manual_seed(0))
    batches = tokens.split(batch_size) if batch_size > 1 else tokens[:, None]
    ours = {"chain": {"mode": "chain"}}
    ours |= {f"reuse {count}": {"mode": "reuse", "num_speculative_tokens": count} for count in args.reuse}
    sides: dict[str, Callable] = {"plain": model.generate}
    if batch_size == 1:
        sides["transformers"] = partial(model.generate, use_mtp=True)
    sides |= {
        side: partial(model.generate, speculative={"method": "mtp", **settings}) for side, settings in ours.items()
    }
    calls: dict[str, list[Call]] = {side: [] for side in sides}
    texts = None
    for turn in range(-1, args.rounds):
        order = list(sides)
        for side in order[turn % len(order) :] + order[: turn % len(order)]:
            call = time_all(sides[side], model, batches, args.new_tokens)
            texts = texts or call.sample.texts
            if args.dtype == "float32" and call.sample.texts != texts:
                raise SystemExit(f"{name}, {side}: another text than that of the other sides.")
            if turn >= 0:
                # The round before is to warm up.
                calls[side].append(call)
    figures = []
    for side, rounds in calls.items():
        cycles = rounds[0].sample.cycles
        stock = calls.get("transformers") if side != "transformers" else None
        loads = [1000 * call.load_seconds / len(batches) for call in rounds]
        figures.append(
            Figures(
                name,
                model.config.num_hidden_layers,
                context,
                batch_size,
                side,
                rounds[0].sample.tokens / cycles / batch_size,
                cycles,
                statistics.median(1000 * call.sample.seconds / cycles for call in rounds),
                1000 * first_load if side in ours else statistics.median(loads),
                _spread(_speeds(rounds, calls["plain"])),
                _spread(_speeds(rounds, stock)) if stock else None,
                _spread([other.seconds / call.seconds for call, other in zip(rounds, stock)]) if stock else None,
            )
        )
    return figures


def time_all(generate: Callable, model: PreTrainedModel, batches, new_tokens: int) -> Call:
    """All prompts, one call after the other."""
    calls = [
        time_whole_call(
            generate,
            model,
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=new_tokens,
        )
        for input_ids in batches
    ]
    return sum(calls[1:], start=calls[0])


def _speeds(rounds: list[Call], others: list[Call]) -> list[float]:
    return [call.sample.tokens_per_second / other.sample.tokens_per_second for call, other in zip(rounds, others)]


def _spread(ratios: list[float]) -> tuple[float, float, float]:
    return statistics.median(ratios), min(ratios), max(ratios)


def refusal(model: PreTrainedModel) -> str:
    """What transformers says to a batch."""
    input_ids = torch.ones((2, 4), dtype=torch.long)
    try:
        model.generate(input_ids=input_ids, attention_mask=input_ids, use_mtp=True, max_new_tokens=4)
    except ValueError as error:
        return re.sub(r"\s+", " ", str(error))
    return "nothing: it takes batches"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS[:2]))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--reuse", nargs="+", type=int, default=[3])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--layers", nargs="+", type=int, default=[3, 24])
    parser.add_argument("--contexts", nargs="+", type=int, default=[64, 2048])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one target, fewer tokens")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.targets, args.layers, args.contexts = args.targets[:1], args.layers[:1], args.contexts[:1]
        args.rounds, args.new_tokens = 2, 48
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    figures, refused = [], {}
    for name, num_layers in product(args.targets, args.layers):
        with tempfile.TemporaryDirectory() as folder:
            write_deeper(name, num_layers, Path(folder))
            model = load_target(Path(folder), getattr(torch, args.dtype))
            refused[name] = refusal(model)
            # What the first call would do.
            began = process_time()
            load_speculator(model, "mtp")
            first_load = process_time() - began
            for context, batch_size in product(args.contexts, args.batch_sizes):
                figures += measure(model, name, context, batch_size, first_load, args)
    console = Console()
    table = Table("target", "layers", "context", "batch", "side", "tokens/cycle", "cycles", "cycle ms", "load ms")
    for title in ("speed / plain", "speed / transformers", "call / transformers"):
        table.add_column(title)
    for row in figures:
        numbers = (f"{row.tokens_per_cycle:.2f}", str(row.cycles), f"{row.cycle_ms:.2f}", f"{row.load_ms:.1f}")
        ratios = [_shown(ratio) for ratio in (row.to_plain, row.to_stock, row.call_to_stock)]
        where = (row.target, *map(str, (row.layers, row.context, row.batch_size)), row.side)
        table.add_row(*where, *numbers, *ratios)
    console.print(table)
    console.print("Loading: of transformers in every call, of ours in the first one. Batches with use_mtp=True:")
    for name, text in refused.items():
        console.print(f"  {name}: {text}", highlight=False)
    if args.json:
        settings = {key: str(value) for key, value in vars(args).items()}
        rows = [asdict(row) for row in figures]
        report = {
            "environment": describe_environment("cpu", getattr(torch, args.dtype)),
            "settings": settings,
            "refused": refused,
            "rows": rows,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def _shown(ratio: tuple[float, float, float] | None) -> str:
    return "" if ratio is None else "{:.2f} ({:.2f}-{:.2f})".format(*ratio)


if __name__ == "__main__":
    main()
