"""The server under load: the same requests with their drafts and without, at several numbers of clients.

    python benchmarks/serving.py                                 # the demo's target, some minutes
    python benchmarks/serving.py --quick
    python benchmarks/serving.py --method eagle3 --clients 1 8 --json out.json
    python benchmarks/serving.py --model PATH --method ngram

One server on the loopback interface. Clients send greedy completions of spread lengths, each the next one as soon as
it has its answer. In every round the two sides take turns: requests as they are, and with `"spec_method": "off"`.
Ratios are of generated tokens per second, drafted to plain, by the time of the clock; latencies are of whole answers,
the waiting included. Clients share the process, and so the cores, with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, sleep

import httpx
import uvicorn
from common import demo_prompts
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import SpeculativeBatchingManager, demo, load_speculator
from hf_specdec.machine import describe_environment
from hf_specdec.serving.app import build_app
from hf_specdec.serving.service import Limits, Service


SIDES = {"drafted": {}, "plain": {"spec_method": "off"}}


@dataclass
class Figures:
    """One number of clients.

    Attributes:
        tokens_per_second (`dict[str, list[float]]`): Of each side, by round.
        latency (`dict[str, list[float]]`): Seconds to a whole answer: median and 95th percentile of all rounds.
        ratio (`float`): Tokens per second drafted, to those plain; median over the rounds.
        identical (`bool`): All texts are the same.
    """

    clients: int
    tokens_per_second: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    latency: dict[str, list[float]] = field(default_factory=dict)
    ratio: float = 1.0
    identical: bool = True


@contextmanager
def served(model, tokenizer, speculator, places: int, waiting: int) -> Iterator[str]:
    """The address of a server."""
    manager = SpeculativeBatchingManager(
        model, batch_size=places, tokenizer=tokenizer, eos_token_id=None, pad_token_id=0, assistant=speculator
    )
    app = build_app(Service(manager, "model", Limits(max_waiting=waiting)))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        while not server.started:
            sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


async def ask_all(address: str, requests: list[dict], clients: int) -> tuple[list[str], list[float]]:
    """Texts of all requests, and the seconds that each took."""
    waiting, texts, seconds = list(enumerate(requests))[::-1], [""] * len(requests), [0.0] * len(requests)

    async def client(session: httpx.AsyncClient) -> None:
        while waiting:
            number, request = waiting.pop()
            began = perf_counter()
            answer = (await session.post("/v1/completions", json=request)).raise_for_status().json()
            seconds[number] = perf_counter() - began
            texts[number] = answer["choices"][0]["text"]

    async with httpx.AsyncClient(base_url=address, timeout=None) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return texts, seconds


def measure(address: str, requests: list[dict], clients: int, rounds: int, console: Console) -> Figures:
    figures, texts = Figures(clients), {}
    latencies: dict[str, list[float]] = {side: [] for side in SIDES}
    num_tokens = sum(request["max_tokens"] for request in requests)
    for number in range(rounds):
        # A different side begins in each round.
        for side in sorted(SIDES, reverse=bool(number % 2)):
            began = perf_counter()
            texts[side], seconds = asyncio.run(ask_all(address, [{**own, **SIDES[side]} for own in requests], clients))
            figures.tokens_per_second[side].append(round(num_tokens / (perf_counter() - began), 1))
            latencies[side] += seconds
        console.print(f"{clients} clients, round {number + 1}", style="dim")
    drafted, plain = (figures.tokens_per_second[side] for side in SIDES)
    figures.ratio = round(median(mine / base for mine, base in zip(drafted, plain)), 3)
    figures.latency = {
        side: [round(median(all_), 3), round(quantiles(all_, n=20)[-1], 3)] for side, all_ in latencies.items()
    }
    figures.identical = texts["drafted"] == texts["plain"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or repo id; left out: the demo's target")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--spec-model")
    parser.add_argument("-k", type=int, help="fixed length of drafts; left out: what pays")
    parser.add_argument("--places", type=int, default=8)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.clients, options.requests, options.rounds = [1, 4], 8, 1
    console = Console()
    if options.model is None:
        model, tokenizer = demo.load_target(), demo.load_tokenizer()
    else:
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(options.model),
            AutoTokenizer.from_pretrained(options.model),
        )
    settings = {"method": options.method, "model": options.spec_model, "num_speculative_tokens": options.k}
    if options.model is None and options.spec_model is None:
        settings |= {name: value for name, value in demo.settings().get(options.method, {}).items() if name == "model"}
    speculator = load_speculator(model, **{name: value for name, value in settings.items() if value is not None})
    texts = demo.load_tokenizer().batch_decode(demo_prompts(options.requests, 30))
    lengths = random.Random(0)
    requests = [{"prompt": text, "temperature": 0, "max_tokens": lengths.randint(8, 128)} for text in texts]
    with served(model.eval(), tokenizer, speculator, options.places, options.requests) as address:
        # The first requests find out what drafts and verifications cost.
        asyncio.run(ask_all(address, requests[:4], 1))
        figures = [measure(address, requests, clients, options.rounds, console) for clients in options.clients]
    table = Table(
        "clients", "plain tokens/s", "drafted", "ratio", "latency plain, p50 / p95 s", "drafted", "identical"
    )
    for own in figures:
        speeds = [f"{median(own.tokens_per_second[side]):.0f}" for side in ("plain", "drafted")]
        waits = ["{:.2f} / {:.2f}".format(*own.latency[side]) for side in ("plain", "drafted")]
        table.add_row(str(own.clients), *speeds, f"{own.ratio:.2f}", *waits, "yes" if own.identical else "NO")
    console.print(table)
    if options.json is not None:
        report = {"environment": describe_environment(model.device, model.dtype), "method": options.method}
        report |= {"places": options.places, "requests": options.requests, "rows": list(map(asdict, figures))}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
