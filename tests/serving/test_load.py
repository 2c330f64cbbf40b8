"""Many clients at a time, some of whom leave: nothing is lost, mixed up, or left in the server."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter

import psutil
import pytest

from hf_specdec import demo
from tests.serving.servers import Running, httpx, plain, serving, wait_until


PROMPTS = [prompt.text[-60:] for prompt in demo.prompts()]
NUM_KINDS = 12
LEAVING = 10  # one client in so many


def fields_of(kind: int) -> dict:
    """A request of each kind; every third one samples."""
    sampling = {"temperature": 1.0, "seed": kind} if kind % 3 == 2 else {"temperature": 0}
    drafts = [{}, {"num_speculative_tokens": 1}, {"spec_method": "off"}][kind % 3]
    return {"prompt": PROMPTS[kind % len(PROMPTS)], "max_tokens": 3 + 5 * kind, **sampling, **drafts}


async def ask(client: httpx.AsyncClient, number: int, stays: bool) -> tuple[int, str] | None:
    """The kind of a client's request and its text; `None` for one that leaves."""
    kind = number % NUM_KINDS
    fields = fields_of(kind)
    if not stays:
        fields = {**fields, "max_tokens": 500, "stream": True}
        async with client.stream("POST", "/v1/completions", json=fields) as answer:
            async for _ in answer.aiter_lines():
                return None
    if number % 2:
        answer = await client.post("/v1/completions", json=fields)
        assert answer.status_code == 200, answer.text
        return kind, answer.json()["choices"][0]["text"]
    text, is_complete = "", False
    async with client.stream("POST", "/v1/completions", json={**fields, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            is_complete = is_complete or data == "[DONE]"
            if data and not is_complete:
                text += json.loads(data)["choices"][0]["text"]
    return (kind, text) if is_complete else (kind, "is not complete")


async def crowd(running: Running, num_clients: int) -> list[tuple[int, str]]:
    """What clients get who come at the same time."""
    limits = httpx.Limits(max_connections=num_clients, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=running.address, timeout=300, limits=limits) as client:
        answers = await asyncio.gather(*(ask(client, number, number % LEAVING > 0) for number in range(num_clients)))
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
    # Who leaves in the moment of the end was answered.
    new = running.service.outcomes - before
    assert new.keys() <= {"answered", "left"}
    assert new["answered"] >= len(answers)
    assert new.total() == num_clients
    wait_until(lambda: running.service.manager._engine.is_idle and not running.service.manager._names)


def test_a_few_clients():
    with serving(batch_size=4) as running:
        check_crowd(running, 24, expected(running))


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
