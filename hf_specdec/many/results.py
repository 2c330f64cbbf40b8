"""Results of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..metrics import SpecDecodingStats
from .row import Row, TokenLogprobs


@dataclass
class RequestResult:
    """The end of one request.

    Attributes:
        index (`int`): Its number: requests are counted as they are taken from the iterable.
        tokens (`list[int]`): The generated tokens, an end token included.
        text (`str`, *optional*): The same as text, where there is a tokenizer.
        finish_reason (`str`): "stop" (an end token, a stop string or another criterion), "length", or "error".
        error (`Exception`, *optional*): Why it has failed. What was generated before is in `tokens`.
        num_prompt_tokens (`int`): Tokens of the prompt; 0 if it could not be read.
        stats (`SpecDecodingStats`): What was drafted and accepted for it. Forwards and seconds are shared, and 0 here.
        logprobs (`list[TokenLogprobs]`, *optional*): Of the generated tokens, where `top_logprobs` asks for them.
    """

    index: int
    tokens: list[int]
    text: str | None
    finish_reason: str
    error: Exception | None = None
    num_prompt_tokens: int = 0
    stats: SpecDecodingStats = field(default_factory=lambda: SpecDecodingStats(batch_size=1), repr=False)
    logprobs: list[TokenLogprobs] | None = field(default=None, repr=False)

    @classmethod
    def of_row(cls, index: int, row: Row, tokenizer: Any = None) -> RequestResult:
        """The result of a row that has ended."""
        tokens = row.tokens
        text = None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)
        logprobs = None if row.top_logprobs is None else row.logprobs[: len(tokens)]
        return cls(index, tokens, text, row.finish_reason, row.error, len(row.prompt), row.stats, logprobs)

    @classmethod
    def failed(cls, index: int, error: Exception) -> RequestResult:
        """The result of a request that was never decoded."""
        return cls(index, [], None, "error", error)


def error_text(error: Exception | None) -> str | None:
    """A request's error as it is written down: its message or, where it has none, its kind."""
    return None if error is None else str(error) or type(error).__name__
