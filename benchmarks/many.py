"""Many requests of spread lengths: batches of fixed size beside batches that are kept full.

    python benchmarks/many.py                                      # 64 requests in 8 places, some minutes
    python benchmarks/many.py --quick                              # 12 requests in 3 places
    python benchmarks/many.py --methods ngram eagle3 --stock --json out.json
    python benchmarks/many.py --model PATH --spec-model HEAD --methods eagle3
    python benchmarks/many.py --split --length 8                   # with the time of a forward by its size

Greedy, without end tokens: each request has a number of new tokens of its own, drawn from 16 to 256. In one run the
sides take turns:

- static plain: `generate()` on batches, in the given order; a batch goes on until its longest row has ended
- static METHOD: batches as well, from which rows that have ended leave, with drafts
- refill plain, refill METHOD: `generate_many()`
- stock: transformers' own continuous batching, with `--stock`

Ratios are of wanted tokens per second of process time (`--clock wall` for the time of the clock), to "static plain".
`forwards` are those of the target; those of static plain include the prompts' as all others do.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, thread_time

import torch
from common import demo_prompts, without_end
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from hf_specdec import Speculator, demo, generate_many, load_speculator
from hf_specdec.loop.loop import DecodingLoop
from hf_specdec.machine import describe_environment
from hf_specdec.method import methods


_SETTINGS = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@dataclass
class Figures:
    """One side.

    Attributes:
        forwards (`int`): Of the target, in the last round.
        seconds (`list[float]`): Of each round.
        ratio (`float`): Wanted tokens per second, to those of static plain; median over the rounds.
        identical (`bool`): All texts are those of static plain.
    """

    side: str
    forwards: int
    seconds: list[float]
    ratio: float = 1.0
    identical: bool = True


Texts = list[list[int]]
Side = Callable[[], tuple[Texts, int]]


def static_plain(model: PreTrainedModel, requests: list[dict], places: int) -> tuple[Texts, int]:
    texts, forwards = [], 0
    for batch in _batches(requests, places):
        ids = torch.tensor([own["input_ids"] for own in batch])
        longest = max(request["max_new_tokens"] for request in batch)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=longest, **_SETTINGS)
        news = output[:, -longest:].tolist()
        texts += [new[: request["max_new_tokens"]] for new, request in zip(news, batch)]
        forwards += longest
    return texts, forwards


def many(
    model: PreTrainedModel, requests: list[dict], places: int, speculator: Speculator | None, refills: bool
) -> tuple[Texts, int]:
    texts, forwards = [], 0
    for batch in [requests] if refills else _batches(requests, places):
        drafts = {} if speculator is None else {"assistant": speculator}
        results = generate_many(model, batch, places, in_order=True, **_SETTINGS, **drafts)
        texts += [result.tokens for result in results]
        forwards += results.stats.num_target_forwards
    return texts, forwards


def stock(model: PreTrainedModel, requests: list[dict], places: int) -> tuple[Texts, int]:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    most = max(len(request["input_ids"]) + request["max_new_tokens"] for request in requests)
    page = 256
    config = ContinuousBatchingConfig(
        num_blocks=2 * places * (most // page + 1), max_batch_tokens=1024, max_requests_per_batch=places
    )
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=most)
    found: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=config
    ) as manager:
        names = [
            manager.add_request(request["input_ids"], max_new_tokens=request["max_new_tokens"]) for request in requests
        ]
        while len(found) < len(names):
            result = manager.get_result(timeout=5)
            if result is not None and result.is_finished():
                found[result.request_id] = result.generated_tokens
            elif result is None and not manager.is_running():
                raise RuntimeError("its thread has ended")
    return [found[name] for name in names], 0


@contextmanager
def forwards_by_size() -> Iterator[dict[tuple[int, int], list[tuple[float, int]]]]:
    """For each number of rows and of nodes a row the seconds of the verifications, and the slots that they read."""
    found, verify = defaultdict(list), DecodingLoop.verify

    def timed(loop, step, draft):
        began = thread_time()
        output = verify(loop, step, draft)
        found[len(step.rows), draft.size + 1].append((thread_time() - began, loop.target.cache.plan.columns))
        return output

    DecodingLoop.verify = timed
    try:
        yield found
    finally:
        DecodingLoop.verify = verify


def show_split(sides: dict[str, Side], console: Console) -> None:
    """Shows the time of the target's forwards, by rows and nodes, for each side of this package's loop."""
    table = Table("side", "rows x nodes", "forwards", "ms of a forward", "slots", "s of all", title="Verifications")
    for name, side in sides.items():
        with forwards_by_size() as found:
            side()
        for (rows, nodes), timed in sorted(found.items()):
            seconds, slots = map(sum, zip(*timed))
            mean = f"{1e3 * seconds / len(timed):.1f}", f"{slots / len(timed):.0f}", f"{seconds:.2f}"
            table.add_row(name, f"{rows} x {nodes}", str(len(timed)), *mean)
        num_nodes = sum(rows * nodes * len(timed) for (rows, nodes), timed in found.items())
        table.add_row(name, f"{num_nodes} in all", str(sum(map(len, found.values()))), "", "", "", end_section=True)
    console.print(table)


def _batches(requests: list[dict], places: int) -> list[list[dict]]:
    return [requests[first : first + places] for first in range(0, len(requests), places)]


def prompts_for(path: str | None, count: int, seed: int) -> list[list[int]]:
    """Beginnings of Python sources of one length: 30 tokens of the demo's target, or what a model at `path` makes of
    them."""
    prompts = demo_prompts(count, 30, seed)
    if path is None:
        return prompts.tolist()
    encoded = AutoTokenizer.from_pretrained(path)(demo.load_tokenizer().batch_decode(prompts))["input_ids"]
    return [ids[: min(map(len, encoded))] for ids in encoded]


def measure(sides: dict[str, Side], rounds: int, clock: Callable[[], float], console: Console) -> list[Figures]:
    figures: dict[str, Figures] = {}
    texts: dict[str, Texts] = {}
    for number in range(rounds):
        for name, side in sides.items():
            began = clock()
            try:
                texts[name], forwards = side()
            except Exception as error:
                # A side that does not run here is left out.
                if name != "stock":
                    raise
                console.print(f"stock does not run here: {type(error).__name__}: {error}")
                continue
            figures.setdefault(name, Figures(name, forwards, [])).seconds.append(round(clock() - began, 3))
            console.print(f"round {number + 1}, {name}: {figures[name].seconds[-1]:.1f} s", style="dim")
    base = figures["static plain"]
    for own in figures.values():
        own.ratio = round(median(plain / mine for plain, mine in zip(base.seconds, own.seconds)), 3)
        own.identical = texts[own.side] == texts["static plain"]
    return list(figures.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="12 requests of up to 48 tokens in 3 places.")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--places", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs=2, default=[16, 256], help="New tokens, from and to.")
    parser.add_argument("--methods", nargs="*", default=["ngram", "eagle3"])
    parser.add_argument("--model", help="A target in the place of the demo's.")
    parser.add_argument("--spec-model", help="Its drafter.")
    parser.add_argument("--stock", action="store_true", help="transformers' own continuous batching, too.")
    parser.add_argument("--length", type=int, help="Draft tokens of a cycle, in the place of the method's own number.")
    parser.add_argument("--split", action="store_true", help="The time of forwards by their size, too, in one round.")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--clock", choices=("process", "wall"), default="process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="File for the figures.")
    options = parser.parse_args()
    if options.quick:
        options.requests, options.places, options.lengths = 12, 3, [4, 48]
    torch.set_num_threads(1)
    draw = random.Random(options.seed)
    target = demo.load_target() if options.model is None else AutoModelForCausalLM.from_pretrained(options.model)
    prompts = prompts_for(options.model, options.requests, options.seed)
    model = without_end(target.eval())
    requests = [{"input_ids": ids, "max_new_tokens": draw.randint(*options.lengths)} for ids in prompts]
    places = options.places

    def joined(speculator: Speculator | None, refills: bool) -> Side:
        return lambda: many(model, requests, places, speculator, refills)

    sides: dict[str, Side] = {"static plain": lambda: static_plain(model, requests, places)}
    sides["refill plain"] = joined(None, refills=True)
    for method in options.methods:
        path = options.spec_model
        if options.model is None and methods()[method].demo:
            path = demo.drafter_path(method)
        given = {"model": path, "num_speculative_tokens": options.length}
        given = {name: value for name, value in given.items() if value is not None}
        speculator = load_speculator(model, method, **given)
        sides[f"static {method}"] = joined(speculator, refills=False)
        sides[f"refill {method}"] = joined(speculator, refills=True)
    if options.stock:
        sides["stock"] = lambda: stock(model, requests, places)
    console = Console()
    clock = process_time if options.clock == "process" else perf_counter
    figures = measure(sides, options.rounds, clock, console)
    table = Table("side", "forwards", "seconds", "ratio", "identical text", title="Wanted tokens per second")
    for own in figures:
        seconds = " ".join(f"{value:.1f}" for value in own.seconds)
        table.add_row(
            own.side, str(own.forwards or "-"), seconds, f"{own.ratio:.2f}", "yes" if own.identical else "no"
        )
    console.print(table)
    of = {own.side: own for own in figures}
    for method in options.methods:
        static, refill = of[f"static {method}"], of[f"refill {method}"]
        ratio = median(a / b for a, b in zip(static.seconds, refill.seconds))
        console.print(
            f"{method}: refill {ratio:.2f} times static, {static.forwards / refill.forwards:.2f} by forwards"
        )
    if options.split:
        show_split({name: side for name, side in sides.items() if name not in ("static plain", "stock")}, console)
    if options.json is not None:
        wanted = sum(request["max_new_tokens"] for request in requests)
        content = {
            "environment": describe_environment("cpu", torch.float32),
            "clock": options.clock,
            "requests": options.requests,
            "places": places,
            "wanted_tokens": wanted,
            "sides": list(map(asdict, figures)),
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
