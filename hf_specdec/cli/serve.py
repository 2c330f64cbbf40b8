"""`hf-specdec serve`: a model through OpenAI's interface, for a handful of users."""

from __future__ import annotations

import ipaddress
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from typing import Annotated

import typer

from ..errors import MissingDependencyError, SpecConfigError
from . import options
from .drafters import Drafting, load_drafter
from .output import say
from .target import Target


API_KEY_VARIABLE = "HF_SPECDEC_API_KEY"

_limit = partial(typer.Option, rich_help_panel="Limits")


def serve_command(
    *,
    model: options.Model,
    drafting: Drafting,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option("--served-model-name", help="Name of the model for clients. Default: MODEL.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=API_KEY_VARIABLE,
            help=f"What clients send as bearer token. Better in {API_KEY_VARIABLE}: others see arguments.",
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(help="Origin of pages that may ask the server from a browser; '*' for all. May be repeated."),
    ] = None,
    batch_size: options.BatchSize = 8,
    max_tokens_in_flight: options.TokensInFlight = None,
    max_new_tokens: options.MaxNewTokens = 1024,
    max_waiting: Annotated[int, _limit(min=0, help="Requests that may wait; others are refused with 429.")] = 64,
    max_prompt_tokens: Annotated[int | None, _limit(min=1, help="Tokens of a prompt. Default: the model's.")] = None,
    max_body_bytes: Annotated[int, _limit(min=1, help="Bytes of a request's body.")] = 1 << 20,
    timeout: Annotated[float, _limit(min=0.001, help="Seconds from a request to the end of its answer.")] = 600.0,
    grace: Annotated[int, _limit(min=0, help="Seconds for open answers when the server is stopped.")] = 30,
    place: options.Place,
) -> None:
    """Serve a model with speculation: /v1/chat/completions, /v1/completions, /metrics, /health.

    All requests share the drafter. One may bound its drafts (num_speculative_tokens) or switch them off
    (spec_method "off"), and never names a model.
    """
    try:
        import uvicorn

        from ..serving.app import LOOPBACK, build_app
    except ImportError as error:
        raise MissingDependencyError(
            f"The server lacks a package ({error}). Install all that it needs: pip install fastapi uvicorn "
            "prometheus-client"
        ) from error
    from ..many.manager import SpeculativeBatchingManager
    from ..serving.service import Limits, Service

    if api_key is not None and not api_key.strip():
        raise SpecConfigError(f"The API key is empty. Give --api-key or {API_KEY_VARIABLE} a text, or neither.")
    limits = Limits(max_waiting, max_prompt_tokens, max_new_tokens, max_body_bytes, timeout)
    target = Target(model, place)
    spec = drafting.read(target)
    with _bound(host, port) as listening, target.loaded() as (loaded, tokenizer):
        manager = SpeculativeBatchingManager(
            loaded,
            batch_size=batch_size,
            max_tokens_in_flight=max_tokens_in_flight,
            tokenizer=tokenizer,
            max_new_tokens=max_new_tokens,
            **load_drafter(loaded, spec),
        )
        service = Service(manager, name or model, limits)
        address, port = listening.getsockname()[:2]
        is_loopback = ipaddress.ip_address(address).is_loopback
        if not is_loopback and api_key is None:
            say(f"Everybody who reaches {host} may use this server: there is no --api-key.", "yellow", stderr=True)
        hosts = (*LOOPBACK, host) if is_loopback else ("*",)
        app = build_app(service, api_key, hosts, tuple(cors or ()))
        server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=grace, server_header=False))
        # uvicorn ends open answers first, and then hands the signal on.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        say(f"Serving {service.name} at {url}", stderr=True)
        with suppress(KeyboardInterrupt):
            server.run([listening])


def _bound(host: str, port: int) -> socket.socket:
    """A socket of this address, on which nobody is served yet."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        return listening
    except OSError as error:
        listening.close()
        raise SpecConfigError(
            f"The server cannot listen on {host}:{port}: {error}. Name a free --port, and a --host of this machine."
        ) from error
