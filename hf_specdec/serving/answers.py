"""Bodies of answers, in OpenAI's form."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from .text import UNFINISHED
from .tool_calls import ToolCall


# What OpenAI writes for tokens that cannot be; JSON has no infinity.
_LEAST_LOGPROB = -9999.0


class ScoredToken(NamedTuple):
    """A token of an answer, with log-probabilities."""

    token: int
    offset: int  # of its text in that of the answer
    own: float
    top: list[tuple[int, float]]  # the most probable tokens in its place, and theirs


class Part(NamedTuple):
    """A part of a text, its tokens where log-probabilities are wanted, and calls of tools that it has completed."""

    text: str
    tokens: Sequence[ScoredToken] = ()
    calls: Sequence[ToolCall] = ()


class Form:
    """The form of the answers to one request, whole or in chunks; log-probabilities need the text of a token."""

    def __init__(self, name: str, model: str, is_chat: bool, text_of: Callable[[int], str] | None = None):
        self._is_chat, self._has_logprobs, self._text_of = is_chat, text_of is not None, text_of or str
        self._head = {"id": name, "created": int(time.time()), "model": model}

    def whole(self, choices: list[tuple[list[Part], str]], usage: dict[str, Any]) -> dict[str, Any]:
        """All choices, each the parts of a text and why it has ended."""
        listed = []
        for index, (parts, reason) in enumerate(choices):
            texts, tokens, calls = zip(*parts) if parts else ((), (), ())
            part = Part("".join(texts), [*chain(*tokens)], [*chain(*calls)])
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

    def _chat_logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
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

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        tops = [{self._text_of(token): max(value, _LEAST_LOGPROB) for token, value in one.top} for one in tokens]
        return {
            "tokens": [self._text_of(one.token) for one in tokens],
            "token_logprobs": [max(one.own, _LEAST_LOGPROB) for one in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [one.offset for one in tokens],
        }

    def _object(self, suffix: str) -> str:
        return f"chat.completion{suffix}" if self._is_chat else "text_completion"
