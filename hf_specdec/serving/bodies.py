"""Bodies of requests and answers, in OpenAI's form. What is not named here is refused."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..metrics import SpecDecodingStats


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
    # Sent by many clients; other values are refused, and who the user is changes nothing.
    n: Literal[1] | None = None
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    presence_penalty: float | None = Field(None, ge=0, le=0)
    user: str | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def asked_length(self) -> int | None:
        return self.max_tokens

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
        return given


class TextPart(_Body):
    """A part of a message; there are only texts."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def as_dict(self) -> dict[str, str]:
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text}


class ChatBody(GenerationBody):
    """Body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Literal[False] | None = None

    @property
    def asked_length(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [message.as_dict() for message in self.messages]


class CompletionBody(GenerationBody):
    """Body of `/v1/completions`: a text, or token ids."""

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)]
    echo: Literal[False] | None = None
    logprobs: None = None
    best_of: Literal[1] | None = None


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
    """

    def __init__(self, name: str, model: str, is_chat: bool):
        self._is_chat = is_chat
        self._head = {"id": name, "created": int(time.time()), "model": model}

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "object": self._object(""), "choices": [choice], "usage": usage}

    def chunk(self, text: str | None, finish_reason: str | None = None) -> dict[str, Any]:
        """A part of the text; without one the beginning of the answer, or its end."""
        if self._is_chat:
            begins = text is None and finish_reason is None
            delta = {"role": "assistant", "content": ""} if begins else {} if text is None else {"content": text}
            content: dict[str, Any] = {"delta": delta}
        else:
            content = {"text": text or ""}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "object": self._object(".chunk"), "choices": [choice]}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self._object(".chunk"), "choices": [], "usage": usage}

    def _object(self, suffix: str) -> str:
        return f"chat.completion{suffix}" if self._is_chat else "text_completion"
