"""What the server refuses, and to whom; how it goes on when clients leave, requests fail, or the model does."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress

import psutil
import pytest
from typer.testing import CliRunner

from hf_specdec import SpecDecError, SpeculativeBatchingManager, cli, demo
from hf_specdec.serving.app import build_app
from hf_specdec.serving.service import UNAVAILABLE, Limits, Service
from tests.helpers.levels import full, in_full, when_slow
from tests.helpers.methods import demo_target
from tests.helpers.paths import ROOT
from tests.helpers.servers import PROMPT, Running, httpx, plain, serving, uvicorn, wait_until


LONG = {"max_tokens": 800, "spec_method": "off", "temperature": 0}


@pytest.fixture(scope="module")
def running():
    with serving(max_prompt_tokens=200, max_new_tokens=400, max_body_bytes=4000) as running:
        yield running


REFUSED = [
    ({"spec_model": "user/head"}, "`spec_model` cannot be honoured. The drafter is chosen when the server starts"),
    ({"spec_method": "ngram"}, "spec_method.*'off'"),
    ({"num_speculative_tokens": -1}, "num_speculative_tokens: .*greater than or equal to 0"),
    ({"n": 35, "prompt": ["x", "y"]}, "at most 68 answers here, got 70"),
    ({"best_of": 2}, "`best_of` other than `n`"),
    ({"echo": True, "logprobs": 1}, "`echo` with `logprobs`"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty: .*0.01"),
    ({"min_tokens": 401}, "At most 12 tokens are generated, and at least 401"),
    ({"logit_bias": {"x": 1}}, "`logit_bias` needs token ids"),
    ({"logit_bias": {"999999999": 1}}, "`logit_bias`: '999999999' is no token"),
    ({"prompt": ["x", ""]}, "^prompt: it must be a text, a list of token ids, or a list of such prompts"),
    ({"prompt": [True]}, "^prompt: it must be"),
    ({"prompt": [1 << 40]}, "all from 0 to"),
    ({"prompt": [5] * 201}, "201 tokens, more than the 200"),
]
REFUSED_IN_CHATS = [
    ({"chat_template": "{{ 1 }}"}, "`chat_template` cannot be honoured"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "cannot have 'chat_template'"),
    ({"top_logprobs": 2}, "`top_logprobs` needs `logprobs`"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content.0.type: Input should be 'text'"),
]


def test_fields_that_are_refused(running):
    for fields, message in REFUSED:
        assert re.search(message, running.error(**{"prompt": PROMPT, **fields})), fields
    for fields, message in REFUSED_IN_CHATS:
        assert message in running.chat_error(**{"messages": "x", **fields}), fields
    assert running.service.num_open == 0


def test_bodies_and_paths_that_are_refused(running):
    client, path = running.client, "/v1/completions"
    assert "model_not_found" in running.complete(model="other").text
    broken = client.post(path, content="{", headers={"content-type": "application/json"})
    assert broken.status_code == 400
    assert "The body is no JSON: Expecting property name" in broken.json()["error"]["message"]
    assert "must be a JSON object" in client.post(path, json=[1]).json()["error"]["message"]
    assert client.post(path, content='{"prompt": "x"}').status_code == 400
    assert running.error("x" * 5000, status=413) == "A body has at most 4000 bytes."
    unknown = client.post("/load_model", json={"model": "other"})
    assert (unknown.status_code, unknown.json()["error"].keys()) == (404, {"message", "type", "param", "code"})
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == "demo"
    assert client.get("/v1/models/demo").json() == model
    assert client.get("/v1/models/user/other").json()["error"]["code"] == "model_not_found"
    # A page in the user's browser may have got a name of its own for 127.0.0.1.
    stranger = "stranger.example"
    for host in (stranger, f"127.0.0.1.{stranger}", f"[::1].{stranger}:80", "[::2]", "127.0.0.1:x"):
        refused = client.get("/v1/models", headers={"host": host})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_host"), host
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]", "[::1]:8000"):
        assert client.get("/v1/models", headers={"host": host}).status_code == 200, host


def test_lengths_are_cut_and_counted(running, monkeypatch):
    before = running.service.outcomes["answered"]
    answer = running.complete(max_tokens=10**9).json()
    assert answer["usage"]["completion_tokens"] == 400
    assert answer["choices"][0]["finish_reason"] == "length"
    metrics = running.client.get("/metrics").text
    assert f'hf_specdec_server_requests_total{{outcome="answered"}} {before + 1:.1f}' in metrics
    assert 'num_accepted_tokens_total{method="ngram",model_name="demo"}' in metrics
    assert running.client.get("/health").json() == {"status": "ok"}
    monkeypatch.setattr(running.service, "_positions", 20)
    assert "20 positions, and the prompt has 20 tokens" in running.error([5] * 20)
    # An answer without a length of its own gets what is left, and so does one that asks for more.
    for length in (None, 18):
        answer = running.complete(max_tokens=length).json()
        assert (answer["usage"]["total_tokens"], answer["choices"][0]["finish_reason"]) == (20, "length")


def test_api_key_and_pages_of_other_origins(running):
    page = {"Origin": "http://localhost:3000"}
    asks = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert running.client.options("/v1/completions", headers=asks).status_code == 405
    with serving(api_key="secret\n", origins=("http://localhost:3000",)) as other:
        client = other.client
        assert other.error(status=401) == "The API key is missing or wrong."
        assert client.post("/v1/completions", headers={"Authorization": "Bearer other"}).status_code == 401
        for path, status in (("/health", 200), ("/metrics", 401), ("/v1/models", 401)):
            assert client.get(path).status_code == status
        allowed = client.options("/v1/completions", headers=asks)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == page["Origin"]
        assert client.get("/health", headers=page).headers["access-control-allow-origin"] == page["Origin"]
        stranger = client.get("/health", headers={"Origin": "http://stranger.example"})
        assert "access-control-allow-origin" not in stranger.headers
        client.headers["Authorization"] = "Bearer secret"
        assert other.text() == plain(PROMPT, 12)


def request(host: str, body: dict, missing: int = 0) -> bytes:
    """As it is sent, but for so many bytes at its end."""
    sent = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(sent) + missing}\r\n\r\n".encode() + sent


def test_too_many_requests_and_clients_that_leave():
    with serving(batch_size=1, max_waiting=1) as running, running.steps(5) as steps:
        service, fields = running.service, {"prompt": PROMPT, **LONG, "stream": True}
        with running.client.stream("POST", "/v1/completions", json=fields) as first:
            lines = first.iter_lines()
            assert next(lines).startswith("data: ")
            waiting = threading.Thread(target=running.complete, kwargs={"max_tokens": 2})
            waiting.start()
            wait_until(lambda: service.num_open == 2)
            refused = running.complete()
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
        # The first one has left: who waits gets its place, long before its 800 tokens are there.
        wait_until(lambda: service.outcomes["left"] == 1)
        steps.release(9)
        waiting.join()
        # One who wants the whole at once leaves before there is any of it.
        url = httpx.URL(running.address)
        with socket.create_connection((url.host, url.port)) as client:
            client.sendall(request(url.host, {"prompt": PROMPT, **LONG}))
            wait_until(lambda: service.num_open == 1)
        wait_until(lambda: service.num_open == 0)
        steps.release(9)
        wait_until(lambda: not service.manager._open)
        assert service.outcomes == {"left": 2, "answered": 1, "refused": 1}
        steps.release(99)
        assert running.text() == plain(PROMPT, 12)


def test_answers_that_take_too_long():
    with serving(batch_size=1, timeout=0.3) as running:
        with running.service.manager.pause():
            assert running.error(status=504, **LONG) == "The answer has taken more than 0.3 seconds."
        wait_until(lambda: not running.service.manager._open)
        assert running.service.outcomes == {"timeout": 1}


PROMPTS = [prompt.text[-60:] for prompt in demo.prompts()]
NUM_KINDS, LEAVING, AT_A_TIME = 12, 3, 64  # one client in three leaves


def fields_of(kind: int) -> dict:
    """A request of each kind; every third one samples."""
    sampling = {"temperature": 1.0, "seed": kind} if kind % 3 == 2 else {"temperature": 0}
    drafts = [{}, {"num_speculative_tokens": 1}, {"spec_method": "off"}][kind % 3]
    return {"prompt": PROMPTS[kind % len(PROMPTS)], "max_tokens": 3 + 5 * kind, **sampling, **drafts}


async def stay(client: httpx.AsyncClient, number: int, texts: list[str]) -> None:
    fields = {**fields_of(number % NUM_KINDS), "stream": bool(number % 2)}
    while (answer := await client.post("/v1/completions", json=fields)).status_code == 429:
        # Places of those who have left are free when the server has heard of it.
        await asyncio.sleep(0.05)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert not fields["stream"] or lines.pop() == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == texts[number % NUM_KINDS]


async def leave(host: str, port: int, number: int) -> None:
    """Asks, and leaves: some before all of the body was sent, some at once, some after a part of the answer."""
    chance = random.Random(number)
    missing = chance.choice([0, 0, 0, 1, 4000])
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request(host, {**fields_of(number % NUM_KINDS), "max_tokens": 500, "stream": True}, missing))
    await writer.drain()
    for _ in range(0 if missing else chance.choice([0, 1, 9])):
        await reader.readline()
    writer.transport.abort() if chance.random() < 0.5 else writer.close()


async def crowd(running: Running, num_clients: int, texts: list[str]) -> None:
    """Clients that stay, while others leave."""
    limits = httpx.Limits(max_connections=AT_A_TIME, max_keepalive_connections=0)
    places, url = asyncio.Semaphore(AT_A_TIME), httpx.URL(running.address)

    async def come(number: int) -> None:
        async with places:
            await (stay(client, number, texts) if number % LEAVING else leave(url.host, url.port, number))

    async with httpx.AsyncClient(base_url=running.address, timeout=300, limits=limits) as client:
        await asyncio.gather(*map(come, range(num_clients)))


@pytest.mark.parametrize(("batch_size", "num_rounds", "num_clients"), [*in_full((4, 1, 24)), *when_slow((8, 12, 420))])
def test_many_clients_some_of_whom_leave(batch_size, num_rounds, num_clients):
    process, used = psutil.Process(), []
    with serving(batch_size=batch_size) as running:
        service, manager = running.service, running.service.manager
        # What each kind of request gets when nobody else is there; greedy ones what plain generation says.
        texts = [running.text(**fields_of(kind)) for kind in range(NUM_KINDS)]
        for fields in map(fields_of, range(0, NUM_KINDS, 3)):
            assert plain(fields["prompt"], fields["max_tokens"]) in texts
        for _ in range(num_rounds):
            before = Counter(service.outcomes)
            asyncio.run(crowd(running, num_clients, texts))
            wait_until(lambda: service.num_open == 0)
            assert "hf_specdec_server_open_requests 0.0" in running.client.get("/metrics").text
            # Who leaves in the moment of the end was answered, and whose request was never complete is not counted.
            new = service.outcomes - before
            assert new.keys() <= {"answered", "left", "refused"}
            assert num_clients - num_clients // LEAVING <= new["answered"] <= num_clients - new["left"]
            wait_until(lambda: manager._engine.is_idle and not manager._open)
            gc.collect()
            used.append(process.memory_info().rss / 2**20)
        kept = (manager._results, manager._handlers, manager._open, manager._changed)
        assert list(map(len, kept)) == [0] * len(kept)
        # All places are there.
        most = batch_size + service.limits.max_waiting
        assert len(running.complete(n=most, max_tokens=2).json()["choices"]) == most
    # Megabytes. The allocator grows in the first rounds.
    assert num_rounds < 9 or max(used[-4:]) - max(used[2:6]) < 16, [round(one) for one in used]


def test_failures_inside_are_no_mistakes_of_the_client(running, monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("of the model")

    before = running.service.outcomes["failed"]
    with monkeypatch.context() as patch:
        patch.setattr("hf_specdec.loop.judging.Verifier.begin", fail)
        assert running.error(status=500) == "The server has failed at this request. See its log."
    assert running.service.outcomes["failed"] == before + 1
    with monkeypatch.context() as patch:
        patch.setattr(running.service.manager, "encode", lambda prompt: 1 / 0)
        assert running.client.post("/v1/completions", json={"prompt": "x"}).status_code == 500
    assert running.text() == plain(PROMPT, 12)


def test_a_server_whose_model_has_failed():
    with serving() as running:
        # Nobody has asked for what the warm-up has generated.
        assert "generation_tokens_total{" not in running.client.get("/metrics").text
        running.service.manager._engine.step = None
        assert "has failed" in running.error(status=503)
        health = running.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "failed", "message": UNAVAILABLE["failed"]})
        assert "has failed and decodes no more" in running.error(status=503)
        running.service.manager.error = None
        assert running.client.get("/health").json() == {"status": "stopped", "message": UNAVAILABLE["stopped"]}
        assert "has stopped" in running.error(status=503)


def test_the_first_client_finds_all_warm():
    settings = {"tokenizer": demo.load_tokenizer(), "spec_method": "ngram", "batch_size": 3}
    manager = SpeculativeBatchingManager(demo_target(), **settings, max_tokens_in_flight=200)
    service = Service(manager, "demo", Limits())

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get("/health"), await client.post("/v1/completions", json={"prompt": "x"})

    health, refused = asyncio.run(ask())
    assert (health.status_code, health.json()) == (503, {"status": "starting", "message": UNAVAILABLE["starting"]})
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, "The server is starting.")
    try:
        service.start()
        stats = manager._engine.stats
        assert (service.status, stats.num_committed_tokens) == ("ok", 16 + 21 + 26)
        assert stats.num_accepted_tokens > 0
        assert not manager._open
    finally:
        manager.destroy()


@full
def test_models_that_cannot_be_served(monkeypatch):
    monkeypatch.setattr("hf_specdec.loop.judging.Verifier.begin", lambda *args, **kwargs: 1 / 0)
    manager = SpeculativeBatchingManager(demo_target(), tokenizer=demo.load_tokenizer(), spec_method="ngram")
    try:
        with pytest.raises(SpecDecError, match="The server cannot decode: .*division by zero"):
            Service(manager, "demo", Limits()).start()
    finally:
        manager.destroy()


# The command


def serve(*arguments: str):
    result = CliRunner().invoke(cli.app, ["serve", "demo", *arguments])
    return result.exit_code, " ".join(result.stderr.split())


@full
def test_signals_end_open_answers_first():
    command = [sys.executable, "-m", "hf_specdec", "serve", "demo", "--port", "0", "-d", "ngram", "-k", "4"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    # Whatever happens, nobody waits for ever; on a busy machine the imports alone take minutes.
    timer = threading.Timer(600, process.kill)
    timer.start()

    def is_up() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{address}/health", timeout=5).is_success
        return False

    try:
        address = next(found[0] for line in process.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        fields = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "stream": True}
        wait_until(is_up, 300)
        with httpx.stream("POST", f"{address}/v1/completions", json=fields, timeout=300) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        process.stderr.read()
        assert process.wait(300) == 0
    finally:
        timer.cancel()
        process.kill()
        process.stderr.close()


@pytest.mark.parametrize("host", ["127.0.0.2", "0.0.0.0", *in_full("localhost", "::1")])
def test_hosts(monkeypatch, host):
    statuses, is_open = [], host == "0.0.0.0"

    def run(server, sockets):
        async def ask() -> None:
            transport = httpx.ASGITransport(server.config.app)
            async with httpx.AsyncClient(transport=transport, base_url=url) as client:
                for headers in ({}, {"host": "stranger.example"}):
                    statuses.append((await client.get("/v1/models", headers=headers)).status_code)

        url = f"http://{'[::1]' if host == '::1' else host}:{sockets[0].getsockname()[1]}"
        statuses.append(url)
        asyncio.run(ask())

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    code, text = serve("--host", host, "--port", "0", "-d", "ngram")
    if code == 2 and host == "::1":
        pytest.skip("This machine has no IPv6.")
    assert code == 0, text
    assert f"Serving demo at {statuses[0]}" in text
    assert ("Everybody who reaches" in text) == is_open
    assert statuses[1:] == [200, 200 if is_open else 400]


def test_wrong_options(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, text = serve("--port", str(taken.getsockname()[1]))
        assert (code, "Name a free --port" in text) == (2, True)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, text = serve()
    assert (code, "pip install fastapi uvicorn prometheus-client" in text) == (2, True)
