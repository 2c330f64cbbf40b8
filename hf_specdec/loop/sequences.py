"""The tokens of a call, and where each row ends.

Rows have their own lengths while they grow. What plain generation decides after every token is decided here for every
token of an accepted block, in order, so that the output ends exactly where plain generation would have ended it.

Shapes: B rows of the call, C token columns.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..logits.recorder import StepRecorder
from ..validation import MOST_INTEGER


class Sequences:
    """Prompts and what has been committed so far, kept on the host, where stop rules and streamers read them.

    Args:
        input_ids (`torch.LongTensor` of shape `(B, P)`): Prompts, left-padded.
        pad_token_id (`int`): Fills the columns after a row's end, as plain generation fills finished rows.
    """

    def __init__(self, input_ids: torch.LongTensor, pad_token_id: int):
        self.pad_token_id = pad_token_id
        self.device: torch.device = input_ids.device
        self.prompt_length: int = input_ids.shape[1]
        self.lengths: list[int] = [self.prompt_length] * input_ids.shape[0]
        self._tokens = self._padded(input_ids.cpu().numpy(), self.prompt_length + 256)

    def _padded(self, tokens: np.ndarray, columns: int) -> np.ndarray:
        padded = np.full((tokens.shape[0], columns), self.pad_token_id, dtype=np.int64)
        padded[:, : tokens.shape[1]] = tokens
        return padded

    def extend(self, rows: list[int], token_lists: list[list[int]]) -> None:
        """Appends to each of `rows` its list of tokens."""
        longest = max(self.lengths[row] + len(tokens) for row, tokens in zip(rows, token_lists))
        if longest > self._tokens.shape[1]:
            self._tokens = self._padded(self._tokens, 2 * longest)
        for row, tokens in zip(rows, token_lists):
            start = self.lengths[row]
            self._tokens[row, start : start + len(tokens)] = tokens
            self.lengths[row] = start + len(tokens)

    def truncate(self, row: int, length: int) -> None:
        self._tokens[row, length : self.lengths[row]] = self.pad_token_id
        self.lengths[row] = length

    def prefix(self, length: int, row: int | None = None) -> torch.LongTensor:
        """The first `length` columns, `(B, length)`, or of one row, `(1, length)`; padded where a row is shorter."""
        rows = slice(None) if row is None else slice(row, row + 1)
        return self.on_host(length, rows).to(self.device)

    def on_host(self, length: int, rows: slice) -> torch.LongTensor:
        """The first `length` columns of some rows, where they are kept: nothing is copied."""
        return torch.from_numpy(self._tokens[rows, :length])

    def row(self, row: int) -> torch.LongTensor:
        """A row's tokens so far, left padding included, shape `(L,)`."""
        return self.prefix(self.lengths[row], row)[0]

    def tokens(self, row: int, first: int = 0) -> list[int]:
        """A row's tokens so far from column `first` on, left padding included, on the host."""
        return self._tokens[row, first : self.lengths[row]].tolist()

    def new_columns(self, first: int, last: int) -> torch.LongTensor:
        """Generated columns `first` to `last - 1` of all rows, on the host."""
        return torch.from_numpy(self._tokens[:, self.prompt_length + first : self.prompt_length + last])

    def output(self) -> torch.LongTensor:
        """Tokens of all rows, shorter ones padded on the right, as `generate()` returns them."""
        return self.prefix(max(self.lengths)).clone()

    @property
    def num_generated(self) -> list[int]:
        return [length - self.prompt_length for length in self.lengths]


class StopRules:
    """The stopping criteria of a call, applied to every token of a block in order.

    A criterion that this package does not know may look across the rows, keep state or count its calls. It is called
    as in plain generation: with the whole batch, once for each column, in order, as soon as no row is shorter. So rows
    do not wait for each other: one that has gone ahead is cut back to where the criterion ends it.

    Args:
        criteria (`StoppingCriteriaList`): What `generate()` prepared.
        sequences (`Sequences`): The rows, extended here with the tokens that are kept.
        scores (`StepRecorder`, *optional*): Scores of all tokens appended so far, for criteria that read them.

    Attributes:
        max_length (`int`): Columns that a row may fill, the least of all `MaxLengthCriteria`.
        rows_end_alone (`bool`): There is an end-of-sequence token, so plain generation pads finished rows instead of
            going on with them until all have finished.
        ends (`list[int | None]`): For each row the column that ends it, as far as known.
        all_finished (`bool`): No row takes any more tokens.
        num_cut_back (`int`): Tokens that had been appended before it was known that they are after their row's end.
    """

    def __init__(self, criteria: StoppingCriteriaList, sequences: Sequences, scores: StepRecorder | None = None):
        self.sequences = sequences
        limit = min(c.max_length for c in criteria if type(c) is MaxLengthCriteria)
        # The first number of columns that reaches it, of whatever kind it is.
        self.max_length: int = math.ceil(limit) if limit < MOST_INTEGER else MOST_INTEGER
        self.eos_tokens: set[int] = {
            int(token) for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.reshape(-1)
        }
        self._times = [c for c in criteria if type(c) is MaxTimeCriteria]
        self._strings = StoppingCriteriaList(c for c in criteria if type(c) is StopStringCriteria)
        built_in = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
        self._others = StoppingCriteriaList(c for c in criteria if type(c) not in built_in)
        self.rows_end_alone: bool = any(hasattr(c, "eos_token_id") for c in criteria)
        self.ends: list[int | None] = [None] * len(sequences.lengths)
        self.all_finished: bool = False
        self.num_cut_back: int = 0
        self._num_judged = sequences.prompt_length
        self._scores = scores
        self._steps: list[torch.Tensor] = []

    def has_left(self, row: int) -> bool:
        """Tells whether a row takes no more tokens: it has finished, and plain generation would only pad it."""
        return self.ends[row] is not None and (self.rows_end_alone or self.sequences.lengths[row] >= self.max_length)

    @property
    def may_cut_back(self) -> bool:
        """Tells whether a row's end may become known when the row is longer already."""
        watch_all = bool(self._strings or self._times) and not self.rows_end_alone
        return len(self.ends) > 1 and (bool(self._others) or watch_all)

    @property
    def num_settled(self) -> int:
        """Columns that will not change: all rows have reached them, or end before."""
        lengths = self.sequences.lengths
        if self.rows_end_alone:
            growing = [length for length, end in zip(lengths, self.ends) if end is None]
            return min(growing, default=max(lengths))
        return min(lengths)

    def append(self, rows: list[int], token_lists: list[list[int]]) -> list[list[int]]:
        """Appends each row's tokens up to and including the first one that ends the row.

        Args:
            rows (`list[int]`): Rows of the call.
            token_lists (`list[list[int]]`): Their new tokens, at least one each.

        Returns:
            The tokens kept of each row; all of them where the row turns out to have ended before them.
        """
        begins = [self.sequences.lengths[row] for row in rows]
        kept = [self._up_to_end(row, tokens) for row, tokens in zip(rows, token_lists)]
        self.sequences.extend(rows, kept)
        if self._strings:
            for row, begin in zip(rows, begins):
                self._find_string(row, begin)
        if self._others:
            self._show_columns()
        if self._times and any(bool(c(self.sequences.on_host(1, slice(1)), None)) for c in self._times):
            self._end_all()
        if None not in self.ends:
            self.all_finished = self.rows_end_alone or min(self.sequences.lengths) >= max(self.ends)
        if self.all_finished and not self.rows_end_alone:
            for row in range(len(self.ends)):
                self._cut_back(row, max(self.ends))
        news = [self.sequences.lengths[row] - begin for row, begin in zip(rows, begins)]
        self.num_cut_back -= sum(len(tokens) - new for tokens, new in zip(kept, news) if 0 < new)
        return [tokens[:new] if new > 0 else tokens for tokens, new in zip(kept, news)]

    def _end(self, row: int, column: int) -> None:
        """A row ends with this column, if not before."""
        end = self.ends[row]
        self.ends[row] = column if end is None else min(end, column)
        if self.rows_end_alone:
            self._cut_back(row, column)

    def _cut_back(self, row: int, column: int) -> None:
        if self.sequences.lengths[row] > column:
            self.num_cut_back += self.sequences.lengths[row] - column
            self.sequences.truncate(row, column)

    def _up_to_end(self, row: int, tokens: list[int]) -> list[int]:
        begin = self.sequences.lengths[row]
        # Plain generation looks at the length after a token, so there is always room for one.
        tokens = tokens[: max(self.max_length - begin, 1)]
        if not self.eos_tokens.isdisjoint(tokens):
            end = next(index for index, token in enumerate(tokens) if token in self.eos_tokens)
            tokens = tokens[: end + 1]
            self._end(row, begin + len(tokens))
        elif begin + len(tokens) >= self.max_length:
            self._end(row, begin + len(tokens))
        return tokens

    def _find_string(self, row: int, begin: int) -> None:
        """Ends a row where its first stop string does, after column `begin`."""
        for length in range(begin + 1, self.sequences.lengths[row] + 1):
            # It reads the end of the text, for every token: not from a device, where the text would have to go first.
            if bool(self._strings(self.sequences.on_host(length, slice(row, row + 1)), None)):
                self._end(row, length)
                return

    def _show_columns(self) -> None:
        """Shows criteria every column that all rows have reached, until all have ended."""
        while self._num_judged < self.num_settled and not self._ended_by(self._num_judged):
            self._num_judged += 1
            # A copy: whoever keeps it, or writes to it, does so in plain generation too.
            done = self._others(self.sequences.prefix(self._num_judged).clone(), self._scores_so_far())
            for row in torch.as_tensor(done, device="cpu").nonzero()[:, 0].tolist():
                self._end(row, self._num_judged)

    def _ended_by(self, column: int) -> bool:
        return all(end is not None and end <= column for end in self.ends)

    def _scores_so_far(self) -> tuple | None:
        if self._scores is None:
            return None
        while len(self._steps) < self._num_judged - self.sequences.prompt_length:
            self._steps.append(self._scores.step(len(self._steps)))
        return tuple(self._steps)

    def _end_all(self) -> None:
        """Time is over: rows end where they stand, or where others see them if that matters."""
        together = bool(self._others) or not self.rows_end_alone
        settled = self.num_settled
        for row, length in enumerate(list(self.sequences.lengths)):
            self._end(row, settled if together else length)
