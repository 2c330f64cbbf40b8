"""A request while it is decoded: a group of one row, with what is told of it alone.

Shapes: R active rows, M committed tokens, V vocabulary, K most probable tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..loop.observers import Cycle, Observer
from ..loop.rows import Group, Rows
from ..metrics import SpecDecodingStats
from ..target.request import Request
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
    """One request of many: prepared for a batch of one, without padding, and named after itself.

    Its random numbers are those of row `number` in a call with this seed. `top_logprobs`: log-probabilities of its
    tokens are kept, and of so many of the most probable.
    """

    fails_alone = True
    # How many have come before it.
    arrival: int = 0

    def __init__(
        self,
        request: Request,
        seed: int,
        number: int,
        most_draft_tokens: int | None = None,
        top_logprobs: int | None = None,
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

    def read_again(self) -> None:
        """Makes its text so far the prompt of another loop; where that cannot be, it begins anew."""
        if self.top_logprobs is not None and len(self.logprobs) != len(self.tokens):
            self.restart()
        # One token more comes from what is read.
        self.stats.num_committed_tokens = len(self.tokens) + 1

    @property
    def length(self) -> int:
        return self.sequences.lengths[0]

    @property
    def most_tokens(self) -> int:
        """Tokens that it may come to, the prompt included."""
        return self.stop.max_length

    @property
    def tokens(self) -> list[int]:
        """The generated tokens."""
        return self.tokens_from(0)

    def tokens_from(self, first: int) -> list[int]:
        """The generated tokens without so many of the first ones."""
        return self.sequences.tokens(0, self.sequences.prompt_length + first)

    @property
    def prompt(self) -> list[int]:
        return self.sequences.tokens(0)[: self.sequences.prompt_length]

    @property
    def finish_reason(self) -> str:
        """Why it has ended: "stop", "length", "error" or "cancelled"."""
        if self.error is not None:
            return "error"
        if self.stop.all_finished:
            is_full = self.length >= self.stop.max_length and self.tokens[-1] not in self.stop.eos_tokens
            return "length" if is_full else "stop"
        return "cancelled"


class RowStatistics(Observer):
    """Counts drafts and tokens for each request."""

    def __init__(self, rows: Rows):
        self._rows = rows

    def see_first(self, cycle: Cycle) -> None:
        """Those of the prompts count as soon as a request begins."""

    def tell(self, cycle: Cycle) -> None:
        draft, verdict = cycle.draft, cycle.verdict
        counts = zip(draft.counts(), draft.max_depths(), verdict.num_accepted, verdict.counts)
        for number, row_counts in zip(cycle.rows, counts):
            self._rows.group(number).stats.count(*row_counts)


class RowLogprobs(Observer):
    """Keeps log-probabilities for the requests that ask for them."""

    def __init__(self, rows: Rows):
        self._rows = rows

    @property
    def reads_logits(self) -> bool:
        return any(self._rows.group(number).top_logprobs is not None for number in self._rows.active)

    def see(self, cycle: Cycle) -> None:
        rows = [self._rows.group(number) for number in cycle.rows]
        asking = [index for index, row in enumerate(rows) if row.top_logprobs is not None]
        if not asking:
            return
        logits, verdict = cycle.output.logits, cycle.verdict
        most = max(rows[index].top_logprobs for index in asking)
        places = upload(asking, logits.device)
        nodes, tokens = (values.to(logits.device)[places] for values in (verdict.path, verdict.tokens))
        # A wait of its own, for those who ask: the device has nothing else to do here.
        values = _log_probs(take_nodes(logits[places], nodes), tokens, most).tolist()
        for index, positions in zip(asking, values):
            row = rows[index]
            for own, *top in positions[: verdict.counts[index]]:
                pairs = [(int(token), value) for value, token in zip(top, top[len(top) // 2 :])]
                row.logprobs.append(TokenLogprobs(own, pairs[: row.top_logprobs]))


def _log_probs(logits: torch.Tensor, tokens: torch.LongTensor, most: int) -> torch.DoubleTensor:
    """Log-probabilities of tokens `(R, M)` and of the K best, then the K best: `(R, M, 1 + 2 K)`.

    Args:
        logits (`torch.Tensor` of shape `(R, M, V)`): The target's.
        tokens (`torch.LongTensor` of shape `(R, M)`): The tokens.
        most (`int`): K, or more than there are tokens.
    """
    logs = logits.float().log_softmax(-1)
    best = logs.topk(min(most, logs.shape[-1]), dim=-1)
    # Doubles hold both.
    return torch.cat([values.double() for values in (logs.gather(-1, tokens[..., None]), *best)], dim=-1)
