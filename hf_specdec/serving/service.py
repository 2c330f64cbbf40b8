"""Requests of clients on their way through the manager: admitted, answered, and given up when nobody waits."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic
from typing import Any

from ..errors import SpecConfigError
from ..many.batching import SpeculativeGenerationOutput
from ..many.manager import SpeculativeBatchingManager
from ..validation import Bounds, checked
from .bodies import GenerationBody, usage_of
from .text import GrowingText


# Seconds after which a client may come again when all places were taken.
RETRY_AFTER = 1


class RefusedError(Exception):
    """A request that gets no answer.

    Args:
        status (`int`): HTTP status.
        message (`str`): For the client.
        code (`str`): The same as a word.
    """

    def __init__(self, status: int, message: str, code: str):
        super().__init__(message)
        self.status: int = status
        self.message: str = message
        self.code: str = code


@dataclass(frozen=True)
class Limits:
    """Bounds of a server.

    Attributes:
        max_waiting (`int`): Requests that may wait for a place; further ones are refused with 429.
        max_prompt_tokens (`int`, *optional*): Of a prompt. Without it, what the model's positions leave.
        max_new_tokens (`int`): Of an answer; a request may ask for fewer.
        max_body_bytes (`int`): Of a request's body.
        timeout (`float`): Seconds from a request's arrival to the end of its answer.
    """

    max_waiting: int = 64
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 1024
    max_body_bytes: int = 1 << 20
    timeout: float = 600.0

    def __post_init__(self) -> None:
        checked("max_waiting", self.max_waiting, int, Bounds(least=0))
        checked("max_prompt_tokens", self.max_prompt_tokens, int | None, Bounds(least=1))
        checked("max_new_tokens", self.max_new_tokens, int, Bounds(least=1))
        checked("max_body_bytes", self.max_body_bytes, int, Bounds(least=1))
        if not self.timeout > 0:
            raise SpecConfigError(f"`timeout` must be more than 0 seconds, got {self.timeout}.")


class Service:
    """One model with its drafter, and who is served by it.

    Args:
        manager (`SpeculativeBatchingManager`): Decodes.
        name (`str`): Of the model.
        limits (`Limits`): What is refused.
    """

    def __init__(self, manager: SpeculativeBatchingManager, name: str, limits: Limits):
        self.manager: SpeculativeBatchingManager = manager
        self.name: str = name
        self.limits: Limits = limits
        positions = getattr(manager.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self._positions: int | None = positions
        # Long prompts keep nobody waiting, and the tokenizer belongs to one thread.
        self._encoder = ThreadPoolExecutor(1, "hf_specdec encoder")
        self.num_open = 0
        self.outcomes: Counter[str] = Counter()  # by "answered", "left", "refused", "timeout" and "failed"

    @property
    def num_places(self) -> int:
        """Requests that are decoded at a time."""
        return self.manager.batch_size

    async def begin(self, body: GenerationBody, prompt: Any, streams: bool) -> Answer:
        """Admits a request; returns when its answer begins.

        Args:
            body (`GenerationBody`): The request.
            prompt (*of any kind that the manager takes*): Its prompt.
            streams (`bool`): The answer is wanted in parts.

        Raises:
            RefusedError: There is no place, or it cannot be answered.
        """
        answer = Answer(self, body)
        try:
            if body.model not in (None, self.name):
                raise RefusedError(
                    404, f"This server has '{self.name}' alone, as GET /v1/models says.", "model_not_found"
                )
            if not self.is_well:
                raise RefusedError(503, "The server decodes no more. See its log.", "unavailable")
            if self.num_open > self.num_places + self.limits.max_waiting:
                raise RefusedError(429, "All places are taken. Try again later.", "overloaded")
            await answer.begin(prompt, streams)
        except BaseException as error:
            answer.close("refused" if isinstance(error, RefusedError) else None)
            raise
        return answer

    @property
    def is_well(self) -> bool:
        """Tells whether it decodes: a loop that has failed may still be telling those who wait."""
        return self.manager.is_running() and self.manager.error is None

    async def encode(self, prompt: Any) -> list[int]:
        """Tokens of a prompt.

        Raises:
            RefusedError: It cannot be read.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoder, self.manager.encode, prompt)
        except Exception as error:
            # Of any kind: chat templates raise what they like.
            raise RefusedError(400, f"The prompt cannot be read: {error}", "invalid_prompt") from error

    def length(self, num_prompt_tokens: int, asked: int | None) -> int:
        """Tokens that an answer may have.

        Raises:
            RefusedError: The prompt leaves no room for it.
        """
        most_prompt, most = self.limits.max_prompt_tokens, self.limits.max_new_tokens
        if most_prompt is not None and num_prompt_tokens > most_prompt:
            message = f"The prompt has {num_prompt_tokens} tokens, more than the {most_prompt} that are taken."
            raise RefusedError(400, message, "context_length_exceeded")
        if asked is not None and asked > most:
            raise RefusedError(400, f"At most {most} tokens are generated, and {asked} are asked for.", "too_long")
        if self._positions is not None:
            left = self._positions - num_prompt_tokens
            if left < (asked or 1):
                message = (
                    f"The model has {self._positions} positions: a prompt of {num_prompt_tokens} tokens leaves "
                    f"{max(left, 0)}, and {asked or 1} are asked for."
                )
                raise RefusedError(400, message, "context_length_exceeded")
            most = min(most, left)
        return asked or most


class Answer:
    """The answer to one request, while it grows.

    Attributes:
        id (`str`): Its name.
        finish_reason (`str`, *optional*): "stop" or "length", once it has ended.
    """

    def __init__(self, service: Service, body: GenerationBody):
        self._service, self._body = service, body
        self._deadline = monotonic() + service.limits.timeout
        self._text = GrowingText(service.manager.tokenizer, body.stop_strings)
        # Outputs hold all tokens so far: of a slow reader's the last one is enough.
        self._latest: SpeculativeGenerationOutput | None = None
        self._news = asyncio.Event()
        self._has_ended = self._is_added = self._is_closed = False
        self._outcome: str | None = None
        self.id: str = uuid.uuid4().hex
        self.finish_reason: str | None = None
        service.num_open += 1

    async def begin(self, prompt: Any, streams: bool) -> None:
        """Adds the request, and waits for its first tokens, or for all where they are not wanted in parts."""
        tokens = await self._in_time(self._service.encode(prompt))
        length = self._service.length(len(tokens), self._body.asked_length)
        manager, settings = self._service.manager, self._body.settings()
        manager.register_result_handler(self.id, self._hear)
        # Stop strings are looked for in the text: transformers' own criterion compares each new one with the whole
        # vocabulary first, while all others would wait.
        try:
            manager.add_request(tokens, self.id, length, streaming=streams or bool(self._text.stop), **settings)
        except SpecConfigError as error:
            raise RefusedError(503 if not manager.is_running() else 400, str(error), "invalid_request") from error
        self._is_added = True
        await self._hear_more()

    def _hear(self, output: SpeculativeGenerationOutput | None) -> None:
        if output is None:
            self._has_ended = True
        else:
            self._latest, self._has_ended = output, output.is_finished()
        self._news.set()

    async def _hear_more(self) -> None:
        """Waits for the next output.

        Raises:
            RefusedError: There is none, or it says that the request has failed.
        """
        await self._in_time(self._news.wait())
        self._news.clear()
        if self._latest is None or (self._has_ended and not self._latest.is_finished()):
            self._outcome = "failed"
            raise RefusedError(503, "The server has stopped.", "unavailable")
        if self._latest.error is not None:
            self._outcome = "failed"
            if self._service.manager.error is not None:
                raise RefusedError(503, "The server has failed. See its log.", "unavailable")
            raise RefusedError(400, self._latest.error, "invalid_request")

    @property
    def seconds_left(self) -> float:
        return max(self._deadline - monotonic(), 0.0)

    async def _in_time(self, waiting: Any) -> Any:
        try:
            return await asyncio.wait_for(waiting, self.seconds_left)
        except asyncio.TimeoutError:
            self._outcome = "timeout"
            message = f"The answer has taken more than {self._service.limits.timeout:g} seconds."
            raise RefusedError(504, message, "timeout") from None

    async def parts(self) -> AsyncIterator[str]:
        """The text as it comes.

        Raises:
            RefusedError: It does not come to an end.
        """
        while True:
            latest, is_last = self._latest, self._has_ended
            new = self._text.add(latest.generated_tokens, is_last)
            if new:
                yield new
            if is_last or self._text.has_stopped:
                self._outcome = "answered"
                self.finish_reason = "stop" if self._text.has_stopped else latest.finish_reason
                return
            await self._hear_more()

    def usage(self) -> dict[str, Any]:
        """Tokens so far, and what became of draft tokens."""
        latest = self._latest
        return usage_of(len(latest.prompt_ids), len(latest.generated_tokens), latest.speculative)

    def close(self, outcome: str | None = None) -> None:
        """Gives the place to others. An answer that has not ended is given up.

        Args:
            outcome (`str`, *optional*): What has become of the request, if the answer itself does not know.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._service.num_open -= 1
        self._service.outcomes[self._outcome or outcome or "left"] += 1
        if self._is_added and not self._has_ended:
            self._service.manager.cancel_request(self.id)
