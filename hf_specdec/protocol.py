"""Data that the decoding loop and a candidate generator hand to each other.

Shapes: B active rows, P padded prompt length, M committed tokens of a cycle, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import TYPE_CHECKING
from weakref import ref

import torch

from .threads import cached_property
from .transfers import last_of_each, select_rows, take_nodes, upload, widened


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .logits.sampling import DraftSampler
    from .target.graphs import CallGraphs
    from .target.model import SlotModel
    from .target.parts.source import Source


@dataclass
class Session:
    """Constants of one `generate()` call, and what is collected in it.

    Attributes:
        batch_size (`int`): Rows at the start; row indices 0 to `batch_size - 1` name them for the whole call.
        max_length (`int`): Tokens a row may hold, prompt included (padding not counted for the longest prompt).
        device (`torch.device`): Where draft tokens are expected.
        sampler (`DraftSampler`, *optional*): Processes draft logits as the target's are.
        supports_trees (`bool`): The target can verify branches; if not, drafts must be chains.
        notes (`list[str]`): Limits of this call, and the reasons for them; part of the statistics.
        adapts (`bool`): The length of drafts is chosen from cycle to cycle.
        draft_graphs (`list[CallGraphs]`): The CUDA graphs of draft networks in this call; part of the statistics.
        group (`ProcessGroup`, *optional*): The processes that hold parts of one target, see `agreed`.
        target_ref (`ref`, *optional*): To `target`; a generator that outlives its call must not keep the slots alive.
    """

    batch_size: int
    max_length: int
    device: torch.device
    sampler: DraftSampler | None = None
    supports_trees: bool = True
    notes: list[str] = field(default_factory=list)
    adapts: bool = False
    draft_graphs: list[CallGraphs] = field(default_factory=list)
    group: ProcessGroup | None = None
    target_ref: ref[SlotModel] | None = None

    @property
    def target(self) -> SlotModel | None:
        """The target over its slots, for methods that draft with its own layers.

        `None` while the generator is made, after the call, and in transformers' own assisted decoding.
        """
        return None if self.target_ref is None else self.target_ref()

    def agreed(self, numbers: list[int]) -> list[int]:
        """The decision of the first process of the group.

        Processes with parts of one target must draft alike, or they wait for each other for ever. Whatever depends on
        a clock, which differs from process to process, is decided by the first one alone.

        Args:
            numbers (`list[int]`): A decision, of the same length in all processes.

        Returns:
            `list[int]`: That of the first process.
        """
        if self.group is None:
            return numbers
        decided = torch.tensor(numbers, dtype=torch.long, device=self.device)
        torch.distributed.broadcast(decided, group=self.group, group_src=0)
        return decided.tolist()

    def join(self, call: Session) -> None:
        """Becomes the session of a call for those who hold it already; its notes go to that of the call."""
        call.notes[:0] = self.notes
        for item in fields(self):
            setattr(self, item.name, getattr(call, item.name))


@dataclass
class Prompt:
    """The prompts of a call, as the target has read them.

    Attributes:
        input_ids (`torch.LongTensor` of shape `(B, P)`): Left-padded tokens.
        starts (`list[int]` of length B): Index of each row's first real token.
        hidden_states (`dict[int | str, torch.Tensor]`): The states the method asked for, each `(B, P, H)`.
        source (`Source`, *optional*): What the target's encoder has read, where it has one.
    """

    input_ids: torch.LongTensor
    starts: list[int]
    hidden_states: dict[int | str, torch.Tensor] = field(default_factory=dict)
    source: Source | None = None

    @cached_property
    def token_lists(self) -> list[list[int]]:
        """Each row's tokens without padding, on the host."""
        return [row[start:] for row, start in zip(self.input_ids.tolist(), self.starts)]

    @cached_property
    def texts(self) -> list[list[int]]:
        """Tokens of each row that drafts may repeat: the source's, where they are of the same kind, then its own.

        Negative ids stand beside embeddings for what is no text; of such rows it is what comes after them.
        """
        texts = list(self.token_lists)
        if self.source is not None and self.source.token_lists is not None:
            texts = [source + tokens for source, tokens in zip(self.source.token_lists, texts)]
        for row, tokens in enumerate(texts):
            if min(tokens, default=0) < 0:
                last = max(index for index, token in enumerate(tokens) if token < 0)
                texts[row] = tokens[last + 1 :]
        return texts

    @property
    def num_states(self) -> int:
        """Tokens whose states are given, the padding included: the last ones."""
        return next(iter(self.hidden_states.values())).shape[1]


@dataclass
class DraftStep:
    """The state of the active rows at the start of a cycle.

    Attributes:
        rows (`list[int]` of length B): Number of each active row in the call.
        anchor_tokens (`torch.LongTensor` of shape `(B,)`): The last committed token of each row.
        lengths (`list[int]` of length B): Committed tokens, prompt and anchor included, padding excluded.
        max_draft_tokens (`list[int]` of length B): Largest depth of each row's draft; 0 where nothing more fits.
        leads (`list[list[int]]` of length B, *optional*): Tokens that another method has drafted after each row's
            text. Only methods that say `continues_leads` are given some, and draft what comes after them.
        depth (`int`, *optional*): Depth that was chosen for the drafts of this cycle, however little room rows have;
            `None`: k, as always.
    """

    rows: list[int]
    anchor_tokens: torch.LongTensor
    lengths: list[int]
    max_draft_tokens: list[int]
    leads: list[list[int]] | None = None
    depth: int | None = None


@dataclass
class Commit:
    """Tokens that a cycle has added to each active row.

    Attributes:
        rows (`list[int]` of length B): Number of each active row in the call.
        tokens (`torch.LongTensor` of shape `(B, M)`): Committed tokens: the accepted draft tokens and one more of
            the target's, fewer where the row has ended or waits for others. Shorter rows are padded.
        token_lists (`list[list[int]]`): Those of each row on the host, without padding.
        num_accepted (`list[int]`): Draft tokens among them.
        hidden_states (`dict[int | str, torch.Tensor]`): The states the method asked for, each `(B, M, H)`: entry j is
            the state from which the target predicted committed token j.
        counts (`list[int]`): Committed tokens of each row.
    """

    rows: list[int]
    tokens: torch.LongTensor
    token_lists: list[list[int]]
    num_accepted: list[int]
    hidden_states: dict[int | str, torch.Tensor] = field(default_factory=dict)
    counts: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.counts = list(map(len, self.token_lists))

    def anchor_states(self, key: int | str) -> torch.Tensor:
        """States `(B, H)` from which each row's last committed token, the next anchor, was predicted."""
        return last_of_each(self.hidden_states[key], self.counts)

    def select(self, keep: list[int]) -> Commit:
        """The active rows at these positions, in this order."""
        return Commit(
            [self.rows[index] for index in keep],
            select_rows(self.tokens, keep),
            [self.token_lists[index] for index in keep],
            [self.num_accepted[index] for index in keep],
            {key: select_rows(states, keep) for key, states in self.hidden_states.items()},
        )

    def cat(self, other: Commit) -> Commit:
        """This commit, and that of other rows after it."""
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        states = {
            key: torch.cat([widened(mine, width), widened(other.hidden_states[key], width)])
            for key, mine in self.hidden_states.items()
        }
        return Commit(
            self.rows + other.rows,
            torch.cat([widened(self.tokens, width), widened(other.tokens, width)]),
            self.token_lists + other.token_lists,
            self.num_accepted + other.num_accepted,
            states,
        )

    @classmethod
    def joined(cls, commits: list[Commit]) -> Commit:
        """Joins successive commits of the same rows, for a drafter that has drafted none of their tokens."""
        first = commits[0]
        begins = [0, *accumulate(commit.tokens.shape[1] for commit in commits)]
        columns = [
            [column for begin, count in zip(begins, counts) for column in range(begin, begin + count)]
            for counts in zip(*(commit.counts for commit in commits))
        ]
        tokens = torch.cat([commit.tokens for commit in commits], dim=1)
        keys = first.hidden_states
        states = {key: torch.cat([commit.hidden_states[key] for commit in commits], dim=1) for key in keys}
        if any(len(row) < begins[-1] for row in columns):
            # Padding in the middle goes to the end.
            longest = max(map(len, columns))
            index = upload([row + row[-1:] * (longest - len(row)) for row in columns], tokens.device)
            tokens = tokens.gather(1, index)
            states = {key: take_nodes(value, index) for key, value in states.items()}
        lists = [sum(lists, []) for lists in zip(*(commit.token_lists for commit in commits))]
        return cls(first.rows, tokens, lists, [0] * len(first.rows), states)


@dataclass
class DeviceCommit:
    """What the next [`Commit`] will say, as far as the device knows it and the host does not."""

    rows: list[int]  # number of each active row in the call
    tokens: torch.LongTensor  # (B, M), padded
    counts: torch.LongTensor  # (B,)
    anchors: torch.LongTensor  # (B,), the last token of each row
    hidden_states: dict[int | str, torch.Tensor]  # as those of a `Commit`
    max_draft_tokens: list[int]  # largest depth of each row's next draft, for which there is room
    target_is_free: bool = False  # nothing is needed any more that the target's graphs would write again

    @property
    def depth(self) -> int:
        """Depth that was chosen for the next drafts."""
        return max(self.max_draft_tokens)

    def anchor_states(self, key: int | str) -> torch.Tensor:
        """States `(B, H)` from which the anchors were predicted."""
        return last_of_each(self.hidden_states[key], self.counts)


@dataclass
class VerifiedNodes:
    """Tokens that the target considers best after each node of a verification, accepted or not.

    Attributes:
        token_lists (`list[list[int]]` of length B): Tokens of each row's nodes: its anchor, then its draft tokens.
        best (`torch.LongTensor` of shape `(B, T, K)`): Ids of the K largest logits after each node, best first, before
            any logits processor but a grammar's masks, which leave -1 where nothing else is allowed; rows with fewer
            nodes are padded. On the host; fewer than K where the vocabulary is smaller.
    """

    token_lists: list[list[int]]
    best: torch.LongTensor


@dataclass
class Lookups:
    """Counts of the lookups that a retrieving method has made in one call, row by row."""

    num_rows: int = 0
    num_hits: int = 0  # found a draft
    num_tokens: int = 0  # searched last
    num_bytes: int = 0  # an estimate of their memory

    def count(self, counts: Sequence[int], rooms: Sequence[int], num_tokens: int, num_bytes: int) -> None:
        """Adds the draft tokens of one cycle, none where nothing was found, and how many each row had room for."""
        self.num_rows += sum(room > 0 for room in rooms)
        self.num_hits += sum(map(bool, counts))
        self.num_tokens, self.num_bytes = num_tokens, num_bytes
