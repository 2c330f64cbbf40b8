"""Requests of clients on their way through the manager: admitted, answered, and given up when nobody waits."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from time import monotonic
from typing import Any, NamedTuple

import anyio
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.utils import logging

from ..errors import MissingDependencyError, SpecConfigError, SpecDecError, shown
from ..logits.grammar.processor import grammar
from ..many.batching import SpeculativeGenerationOutput
from ..many.manager import SpeculativeBatchingManager
from ..metrics import SpecDecodingStats
from ..target_facts import vocabulary_size
from ..threads import Recent
from ..validation import Bounds, checked
from .answers import Part, ScoredToken, usage_of
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

# Those of twice the length may take half a minute to be compiled.
_MOST_OF_A_GRAMMAR = 1 << 16

# N-grams are found in it, so that drafts are verified.
_WARM_UP, _WARM_UP_LENGTH = "1 2 3 4 5 6 7 8 " * 4, 16


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
        """Takes places for a request. Whoever gets the reply closes it, whatever happens.

        Args:
            body (`GenerationBody`): The request.

        Raises:
            RefusedError: There is no place, or it cannot be answered.
        """
        try:
            self._check(body)
        except RefusedError:
            self.outcomes["refused"] += 1
            raise
        return Reply(self, body)

    def check_name(self, model: str) -> None:
        """Refuses names of other models.

        Raises:
            RefusedError: It is another one's.
        """
        if model != self.name:
            message = f"This server has '{self.name}' alone, as GET /v1/models says."
            raise RefusedError(404, message, "model_not_found")

    def _check(self, body: GenerationBody) -> None:
        self.check_name(self.name if body.model is None else body.model)
        if self.status != "ok":
            raise RefusedError(503, UNAVAILABLE[self.status], "unavailable")
        count, most = body.num_answers, self.num_places + self.limits.max_waiting
        if count > most:
            raise RefusedError(400, f"A request has at most {most} answers here, got {count}.", "too_many")
        if self.num_open + count > most:
            raise RefusedError(429, "All places are taken. Try again later.", "overloaded")

    def start(self) -> None:
        """Starts the manager, and decodes until kernels are compiled and graphs captured.

        Raises:
            SpecDecError: It cannot decode.
        """
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

    async def prepare(self, body: GenerationBody) -> Prepared:
        """What a request's answers have in common.

        Raises:
            RefusedError: It cannot be read, or there is no room for its answers.
        """
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(self._encoder, self._prepare, body)
        if body.grammar is None:
            return prepared
        return prepared._replace(grammar=await loop.run_in_executor(self._compiler, self._grammar, body.grammar))

    def _prepare(self, body: GenerationBody) -> Prepared:
        try:
            prompts = [self.manager.encode(prompt) for prompt in body.prompts]
        except SpecConfigError as error:
            raise RefusedError(400, f"The prompt cannot be read: {error}", "invalid_prompt") from error
        lengths = [self.length(len(prompt), body.asked_length) for prompt in prompts]
        if body.min_tokens is not None and body.min_tokens > min(lengths):
            message = f"At most {min(lengths)} tokens are generated, and at least {body.min_tokens} are asked for."
            raise RefusedError(400, message, "too_long")
        num_tokens = vocabulary_size(self.manager.model)
        beyond = [token for token in body.logit_bias or () if int(token) >= num_tokens]
        if beyond:
            raise RefusedError(400, f"`logit_bias`: {shown(beyond[0])} is no token of the model.", "invalid_request")
        size = len(json.dumps(body.grammar))
        if size > _MOST_OF_A_GRAMMAR:
            message = f"The form of an answer has at most {_MOST_OF_A_GRAMMAR} characters, got {size}."
            raise RefusedError(400, message, "invalid_request")
        echoes = [self._text(prompt, tokens) for prompt, tokens in zip(body.prompts, prompts)] if body.echoes else None
        return Prepared(prompts, lengths, echoes)

    def _text(self, prompt: Any, tokens: list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.manager.tokenizer.decode(tokens, skip_special_tokens=True)

    def _grammar(self, wanted: dict[str, Any]) -> LogitsProcessor:
        """The processor of a grammar, which requests share."""
        key = json.dumps(wanted)
        found = self._grammars.get(key)
        if found is None:
            try:
                # Of the two libraries this one bounds what a form may cost, while it is compiled and later.
                backend = "llguidance" if find_spec("llguidance") else None
                found = grammar(**wanted, tokenizer=self.manager.tokenizer, backend=backend)
            except (SpecConfigError, MissingDependencyError) as error:
                raise RefusedError(
                    400, f"The form of the answer cannot be kept: {error}", "invalid_request"
                ) from error
            self._grammars.put(key, found)
        return found

    def length(self, num_prompt_tokens: int, asked: int | None) -> int:
        """Tokens that an answer may have; of one that asks for more, the rest is cut off.

        Raises:
            RefusedError: The prompt leaves no room for it.
        """
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
    """What the answers to a request have in common.

    Attributes:
        prompts (`list[list[int]]`): Tokens of each prompt.
        lengths (`list[int]`): Most tokens of the answers to each.
        echoes (`list[str]`, *optional*): Texts of the prompts, where answers begin with them.
        grammar (`LogitsProcessor`, *optional*): Keeps the answers in their form.
    """

    prompts: list[list[int]]
    lengths: list[int]
    echoes: list[str] | None
    grammar: LogitsProcessor | None = None


class Reply:
    """The answer to a request, or several answers to each of its prompts.

    Attributes:
        id (`str`): Its name.
        answers (`list[Answer]`): As many as the request wants.
    """

    def __init__(self, service: Service, body: GenerationBody):
        self._service, self._body = service, body
        self._deadline = monotonic() + service.limits.timeout
        self._is_closed, self._num_prompt_tokens = False, 0
        self.id: str = uuid.uuid4().hex
        self.answers: list[Answer] = [Answer(self, service, body, index) for index in range(body.num_answers)]
        service.num_open += len(self.answers)

    async def begin(self) -> None:
        """Adds the answers, and waits for their first tokens, or for all where they are not wanted in parts.

        Raises:
            RefusedError: It cannot be answered.
        """
        try:
            prepared = await self.in_time(self._service.prepare(self._body))
            self._num_prompt_tokens = sum(map(len, prepared.prompts))
            for answer in self.answers:
                answer.add(prepared)
            for answer in self.answers:
                await answer.hear_more()
        except RefusedError:
            self.close("refused")
            raise

    async def parts(self) -> AsyncIterator[tuple[Answer, Part | None]]:
        """Parts of all answers as they come, and `None` for the end of each.

        Raises:
            RefusedError: One of them does not come to an end.
        """
        come: asyncio.Queue[tuple[Answer, Part | None | Exception]] = asyncio.Queue()

        async def take(answer: Answer) -> None:
            try:
                async for part in answer.parts():
                    come.put_nowait((answer, part))
                come.put_nowait((answer, None))
            except Exception as error:  # noqa: BLE001 - of any kind: it is raised below
                come.put_nowait((answer, error))

        tasks, num_open = [asyncio.ensure_future(take(answer)) for answer in self.answers], len(self.answers)
        try:
            while num_open:
                answer, part = await come.get()
                if isinstance(part, Exception):
                    raise part
                num_open -= part is None
                yield answer, part
        finally:
            for task in tasks:
                task.cancel()

    @property
    def seconds_left(self) -> float:
        return max(self._deadline - monotonic(), 0.0)

    async def in_time(self, waiting: Any) -> Any:
        """Result of what is waited for.

        Raises:
            RefusedError: It takes too long.
        """
        try:
            # Before Python 3.12 asyncio.wait_for() swallows a cancellation that comes with the result.
            with anyio.fail_after(self.seconds_left):
                return await waiting
        except TimeoutError:
            self.answers[0].outcome = "timeout"
            message = f"The answer has taken more than {self._service.limits.timeout:g} seconds."
            raise RefusedError(504, message, "timeout") from None

    def usage(self) -> dict[str, Any]:
        """Tokens so far, and what became of draft tokens, of all answers together."""
        outputs = [answer.latest for answer in self.answers]
        num_tokens = sum(len(output.generated_tokens) for output in outputs)
        stats = SpecDecodingStats.total(output.speculative for output in outputs)
        return usage_of(self._num_prompt_tokens, num_tokens, stats)

    def close(self, outcome: str | None = None) -> None:
        """Gives the places to others. Answers that have not ended are given up.

        Args:
            outcome (`str`, *optional*): What has become of the request, if the answers themselves do not know.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._service.num_open -= len(self.answers)
        outcomes = [answer.outcome for answer in self.answers]
        failed = next((found for found in outcomes if found not in (None, "answered")), None)
        self._service.outcomes[failed or (outcomes[0] if None not in outcomes else outcome or "left")] += 1
        for answer in self.answers:
            answer.give_up()


class Answer:
    """One answer, while it grows.

    Attributes:
        index (`int`): Its number in the reply.
        latest (`SpeculativeGenerationOutput`, *optional*): What is known of it. Outputs hold all tokens so far: of a
            slow reader's the last one is enough.
        outcome (`str`, *optional*): "answered", "timeout" or "failed", once that is known.
        finish_reason (`str`, *optional*): "stop", "tool_calls" or "length", once it has ended.
    """

    def __init__(self, reply: Reply, service: Service, body: GenerationBody, index: int):
        self._reply, self._service, self._body = reply, service, body
        self._name = f"{reply.id}-{index}"
        self._shows_special = body.skip_special_tokens is False
        self._text = GrowingText(service.manager.tokenizer, body.stop or [], self._shows_special)
        self._echo = ""
        self._calls = ToolCallReader(body.told_tools) if body.told_tools else None
        self._num_scored, self._scored = 0, list[ScoredToken]()  # those whose text has not been shown
        self._news = asyncio.Event()
        self._has_ended = self._is_added = False
        self.index = index
        self.latest: SpeculativeGenerationOutput | None = None
        self.outcome: str | None = None
        self.finish_reason: str | None = None

    def add(self, prepared: Prepared) -> None:
        """Adds it to those that are decoded.

        Raises:
            RefusedError: The settings of the request are wrong.
        """
        manager, body = self._service.manager, self._body
        prompt, row = divmod(self.index, body.n or 1)
        tokens, length = prepared.prompts[prompt], prepared.lengths[prompt]
        self._echo = prepared.echoes[prompt] if prepared.echoes else ""
        settings = body.settings()
        if "seed" in settings:
            # Answers to one prompt are the rows of one call.
            settings["seed_row"] = row
        if body.ignore_eos:
            settings |= self._service.endless
        penalties = body.frequency_penalty or 0.0, body.presence_penalty or 0.0
        own = [PenaltiesLogitsProcessor(*penalties, len(tokens))] if any(penalties) else []
        own += [] if prepared.grammar is None else [prepared.grammar]
        if own and manager.arguments.get("logits_processor"):
            message = "This server has logits processors of its own, beside which no penalty and no form can be kept."
            raise RefusedError(400, message, "invalid_request")
        if own:
            settings["logits_processor"] = LogitsProcessorList(own)
        manager.register_result_handler(self._name, self._hear)
        # Stop strings are looked for in the text: transformers' own criterion compares each new one with the whole
        # vocabulary first, while all others would wait.
        try:
            manager.add_request(tokens, self._name, length, streaming=bool(body.stream or self._text.stop), **settings)
        except SpecConfigError as error:
            raise RefusedError(503 if not manager.is_running() else 400, str(error), "invalid_request") from error
        self._is_added = True

    def _hear(self, output: SpeculativeGenerationOutput | None) -> None:
        if output is None:
            self._has_ended = True
        else:
            self.latest, self._has_ended = output, output.is_finished()
        self._news.set()

    async def hear_more(self) -> None:
        """Waits for the next output.

        Raises:
            RefusedError: There is none, or it says that the request has failed.
        """
        await self._reply.in_time(self._news.wait())
        self._news.clear()
        if self.latest is None or (self._has_ended and not self.latest.is_finished()):
            self.outcome = "failed"
            raise RefusedError(503, UNAVAILABLE["stopped"], "unavailable")
        if self.latest.error is None:
            return
        self.outcome = "failed"
        if self._service.status == "failed":
            raise RefusedError(503, UNAVAILABLE["failed"], "unavailable")
        if self.latest.is_refused:
            raise RefusedError(400, self.latest.error, "invalid_request")
        logger.error(f"Request {self._name} has failed: {self.latest.error}")
        raise RefusedError(500, "The server has failed at this request. See its log.", "internal_error")

    async def parts(self) -> AsyncIterator[Part]:
        """The text as it comes.

        Raises:
            RefusedError: It does not come to an end.
        """
        if self._echo:
            yield Part(self._echo, [], [])
        while True:
            latest, is_last = self.latest, self._has_ended
            part = self._read(latest, is_last)
            ends = is_last or self._text.has_stopped
            if self._calls is not None:
                text, calls = self._calls.add(part.text, ends)
                part = Part(text, part.tokens, calls[: self._body.most_calls])
                ends = ends or (bool(calls) and self._body.most_calls is not None)
            if any(part):
                yield part
            if ends:
                self.outcome = "answered"
                # Others to the same prompt may go on for long.
                self.give_up()
                self.finish_reason = "stop" if self._text.has_stopped or not is_last else latest.finish_reason
                if self.finish_reason == "stop" and self._calls is not None and self._calls.num_calls:
                    self.finish_reason = "tool_calls"
                return
            await self.hear_more()

    def _read(self, latest: SpeculativeGenerationOutput, is_last: bool) -> Part:
        """Adds an output. Where log-probabilities are wanted, the text is read token by token."""
        tokens, texts = latest.generated_tokens, []
        if self._shows_special and is_last and latest.finish_reason == "stop":
            # That which ends the answer is none of its text.
            tokens = tokens[:-1]
        if self._body.num_top_logprobs is None:
            return Part(self._text.add(tokens, is_last), [], [])
        for number in range(self._num_scored, len(tokens)):
            if self._text.has_stopped:
                break
            scores = latest.logprobs[number], latest.top_logprobs[number]
            self._scored.append(ScoredToken(tokens[number], self._text.num_read, *scores))
            texts.append(self._text.add(tokens[: number + 1], is_last=False))
        self._num_scored = len(tokens)
        if is_last and not self._text.has_stopped:
            texts.append(self._text.add(tokens, is_last=True))
        ended = is_last and not self._text.has_stopped
        shown = [one for one in self._scored if ended or one.offset < self._text.num_shown]
        self._scored = self._scored[len(shown) :]
        return Part("".join(texts), shown, [])

    def give_up(self) -> None:
        """Gives the place to others, if it has not ended."""
        if self._is_added and not self._has_ended:
            self._service.manager.cancel_request(self._name)
