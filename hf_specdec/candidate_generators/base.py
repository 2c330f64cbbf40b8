"""What a drafting method owes the decoding loop, and the loop it.

A candidate generator is a method's state for one `generate()` call. The loop calls:

    prefill(prompt)                   once, first, after the target has read the prompt: all rows, in their order
    observe(commit)                   after every cycle, the first token after the prompt included
    propose(step) -> DraftTree        at the start of a cycle, when something has been observed since the prompt
    keep_rows(keep)                   when rows of the batch have finished, anywhere but between a draft and its commit
    close()                           once, last, also after an error, and also where nothing else was ever called

What a method may not take for granted:

- Not every cycle asks it. Another drafter may have drafted the tokens of a commit, or nobody: the length may be chosen
  from cycle to cycle, or depend on the number of rows. Then `num_accepted` is 0.
- It may be told late. `prefill` may come many cycles after the prompt was read, and commits come joined to one.
- Rows may finish before it has observed anything: `keep_rows` may come between `prefill` and the first `observe`.
- A step may forbid drafts for some rows (`max_draft_tokens` of 0) and allow them later. Where it forbids them for all
  rows, none of them will have room again.
- The target, or the length of the text, may cut what was drafted; the commit says what has become of it.

What outlives the call (draft weights, caches of past responses) is made once by the class method `load` and kept by
the `Speculator`. A method knows nothing of the target's cache, of logits processors or of stopping rules.

Shapes: B active rows, P padded prompt length, M committed tokens of a cycle, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers.generation.candidate_generator import CandidateGenerator as HfCandidateGenerator

from ..drafting.tensors import last_of_each
from ..drafts import DraftTree
from ..errors import SpecConfigError
from ..hub.files import RepoFiles
from ..logits.randomness import NODES_PER_ANCHOR
from ..threads import cached_property
from ..transfers import select_rows, upload
from .options import NoOptions


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..decoding.graphs import CallGraphs
    from ..logits.sampling import DraftSampler
    from ..settings import SpeculativeConfig
    from .assisted import AssistedSide


_LEAST_SHARED_LENGTH = 4


@dataclass
class Session:
    """What stays the same during one `generate()` call.

    Attributes:
        batch_size (`int`): Rows at the start; row indices 0 to `batch_size - 1` name them for the whole call.
        max_length (`int`): Tokens a row may hold, prompt included (padding not counted for the longest prompt).
        device (`torch.device`): Where draft tokens are expected.
        sampler (`DraftSampler`): How to draw a draft token from draft logits as the target would draw it.
        takes_trees (`bool`): Whether the target can verify branches; if not, drafts must be chains.
        notes (`list[str]`): What is limited or switched off in this call, and why; part of the statistics.
        draft_graphs (`list[CallGraphs]`): The CUDA graphs of draft networks in this call; part of the statistics.
        group (`ProcessGroup`, *optional*): The processes that hold parts of one target, see `agreed`.
    """

    batch_size: int
    max_length: int
    device: torch.device
    sampler: DraftSampler | None = None
    takes_trees: bool = True
    notes: list[str] = field(default_factory=list)
    draft_graphs: list[CallGraphs] = field(default_factory=list)
    group: ProcessGroup | None = None

    def agreed(self, numbers: list[int]) -> list[int]:
        """What the first process of the group has decided.

        Processes with parts of one target must draft alike, or they wait for each other for ever. Whatever depends on
        a clock, which differs from process to process, is decided by the first one alone.

        Args:
            numbers (`list[int]`): A decision, of the same length in all processes.
        """
        if self.group is None:
            return numbers
        decided = torch.tensor(numbers, dtype=torch.long, device=self.device)
        torch.distributed.broadcast(decided, group=self.group, group_src=0)
        return decided.tolist()

    def join(self, call: Session) -> None:
        """Becomes the session of a call for those who hold it already; its notes go to that of the call."""
        call.notes[:0] = self.notes
        vars(self).update(vars(call))


@dataclass
class Prompt:
    """The prompts as the target read them.

    Attributes:
        input_ids (`torch.LongTensor` of shape `(B, P)`): Left-padded tokens.
        starts (`list[int]` of length B): Index of each row's first real token.
        hidden_states (`dict[int | str, torch.Tensor]`): The states the method asked for, each `(B, P, H)`.
    """

    input_ids: torch.LongTensor
    starts: list[int]
    hidden_states: dict = field(default_factory=dict)

    @cached_property
    def token_lists(self) -> list[list[int]]:
        """Each row's tokens without padding, on the host."""
        return [row[start:] for row, start in zip(self.input_ids.tolist(), self.starts)]

    @property
    def num_states(self) -> int:
        """Tokens whose states are given, the padding included: the last ones."""
        return next(iter(self.hidden_states.values())).shape[1]


@dataclass
class DraftStep:
    """The state of the active rows at the start of a cycle.

    Attributes:
        rows (`list[int]` of length B): Which row of the call each active row is.
        anchor_tokens (`torch.LongTensor` of shape `(B,)`): The last committed token of each row.
        lengths (`list[int]` of length B): Committed tokens, prompt and anchor included, padding excluded.
        max_draft_tokens (`list[int]` of length B): How deep each row may draft; 0 where nothing more fits.
    """

    rows: list[int]
    anchor_tokens: torch.LongTensor
    lengths: list[int]
    max_draft_tokens: list[int]


@dataclass
class Commit:
    """What a cycle added to each active row.

    Attributes:
        rows (`list[int]` of length B): Which row of the call each active row is.
        tokens (`torch.LongTensor` of shape `(B, M)`): Committed tokens: the accepted draft tokens and one more of
            the target's, fewer where the row has ended or waits for others. Shorter rows are padded.
        token_lists (`list[list[int]]`): The same on the host, without padding.
        num_accepted (`list[int]`): Draft tokens among them.
        hidden_states (`dict[int | str, torch.Tensor]`): The states the method asked for, each `(B, M, H)`: entry j is
            the state from which the target predicted committed token j.
    """

    rows: list[int]
    tokens: torch.LongTensor
    token_lists: list[list[int]]
    num_accepted: list[int]
    hidden_states: dict = field(default_factory=dict)

    @property
    def counts(self) -> list[int]:
        """Committed tokens of each row."""
        return list(map(len, self.token_lists))

    def anchor_states(self, key: int | str) -> torch.Tensor:
        """The state from which each row's last committed token, the next anchor, was predicted: `(B, H)`."""
        return last_of_each(self.hidden_states[key], self.counts)

    def of_rows(self, keep: list[int]) -> Commit:
        """The active rows at these positions, in this order."""
        return Commit(
            [self.rows[index] for index in keep],
            select_rows(self.tokens, keep),
            [self.token_lists[index] for index in keep],
            [self.num_accepted[index] for index in keep],
            {key: select_rows(states, keep) for key, states in self.hidden_states.items()},
        )

    @classmethod
    def joined(cls, commits: list[Commit]) -> Commit:
        """Successive commits of the same rows as one, for a drafter whose drafts are not among them."""
        first, width = commits[0], sum(commit.tokens.shape[1] for commit in commits)
        tokens = torch.cat([commit.tokens for commit in commits], dim=1)
        keys = first.hidden_states
        states = {key: torch.cat([commit.hidden_states[key] for commit in commits], dim=1) for key in keys}
        places = [_places(row_counts, commits) for row_counts in zip(*(commit.counts for commit in commits))]
        longest = max(map(len, places))
        if any(len(row) < width for row in places):
            # What was padding in the middle goes to the end.
            index = upload([row + row[-1:] * (longest - len(row)) for row in places], tokens.device)
            tokens = tokens.gather(1, index)
            states = {key: _entries(value, index.to(value.device)) for key, value in states.items()}
        lists = [sum(lists, []) for lists in zip(*(commit.token_lists for commit in commits))]
        return cls(first.rows, tokens, lists, [0] * len(first.rows), states)


def _places(counts: tuple[int, ...], commits: list[Commit]) -> list[int]:
    """Where a row's tokens stand in the commits that are written one after the other."""
    ends = accumulate(commit.tokens.shape[1] for commit in commits)
    begins = [end - commit.tokens.shape[1] for end, commit in zip(ends, commits)]
    return [place for begin, count in zip(begins, counts) for place in range(begin, begin + count)]


def _entries(values: torch.Tensor, index: torch.LongTensor) -> torch.Tensor:
    """Of each row's values `(B, W, H)` those at `(B, M)`: `(B, M, H)`."""
    return values[torch.arange(len(index), device=index.device)[:, None], index]


@dataclass
class Lookups:
    """What a method that retrieves has looked up in one call.

    Attributes:
        num_rows (`int`): Lookups, counted per row.
        num_hits (`int`): Those of them that found a draft.
        num_tokens, num_bytes (`int`): Tokens that were searched at last, and about the memory that they take.
    """

    num_rows: int = 0
    num_hits: int = 0
    num_tokens: int = 0
    num_bytes: int = 0

    def count(self, drafts: Sequence[Sequence[int]], rooms: Sequence[int], num_tokens: int, num_bytes: int) -> None:
        """Adds the drafts of one cycle, empty where nothing was found, and the tokens that each had room for."""
        self.num_rows += sum(room > 0 for room in rooms)
        self.num_hits += sum(map(bool, drafts))
        self.num_tokens, self.num_bytes = num_tokens, num_bytes


class CandidateGenerator(HfCandidateGenerator):
    """Base class of the methods.

    Class attributes are the capabilities that the loop reads; it never looks at a method's name.

    Attributes:
        options_class (`type`): Frozen dataclass of the method's own options; without fields by default.
        target_hidden_states (`tuple`): States of the target the method needs: "last", the one behind the final norm,
            or boundaries: i is what enters decoder layer i.
        default_num_speculative_tokens (`int`): k when the user names none.
        most_speculative_tokens (`int`, *optional*): Largest k that num_speculative_tokens="auto" may choose. `None`:
            what is drafted when the user names no k.
        loaded_by (`tuple[str, ...]`, *optional*): Flat settings that `load` reads. Configurations that agree in them
            share what was loaded; `None`: in all of them.
        draws (`bool`, *optional*): Draft tokens are drawn, and their distributions handed over. `None`: not known.
        rates_drafts (`bool`): `draft_chances` says how good the last drafts are, as the first part of a combination
            must.
        parts (`tuple[type, ...]`): The generators of which this one consists; the last one may have a draft model.

    Args:
        config (`SpeculativeConfig`, *optional*): The settings of the call. `None`: all defaults.
        resources (`Any`, *optional*): What `load` returned.
        session (`Session`, *optional*): The call. `None`: it is not known yet, and comes with [`bind`].
    """

    options_class: ClassVar[type] = NoOptions
    target_hidden_states: ClassVar[tuple] = ()
    default_num_speculative_tokens: ClassVar[int] = 5
    most_speculative_tokens: ClassVar[int | None] = None

    rates_drafts: ClassVar[bool] = False
    parts: ClassVar[tuple[type[CandidateGenerator], ...]] = ()
    draws: bool | None = None
    # Generators without settings have the standard acceptance rule.
    config: SpeculativeConfig | None = None
    session: Session | None = None
    loaded_by: ClassVar[tuple[str, ...] | None] = None
    # What was looked up in texts until now; `None` for methods that look nothing up.
    lookups: Lookups | None = None

    @classmethod
    def load(cls, config: SpeculativeConfig, target_model: torch.nn.Module) -> Any:
        """Loads what outlives a call: weights, caches. All checks of the checkpoint against the target happen here."""
        return None

    @classmethod
    def network(cls, resources: Any) -> torch.nn.Module | None:
        """The draft network among what was loaded; `None` for methods without one."""
        return resources if isinstance(resources, torch.nn.Module) else None

    @classmethod
    def files(cls, config: SpeculativeConfig, target_model: torch.nn.Module) -> RepoFiles | None:
        """The files that `load` reads, which is called again when they have changed; `None` where it reads none."""
        return None if config.model is None else RepoFiles.of(config)

    @classmethod
    def check(cls, config: SpeculativeConfig, resources: Any, session: Session) -> None:
        """Refuses settings that what was loaded cannot follow, before anything is generated.

        It begins a call and ends it, so that every check of the constructor is made when a speculator is loaded, also
        of what earlier settings have loaded.

        Raises:
            SpecConfigError: They ask for more than was loaded.
        """
        cls(config, resources, session).close()

    @classmethod
    def text_bytes(cls, resources: Any) -> int:
        """Bytes of memory that what was loaded has of texts, beside the weights of its network."""
        return 0

    @classmethod
    def stock_assistant(cls, resources: Any) -> torch.nn.Module | None:
        """A draft model that only transformers' own assisted decoding can drive, not this package's loop."""
        return None

    def __init__(self, config: SpeculativeConfig | None = None, resources: Any = None, session: Session | None = None):
        self.config = config
        self.options = self.options_class() if config is None else config.options
        self.session = session
        length = None if config is None else config.fixed_length
        self.num_speculative_tokens = length or self.default_length(self.options)

    def bind(self, session: Session) -> CandidateGenerator:
        """Takes the generator for a call; the loop does so with what `generate(assistant=...)` was given.

        Args:
            session (`Session`): The call. It takes the place of one that the generator was made with.

        Returns:
            `CandidateGenerator`: What drafts in the call: the generator itself, or one that it has made.

        Raises:
            SpecConfigError: It has had its call, or was made for another number of rows.
        """
        own, name, mark = self.session, type(self).__name__, "_CandidateGenerator__call"
        if own is not None and own.batch_size != session.batch_size and mark not in vars(self):
            raise SpecConfigError(
                f"This {name} was made for {own.batch_size} rows, and the batch has {session.batch_size}. Make it "
                "without a session: the call brings its own."
            )
        # Of threads that come at once one is first.
        call = object()
        if vars(self).setdefault(mark, call) is not call:
            raise SpecConfigError(
                f"This {name} has been used. A candidate generator belongs to one call: make another one for each, or "
                "pass the speculator itself, which any number of calls may share."
            )
        if own is None:
            self.session = session
        elif own is not session:
            own.join(session)
        if not hasattr(self, "num_speculative_tokens"):
            # Of a class whose own `__init__` does without this one's.
            self.num_speculative_tokens = self.default_num_speculative_tokens
        return self

    @property
    def num_draft_nodes(self) -> int:
        """Most nodes of a row's draft; more than `num_speculative_tokens`, its depth, for a tree."""
        return self.num_speculative_tokens

    @property
    def longest_row(self) -> tuple[int, str] | None:
        """Tokens of a row from which on nothing is drafted for it, and what says so; `None` without a limit."""
        limit = None if self.config is None else self.config.max_model_len
        return None if limit is None else (limit - 1, "max_model_len")

    def note_longest_row(self) -> None:
        """Says in the call's notes that a row has got too long, once."""
        length, why = self.longest_row
        note = f"no drafts for rows of {length} tokens and more ({why})"
        if note not in self.session.notes:
            self.session.notes.append(note)

    @property
    def draft_chances(self) -> list[list[float]]:
        """For each row of the last drafts its estimates of the chance that 1, 2, ... draft tokens are accepted."""
        raise NotImplementedError(f"{type(self).__name__} does not rate its drafts.")

    @classmethod
    def default_length(cls, options: Any) -> int:
        """k when the user names none, for these options of the method."""
        return cls.default_num_speculative_tokens

    def shared_length(self, num_rows: int) -> int:
        """k for a method whose drafts differ much in length from row to row.

        A verification is as wide as its longest draft, so where the user has named no k the rows share the default:
        one good match must not make all others pay for its length.
        """
        if self.config is not None and self.config.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return max(
            self.num_speculative_tokens // max(num_rows, 1), min(_LEAST_SHARED_LENGTH, self.num_speculative_tokens)
        )

    def draft_depths(self, step: DraftStep) -> list[int]:
        """How deep each row may draft: at most k, in what the loop and `max_model_len` leave beside the bonus one."""
        depths = [min(most, self.num_speculative_tokens) for most in step.max_draft_tokens]
        limit = None if self.config is None else self.config.max_model_len
        if limit is None:
            return depths
        free = [max(limit - length - 1, 0) for length in step.lengths]
        return list(map(min, depths, free))

    @property
    def asks_to_draw(self) -> bool:
        """Whether the target samples and the options ask for draft tokens that are drawn from their distributions."""
        sampler = self.session.sampler
        samples = sampler is not None and not sampler.is_greedy
        return samples and self.options.draft_sample_method == "probabilistic"

    @property
    def why_chains(self) -> str | None:
        """Why the call can only have chains; `None` where it can have trees."""
        if self.draws:
            return "draft_sample_method='probabilistic' draws chains"
        return None if self.session.takes_trees else "the target tells positions from the order of its cache"

    def check_drawn_length(self) -> None:
        """Refuses more draft tokens than a cycle has random numbers to draw with."""
        if self.draws and self.num_speculative_tokens > NODES_PER_ANCHOR:
            raise SpecConfigError(
                f"`num_speculative_tokens` must be at most {NODES_PER_ANCHOR} where draft tokens are sampled, got "
                f"{self.num_speculative_tokens}. Draft fewer, or set draft_sample_method='greedy'."
            )

    def prefill(self, prompt: Prompt) -> None:
        """Takes in the prompts."""

    def propose(self, step: DraftStep) -> DraftTree:
        """Drafts for all active rows, at most `min(k, step.max_draft_tokens[b])` deep."""
        raise NotImplementedError(f"{type(self).__name__} must implement propose().")

    def observe(self, commit: Commit) -> None:
        """Takes in what was committed."""

    def keep_rows(self, keep: list[int]) -> None:
        """Drops finished rows: the active rows at these positions remain, in this order, which may be another."""

    def close(self) -> None:
        """Releases what belongs to the call. Called exactly once."""

    # The protocol of transformers' own assisted decoding, for batch size 1 and drafts without branches.

    # The host then says which call is the first, and hands over its last output.
    requires_model_outputs = True

    @cached_property
    def assisted_side(self) -> AssistedSide:
        """How transformers' own assisted decoding drives this generator."""
        from .assisted import AssistedSide

        return AssistedSide(self)

    @property
    def model_kwargs_overrides(self) -> dict[str, Any]:
        """Arguments of the host's next forward, asked for right in front of it."""
        return self.assisted_side.forward_kwargs()

    def get_candidates(self, input_ids: torch.LongTensor, **given) -> tuple[torch.LongTensor, None]:
        """Prompt plus draft of shape `(1, L + N)`; no logits, so the host verifies the drafts as point masses."""
        return self.assisted_side.candidates(input_ids, **given), None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        self.assisted_side.num_matches = int(num_matches)


class NoDrafts(CandidateGenerator):
    """Plain decoding in the same loop, because of the batch size: every cycle verifies the anchors alone."""

    default_num_speculative_tokens = 0

    def __init__(self, config: SpeculativeConfig | None, resources: Any, session: Session):
        self.session = session
        self.num_speculative_tokens = 0

    def propose(self, step: DraftStep) -> DraftTree:
        return DraftTree.empty(len(step.rows), self.session.device, why="batch_size")
