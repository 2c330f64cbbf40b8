"""The texts of rows, and the stopping criteria that end them.

What plain generation decides after every token is decided here for every token of an accepted block, in order, so that
the output ends exactly where plain generation would have ended it.

Shapes: B rows of a request, C token columns, L tokens of a row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..settings.checks import MOST_INTEGER


if TYPE_CHECKING:
    from ..target.prompts import Request
    from .recorder import StepRecorder


class Texts:
    """The texts of a group's rows on the host, left-padded prompts and what follows, and the criteria that end them.

    Columns after a row's end hold `pad_token`, as plain generation fills finished rows. Criteria are applied to
    every token of a block in order.

    A criterion that this package does not know may look across the rows, keep state or count its calls. It is called
    as in plain generation: with the whole batch, once for each column, in order, as soon as no row is shorter. So rows
    do not wait for each other: one that has gone ahead is cut back to where the criterion ends it. `scores` are those
    of all tokens so far, for criteria that read them.
    """

    def __init__(self, request: Request, scores: StepRecorder | None = None):
        criteria, num_rows = request.stopping_criteria, request.batch_size
        self.pad_token: int = request.pad_token
        self.device: torch.device = request.device
        self.prompt_length: int = request.input_ids.shape[1]
        self.lengths: list[int] = [self.prompt_length] * num_rows
        self._tokens = self._padded(request.input_ids.cpu().numpy(), self.prompt_length + 256)
        limit = min(c.max_length for c in criteria if type(c) is MaxLengthCriteria)
        # Columns that a row may fill: the first number that reaches the limit, of whatever kind that is.
        self.max_length: int = math.ceil(limit) if limit < MOST_INTEGER else MOST_INTEGER
        self.eos_tokens: set[int] = {
            int(token) for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.reshape(-1)
        }
        self._times = [c for c in criteria if type(c) is MaxTimeCriteria]
        self._strings = StoppingCriteriaList(c for c in criteria if type(c) is StopStringCriteria)
        built_in = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
        self._others = StoppingCriteriaList(c for c in criteria if type(c) not in built_in)
        # With an end-of-sequence token plain generation pads finished rows, instead of going on with them until all
        # have finished.
        self.rows_end_alone: bool = any(hasattr(c, "eos_token_id") for c in criteria)
        # The column that ends each row, as far as known.
        self.ends: list[int | None] = [None] * num_rows
        self.all_finished: bool = False
        # Tokens that had been appended before it was known that they are after their row's end.
        self.num_cut_back: int = 0
        self._num_judged = self.prompt_length
        self._scores = scores
        self._steps: list[torch.Tensor] = []

    def _padded(self, tokens: np.ndarray, columns: int) -> np.ndarray:
        padded = np.full((tokens.shape[0], columns), self.pad_token, dtype=np.int64)
        padded[:, : tokens.shape[1]] = tokens
        return padded

    # What they are

    def columns(self, last: int, first: int = 0, row: int | None = None) -> torch.LongTensor:
        """Columns `first` to `last - 1` of all rows or of one, `(B, C)`, where they are kept: nothing is copied."""
        rows = slice(None) if row is None else slice(row, row + 1)
        return torch.from_numpy(self._tokens[rows, first:last])

    def row(self, row: int) -> torch.LongTensor:
        """A row's tokens so far `(L,)`, left padding included, on the device of the prompts."""
        return self.columns(self.lengths[row], row=row)[0].to(self.device)

    def tokens(self, row: int, first: int = 0) -> list[int]:
        """A row's tokens so far from column `first` on, left padding included."""
        return self._tokens[row, first : self.lengths[row]].tolist()

    def output(self) -> torch.LongTensor:
        """Tokens of all rows, shorter ones padded on the right, as `generate()` returns them."""
        return self.columns(max(self.lengths)).to(self.device, copy=True)

    @property
    def may_cut_back(self) -> bool:
        """Tells whether a row's end may become known when the row is longer already."""
        watch_all = bool(self._strings or self._times) and not self.rows_end_alone
        return len(self.ends) > 1 and (bool(self._others) or watch_all)

    @property
    def num_settled(self) -> int:
        """Columns that will not change: all rows have reached them, or end before."""
        if self.rows_end_alone:
            growing = [length for length, end in zip(self.lengths, self.ends) if end is None]
            return min(growing, default=max(self.lengths))
        return min(self.lengths)

    # How they go on and end

    def append(self, rows: list[int], token_lists: list[list[int]]) -> list[list[int]]:
        """Appends each row's tokens, at least one, up to and including the first that ends it; returns those kept.

        All of a row's are returned where it turns out to have ended before them.
        """
        begins = [self.lengths[row] for row in rows]
        kept = []
        for row, begin, tokens in zip(rows, begins, token_lists):
            # Plain generation looks at the length after a token, so there is always room for one.
            tokens = tokens[: max(self.max_length - begin, 1)]
            has_ended = not self.eos_tokens.isdisjoint(tokens)
            if has_ended:
                tokens = tokens[: 1 + next(place for place, token in enumerate(tokens) if token in self.eos_tokens)]
            end = begin + len(tokens)
            if end > self._tokens.shape[1]:
                self._tokens = self._padded(self._tokens, 2 * end)
            self._tokens[row, begin:end] = tokens
            self.lengths[row] = end
            if has_ended or end >= self.max_length:
                self._end(row, end)
            kept.append(tokens)
        for row, begin in zip(rows, begins if self._strings else []):
            for length in range(begin + 1, self.lengths[row] + 1):
                # It reads the end of the text, for every token: not from a device, where the text would have to go.
                if bool(self._strings(self.columns(length, row=row), None)):
                    self._end(row, length)
                    break
        if self._others:
            self._show_columns()
        if self._times and any(bool(c(self.columns(1, row=0), None)) for c in self._times):
            # Time is over: rows end where they stand, or where others see them if that matters.
            settled = self.num_settled if self._others or not self.rows_end_alone else None
            for row, length in enumerate(list(self.lengths)):
                self._end(row, length if settled is None else settled)
        if None not in self.ends:
            self.all_finished = self.rows_end_alone or min(self.lengths) >= max(self.ends)
        if self.all_finished and not self.rows_end_alone:
            for row in range(len(self.ends)):
                self._cut_back(row, max(self.ends))
        news = [self.lengths[row] - begin for row, begin in zip(rows, begins)]
        self.num_cut_back -= sum(len(tokens) - new for tokens, new in zip(kept, news) if 0 < new)
        return [tokens[:new] if new > 0 else tokens for tokens, new in zip(kept, news)]

    def _end(self, row: int, column: int) -> None:
        """A row ends with this column, if not before."""
        end = self.ends[row]
        self.ends[row] = column if end is None else min(end, column)
        if self.rows_end_alone:
            self._cut_back(row, column)

    def _cut_back(self, row: int, column: int) -> None:
        length = self.lengths[row]
        if length > column:
            self.num_cut_back += length - column
            self._tokens[row, column:length] = self.pad_token
            self.lengths[row] = column

    def _show_columns(self) -> None:
        """Shows criteria every column that all rows have reached, until all have ended."""
        while self._num_judged < self.num_settled and any(end is None or end > self._num_judged for end in self.ends):
            self._num_judged += 1
            # A copy: whoever keeps it, or writes to it, does so in plain generation too.
            columns = self.columns(self._num_judged).to(self.device, copy=True)
            scores = None
            if self._scores is not None:
                for step in range(len(self._steps), self._num_judged - self.prompt_length):
                    self._steps.append(self._scores.step(step))
                scores = tuple(self._steps)
            done = self._others(columns, scores)
            for row in torch.as_tensor(done, device="cpu").nonzero()[:, 0].tolist():
                self._end(row, self._num_judged)
