"""Results of requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..metrics import SpecDecodingStats
from .row import TokenLogprobs


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


def error_text(error: Exception | None) -> str | None:
    """A request's error as it is written down: its message or, where it has none, its kind."""
    return None if error is None else str(error) or type(error).__name__
