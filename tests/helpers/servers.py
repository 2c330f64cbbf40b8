"""A server on the loopback interface, in a thread."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")

from hf_specdec import SpeculativeBatchingManager, demo  # noqa: E402
from hf_specdec.serving.app import LOOPBACK, build_app  # noqa: E402
from hf_specdec.serving.service import Limits, Service  # noqa: E402
from tests.helpers.methods import demo_target, demo_tokenizer  # noqa: E402


TEMPLATE = "{% for message in messages %}# {{ message.content }}\n{% endfor %}"

# One that takes tools, without showing them.
WITH_TOOLS = "{% for tool in tools or [] %}{% endfor %}{% for message in messages %}{{ message.content }}{% endfor %}"

PROMPT = "def read(path):"


class Running:
    """A server, and its clients."""

    def __init__(self, service: Service, address: str):
        self.service, self.address = service, address
        self.client = httpx.Client(base_url=address, timeout=60)

    def complete(self, prompt: Any = PROMPT, **fields) -> Any:
        fields = {"prompt": prompt, "temperature": 0, "max_tokens": 12, **fields}
        return self.client.post("/v1/completions", json=fields)

    def text(self, *args, **fields) -> str:
        return _content(self.complete(*args, **fields))["choices"][0]["text"]

    def error(self, *args, status: int = 400, **fields) -> str:
        return _content(self.complete(*args, **fields), status)["error"]["message"]

    def chat(self, messages: Any = "x", **fields) -> Any:
        """An answer to messages, or to a text of the user."""
        return self.client.post("/v1/chat/completions", json=_chat(messages, fields))

    def chat_text(self, *args, **fields) -> str:
        return _content(self.chat(*args, **fields))["choices"][0]["message"]["content"]

    def chat_error(self, *args, **fields) -> str:
        return _content(self.chat(*args, **fields), 400)["error"]["message"]

    def stream(self, prompt: Any = PROMPT, **fields) -> list[dict[str, Any]]:
        fields = {"prompt": prompt, "temperature": 0, "max_tokens": 12, **fields}
        return self._events("/v1/completions", fields)

    def stream_chat(self, messages: Any = "x", **fields) -> list[dict[str, Any]]:
        return self._events("/v1/chat/completions", _chat(messages, fields))

    def _events(self, path: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        with self.client.stream("POST", path, json={**fields, "stream": True}) as answer:
            *lines, last = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert last == "[DONE]"
        return [json.loads(line) for line in lines]

    @contextmanager
    def steps(self, number: int) -> Iterator[threading.Semaphore]:
        """Inside, the engine makes so many steps, and one more for each release; after it as many as it likes."""
        engine, allowed = self.service.manager._engine, threading.Semaphore(number)
        step = engine.step

        def allowed_step():
            assert allowed.acquire(timeout=60), "no step was allowed"
            return step()

        engine.step = allowed_step
        try:
            yield allowed
        finally:
            engine.step = step
            allowed.release(1 << 20)


def _content(answer: Any, status: int = 200) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return answer.json()


def _chat(messages: Any, fields: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return {"messages": messages, "temperature": 0, "max_tokens": 8, **fields}


@contextmanager
def serving(
    batch_size: int = 4,
    api_key: str | None = None,
    template: str = TEMPLATE,
    arguments: dict[str, Any] | None = None,
    origins: tuple[str, ...] = (),
    **limits,
) -> Iterator[Running]:
    """Serves the demo's target, drafting with ngram; `arguments` are those of all requests."""
    tokenizer = demo.load_tokenizer()
    tokenizer.chat_template = template
    drafting = {"spec_method": "ngram", "num_speculative_tokens": 4}
    manager = SpeculativeBatchingManager(
        demo_target(),
        batch_size=batch_size,
        tokenizer=tokenizer,
        seed=1,
        **{"eos_token_id": None, "pad_token_id": 0, **drafting, **(arguments or {})},
    )
    service = Service(manager, "demo", Limits(**limits))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            build_app(service, api_key, LOOPBACK, origins), log_level="warning", timeout_graceful_shutdown=5
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        running = Running(service, f"http://127.0.0.1:{listening.getsockname()[1]}")
        try:
            wait_until(lambda: server.started)
            yield running
        finally:
            running.client.close()
            server.should_exit = True
            thread.join()


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def plain(prompt: str, length: int, **settings) -> str:
    """What plain generation says."""
    tokenizer = demo_tokenizer()
    ids = tokenizer(prompt)["input_ids"]
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": length, **settings}
    tokens = demo_target().generate(torch.tensor([ids]), **settings)[0, len(ids) :]
    return tokenizer.decode(tokens, skip_special_tokens=True)
