"""Many clients at a time, some of whom leave: nothing is lost, mixed up, or left in the server."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections import Counter

import psutil
import pytest

from hf_specdec import demo
from tests.helpers.servers import Running, httpx, plain, serving, wait_until


PROMPTS = [prompt.text[-60:] for prompt in demo.prompts()]
NUM_KINDS = 12
LEAVING = 3  # one client in so many
AT_A_TIME = 64


def fields_of(kind: int) -> dict:
    """A request of each kind; every third one samples."""
    sampling = {"temperature": 1.0, "seed": kind} if kind % 3 == 2 else {"temperature": 0}
    drafts = [{}, {"num_speculative_tokens": 1}, {"spec_method": "off"}][kind % 3]
    return {"prompt": PROMPTS[kind % len(PROMPTS)], "max_tokens": 3 + 5 * kind, **sampling, **drafts}


async def ask(client: httpx.AsyncClient, number: int) -> tuple[int, str]:
    """The kind of a client's request and its text."""
    kind = number % NUM_KINDS
    fields = {**fields_of(kind), "stream": bool(number % 2)}
    while (answer := await client.post("/v1/completions", json=fields)).status_code == 429:
        # Places of those who have left are free when the server has heard of it.
        await asyncio.sleep(0.05)
    assert answer.status_code == 200, answer.text
    if not fields["stream"]:
        return kind, answer.json()["choices"][0]["text"]
    *lines, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert last == "[DONE]"
    return kind, "".join(json.loads(line)["choices"][0]["text"] for line in lines)


async def leave(host: str, port: int, number: int) -> None:
    """Asks, and leaves at a random moment, in some cases before all of the body was sent."""
    chance = random.Random(number)
    body = json.dumps({**fields_of(number % NUM_KINDS), "max_tokens": 500, "stream": chance.random() < 0.5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    promised = len(body) + chance.choice([0, 0, 0, 1, 4000])
    _, writer = await asyncio.open_connection(host, port)
    writer.write(f"{head}Content-Length: {promised}\r\n\r\n".encode() + body)
    await writer.drain()
    await asyncio.sleep(chance.choice([0, chance.uniform(0, 0.01), chance.uniform(0, 0.3)]))
    writer.transport.abort() if chance.random() < 0.5 else writer.close()


async def crowd(running: Running, num_clients: int) -> list[tuple[int, str]]:
    """What clients get who stay, while others leave."""
    limits = httpx.Limits(max_connections=AT_A_TIME, max_keepalive_connections=0)
    places, url = asyncio.Semaphore(AT_A_TIME), httpx.URL(running.address)

    async def come(number: int) -> tuple[int, str] | None:
        async with places:
            return await (ask(client, number) if number % LEAVING else leave(url.host, url.port, number))

    async with httpx.AsyncClient(base_url=running.address, timeout=300, limits=limits) as client:
        answers = await asyncio.gather(*map(come, range(num_clients)))
    return [answer for answer in answers if answer is not None]


def expected(running: Running) -> list[str]:
    """What each kind of request gets when nobody else is there; greedy ones what plain generation says."""
    texts = [running.text(**fields_of(kind)) for kind in range(NUM_KINDS)]
    for kind in range(0, NUM_KINDS, 3):
        fields = fields_of(kind)
        assert texts[kind] == plain(fields["prompt"], fields["max_tokens"])
    return texts


def check_crowd(running: Running, num_clients: int, texts: list[str]) -> None:
    before = Counter(running.service.outcomes)
    answers = asyncio.run(crowd(running, num_clients))
    assert answers == [(kind, texts[kind]) for kind, _ in answers]
    num_leaving = -(-num_clients // LEAVING)
    assert len(answers) == num_clients - num_leaving
    wait_until(lambda: running.service.num_open == 0)
    assert "hf_specdec_server_open_requests 0.0" in running.client.get("/metrics").text
    # Who leaves in the moment of the end was answered, and whose request never was complete is not counted.
    new = running.service.outcomes - before
    assert new.keys() <= {"answered", "left", "refused"}
    assert new["answered"] >= len(answers)
    assert new["answered"] + new["left"] <= num_clients
    wait_until(lambda: running.service.manager._engine.is_idle and not running.service.manager._names)


def test_a_few_clients():
    with serving(batch_size=4) as running:
        check_crowd(running, 36, expected(running))


@pytest.mark.slow
def test_5000_clients():
    with serving(batch_size=8) as running:
        texts = expected(running)
        check_crowd(running, 5000, texts)
        # All places are there.
        most = 8 + running.service.limits.max_waiting
        assert len(running.complete(n=most, max_tokens=2).json()["choices"]) == most


@pytest.mark.slow
def test_64_clients_again_and_again():
    process, used = psutil.Process(), []
    with serving(batch_size=8) as running:
        texts = expected(running)
        for _ in range(12):
            check_crowd(running, 64, texts)
            gc.collect()
            used.append(process.memory_info().rss / 2**20)
        manager = running.service.manager
        kept = (manager._results, manager._handlers, manager._streaming, manager._rows, manager._cancelled)
        assert list(map(len, kept)) == [0] * len(kept)
    # Megabytes. The allocator grows in the first rounds.
    assert max(used[-4:]) - max(used[2:6]) < 16, [round(one) for one in used]
