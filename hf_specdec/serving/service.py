"""Requests of clients on their way through the manager: admitted, answered, and given up when nobody waits."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import anyio
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.utils import logging

from ..errors import MissingDependencyError, SpecConfigError, SpecDecError, shown
from ..logits.grammar.processor import grammar
from ..many.generate import SpeculativeGenerationOutput
from ..many.manager import SpeculativeBatchingManager
from ..metrics import SpecDecodingStats
from ..settings.checks import Options, setting
from ..target_facts import vocabulary_size
from ..threads import Recent
from .answers import Part, ScoredToken
from .bodies import GenerationBody
from .penalties import PenaltiesLogitsProcessor
from .text import GrowingText
from .tool_calls import ToolCallReader


logger = logging.get_logger(__name__)

# Seconds after which a client may come again when all places were taken.
RETRY_AFTER = 1

UNAVAILABLE = {
    "starting": "The server is starting.",
    "failed": "The server has failed and decodes no more. See its log.",
    "stopped": "The server has stopped.",
}

FAILED = "The server has failed at this request. See its log."

# Those of twice the length may take half a minute to be compiled.
_MOST_OF_A_GRAMMAR = 1 << 16

# N-grams are found in it, so that drafts are verified.
_WARM_UP, _WARM_UP_LENGTH = "1 2 3 4 5 6 7 8 " * 4, 16

Result = TypeVar("Result")


class RefusedError(Exception):
    """A request that gets no answer: the HTTP status, a message for the client, and the same as a word."""

    def __init__(self, status: int, message: str, code: str = "invalid_request"):
        super().__init__(message)
        self.status: int = status
        self.message: str = message
        self.code: str = code


@dataclass(frozen=True)
class Limits(Options):
    """Bounds of a server.

    Attributes:
        max_waiting (`int`): Requests that may wait for a place; further ones are refused with 429.
        max_prompt_tokens (`int`, *optional*): Of a prompt. Without it, what the model's positions leave.
        max_new_tokens (`int`): Of an answer; a request may ask for fewer.
        max_body_bytes (`int`): Of a request's body.
        timeout (`float`): Seconds from a request's arrival to the end of its answer.
    """

    max_waiting: int = setting(64, least=0)
    max_prompt_tokens: int | None = setting(None, least=1)
    max_new_tokens: int = setting(1024, least=1)
    max_body_bytes: int = setting(1 << 20, least=1)
    timeout: float = setting(600.0, least=0, inclusive=False)


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
        config = manager.model.config.get_text_config(decoder=True)
        self._positions: int | None = getattr(config, "max_position_embeddings", None)
        # Long prompts keep nobody waiting, and the tokenizer belongs to one thread.
        self._encoder = ThreadPoolExecutor(1, "hf_specdec encoder")
        self._compiler = ThreadPoolExecutor(1, "hf_specdec compiler")
        self._has_started, self._told = False, None
        self._grammars: Recent[LogitsProcessor] = Recent(16)
        self.num_open = 0
        self.outcomes: Counter[str] = Counter()  # by "answered", "left", "refused", "timeout" and "failed"

    @property
    def num_places(self) -> int:
        """Requests that are decoded at a time."""
        return self.manager.batch_size

    def admit(self, body: GenerationBody) -> Reply:
        """Takes places for a request, or raises `RefusedError`. Whoever gets the reply closes it, whatever happens."""
        try:
            self.check_name(self.name if body.model is None else body.model)
            if self.status != "ok":
                raise RefusedError(503, UNAVAILABLE[self.status], "unavailable")
            count, most = body.num_answers, self.num_places + self.limits.max_waiting
            if count > most:
                raise RefusedError(400, f"A request has at most {most} answers here, got {count}.", "too_many")
            if self.num_open + count > most:
                raise RefusedError(429, "All places are taken. Try again later.", "overloaded")
        except RefusedError:
            self.outcomes["refused"] += 1
            raise
        return Reply(self, body)

    def check_name(self, model: str) -> None:
        """Refuses names of other models."""
        if model != self.name:
            message = f"This server has '{self.name}' alone, as GET /v1/models says."
            raise RefusedError(404, message, "model_not_found")

    def start(self) -> None:
        """Starts the manager, and decodes until kernels are compiled and graphs captured, or raises `SpecDecError`."""
        self.manager.start()
        tokens = self.manager.encode(_WARM_UP)
        room = (self._positions or self.limits.max_new_tokens) - len(tokens)
        names = []
        # One after the other ends, so batches of many sizes are there, with samples and without.
        for number in range(self.num_places):
            wanted = _WARM_UP_LENGTH + _WARM_UP_LENGTH * number // self.num_places
            length = max(min(wanted, self.limits.max_new_tokens, room), 1)
            settings = {**self.endless, "do_sample": number % 2 == 0, "seed": 0}
            names.append(self.manager.add_request(tokens, max_new_tokens=length, **settings))
        for output in map(self.manager.get_result, names):
            # Limits may leave no room for such requests.
            if output is None or not (output.error is None or output.is_refused):
                raise SpecDecError(f"The server cannot decode: {self.manager.error or (output and output.error)}")
        self._has_started = True

    @property
    def endless(self) -> dict[str, Any]:
        """Settings of requests that no token ends."""
        padding = getattr(self.manager.model.generation_config, "pad_token_id", None)
        # An id that no token has.
        return {"eos_token_id": vocabulary_size(self.manager.model), "pad_token_id": padding or 0}

    @property
    def status(self) -> str:
        """What it does: "starting", "ok", "failed" or "stopped"."""
        if self.manager.error is not None:
            # A loop that has failed may still be telling those who wait.
            if self._told is not self.manager.error:
                self._told = self.manager.error
                logger.error("The server decodes no more.", exc_info=self._told)
            return "failed"
        if not self._has_started:
            return "starting"
        return "ok" if self.manager.is_running() else "stopped"

    async def prepare(self, body: GenerationBody) -> tuple[list[Prepared], LogitsProcessor | None]:
        """Its prompts, and what keeps answers in their form; `RefusedError` for those unreadable or without room."""
        loop = asyncio.get_running_loop()
        prompts = await loop.run_in_executor(self._encoder, self._encode, body)
        form = body.wanted.grammar
        compiled = None if form is None else await loop.run_in_executor(self._compiler, self._grammar, form)
        return prompts, compiled

    def _encode(self, body: GenerationBody) -> list[Prepared]:
        try:
            prompts = [self.manager.encode(prompt) for prompt in body.wanted.prompts]
        except SpecConfigError as error:
            raise RefusedError(400, f"The prompt cannot be read: {error}", "invalid_prompt") from error
        lengths = [self._length(len(prompt), body.wanted.length) for prompt in prompts]
        if body.min_tokens is not None and body.min_tokens > min(lengths):
            message = f"At most {min(lengths)} tokens are generated, and at least {body.min_tokens} are asked for."
            raise RefusedError(400, message, "too_long")
        num_tokens = vocabulary_size(self.manager.model)
        beyond = [token for token in body.logit_bias or () if int(token) >= num_tokens]
        if beyond:
            raise RefusedError(400, f"`logit_bias`: {shown(beyond[0])} is no token of the model.")
        size = len(json.dumps(body.wanted.grammar))
        if size > _MOST_OF_A_GRAMMAR:
            raise RefusedError(400, f"The form of an answer has at most {_MOST_OF_A_GRAMMAR} characters, got {size}.")
        echoes = body.wanted.prompts if body.wanted.echoes else [""] * len(prompts)
        decode = partial(self.manager.tokenizer.decode, skip_special_tokens=True)
        return [
            Prepared(tokens, length, echo if isinstance(echo, str) else decode(tokens))
            for tokens, length, echo in zip(prompts, lengths, echoes)
        ]

    def _grammar(self, form: dict[str, Any]) -> LogitsProcessor:
        """The processor of a grammar, which requests share."""
        key = json.dumps(form)
        processor = self._grammars.get(key)
        if processor is None:
            try:
                # Of the two libraries this one bounds what a form may cost, while it is compiled and later.
                backend = "llguidance" if find_spec("llguidance") else None
                processor = grammar(**form, tokenizer=self.manager.tokenizer, backend=backend)
            except (SpecConfigError, MissingDependencyError) as error:
                raise RefusedError(400, f"The form of the answer cannot be kept: {error}") from error
            self._grammars.put(key, processor)
        return processor

    def _length(self, num_prompt_tokens: int, asked: int | None) -> int:
        """Tokens that an answer may have: of one that asks for more, the rest is cut off."""
        most_prompt, most = self.limits.max_prompt_tokens, self.limits.max_new_tokens
        if most_prompt is not None and num_prompt_tokens > most_prompt:
            message = f"The prompt has {num_prompt_tokens} tokens, more than the {most_prompt} that are taken."
            raise RefusedError(400, message, "context_length_exceeded")
        if self._positions is not None:
            left = self._positions - num_prompt_tokens
            if left < 1:
                message = f"The model has {self._positions} positions, and the prompt has {num_prompt_tokens} tokens."
                raise RefusedError(400, message, "context_length_exceeded")
            most = min(most, left)
        return min(asked or most, most)


class Prepared(NamedTuple):
    """A prompt of a request."""

    tokens: list[int]
    length: int  # most tokens of an answer
    echo: str  # its text, where answers begin with it, and elsewhere an empty one


class Reply:
    """The answer to a request, or several answers to each of its prompts."""

    def __init__(self, service: Service, body: GenerationBody):
        self.service: Service = service
        self.body: GenerationBody = body
        self._deadline = monotonic() + service.limits.timeout
        self.news: asyncio.Event = asyncio.Event()  # an output has come, of any answer
        self._outcome: str | None = None  # "timeout" or "failed", once that is known
        self._is_closed, self._num_prompt_tokens = False, 0
        self.id: str = uuid.uuid4().hex
        self.answers: list[Answer] = []
        service.num_open += body.num_answers

    async def begin(self) -> None:
        """Adds the answers, and waits for their first tokens, or for all where they are not wanted in parts."""
        try:
            prompts, form = await self._in_time(self.service.prepare(self.body))
            self._num_prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
            for index in range(self.body.num_answers):
                self.answers.append(Answer(self, index, prompts, form))
            while any(answer.latest is None for answer in self.answers):
                await self._hear_more()
        except RefusedError:
            self.close("refused")
            raise

    async def parts(self) -> AsyncIterator[tuple[Answer, Part | None]]:
        """Parts of all answers as they come, and `None` for the end of each; `RefusedError` where one fails."""
        unfinished = self.answers
        while unfinished:
            for answer in unfinished:
                for part in answer.read():
                    yield answer, part
                if answer.finish_reason is not None:
                    yield answer, None
            unfinished = [answer for answer in unfinished if answer.finish_reason is None]
            if unfinished:
                await self._hear_more()

    @property
    def seconds_left(self) -> float:
        return max(self._deadline - monotonic(), 0.0)

    async def _hear_more(self) -> None:
        """Waits for the next output of any answer; `RefusedError` where one has failed."""
        await self._in_time(self.news.wait())
        self.news.clear()
        for answer in self.answers:
            if (failure := answer.failure()) is not None:
                self._outcome = "failed"
                raise failure

    async def _in_time(self, waiting: Awaitable[Result]) -> Result:
        """Result of what is waited for; `RefusedError` where it takes too long."""
        try:
            # Before Python 3.12 asyncio.wait_for() swallows a cancellation that comes with the result.
            with anyio.fail_after(self.seconds_left):
                return await waiting
        except TimeoutError:
            self._outcome = "timeout"
            message = f"The answer has taken more than {self.service.limits.timeout:g} seconds."
            raise RefusedError(504, message, "timeout") from None

    def usage(self) -> dict[str, Any]:
        """Tokens so far, and what became of draft tokens, of all answers together."""
        outputs = [answer.latest for answer in self.answers]
        num_tokens = sum(len(output.generated_tokens) for output in outputs)
        stats = SpecDecodingStats.total(output.speculative for output in outputs)
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self._num_prompt_tokens + num_tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": stats.num_accepted_tokens,
                "rejected_prediction_tokens": stats.num_draft_tokens - stats.num_accepted_tokens,
            },
        }

    def close(self, outcome: str = "left") -> None:
        """Gives the places to others. Answers that have not ended are given up: then it counts under `outcome`."""
        if self._is_closed:
            return
        self._is_closed = True
        self.service.num_open -= self.body.num_answers
        if self.answers and all(answer.finish_reason is not None for answer in self.answers):
            outcome = "answered"
        self.service.outcomes[self._outcome or outcome] += 1
        for answer in self.answers:
            answer.give_up()


class Answer:
    """One answer of a reply, while it grows; `RefusedError` where the settings of the request are wrong."""

    def __init__(self, reply: Reply, index: int, prompts: list[Prepared], form: LogitsProcessor | None):
        body, manager = reply.body, reply.service.manager
        prompt, row = divmod(index, body.n or 1)
        tokens, length, self._echo = prompts[prompt]
        self._service, self._body, self._news = reply.service, body, reply.news
        self._name = f"{reply.id}-{index}"
        self._shows_special = body.skip_special_tokens is False
        self._text = GrowingText(manager.tokenizer, body.stop or [], self._shows_special)
        self._calls = ToolCallReader(body.wanted.tools) if body.wanted.tools else None
        self._num_scored, self._scored = 0, list[ScoredToken]()  # those whose text has not been shown
        self._has_news = self._is_decoded = False  # decoded: no more outputs come
        self.index = index
        # Outputs hold all tokens so far: of a slow reader's the last one is enough.
        self.latest: SpeculativeGenerationOutput | None = None
        self.finish_reason: str | None = None  # "stop", "tool_calls" or "length", once all has been read

        settings = body.settings()
        if "seed" in settings:
            # Answers to one prompt are the rows of one call.
            settings["seed_row"] = row
        if body.ignore_eos:
            settings |= self._service.endless
        penalties = body.frequency_penalty or 0.0, body.presence_penalty or 0.0
        processors = [PenaltiesLogitsProcessor(*penalties, len(tokens))] if any(penalties) else []
        processors += [] if form is None else [form]
        if processors and manager.arguments.get("logits_processor"):
            message = "This server has logits processors of its own, beside which no penalty and no form can be kept."
            raise RefusedError(400, message)
        if processors:
            settings["logits_processor"] = LogitsProcessorList(processors)
        manager.register_result_handler(self._name, self._hear)
        # Stop strings are looked for in the text: transformers' own criterion compares each new one with the whole
        # vocabulary first, while all others would wait.
        try:
            manager.add_request(tokens, self._name, length, streaming=bool(body.stream or self._text.stop), **settings)
        except SpecConfigError as error:
            raise RefusedError(503 if not manager.is_running() else 400, str(error)) from error

    def _hear(self, output: SpeculativeGenerationOutput | None) -> None:
        if output is None:
            self._is_decoded = True
        else:
            self.latest, self._is_decoded = output, output.is_finished()
        self._has_news = True
        self._news.set()

    def failure(self) -> RefusedError | None:
        """Why it cannot be answered, where that is so."""
        latest = self.latest
        if self.finish_reason is not None:
            return None
        if self._is_decoded and (latest is None or not latest.is_finished()):
            return RefusedError(503, UNAVAILABLE["stopped"], "unavailable")
        if latest is None or latest.error is None:
            return None
        if self._service.status == "failed":
            return RefusedError(503, UNAVAILABLE["failed"], "unavailable")
        if latest.is_refused:
            return RefusedError(400, latest.error)
        logger.error(f"Request {self._name} has failed: {latest.error}")
        return RefusedError(500, FAILED, "internal_error")

    def read(self) -> Iterator[Part]:
        """What has come of the text since the last time."""
        if not self._has_news:
            return
        self._has_news = False
        if self._echo:
            yield Part(self._echo)
            self._echo = ""
        part = self._next_part()
        ends = self._is_decoded or self._text.has_stopped
        if self._calls is not None:
            text, calls = self._calls.add(part.text, ends)
            part = Part(text, part.tokens, calls[: self._body.wanted.most_calls])
            ends = ends or (bool(calls) and self._body.wanted.most_calls is not None)
        if any(part):
            yield part
        if ends:
            # Others to the same prompt may go on for long.
            self.give_up()
            is_cut = self._text.has_stopped or not self._is_decoded
            self.finish_reason = "stop" if is_cut else self.latest.finish_reason
            if self.finish_reason == "stop" and self._calls is not None and self._calls.num_calls:
                self.finish_reason = "tool_calls"

    def _next_part(self) -> Part:
        """Reads the latest output. Where log-probabilities are wanted, the text is read token by token."""
        latest, is_last = self.latest, self._is_decoded
        tokens, texts = latest.generated_tokens, []
        if self._shows_special and is_last and latest.finish_reason == "stop":
            # That which ends the answer is none of its text.
            tokens = tokens[:-1]
        if self._body.wanted.num_top_logprobs is None:
            return Part(self._text.add(tokens, is_last))
        for number in range(self._num_scored, len(tokens)):
            if self._text.has_stopped:
                break
            scores = latest.logprobs[number], latest.top_logprobs[number]
            self._scored.append(ScoredToken(tokens[number], self._text.num_read, *scores))
            texts.append(self._text.add(tokens[: number + 1], is_last=False))
        self._num_scored = len(tokens)
        if is_last and not self._text.has_stopped:
            texts.append(self._text.add(tokens, is_last=True))
        is_whole = is_last and not self._text.has_stopped
        shown = [one for one in self._scored if is_whole or one.offset < self._text.num_shown]
        self._scored = self._scored[len(shown) :]
        return Part("".join(texts), shown)

    def give_up(self) -> None:
        """Gives the place to others, if it has not ended."""
        if not self._is_decoded:
            self._service.manager.cancel_request(self._name)
