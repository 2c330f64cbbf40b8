"""The rows of a loop: whose they are, where they stand, and how deep they may still draft.

Rows that came with one request are a [`Group`]: one batch, its stopping criteria, its processors. A call of
`generate()` is one group whose rows begin together; of many requests each is a group of one row. A row has a number in
the loop and an index in its group.

Shapes: R active rows of the loop, L tokens of a row.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from ..errors import SpecDecError
from ..logits.processors import ProcessorStack
from ..metrics import SpecDecodingStats
from ..protocol import DraftStep
from ..settings.checks import MOST_INTEGER
from ..transfers import select_rows
from .texts import Texts


if TYPE_CHECKING:
    from ..logits.grammar.matchers import GrammarMatcher
    from ..target.prompts import Request
    from .judging import Verifier
    from .recorder import StepRecorder


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
    # Of it alone, where it is one of many.
    stats: SpecDecodingStats | None = None
    # Judges its drafts, once it is in a loop.
    verifier: Verifier

    def __init__(self, request: Request, scores: StepRecorder | None = None, most_draft_tokens: int = MOST_INTEGER):
        self.request = request
        self.most_draft_tokens: int = most_draft_tokens
        self.samples: bool = bool(request.generation_config.do_sample)
        self.is_cancelled: bool = False
        self._scores = scores
        self.restart()
        self.stack: ProcessorStack = request.processor_stack(self.texts.eos_tokens)
        self.signature: tuple[Any, ...] | None = self.stack.signature
        # What a drafter may apply to its own logits without anyone noticing.
        self.draft_stack: ProcessorStack = self.stack.known_only() if self.stack.unknown_names else self.stack

    def restart(self) -> None:
        """Forgets all but the prompts."""
        self.texts: Texts = Texts(self.request, self._scores)
        self.error: Exception | None = None

    @property
    def has_ended(self) -> bool:
        return self.texts.all_finished or self.error is not None or self.is_cancelled

    def fail(self, error: Exception) -> None:
        """Keeps an error of a group that fails alone, of which the first is the cause; raises that of others."""
        if not self.fails_alone:
            raise error
        self.error = self.error or error

    def matcher(self, index: int) -> GrammarMatcher | None:
        """The row's place in its grammar, after all that was committed; `None` without one."""
        try:
            grammar = self.stack.grammar
            return None if grammar is None else grammar.at(index, self.texts.tokens(index))
        except SpecDecError as error:
            self.fail(error)
            return None


class Rows:
    """The rows of a loop by their numbers, of which there are `num_places`.

    `active` are the numbers of those in the batch, in its order, and `members` their groups, with their indices there;
    `anchors` `(R,)` is the last committed token of each, which the target has not read.
    """

    def __init__(self, num_places: int):
        self.places: list[tuple[Group, int] | None] = [None] * num_places
        # Other lists whenever rows have come or gone.
        self.active: list[int] = []
        self.members: list[tuple[Group, int]] = []
        self.groups: list[Group] = []
        self.anchors: torch.Tensor = torch.zeros(0, dtype=torch.long, device="cpu")
        self.has_grammar: bool = False
        # Position of a row's next token, masked ones not counted, less the columns of its text.
        self._offsets: list[int] = [0] * num_places

    @property
    def free_numbers(self) -> list[int]:
        return [number for number, place in enumerate(self.places) if place is None and number not in self.active]

    # Who comes and goes

    def enter(self, group: Group) -> None:
        """The rows of a group get the next numbers, and are active from now on."""
        for index in range(len(group.texts.ends)):
            self.places[len(self.active)] = group, index
            self.active = [*self.active, len(self.active)]
            self.members = [*self.members, (group, index)]
        self._regroup()

    def start(self, positions: list[int]) -> None:
        """Says at which position the next token of each active row is, masked tokens not counted."""
        for row, (group, index), position in zip(self.active, self.members, positions):
            self._offsets[row] = position - group.texts.lengths[index]

    def keep(self, keep: list[int]) -> None:
        """Goes on with these rows of the batch."""
        self.active = [self.active[index] for index in keep]
        self.members = [self.members[index] for index in keep]
        self.anchors = select_rows(self.anchors, keep)

    def leave(self, groups: list[Group]) -> None:
        """The places of these groups are free for others."""
        self.places = [None if place is not None and place[0] in groups else place for place in self.places]
        self._regroup()

    def close(self) -> None:
        """Lets go of all groups: they hold their verifiers, and these the rows."""
        self.places, self.active, self.members, self.groups = [], [], [], []

    def join(self, other: Rows) -> dict[int, int]:
        """Takes over the active rows of another loop: their numbers here, by those that they have there."""
        numbers = dict(zip(other.active, self.free_numbers))
        for theirs, number in numbers.items():
            self.places[number] = other.places[theirs]
            self._offsets[number] = other._offsets[theirs]
        self.active = [*self.active, *numbers.values()]
        self.members = [*self.members, *other.members]
        self.anchors = torch.cat([self.anchors, other.anchors])
        self._regroup()
        return numbers

    def _regroup(self) -> None:
        self.groups = list(dict.fromkeys(place[0] for place in self.places if place is not None))
        self.has_grammar = any(group.stack.grammar is not None for group in self.groups)

    # Of one row

    def at(self, row: int) -> tuple[Group, int]:
        """The row's group, and its index there."""
        place = self.places[row]
        assert place is not None, f"row {row} has left"
        return place

    def group(self, row: int) -> Group:
        return self.at(row)[0]

    def row(self, row: int) -> torch.LongTensor:
        """As [`Texts.row`]."""
        group, index = self.at(row)
        return group.texts.row(index)

    # Of several rows

    def finished(self, members: list[tuple[Group, int]]) -> list[bool]:
        """Which rows take no more tokens, of a batch in which others may: plain generation would only pad them."""
        finished = []
        for group, index in members:
            texts = group.texts
            has_left = texts.rows_end_alone or texts.lengths[index] >= texts.max_length
            finished.append(group.has_ended or (texts.ends[index] is not None and has_left))
        return finished

    @property
    def all_finished(self) -> bool:
        return all(group.has_ended for group in self.groups)

    @property
    def positions(self) -> list[int]:
        """Position of the next token of each active row, masked ones not counted."""
        return [group.texts.lengths[i] + self._offsets[row] for row, (group, i) in zip(self.active, self.members)]

    def depths(self, depth: int, more: int = 0) -> list[int]:
        """Largest depth of each active row's next draft, of a drafter's, once it has `more` tokens."""
        rooms = [group.texts.max_length - group.texts.lengths[index] - more for group, index in self.members]
        # One token more is committed with every draft.
        return [max(min(depth, group.most_draft_tokens, room - 1), 0) for (group, _), room in zip(self.members, rooms)]

    def step(self, depth: int) -> DraftStep:
        """What a drafter of this depth is told of them."""
        return DraftStep(self.active, self.anchors, self.positions, self.depths(depth))

    def prefix(self, length: int, places: list[int]) -> torch.LongTensor:
        """The first tokens `(len(places), length)` of the active rows at these places of the batch."""
        return torch.stack([self.row(self.active[place])[:length] for place in places])

    def draft_stack(self, rows: list[int]) -> ProcessorStack | None:
        """The processors that drafts of all these rows may apply; `None` where they differ."""
        first, *others = dict.fromkeys(map(self.group, rows))
        is_one = all(first.signature is not None and group.signature == first.signature for group in others)
        return first.draft_stack if is_one else None

    def append(self, rows: list[int], token_lists: list[list[int]]) -> list[list[int]]:
        """Appends to each row what its stopping rules keep of some tokens, one token where they fail; returns it."""
        kept: list[list[int]] = []
        for group, members in groupby(zip(map(self.at, rows), token_lists), key=lambda member: member[0][0]):
            places, lists = zip(*members)
            try:
                kept += group.texts.append([index for _, index in places], list(lists))
            except Exception as error:  # noqa: BLE001 - of any kind: the user's criteria raise what they like
                group.fail(error)
                kept += [tokens[:1] for tokens in lists]
        return kept
