"""The HTTP interface of a service."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import prometheus_client
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from transformers.utils import logging

from ..metrics import prometheus
from .answers import Form, Part
from .bodies import ChatBody, CompletionBody, GenerationBody
from .service import FAILED, RETRY_AFTER, UNAVAILABLE, Answer, RefusedError, Reply, Service


logger = logging.get_logger(__name__)

# Names of this machine for itself.
LOOPBACK = ("127.0.0.1", "localhost", "::1")

_HOST = re.compile(r"\[?([^\[\]]*?)\]?(?::\d*)?")

# Seconds for a body to arrive.
_BODY_SECONDS = 30.0

# Seconds in which a client has to read what was sent last.
_READING_SECONDS = 30.0

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def build_app(
    service: Service, api_key: str | None = None, hosts: tuple[str, ...] = ("*",), origins: tuple[str, ...] = ()
) -> FastAPI:
    """The application that serves a model.

    Args:
        service (`Service`): The model; its manager runs while the application does.
        api_key (`str`, *optional*): What clients have to send as `Authorization: Bearer ...`, for all but `/health`.
        hosts (`tuple[str, ...]`): Host names that the server answers to; "*" for all. On a loopback address this keeps
            web pages in the user's own browser out.
        origins (`tuple[str, ...]`): Origins of pages that may use the server from a browser, such as "http://localhost:3000";
            "*" for all.
    """
    registry = prometheus_client.CollectorRegistry()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await asyncio.to_thread(service.start)
            prometheus.enable(registry, service.name)
            yield
        finally:
            await asyncio.to_thread(service.manager.destroy)
            prometheus.disable(registry)

    app = FastAPI(title="hf_specdec", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    registry.register(_ServiceMetrics(service))
    prometheus_client.ProcessCollector(registry=registry)

    app.add_middleware(_Guard, api_key=api_key, hosts=hosts, max_body_bytes=service.limits.max_body_bytes)
    if origins:
        # Around the guard: browsers ask first without the key.
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])

    @app.exception_handler(RefusedError)
    async def refuse(request: Request, error: RefusedError) -> JSONResponse:
        return _error(error)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> JSONResponse:
        service.outcomes["refused"] += 1
        return _error(RefusedError(400, _first_mistake(error)))

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> JSONResponse:
        return _error(RefusedError(error.status_code, str(error.detail)))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> JSONResponse | StreamingResponse:
        return await _respond(service, request, body)

    @app.post("/v1/completions", response_model=None)
    async def complete(body: CompletionBody, request: Request) -> JSONResponse | StreamingResponse:
        return await _respond(service, request, body)

    known = {"id": service.name, "object": "model", "created": int(time.time()), "owned_by": "hf_specdec"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [known]}

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> dict[str, Any]:
        service.check_name(name)
        return known

    @app.get("/health", response_model=None)
    async def health() -> JSONResponse:
        if (status := service.status) == "ok":
            return JSONResponse({"status": status})
        return JSONResponse({"status": status, "message": UNAVAILABLE[status]}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(prometheus_client.generate_latest(registry), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    return app


# Answers


async def _respond(service: Service, request: Request, body: GenerationBody) -> JSONResponse | StreamingResponse:
    reply, response = service.admit(body), None
    try:
        response = await _unless_left(request, _answer(service, reply, body))
        # Who has left reads nothing.
        return response or JSONResponse(None)
    except RefusedError:
        raise
    except Exception:
        logger.exception("A request has failed.")
        raise RefusedError(500, FAILED, "internal_error") from None
    finally:
        if not isinstance(response, _ReplyResponse):
            reply.close()


async def _answer(service: Service, reply: Reply, body: GenerationBody) -> JSONResponse | StreamingResponse:
    await reply.begin()
    is_chat = isinstance(body, ChatBody)
    text_of = None if body.wanted.num_top_logprobs is None else lambda token: service.manager.tokenizer.decode([token])
    form = Form(f"{'chatcmpl' if is_chat else 'cmpl'}-{reply.id}", service.name, is_chat, text_of)
    if body.stream:
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return _ReplyResponse(reply, _events(reply, form, with_usage))
    parts: dict[Answer, list[Part]] = {answer: [] for answer in reply.answers}
    async for answer, part in reply.parts():
        if part is not None:
            parts[answer].append(part)
    choices = [(of_answer, answer.finish_reason) for answer, of_answer in parts.items()]
    return JSONResponse(form.whole(choices, reply.usage()))


async def _unless_left(request: Request, coroutine: Any) -> Any:
    """Result of the coroutine; `None` if the client leaves before, once the coroutine is cancelled and has ended."""
    work, leaving = asyncio.ensure_future(coroutine), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        leaving.cancel()
        work.cancel()
        await asyncio.wait({work})


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(reply: Reply, form: Form, with_usage: bool) -> AsyncIterator[str]:
    """Server-sent events of a reply."""
    try:
        for answer in reply.answers:
            yield _event(form.chunk(answer.index, None))
        async for answer, part in reply.parts():
            yield _event(form.chunk(answer.index, part, answer.finish_reason if part is None else None))
        if with_usage:
            yield _event(form.usage_chunk(reply.usage()))
    except RefusedError as error:
        yield _event(_error_body(error))
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


class _ReplyResponse(StreamingResponse):
    """Events of a reply, which is closed with the connection, whether a client has read any of them or not."""

    def __init__(self, reply: Reply, events: AsyncIterator[str]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._reply = reply

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            # Who does not read gives the place back, too.
            with anyio.fail_after(self._reply.seconds_left + _READING_SECONDS):
                await super().__call__(scope, receive, send)
        finally:
            self._reply.close()


# Errors


def _error(error: RefusedError) -> JSONResponse:
    headers = {429: {"Retry-After": str(RETRY_AFTER)}, 401: {"WWW-Authenticate": "Bearer"}}.get(error.status)
    return JSONResponse(_error_body(error), error.status, headers)


def _error_body(error: RefusedError) -> dict[str, Any]:
    kind = _KINDS.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    # Names of fields may have halves of characters.
    message = error.message.encode("utf-8", "replace").decode("utf-8")
    return {"error": {"message": message, "type": kind, "param": None, "code": error.code}}


def _first_mistake(error: RequestValidationError) -> str:
    found = error.errors()[0]
    if found["type"] == "json_invalid":
        return f"The body is no JSON: {found['ctx']['error']}, at character {found['loc'][-1]}."
    where, message = ".".join(map(str, found["loc"][1:])), found["msg"].removeprefix("Value error, ")
    if where and found["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{where}: Input should be an object"
    if where:
        return f"{where}: {message}"
    if found["type"] == "value_error":
        return message
    return "The body must be a JSON object, with the header `Content-Type: application/json`."


class _Guard:
    """Lets in who asks by a known name and has the key, with a body of limited size that arrives in time."""

    def __init__(self, app: Any, api_key: str | None, hosts: tuple[str, ...], max_body_bytes: int):
        self._app, self._max_body_bytes = app, max_body_bytes
        self._hosts = None if "*" in hosts else {host.lower() for host in hosts}
        # Keys from files end with a line break, which no header has.
        self._expected = None if api_key is None else f"Bearer {api_key.strip()}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            self._check(scope)
            body = await self._read(receive)
        except RefusedError as error:
            return await _error(error)(scope, receive, send)
        if body is None:
            return None
        message: dict[str, Any] | None = {"type": "http.request", "body": body, "more_body": False}

        async def replay() -> Any:
            nonlocal message
            first, message = message, None
            return await receive() if first is None else first

        return await self._app(scope, replay, send)

    def _check(self, scope: Any) -> None:
        headers = dict(scope["headers"])
        if self._hosts is not None:
            host = _HOST.fullmatch(headers.get(b"host", b"").decode("latin-1").lower())
            if host is None or host[1] not in self._hosts:
                raise RefusedError(400, "The server is not asked by this name.", "invalid_host")
        if self._expected is not None and scope["path"] != "/health":
            if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
                raise RefusedError(401, "The API key is missing or wrong.", "invalid_api_key")

    async def _read(self, receive: Any) -> bytes | None:
        """The body; `None` if the client leaves before its end."""
        body = bytearray()
        try:
            with anyio.fail_after(_BODY_SECONDS):
                while (message := await receive())["type"] != "http.disconnect":
                    body += message.get("body", b"")
                    if len(body) > self._max_body_bytes:
                        raise RefusedError(413, f"A body has at most {self._max_body_bytes} bytes.", "body_too_large")
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise RefusedError(408, "The body has not arrived in time.", "timeout") from None
        return None


class _ServiceMetrics:
    """Numbers of open requests, and of others by what became of them, for Prometheus."""

    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        running = GaugeMetricFamily("hf_specdec_server_open_requests", "Requests that are decoded or wait.")
        running.add_metric([], service.num_open)
        yield running
        ended = CounterMetricFamily(
            "hf_specdec_server_requests", "Requests by what became of them.", labels=["outcome"]
        )
        for outcome, count in sorted(service.outcomes.items()):
            ended.add_metric([outcome], count)
        yield ended
