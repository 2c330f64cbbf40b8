"""Many requests of spread lengths: batches of fixed size beside batches that are kept full, and a server under load.

    python benchmarks/many.py                                      # 64 requests in 8 places, some minutes
    python benchmarks/many.py --quick                              # 12 requests in 3 places
    python benchmarks/many.py --methods ngram eagle3 --rounds 3 --json many.json
    python benchmarks/many.py --model PATH --methods eagle3 --spec-model HEAD
    python benchmarks/many.py --clients 1 4 16                     # by `hf-specdec serve`, with this many clients

Greedy, without end tokens: each request has a number of new tokens of its own, drawn from 16 to 256. In one run the
sides take turns:

- plain: `generate()` on batches, in the given order; a batch goes on until its longest row has ended
- transformers: its own continuous batching
- none, METHOD: `generate_many()`, in which the next request takes the place of one that has ended
- METHOD, fixed batches: rows that have ended leave their batch, and no others come

With `--clients` a server on the loopback interface answers completions: each client sends the next one as soon as it
has its answer. "plain" is then the same server with `"spec_method": "off"`. Ratios are of wanted tokens per second of
process time, with `--clients` of the clock on the wall.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time, sleep
from typing import Any

import torch
from common import CONSOLE, NONE, PLAIN, Row, beside, demo_prompts, in_turn, show, without_end, write_report
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from hf_specdec import SpeculativeBatchingManager, Speculator, demo, generate_many, load_speculator
from hf_specdec.machine import describe_environment
from hf_specdec.method import methods


SETTINGS = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

Texts = list[list[int]]
Requests = list[dict[str, Any]]
# Makes all calls; texts, and the target's forwards where they are counted.
Side = Callable[[], tuple[Texts, int | None]]


def plain(model: PreTrainedModel, requests: Requests, places: int) -> tuple[Texts, int]:
    """`generate()` on fixed batches."""
    texts, forwards = [], 0
    for batch in batches(requests, places):
        ids = torch.tensor([request["input_ids"] for request in batch])
        longest = max(request["max_new_tokens"] for request in batch)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=longest, **SETTINGS)
        texts += [new[: own["max_new_tokens"]] for new, own in zip(output[:, -longest:].tolist(), batch)]
        forwards += longest
    return texts, forwards


def ours(
    model: PreTrainedModel, requests: Requests, places: int, speculator: Speculator, refills: bool
) -> tuple[Texts, int]:
    """`generate_many()` on all requests, or on fixed batches of them."""
    texts, forwards = [], 0
    for batch in [requests] if refills else batches(requests, places):
        results = generate_many(model, batch, places, in_order=True, **SETTINGS, assistant=speculator)
        texts += [result.tokens for result in results]
        forwards += results.stats.num_target_forwards
    return texts, forwards


def continuous(model: PreTrainedModel, requests: Requests, places: int) -> tuple[Texts, None]:
    """transformers' own continuous batching."""
    most, page = max(len(request["input_ids"]) + request["max_new_tokens"] for request in requests), 256
    config = ContinuousBatchingConfig(
        num_blocks=2 * places * (most // page + 1), max_batch_tokens=1024, max_requests_per_batch=places
    )
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=most)
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=config
    ) as manager:
        names = [manager.add_request(own["input_ids"], max_new_tokens=own["max_new_tokens"]) for own in requests]
        texts: dict[str, list[int]] = {}
        while len(texts) < len(names):
            result = manager.get_result(timeout=5)
            if result is not None and result.is_finished():
                texts[result.request_id] = result.generated_tokens
            elif result is None and not manager.is_running():
                raise RuntimeError("its thread has ended")
    return [texts[name] for name in names], None


def batches(requests: Requests, places: int) -> list[Requests]:
    return [requests[first : first + places] for first in range(0, len(requests), places)]


def measure(sides: dict[str, Side], rounds: int) -> list[Row]:
    seconds: dict[str, list[float]] = {}
    found: dict[str, tuple[Texts, int | None]] = {}
    for number in range(rounds):
        for name in in_turn(list(sides), number):
            began = process_time()
            try:
                found[name] = sides[name]()
            except Exception as error:
                # What does not run here is left out, if it is none of ours.
                if not name.startswith("transformers"):
                    raise
                CONSOLE.print(f"{name} does not run here: {type(error).__name__}: {error}")
                continue
            seconds.setdefault(name, []).append(process_time() - began)
    rows = []
    for name in seconds:
        texts, forwards = found[name]
        same = texts == found[PLAIN][0]
        facts = {"forwards": forwards, "seconds": median(seconds[name])}
        rows.append({"side": name, **facts, **beside(name, seconds), "same_texts": same})
    return rows


# ------------------------------------------------------------------------------------------------------------ a server


@contextmanager
def served(model: PreTrainedModel, tokenizer: Any, speculator: Speculator, places: int, waiting: int) -> Iterator[str]:
    """The address of a server."""
    import uvicorn

    from hf_specdec.serving.app import build_app
    from hf_specdec.serving.service import Limits, Service

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


async def ask_all(address: str, requests: Requests, clients: int) -> tuple[list[str], list[float]]:
    """Texts of all requests, and the seconds that each took."""
    import httpx

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


def under_load(address: str, requests: Requests, method: str, clients: int, rounds: int) -> list[Row]:
    """Rows of the drafted and the plain side; latencies are of whole answers, the waiting included."""
    asked = {PLAIN: [{**own, "spec_method": "off"} for own in requests], method: requests}
    seconds, latencies, texts = {name: [] for name in asked}, {name: [] for name in asked}, {}
    for number in range(rounds):
        for name in in_turn(list(asked), number):
            began = perf_counter()
            texts[name], taken = asyncio.run(ask_all(address, asked[name], clients))
            seconds[name].append(perf_counter() - began)
            latencies[name] += taken
    num_tokens = sum(request["max_tokens"] for request in requests)
    return [
        {
            "clients": clients,
            "side": name,
            "tokens_per_second": num_tokens / median(seconds[name]),
            "to_plain": beside(name, seconds)["to_plain"],
            "latency_p50": median(latencies[name]),
            "latency_p95": quantiles(latencies[name], n=20)[-1],
            "same_texts": texts[name] == texts[PLAIN],
        }
        for name in asked
    ]


# ------------------------------------------------------------------------------------------------------------- command


def drafter(model: PreTrainedModel, method: str, options: argparse.Namespace) -> Speculator:
    path = options.spec_model
    if options.model is None and methods()[method].demo:
        path = demo.drafter_path(method)
    return load_speculator(model, method, **({} if path is None else {"model": path}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="12 requests of up to 48 tokens in 3 places")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--places", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs=2, default=[16, 256], help="new tokens, from and to")
    parser.add_argument("--methods", nargs="*", default=["ngram", "eagle3"])
    parser.add_argument("--model", help="a target in the place of the demo's")
    parser.add_argument("--spec-model", help="its drafter")
    parser.add_argument("--clients", type=int, nargs="+", help="measure a server, with this many clients")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    if options.quick:
        options.requests, options.places, options.lengths = 12, 3, [4, 48]
    torch.set_num_threads(1)
    model, tokenizer = demo.load_target(), demo.load_tokenizer()
    prompts = demo_prompts(options.requests, 30)
    texts, ids = tokenizer.batch_decode(prompts), prompts.tolist()
    if options.model is not None:
        model = AutoModelForCausalLM.from_pretrained(options.model)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        encoded = tokenizer(texts)["input_ids"]
        ids = [prompt[: min(map(len, encoded))] for prompt in encoded]
    model, places, draw = without_end(model.eval()), options.places, random.Random(0)
    lengths = [draw.randint(*options.lengths) for _ in ids]
    rows: list[Row] = []
    if options.clients is None:
        requests = [{"input_ids": prompt, "max_new_tokens": new} for prompt, new in zip(ids, lengths)]
        sides: dict[str, Side] = {PLAIN: partial(plain, model, requests, places)}
        for method in (NONE, *options.methods):
            speculator = drafter(model, method, options)
            sides[method] = partial(ours, model, requests, places, speculator, refills=True)
            sides[f"{method}, fixed batches"] = partial(ours, model, requests, places, speculator, refills=False)
        sides["transformers: continuous batching"] = partial(continuous, model, requests, places)
        rows = measure(sides, options.rounds)
    else:
        requests = [{"prompt": text, "temperature": 0, "max_tokens": new} for text, new in zip(texts, lengths)]
        for method in options.methods:
            with served(model, tokenizer, drafter(model, method, options), places, len(requests)) as address:
                # The first requests find out what drafts and verifications cost.
                asyncio.run(ask_all(address, requests[:4], 1))
                for clients in options.clients:
                    rows += under_load(address, requests, method, clients, options.rounds)
    show(rows)
    facts = {"requests": options.requests, "places": places, "wanted_tokens": sum(lengths)}
    write_report(options.json, rows, describe_environment("cpu", model.dtype), **facts)


if __name__ == "__main__":
    main()
