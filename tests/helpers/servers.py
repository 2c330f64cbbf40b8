"""A server on the loopback interface, in a thread."""

from __future__ import annotations

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
pydantic = pytest.importorskip("pydantic")
uvicorn = pytest.importorskip("uvicorn")

from hf_specdec import SpeculativeBatchingManager, demo  # noqa: E402
from hf_specdec.serving.app import LOOPBACK, build_app  # noqa: E402
from hf_specdec.serving.service import Limits, Service  # noqa: E402
from tests.helpers.methods import demo_target  # noqa: E402


TEMPLATE = "{% for message in messages %}# {{ message.content }}\n{% endfor %}"

PROMPT = "def read(path):"


class Reading(pydantic.BaseModel):
    """What a client wants to be told."""

    size: bool
    kind: bool


class Running:
    """A server, and its clients."""

    def __init__(self, service: Service, address: str):
        self.service, self.address = service, address
        self.client = httpx.Client(base_url=address, timeout=60)

    def complete(self, prompt: Any = "def read(path):", **fields) -> Any:
        fields = {"temperature": 0, "max_tokens": 12, **fields}
        return self.client.post("/v1/completions", json={"prompt": prompt, **fields})

    def text(self, *args, **fields) -> str:
        answer = self.complete(*args, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def error(self, *args, status: int = 400, **fields) -> str:
        answer = self.complete(*args, **fields)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]["message"]


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
        try:
            wait_until(lambda: server.started)
            yield Running(service, f"http://127.0.0.1:{listening.getsockname()[1]}")
        finally:
            server.should_exit = True
            thread.join()


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def plain(prompt: str, length: int) -> str:
    """What plain generation says."""
    tokenizer = demo.load_tokenizer()
    ids = tokenizer(prompt)["input_ids"]
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": length}
    tokens = demo_target().generate(torch.tensor([ids]), **settings)[0, len(ids) :]
    return tokenizer.decode(tokens, skip_special_tokens=True)
