"""The rows of a loop: their texts, where each one ends, and how deep it may still draft.

Rows that came with one request are a [`Group`]: one batch, its stopping criteria, its processors. A call of
`generate()` is one group whose rows begin together; of many requests each is a group of one row. A row has a number in
the loop and an index in its group.

What plain generation decides after every token is decided here for every token of an accepted block, in order, so that
the output ends exactly where plain generation would have ended it.

Shapes: B rows of a group, C token columns, R active rows of the loop.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..errors import SpecDecError
from ..logits.processors import ProcessorStack
from ..protocol import DraftStep
from ..transfers import select_rows
from ..validation import MOST_INTEGER


if TYPE_CHECKING:
    from ..logits.grammar.matchers import GrammarMatcher
    from ..target.request import Request
    from .judging import Verifier
    from .recorder import StepRecorder


class Sequences:
    """Prompts `(B, P)`, left-padded, and what has been committed after them, on the host.

    Stop rules and streamers read them there. Columns after a row's end hold `pad_token_id`, as plain generation fills
    finished rows.
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
    """

    def __init__(self, criteria: StoppingCriteriaList, sequences: Sequences, scores: StepRecorder | None = None):
        self.sequences = sequences
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
        self.ends: list[int | None] = [None] * len(sequences.lengths)
        self.all_finished: bool = False
        # Tokens that had been appended before it was known that they are after their row's end.
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
        """Appends each row's tokens, at least one, up to and including the first that ends it; returns those kept.

        All of a row's are returned where it turns out to have ended before them.
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


class Group:
    """Rows that came with one request, and share its criteria and processors.

    `scores` has those of all tokens so far, for criteria that read them; drafts have a depth of `most_draft_tokens` at
    most.
    """

    # An error of its criteria or processors ends this group alone, of many.
    fails_alone: bool = False
    # The random numbers of a group of many are those of this row in a call with this seed.
    seed: int = 0
    seed_row: int = 0
    # Judges its drafts, once it is in a loop.
    verifier: Verifier

    def __init__(self, request: Request, scores: StepRecorder | None = None, most_draft_tokens: int | None = None):
        self.request = request
        self.most_draft_tokens = most_draft_tokens
        self.samples: bool = bool(request.generation_config.do_sample)
        self.error: Exception | None = None
        self.is_cancelled: bool = False
        self._scores = scores
        self.restart()
        self.stack: ProcessorStack = request.processor_stack(self.stop.eos_tokens)
        self.signature: tuple[Any, ...] | None = self.stack.signature
        # What a drafter may apply to its own logits without anyone noticing.
        self.draft_stack: ProcessorStack = self.stack.known_only()

    def restart(self) -> None:
        """Forgets all but the prompts."""
        self.sequences: Sequences = Sequences(self.request.input_ids, self.request.pad_token)
        self.stop: StopRules = StopRules(self.request.stopping_criteria, self.sequences, self._scores)
        self.error = None

    @property
    def has_ended(self) -> bool:
        return self.stop.all_finished or self.error is not None or self.is_cancelled

    def depth(self, index: int, depth: int, more: int = 0) -> int:
        """Depth that the row's next draft may have, of a drafter's, once the row has `more` tokens."""
        if self.most_draft_tokens is not None:
            depth = min(depth, self.most_draft_tokens)
        # One token more is committed with every draft.
        return max(min(depth, self.stop.max_length - 1 - self.sequences.lengths[index] - more), 0)

    def append(self, indices: list[int], token_lists: list[list[int]]) -> list[list[int]]:
        """As [`StopRules.append`]; an error of the criteria of a group that fails alone is kept."""
        try:
            return self.stop.append(indices, token_lists)
        except Exception as error:
            if not self.fails_alone:
                raise
            self.error = error
            return [tokens[:1] for tokens in token_lists]

    def matcher(self, index: int) -> GrammarMatcher | None:
        """The row's place in its grammar, after all that was committed; `None` without one.

        Raises:
            SpecDecError: Something other than the grammar has chosen a token that it forbids.
        """
        if self.stack.grammar is None:
            return None
        try:
            return self.stack.grammar.at(index, self.sequences.tokens(index))
        except SpecDecError as error:
            if not self.fails_alone:
                raise
            self.error = error
            return None


class Rows:
    """The rows of a loop by their numbers, of which there are `num_places`.

    `active` are those of the batch, in its order; `anchors` `(R,)` is the last committed token of each, which the
    target has not read.
    """

    def __init__(self, num_places: int):
        self.places: list[tuple[Group, int] | None] = [None] * num_places
        self.active: list[int] = []
        self.anchors: torch.Tensor = torch.zeros(0, dtype=torch.long, device="cpu")
        # Position of a row's next token, masked ones not counted, less the columns of its text.
        self._offsets: list[int] = [0] * num_places

    @property
    def groups(self) -> list[Group]:
        return list(dict.fromkeys(place[0] for place in self.places if place is not None))

    @property
    def has_grammar(self) -> bool:
        return any(place is not None and place[0].stack.grammar is not None for place in self.places)

    @property
    def free_numbers(self) -> list[int]:
        return [number for number, place in enumerate(self.places) if place is None and number not in self.active]

    def enter(self, group: Group, numbers: list[int]) -> None:
        """The rows of a group get these numbers, and are active from now on."""
        for index, number in enumerate(numbers):
            self.places[number] = group, index
        self.active = self.active + numbers

    def leave(self, groups: list[Group]) -> None:
        """The places of these groups are free for others."""
        self.places = [None if place is not None and place[0] in groups else place for place in self.places]

    def start(self, positions: list[int]) -> None:
        """Says at which position the next token of each active row is, masked tokens not counted."""
        for row, (group, index), position in zip(self.active, self.members, positions):
            self._offsets[row] = position - group.sequences.lengths[index]

    def keep(self, keep: list[int]) -> None:
        """Goes on with these rows of the batch."""
        self.active = [self.active[index] for index in keep]
        self.anchors = select_rows(self.anchors, keep)

    def numbers_for(self, other: Rows) -> dict[int, int]:
        """Free numbers for the active rows of another loop, by those that they have there."""
        return dict(zip(other.active, self.free_numbers))

    def join(self, other: Rows, numbers: dict[int, int]) -> None:
        """Takes over the active rows of another loop, under these numbers."""
        for theirs, number in numbers.items():
            self.places[number] = other.places[theirs]
            self._offsets[number] = other._offsets[theirs]
        self.active = [*self.active, *numbers.values()]
        self.anchors = torch.cat([self.anchors, other.anchors])

    # Of one row

    def at(self, row: int) -> tuple[Group, int]:
        """The row's group, and its index there."""
        place = self.places[row]
        assert place is not None, f"row {row} has left"
        return place

    def group(self, row: int) -> Group:
        return self.at(row)[0]

    def row(self, row: int) -> torch.LongTensor:
        """As [`Sequences.row`]."""
        group, index = self.at(row)
        return group.sequences.row(index)

    def has_left(self, row: int) -> bool:
        """Tells whether the row takes no more tokens, of a batch in which others may."""
        if (place := self.places[row]) is None:
            return True
        group, index = place
        return group.has_ended or group.stop.has_left(index)

    # Of several rows

    @property
    def members(self) -> list[tuple[Group, int]]:
        """The groups of the active rows, and their indices there."""
        return [self.at(row) for row in self.active]

    @property
    def all_finished(self) -> bool:
        return all(place is None or place[0].has_ended for place in self.places)

    @property
    def positions(self) -> list[int]:
        """Position of the next token of each active row, masked tokens not counted."""
        offsets = [self._offsets[row] for row in self.active]
        return [group.sequences.lengths[index] + offset for (group, index), offset in zip(self.members, offsets)]

    def depths(self, depth: int, more: int = 0) -> list[int]:
        """Largest depth of each active row's next draft, of a drafter's, once it has `more` tokens."""
        return [group.depth(index, depth, more) for group, index in self.members]

    def may_end_within(self, more: int) -> bool:
        """Tells whether an active row is as long as it may get, once it has `more` tokens."""
        return any(group.sequences.lengths[index] + more >= group.stop.max_length for group, index in self.members)

    def prefix(self, length: int, places: list[int]) -> torch.LongTensor:
        """The first tokens `(len(places), length)` of the active rows at these places of the batch."""
        return torch.stack([self.row(self.active[place])[:length] for place in places])

    def step(self, depths: list[int]) -> DraftStep:
        return DraftStep(self.active, self.anchors, self.positions, depths)

    def draft_stack(self, rows: list[int]) -> ProcessorStack | None:
        """The processors that drafts of all these rows may apply; `None` where they differ."""
        groups = [self.group(row) for row in rows]
        first = groups[0]
        is_one = all(group is first for group in groups)
        is_alike = first.signature is not None and all(group.signature == first.signature for group in groups)
        return first.draft_stack if is_one or is_alike else None

    def append(self, rows: list[int], token_lists: list[list[int]]) -> list[list[int]]:
        """Appends to each row what its stopping rules keep of some tokens, and returns that."""
        members = [self.at(row) for row in rows]
        first = members[0][0]
        if all(group is first for group, _ in members):
            return first.append([index for _, index in members], token_lists)
        return [group.append([index], [tokens])[0] for (group, index), tokens in zip(members, token_lists)]
