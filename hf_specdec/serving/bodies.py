"""Bodies of requests and answers, in OpenAI's form. What is not named here is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..metrics import SpecDecodingStats
from .text import UNFINISHED
from .tool_calls import ToolCall


# What OpenAI writes for tokens that cannot be; JSON has no infinity.
_LEAST_LOGPROB = -9999.0


_StopString = Annotated[str, Field(min_length=1, max_length=200)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """Beside `stream`."""

    include_usage: bool = False


class GenerationBody(_Body):
    """Fields of both kinds of requests.

    Sampling is the model's own unless `temperature`, `top_p`, `top_k` or `min_p` is given. `spec_method` can only
    switch drafts off, and `num_speculative_tokens` bound their length: the drafter is the server's.
    """

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: _StopString | Annotated[list[_StopString], Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    num_speculative_tokens: int | None = Field(None, ge=0, le=1024)
    spec_method: Literal["off", "none"] | None = None
    n: int | None = Field(None, ge=1, le=128)
    # Sent by many clients; other values are refused, and who the user is changes nothing.
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    presence_penalty: float | None = Field(None, ge=0, le=0)
    user: str | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def asked_length(self) -> int | None:
        return self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """Most probable tokens whose log-probabilities are wanted; `None` if none at all are."""
        raise NotImplementedError

    @property
    def told_tools(self) -> list[dict[str, Any]]:
        """Tools that the model may call."""
        return []

    def settings(self) -> dict[str, Any]:
        """Settings of the request, as [`~many.generate.generate_many`] takes them; without its length."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "num_speculative_tokens")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.temperature == 0:
            # Filters leave the most likely token.
            given = {name: given[name] for name in names[4:] if name in given} | {"do_sample": False}
        elif any(name in given for name in names[:4]):
            given["do_sample"] = True
        if self.spec_method is not None:
            given["spec_method"] = "off"
        if self.num_top_logprobs is not None:
            given["top_logprobs"] = self.num_top_logprobs
        return given


class TextPart(_Body):
    """A part of a message; there are only texts."""

    type: Literal["text"]
    text: str


class Function(_Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(_Body):
    """A tool; there are only functions."""

    type: Literal["function"]
    function: Function

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class FunctionCall(_Body):
    """A call that an earlier answer has made; `arguments` is an object as JSON."""

    name: str
    arguments: str

    @model_validator(mode="after")
    def check(self) -> FunctionCall:
        if not isinstance(self.as_dict()["arguments"], dict):
            raise ValueError("`arguments` of a tool call must be an object as JSON")
        return self

    def as_dict(self) -> dict[str, Any]:
        # Templates write the arguments as JSON themselves.
        try:
            return {"name": self.name, "arguments": json.loads(self.arguments or "{}")}
        except RecursionError as error:
            raise ValueError("`arguments` of a tool call are nested too deep") from error


class EarlierCall(_Body):
    """The same with the name by which its result refers to it."""

    id: str
    type: Literal["function"]
    function: FunctionCall

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.type, "function": self.function.as_dict()}


class Message(_Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def check(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs `content`, or `tool_calls`")
        return self

    def as_dict(self) -> dict[str, Any]:
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        message: dict[str, Any] = {"role": self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.role == "tool" and self.name is not None:
            message["name"] = self.name
        return message


class ChatBody(GenerationBody):
    """Body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None

    @model_validator(mode="after")
    def check(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs`: true")
        return self

    @property
    def asked_length(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def told_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else [tool.as_dict() for tool in self.tools or ()]

    @property
    def prompt(self) -> Any:
        messages, tools = [message.as_dict() for message in self.messages], self.told_tools
        return {"messages": messages, "tools": tools} if tools else messages


class CompletionBody(GenerationBody):
    """Body of `/v1/completions`: a text, or token ids."""

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)]
    echo: Literal[False] | None = None
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: Literal[1] | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs


class ScoredToken(NamedTuple):
    """A token of an answer, where its text begins in that of the answer, and log-probabilities.

    Attributes:
        own (`float`): Its own.
        top (`list[tuple[int, float]]`): The most probable tokens in its place, and theirs.
    """

    token: int
    offset: int
    own: float
    top: list[tuple[int, float]]


class Part(NamedTuple):
    """A part of a text, its tokens where log-probabilities are wanted, and calls of tools that it has completed."""

    text: str
    tokens: list[ScoredToken]
    calls: list[ToolCall]


def joined(parts: list[Part]) -> Part:
    """Several parts as one."""
    lists = ([one for part in parts for one in getattr(part, name)] for name in ("tokens", "calls"))
    return Part("".join(part.text for part in parts), *lists)


def usage_of(num_prompt_tokens: int, num_tokens: int, stats: SpecDecodingStats) -> dict[str, Any]:
    """`usage` of an answer: tokens, and what became of draft tokens."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.num_accepted_tokens,
            "rejected_prediction_tokens": stats.num_draft_tokens - stats.num_accepted_tokens,
        },
    }


class Form:
    """The form of the answers to one request, whole or in chunks.

    Args:
        name (`str`): Id of the answer.
        model (`str`): Name of the model.
        is_chat (`bool`): Answers a chat.
        text_of (`Callable[[int], str]`, *optional*): Text of a token, where log-probabilities are wanted.
    """

    def __init__(self, name: str, model: str, is_chat: bool, text_of: Callable[[int], str] | None = None):
        self._is_chat, self._has_logprobs, self._text_of = is_chat, text_of is not None, text_of or str
        self._head = {"id": name, "created": int(time.time()), "model": model}

    def whole(self, choices: list[tuple[Part, str]], usage: dict[str, Any]) -> dict[str, Any]:
        """All of an answer.

        Args:
            choices (`list[tuple[Part, str]]`): Text of each choice, and why it has ended.
            usage (`dict`): Of all of them.
        """
        listed = []
        for index, (part, reason) in enumerate(choices):
            message: dict[str, Any] = {"role": "assistant", "content": part.text}
            if part.calls:
                message |= {"content": part.text or None, "tool_calls": [call.as_dict() for call in part.calls]}
            listed.append(self._choice(index, {"message": message} if self._is_chat else {}, part, reason))
        return {**self._head, "object": self._object(""), "choices": listed, "usage": usage}

    def chunk(self, index: int, part: Part | None, finish_reason: str | None = None) -> dict[str, Any]:
        """A part of a choice; without one its beginning, or its end."""
        begins = part is None and finish_reason is None
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if begins else {}
        if part is not None and (part.text or not part.calls):
            delta["content"] = part.text
        if part is not None and part.calls:
            delta["tool_calls"] = [{"index": call.index, **call.as_dict()} for call in part.calls]
        choice = self._choice(index, {"delta": delta} if self._is_chat else {}, part, finish_reason)
        return {**self._head, "object": self._object(".chunk"), "choices": [choice]}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self._object(".chunk"), "choices": [], "usage": usage}

    def _choice(self, index: int, content: dict[str, Any], part: Part | None, reason: str | None) -> dict[str, Any]:
        if not self._is_chat:
            content = {"text": "" if part is None else part.text}
        logprobs = None
        if part is not None and self._has_logprobs:
            logprobs = (self._chat_logprobs if self._is_chat else self._logprobs)(part.tokens)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _chat_logprobs(self, tokens: list[ScoredToken]) -> dict[str, Any]:
        content = [
            {**self._named(one.token, one.own), "top_logprobs": [self._named(*pair) for pair in one.top]}
            for one in tokens
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text_of(token)
        # Of a part of a character the tokenizer does not say the bytes.
        known = None if UNFINISHED in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": known}

    def _logprobs(self, tokens: list[ScoredToken]) -> dict[str, Any]:
        tops = [{self._text_of(token): max(value, _LEAST_LOGPROB) for token, value in one.top} for one in tokens]
        return {
            "tokens": [self._text_of(one.token) for one in tokens],
            "token_logprobs": [max(one.own, _LEAST_LOGPROB) for one in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [one.offset for one in tokens],
        }

    def _object(self, suffix: str) -> str:
        return f"chat.completion{suffix}" if self._is_chat else "text_completion"
