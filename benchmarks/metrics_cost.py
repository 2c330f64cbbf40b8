"""What metrics cost a call: with nobody listening, and with each listener.

    python benchmarks/metrics_cost.py                  # 3 minutes
    python benchmarks/metrics_cost.py --method eagle3 --new-tokens 256 --json out.json

The embedded demo target, whose cycles are short, drafts with n-grams, the cheapest method: the share of bookkeeping is
as large as it gets. All sides decode the same prompts in turn, and a ratio is taken within a round, of the process's
own time. Its noise is larger than what is asked for, so that the calls to the listeners are also timed by themselves.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from logging import NullHandler, getLogger
from pathlib import Path
from time import process_time

import torch
from common import demo_prompts, without_end
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from hf_specdec import SpecDecodingStats, demo, load_speculator, metrics, record
from hf_specdec.benchmarking import describe_environment
from hf_specdec.decoding import loop
from hf_specdec.metrics.listeners import CallProgress


BASELINE = "no bookkeeping"
NUM_TIMED_CYCLES, NUM_TIMED_RUNS = 2000, 15


class Deaf(CallProgress):
    """A loop that tells nobody anything: what would be if there were no metrics."""

    def __init__(self, stats: SpecDecodingStats, model_name: str):
        super().__init__(stats, [])

    def end_cycle(self) -> None:
        pass


@contextmanager
def no_bookkeeping() -> Iterator[None]:
    original, loop.begin_call = loop.begin_call, Deaf
    try:
        yield
    finally:
        loop.begin_call = original


@contextmanager
def nobody() -> Iterator[None]:
    yield


@contextmanager
def prometheus() -> Iterator[None]:
    registry = CollectorRegistry()
    metrics.enable(registry)
    try:
        yield
    finally:
        metrics.disable(registry)


@contextmanager
def log_line() -> Iterator[None]:
    metrics.log_every(10)
    try:
        yield
    finally:
        metrics.log_every(None)


@contextmanager
def timings() -> Iterator[None]:
    with record(timings=True):
        yield


@contextmanager
def everybody() -> Iterator[None]:
    with prometheus(), log_line(), timings():
        yield


SIDES: dict[str, Callable] = {
    BASELINE: no_bookkeeping,
    "nobody listens": nobody,
    "record(timings=True)": timings,
    "log line": log_line,
    "Prometheus": prometheus,
    "all three": everybody,
}


@dataclass
class Figures:
    """One side.

    Attributes:
        ratio (`list[float]`): CPU time of the calls beside that of `BASELINE`: median, least, greatest of the rounds.
        fastest (`float`): The same of each side's fastest round.
        microseconds (`float`): Of a cycle, for telling the listeners, timed by itself.
        share (`float`): Of that in the baseline's cycle.
    """

    side: str
    ratio: list[float]
    fastest: float
    microseconds: float
    share: float


def measure(args: argparse.Namespace) -> tuple[list[Figures], float]:
    """The figures of all sides, and the baseline's cycle in seconds."""
    model = without_end(demo.load_target())
    speculator = load_speculator(model, args.method)
    batches = demo_prompts(args.prompts, args.context).split(args.batch_size)
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    cycles: list[float] = []
    names = list(SIDES)
    for number in range(args.rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with SIDES[name]():
                spent, num_cycles = decode(model, speculator, batches, args.new_tokens)
            if number > 0:  # the first round warms up
                seconds[name].append(spent)
            if number > 0 and name == BASELINE:
                cycles.append(spent / num_cycles)
    cycle = min(cycles)
    bookkeeping = {name: telling_seconds(SIDES[name]) for name in SIDES}
    figures = []
    for name in SIDES:
        ratios = [own / base for own, base in zip(seconds[name], seconds[BASELINE])]
        telling = bookkeeping[name] - bookkeeping[BASELINE]
        spread = [statistics.median(ratios), min(ratios), max(ratios)]
        fastest = min(seconds[name]) / min(seconds[BASELINE])
        figures.append(Figures(name, spread, fastest, 1e6 * telling, telling / cycle))
    return figures, cycle


def decode(model, speculator, batches, new_tokens: int) -> tuple[float, int]:
    """CPU seconds of the calls, and their cycles."""
    spent, num_cycles = 0.0, 0
    for input_ids in batches:
        settings = {"do_sample": False, "max_new_tokens": new_tokens, "return_dict_in_generate": True}
        mask = torch.ones_like(input_ids)
        began = process_time()
        output = model.generate(input_ids, attention_mask=mask, **settings, assistant=speculator)
        spent += process_time() - began
        num_cycles += output.speculative.num_target_forwards
    return spent, num_cycles


def telling_seconds(listening: Callable) -> float:
    """CPU seconds of a cycle's end, without the cycle: the fastest of several runs."""
    runs = []
    for _ in range(NUM_TIMED_RUNS):
        stats = SpecDecodingStats(method="ngram", batch_size=1)
        with listening(), loop.begin_call(stats, "model") as progress:
            progress.end_prefill()
            began = process_time()
            for _ in range(NUM_TIMED_CYCLES):
                stats.count(num_nodes=5, max_depth=5, num_accepted=2, num_committed=3)
                progress.end_cycle()
            runs.append((process_time() - began) / NUM_TIMED_CYCLES)
    return min(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # The lines are made, and written nowhere.
    getLogger("hf_specdec.metrics").addHandler(NullHandler())
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    figures, cycle = measure(args)
    table = Table("side", "CPU time / no bookkeeping", "fastest", "us a cycle", "of a cycle")
    for row in figures:
        ratio = "{:.3f} ({:.3f}-{:.3f})".format(*row.ratio)
        numbers = (f"{row.fastest:.3f}", f"{row.microseconds:.2f}", f"{100 * row.share:.2f} %")
        table.add_row(row.side, ratio, *numbers)
    console = Console()
    console.print(table)
    console.print(f"A cycle takes {1000 * cycle:.2f} ms. The last two columns are of the calls to listeners alone.")
    if args.json:
        settings = {key: str(value) for key, value in vars(args).items() if key != "json"}
        environment = describe_environment("cpu", torch.float32)
        report = {"environment": environment, "settings": settings, "rows": [asdict(row) for row in figures]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
