"""The tokens of a call, and where each row ends.

Rows have their own lengths while they grow. What plain generation decides after every token is decided here for every
token of an accepted block, in order, so that the output ends exactly where plain generation would have ended it.

Shapes: B rows of the call, C token columns.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)


class Sequences:
    """Prompts and what has been committed so far, kept on the host, where stop rules and streamers read them.

    Args:
        input_ids (`torch.LongTensor` of shape `(B, P)`): Prompts, left-padded.
        pad_token_id (`int`): Fills the columns behind a row's end, as plain generation fills finished rows.
    """

    def __init__(self, input_ids: torch.LongTensor, pad_token_id: int):
        self.pad_token_id = pad_token_id
        self.device = input_ids.device
        self.prompt_length = input_ids.shape[1]
        self.lengths = [self.prompt_length] * input_ids.shape[0]
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
        return torch.from_numpy(self._tokens[rows, :length]).to(self.device)

    def row(self, row: int) -> torch.LongTensor:
        """A row's tokens so far, left padding included, shape `(L,)`."""
        return self.prefix(self.lengths[row], row)[0]

    def new_columns(self, first: int, last: int) -> torch.LongTensor:
        """Generated columns `first` to `last - 1` of all rows, on the host."""
        return torch.from_numpy(self._tokens[:, self.prompt_length + first : self.prompt_length + last])

    def output(self) -> torch.LongTensor:
        """All rows, shorter ones padded on the right: what `generate()` returns."""
        return self.prefix(max(self.lengths)).clone()

    @property
    def num_generated(self) -> list[int]:
        return [length - self.prompt_length for length in self.lengths]


class StopRules:
    """The stopping criteria of a call, applied to every token of a block in order.

    Args:
        criteria (`StoppingCriteriaList`): What `generate()` prepared.
        sequences (`Sequences`): The rows, extended here with the tokens that are kept.

    Attributes:
        max_length (`int`): Columns that a row may fill, the least of all `MaxLengthCriteria`.
        is_known (`bool`): All criteria look at one row at a time and keep no state.
        rows_end_alone (`bool`): There is an end-of-sequence token, so plain generation pads finished rows instead of
            going on with them until all have finished.
    """

    def __init__(self, criteria: StoppingCriteriaList, sequences: Sequences):
        self.sequences = sequences
        self.max_length = min(c.max_length for c in criteria if type(c) is MaxLengthCriteria)
        self.eos_tokens = {
            int(token) for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.reshape(-1)
        }
        self._times = [c for c in criteria if type(c) is MaxTimeCriteria]
        built_in = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)
        self._others = StoppingCriteriaList(c for c in criteria if type(c) not in built_in)
        self.is_known = all(type(c) is StopStringCriteria for c in self._others)
        self.rows_end_alone = any(hasattr(c, "eos_token_id") for c in criteria)
        self.finished = [False] * len(sequences.lengths)

    @property
    def all_finished(self) -> bool:
        return all(self.finished)

    def has_left(self, row: int) -> bool:
        """Whether a row takes no more tokens: it has finished, and plain generation would only pad it."""
        return self.finished[row] and (self.rows_end_alone or self.sequences.lengths[row] >= self.max_length)

    @property
    def need_equal_lengths(self) -> bool:
        """Whether rows must advance together to end where plain generation ends them."""
        ends_all = bool(self._others or self._times) and not self.rows_end_alone
        return len(self.finished) > 1 and (not self.is_known or ends_all)

    def append(self, rows: list[int], token_lists: list[list[int]], scores: tuple | None = None) -> list[list[int]]:
        """Appends each row's tokens up to and including the first one that ends the row.

        Args:
            rows (`list[int]`): Rows of the call.
            token_lists (`list[list[int]]`): Their new tokens, at least one each.
            scores (`tuple`, *optional*): Scores of all positions so far, for criteria that read them.

        Returns:
            The tokens kept of each row. `finished` says which rows have ended.
        """
        kept = [self._up_to_end(row, tokens) for row, tokens in zip(rows, token_lists)]
        self.sequences.extend(rows, kept)
        if self._others:
            kept = self._apply_others(rows, kept, scores)
        if self._times and any(bool(c(self.sequences.prefix(1, row=0), None)) for c in self._times):
            self.finished = [True] * len(self.finished)
        return kept

    def _up_to_end(self, row: int, tokens: list[int]) -> list[int]:
        # Plain generation looks at the length behind a token, so there is always room for one.
        room = max(self.max_length - self.sequences.lengths[row], 1)
        if len(tokens) >= room:
            tokens = tokens[:room]
            self.finished[row] = True
        if not self.eos_tokens.isdisjoint(tokens):
            end = next(index for index, token in enumerate(tokens) if token in self.eos_tokens)
            self.finished[row] = True
            tokens = tokens[: end + 1]
        return tokens

    def _apply_others(self, rows, kept, scores):
        if not self.is_known and len(self.finished) > 1:
            length = max(self.sequences.lengths)
            done = self._others(self.sequences.prefix(length), scores)
            self.finished = [now or bool(new) for now, new in zip(self.finished, done)]
            return kept
        return [self._first_stop(row, tokens, scores) for row, tokens in zip(rows, kept)]

    def _first_stop(self, row: int, tokens: list[int], scores) -> list[int]:
        end = self.sequences.lengths[row]
        for count in range(1, len(tokens) + 1):
            prefix = self.sequences.prefix(end - len(tokens) + count, row)
            if bool(self._others(prefix, scores)):
                self.finished[row] = True
                self.sequences.truncate(row, end - len(tokens) + count)
                return tokens[:count]
        return tokens
