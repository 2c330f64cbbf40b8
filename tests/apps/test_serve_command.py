"""`hf-specdec serve`: where it listens, what it refuses before it loads anything, and how it ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest
from typer.testing import CliRunner

from hf_specdec import cli
from tests.helpers.levels import full, in_full
from tests.helpers.paths import ROOT
from tests.helpers.servers import PROMPT, httpx, uvicorn, wait_until


def serve(*arguments: str):
    result = CliRunner().invoke(cli.app, ["serve", *arguments])
    return result.exit_code, " ".join(result.stderr.split())


def is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@full
def test_signals_end_open_answers_first():
    command = [sys.executable, "-m", "hf_specdec", "serve", "--port", "0", "--spec-method", "ngram", "-k", "4"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    # Whatever happens, nobody waits for ever; on a busy machine the imports alone take minutes.
    timer = threading.Timer(600, process.kill)
    timer.start()
    try:
        address = next(found[0] for line in process.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        wait_until(lambda: is_up(address), 300)
        fields = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "stream": True}
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


@pytest.mark.parametrize("host", ["127.0.0.2", "0.0.0.0", *in_full("localhost", "127.1", "::1")])
def test_hosts(monkeypatch, host):
    statuses, is_open = [], host == "0.0.0.0"
    address = "http://[::1]" if host == "::1" else f"http://{host}"

    def run(server, sockets):
        async def ask() -> None:
            transport = httpx.ASGITransport(server.config.app)
            async with httpx.AsyncClient(transport=transport, base_url=url) as client:
                for headers in ({}, {"host": "stranger.example"}):
                    statuses.append((await client.get("/v1/models", headers=headers)).status_code)

        url = f"{address}:{sockets[0].getsockname()[1]}"
        statuses.append(url)
        asyncio.run(ask())

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    code, text = serve("--host", host, "--port", "0", "--spec-method", "ngram")
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
    for arguments, message in (
        (["--api-key", " "], "The API key is empty"),
        (["--spec-method", "nothing"], "nothing"),
    ):
        code, text = serve(*arguments)
        assert (code, message in text) == (2, True), arguments
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, text = serve()
    assert (code, "pip install fastapi uvicorn prometheus-client" in text) == (2, True)
