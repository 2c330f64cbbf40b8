"""A request while it is decoded: a group of one row, with what is told of it alone; and its result.

Shapes: R active rows, M committed tokens, V vocabulary, K most probable tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..loop.cycle import Cycle
from ..loop.observers import Observer
from ..loop.rows import Group, Rows
from ..metrics import SpecDecodingStats
from ..settings.checks import MOST_INTEGER
from ..target.prompts import Request
from ..transfers import take_nodes, upload


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the target's probabilities at one position, before any logits processor.

    Attributes:
        own (`float`): Of the token that was generated.
        top (`list[tuple[int, float]]`): The most probable tokens, the best first, and theirs.
    """

    own: float
    top: list[tuple[int, float]]


class Row(Group):
    """One request of many, a batch of one without padding, with the random numbers of row `number` of a call."""

    fails_alone = True
    index: int = 0  # of its request, in the order in which they come
    owner: Any = None  # what it is decoded for

    def __init__(
        self,
        request: Request,
        seed: int,
        number: int,
        most_draft_tokens: int = MOST_INTEGER,
        top_logprobs: int | None = None,  # log-probabilities of its tokens are kept, and of so many of the best
    ):
        self.seed: int = seed
        self.seed_row: int = number
        self.top_logprobs = top_logprobs
        super().__init__(request, most_draft_tokens=most_draft_tokens)

    def restart(self) -> None:
        super().restart()
        # What was drafted and accepted for it; forwards and seconds belong to all rows. The first token comes from the
        # prompt.
        self.stats: SpecDecodingStats = SpecDecodingStats(batch_size=1, num_committed_tokens=1)
        self.logprobs: list[TokenLogprobs] = []

    @property
    def length(self) -> int:
        return self.texts.lengths[0]

    @property
    def most_tokens(self) -> int:
        """Tokens that it may come to, the prompt included."""
        return self.texts.max_length

    @property
    def num_tokens(self) -> int:
        return self.length - self.texts.prompt_length

    @property
    def tokens(self) -> list[int]:
        return self.texts.tokens(0, self.texts.prompt_length)

    @property
    def finish_reason(self) -> str | None:
        """Why it has ended, "stop", "length", "error" or "cancelled"; `None` while it goes on."""
        if self.error is not None:
            return "error"
        if not self.texts.all_finished:
            return "cancelled" if self.is_cancelled else None
        is_full = self.length >= self.texts.max_length and self.tokens[-1] not in self.texts.eos_tokens
        return "length" if is_full else "stop"


class RowLogprobs(Observer):
    """Keeps log-probabilities for the requests that ask for them."""

    def __init__(self, rows: Rows):
        self._rows = rows

    @property
    def reads_logits(self) -> bool:
        return any(row.top_logprobs is not None for row, _ in self._rows.members)

    def see(self, cycle: Cycle) -> None:
        rows = [row for row, _ in self._rows.members]
        asking = [place for place, row in enumerate(rows) if row.top_logprobs is not None]
        if not asking:
            return
        logits, verdict = cycle.output.logits, cycle.verdict
        most = min(max(rows[place].top_logprobs for place in asking), logits.shape[-1])
        index = upload(asking, logits.device)
        nodes, tokens = (values.to(logits.device)[index] for values in (verdict.path, verdict.tokens))
        # Of the tokens `(R, M, 1)` and of the best ones, then these `(R, M, K)`; doubles hold both.
        logs = take_nodes(logits[index], nodes).float().log_softmax(-1)
        tables = logs.gather(-1, tokens[..., None]), *logs.topk(most, dim=-1)
        # A wait of its own, for those who ask: the device has nothing else to do here.
        values = torch.cat([table.double() for table in tables], dim=-1).tolist()
        for place, positions in zip(asking, values):
            row = rows[place]
            for value, *top in positions[: verdict.counts[place]]:
                pairs = [(int(token), log) for log, token in zip(top, top[most:])]
                row.logprobs.append(TokenLogprobs(value, pairs[: row.top_logprobs]))


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
    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    finish_reason: str | None = "error"
    error: Exception | None = None
    num_prompt_tokens: int = 0
    stats: SpecDecodingStats = field(default_factory=lambda: SpecDecodingStats(batch_size=1), repr=False)
    logprobs: list[TokenLogprobs] | None = field(default=None, repr=False)

    @classmethod
    def of_row(cls, row: Row, tokenizer: Any = None) -> RequestResult:
        """What has become of a row so far."""
        tokens = row.tokens
        return cls(
            row.index,
            tokens,
            text=None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True),
            finish_reason=row.finish_reason,
            error=row.error,
            num_prompt_tokens=row.texts.prompt_length,
            # Of a row that goes on they are still counted.
            stats=row.stats.copy(),
            logprobs=None if row.top_logprobs is None else row.logprobs[: len(tokens)],
        )


def error_text(error: Exception | None) -> str | None:
    """A request's error as it is written down: its message or, where it has none, its kind."""
    return None if error is None else str(error) or type(error).__name__
