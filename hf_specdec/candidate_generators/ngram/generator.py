"""N-gram speculation (prompt lookup): drafts the tokens that followed earlier occurrences of the text's end.

Saxena, "Prompt Lookup Decoding" (2023); the rule with `prompt_lookup_max` is that of vLLM's CPU proposer. No weights.

The host scans the text for its end. On a GPU, a graph does it ahead of the verdict, in the tokens alone
([`~candidate_generators.ngram.on_device`]), and the host where the graph has not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch

from ...drafting.graphs import RowGraphs
from ...drafts import DraftTree
from ...errors import SpecConfigError
from ...protocol import Commit, DeviceCommit, DraftStep, Lookups, Prompt, Session
from ...transfers import on_host
from ...validation import Options, setting
from ..base import CandidateGenerator
from .on_device import LONGEST_MATCH, CallTexts, FoundTrees, LookupRule, texts_of
from .text import RowText


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig


# Without a fixed n-gram range, a match of l tokens is trusted for so many times l draft tokens.
_DRAFT_TOKENS_PER_MATCHED = 2

_DEFAULT_MATCHES = 4
_MAX_MATCHES = 64

_MIN_INDEXED_TOKENS = 64
_MAX_INDEXED_TOKENS = 2_000_000


@dataclass(frozen=True)
class NgramOptions(Options):
    """Options of `spec_method="ngram"`.

    With neither `prompt_lookup_min` nor `prompt_lookup_max`, a match of l tokens is followed by at most 2 l draft
    tokens, and what followed several matches is one tree. With one of the two, the other equals
    it, and the draft is the longest that follows the one best match: vLLM's rule.

    Raises:
        SpecConfigError: A value is out of range, or `prompt_lookup_min` is above `prompt_lookup_max`.
    """

    prompt_lookup_min: int | None = setting(
        None,
        "Shortest match that is drafted from, in tokens. Left out, `prompt_lookup_max`, or else 1.",
        least=1,
        most=_MAX_INDEXED_TOKENS,
        published=True,
    )
    prompt_lookup_max: int | None = setting(
        None,
        f"Longest match looked for, in tokens. Left out, `prompt_lookup_min`, or else {LONGEST_MATCH}: what is longer "
        "counts as this long.",
        least=1,
        most=_MAX_INDEXED_TOKENS,
        published=True,
    )
    match: Literal["last", "first"] | None = setting(
        None,
        "Which occurrence of the longest match counts. Left out, 'first' if `prompt_lookup_min` or "
        "`prompt_lookup_max` is given, as in vLLM, or else 'last'.",
        key="prompt_lookup_match",
        published=True,
    )
    num_matches: int | None = setting(
        None,
        "Occurrences that are drafted from, the longest matches first; 1 drafts a chain, more a tree. "
        "Left out, 1 if `prompt_lookup_min` or `prompt_lookup_max` is given, as in vLLM, or else 4.",
        least=1,
        most=_MAX_MATCHES,
        key="prompt_lookup_num_matches",
        published=True,
    )
    max_indexed_tokens: int = setting(
        2**20,
        "Tokens of a row that are searched, 4 to 8 bytes each. A longer row forgets its oldest quarter.",
        least=_MIN_INDEXED_TOKENS,
        most=_MAX_INDEXED_TOKENS,
        key="prompt_lookup_max_indexed_tokens",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_match > self.max_match:
            raise SpecConfigError(
                f"`prompt_lookup_min` must not be above `prompt_lookup_max`, got prompt_lookup_min={self.min_match} "
                f"and prompt_lookup_max={self.max_match}."
            )

    @property
    def has_fixed_range(self) -> bool:
        """The user has chosen the n-gram lengths, and with them vLLM's rule."""
        return self.prompt_lookup_min is not None or self.prompt_lookup_max is not None

    @property
    def min_match(self) -> int:
        """Shortest match in tokens."""
        return self.prompt_lookup_min or self.prompt_lookup_max or 1

    @property
    def max_match(self) -> int:
        """Length in tokens that longer matches count as."""
        return self.prompt_lookup_max or self.prompt_lookup_min or LONGEST_MATCH

    @property
    def takes_first(self) -> bool:
        """The first occurrence of the longest match counts, not the last."""
        return self.match == "first" or (self.match is None and self.has_fixed_range)

    @property
    def most_matches(self) -> int:
        """Occurrences that are drafted from."""
        if self.num_matches is not None:
            return self.num_matches
        return 1 if self.has_fixed_range else _DEFAULT_MATCHES


@dataclass(frozen=True)
class _Ahead:
    """A draft whose graph has run ahead: for which rows, the graph's key, and how deep each row may draft."""

    rows: list[int]
    key: tuple[Any, ...]
    limits: tuple[int, ...]
    draft: DraftTree


class NgramCandidateGenerator(CandidateGenerator):
    """Drafts what followed the longest earlier occurrences of the text's end, row by row."""

    options_class = NgramOptions
    default_num_speculative_tokens = 24
    samples_drafts: bool | None = False
    estimates_acceptance = True
    continues_leads = True
    loaded_by: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: SpeculativeConfig, resources: Any, session: Session):
        # Numba is imported here, before the cycles, which are timed.
        from ...kernels.text import best_matches

        super().__init__(config, resources, session)
        self.lookups: Lookups = Lookups()
        self._best_matches = best_matches
        self._row_texts: dict[int, RowText] = {}
        self._rows: list[int] = []
        self._best: list[tuple[int, int]] = []  # of each row's last draft: its longest match, and the tokens from it
        self._num_matches = self.options.most_matches if session.supports_trees else 1
        if self._num_matches < (self.options.num_matches or 1):
            session.notes.append("ngram drafts from one match: the target cannot verify trees.")
        # On the device, where the target's verifications are graphs.
        self._texts: CallTexts | None = None
        self._graphs: RowGraphs | None = None
        self._ahead: _Ahead | None = None  # the lookup that has run ahead, until its tokens are committed
        self._found: tuple[DraftTree, list[int]] | None = None  # a draft of a graph, and the rooms that it had

    @property
    def num_draft_nodes(self) -> int:
        return self._most_nodes(self.num_speculative_tokens)

    def _most_nodes(self, longest: int) -> int:
        """Most nodes of a row whose longest path may have so many: no more where drafts are tied to their matches."""
        return longest * self._num_matches if self.options.has_fixed_range else longest

    def prefill(self, prompt: Prompt) -> None:
        target = self.session.target
        # Compared on the device token by token, matches of any length would be too slow.
        is_short = self.options.max_match <= LONGEST_MATCH
        if is_short and target is not None and target.graphs is not None and target.graphs.pads_drafts:
            self._texts = CallTexts(texts_of(target.model))
            self._graphs = RowGraphs(self._texts.memory)
            self._graphs.begin(self.config, self.session)
        self._rows = list(range(len(prompt.starts)))
        most = self.options.max_indexed_tokens
        self._row_texts = {row: RowText(tokens, most) for row, tokens in enumerate(prompt.texts)}

    def propose(self, step: DraftStep) -> DraftTree:
        longest, rooms = self.shared_length(len(step.rows)), self.draft_depths(step)
        draft = None if step.leads else self._taken_ahead(step.rows, longest, rooms)
        if draft is not None:
            self._found = draft, rooms
            return draft
        self._best = []
        leads = step.leads or [[]] * len(step.rows)
        drafts = [
            self._draft(self._row_texts[row], lead, longest, room) for row, lead, room in zip(step.rows, leads, rooms)
        ]
        tokens, parents = map(list, zip(*drafts)) if drafts else ([], [])
        self._count_lookups(list(map(len, tokens)), rooms)
        return DraftTree.from_lists(tokens, self.session.device, parents)

    def _count_lookups(self, counts: list[int], rooms: list[int]) -> None:
        texts = self._row_texts.values()
        self.lookups.count(counts, rooms, sum(map(len, texts)), sum(text.num_bytes for text in texts))

    # On the device

    @property
    def drafts_ahead(self) -> bool:
        # Under a grammar the host must know the tokens.
        return self._graphs is not None and self._graphs.are_on and not self.may_mask

    def draft_ahead(self, commit: DeviceCommit) -> DraftTree | None:
        longest, texts = self.shared_length(len(commit.rows)), [self._row_texts[row].tokens for row in commit.rows]
        lengths, width = list(map(len, texts)), commit.tokens.shape[1]
        if max(lengths) + width > self.options.max_indexed_tokens:
            # The row will forget its beginning, and places are others then.
            return None
        self._texts.have_room(max(lengths) + width)
        self._texts.write(commit.rows, texts)
        limits, device = _limits(commit.max_draft_tokens, longest), commit.tokens.device
        rule, memory, size = self._rule(longest), self._texts.memory, self._texts.size

        def look_up(tokens: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor) -> FoundTrees:
            before, most = rows.to(tokens.device).unbind(1)
            memory.append(tokens, counts, before, size)
            return rule.draft(memory.of_rows(len(tokens), size), before + counts, most)

        def values() -> dict[str, torch.Tensor]:
            rows = on_host(list(zip(lengths, limits)), device)
            return {"tokens": commit.tokens, "counts": commit.counts, "rows": rows}

        key = (rule, size, width)
        found = self._graphs.run(key, len(limits), look_up, values, limits=limits)
        if not self._graphs.are_on:
            # Capturing has failed.
            return None
        self._texts.will_grow = True
        self._ahead = _Ahead(commit.rows, key, limits, self._drafted(found))
        return self._ahead.draft

    def _taken_ahead(self, rows: list[int], longest: int, rooms: list[int]) -> DraftTree | None:
        """The draft of a graph that has run ahead for these rows and limits."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or (ahead.rows, ahead.limits) != (rows, _limits(rooms, longest)):
            return None
        # It is forgotten where rows were cut.
        return ahead.draft if self._graphs.has_run_ahead(ahead.key, len(rows), ahead.limits) else None

    def _rule(self, longest: int) -> LookupRule:
        options = self.options
        return LookupRule(
            self._num_matches,
            options.min_match,
            options.max_match,
            options.takes_first,
            None if options.has_fixed_range else _DRAFT_TOKENS_PER_MATCHED,
            longest,
            self._most_nodes(longest),
        )

    def _drafted(self, found: FoundTrees) -> DraftTree:
        tokens, parents, num_nodes = found
        if self._num_matches == 1:
            return DraftTree.chain(tokens, num_nodes)
        return DraftTree(tokens, parents, num_nodes)

    @property
    def acceptance_probs(self) -> list[list[float]]:
        """Estimates from the best match alone: where l tokens agree, one more agrees in l of l + 1 cases."""
        return [[(match / (match + 1)) ** depth for depth in range(1, count + 1)] for match, count in self._best]

    def observe(self, commit: Commit) -> None:
        for row, tokens in zip(commit.rows, commit.token_lists):
            self._row_texts[row].extend(tokens)
        if self._texts is not None and self._texts.will_grow:
            self._texts.have_grown([len(self._row_texts[row]) for row in commit.rows])
        found, self._found = self._found, None
        if found is not None and found[0].node_counts is not None:
            self._count_lookups(found[0].node_counts, found[1])

    def keep_rows(self, keep: list[int]) -> None:
        self._rows = [self._rows[position] for position in keep]
        self._row_texts = {row: self._row_texts[row] for row in self._rows}
        if self._texts is not None:
            self._texts.forget()

    def join(self, other: NgramCandidateGenerator, numbers: dict[int, int]) -> None:
        self._rows = self._rows + list(numbers.values())
        self._row_texts |= {numbers[row]: text for row, text in other._row_texts.items()}
        if self._texts is not None:
            self._texts.forget()

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()
        self._rows, self._row_texts, self._ahead, self._found = [], {}, None, None

    @property
    def longest_row(self) -> tuple[int, str] | None:
        """Length from which on a row drafts nothing: as in vLLM, drafts may fill the model's length."""
        limit = self.config.max_model_len
        return None if limit is None else (limit, "max_model_len")

    def _draft(self, text: RowText, lead: list[int], longest: int, room: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of what followed the best matches, none deeper than `longest` and `room`.

        Matches are those of the end of the text with `lead` after it.
        """
        depth = min(longest, room)
        if depth <= 0:
            self._best.append((0, 0))
            return [], []
        is_tied = not self.options.has_fixed_range
        matches = self._matches(text.followed_by(lead))
        chains = [
            text.tokens[end : end + (min(depth, _DRAFT_TOKENS_PER_MATCHED * match) if is_tied else depth)].tolist()
            for match, end in matches
        ]
        self._best.append((matches[0][0], len(chains[0])) if matches else (0, 0))
        return merge(chains, self._most_nodes(longest))

    def _matches(self, text: np.ndarray) -> list[tuple[int, int]]:
        options = self.options
        found = self._best_matches(text, self._num_matches, options.max_match, options.takes_first)
        return [(match, end) for match, end in found if match >= options.min_match]


def _limits(rooms: list[int], longest: int) -> tuple[int, ...]:
    return tuple(min(room, longest) for room in rooms)


def merge(chains: list[list[int]], most: int) -> tuple[list[int], list[int]]:
    """Merges chains of tokens where they begin alike.

    Args:
        chains (`list[list[int]]`): The chains, the first of at most `most` tokens.
        most (`int`): Most tokens of the tree; what comes later is left out.

    Returns:
        `tuple[list[int], list[int]]`: Tokens and parents (-1: the anchor): the first chain, then what the second does
        not share with it, and so on.
    """
    if not chains:
        return [], []
    tokens = list(chains[0])
    parents = list(range(-1, len(tokens) - 1))
    children = dict(zip(zip(parents, tokens), range(len(tokens))))
    # 13 us a cycle for four chains, where a vectorised form on numpy took 200.
    for chain in chains[1:]:
        node = -1
        for token in chain:
            child = children.setdefault((node, token), len(tokens))
            if child == most:
                return tokens, parents
            if child == len(tokens):
                tokens.append(token)
                parents.append(node)
            node = child
    return tokens, parents
