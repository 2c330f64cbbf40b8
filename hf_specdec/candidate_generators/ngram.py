"""N-gram speculation (prompt lookup): what followed the end of the text the last time is drafted again.

Saxena, "Prompt Lookup Decoding" (2023); the rule with `prompt_lookup_max` is that of vLLM's CPU proposer. No weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

from ..drafts import DraftTree
from ..errors import SpecConfigError
from .base import CandidateGenerator, Commit, DraftStep, Prompt, Session
from .ngram_index import NgramIndex


if TYPE_CHECKING:
    from ..config import SpeculativeConfig


# Without a fixed n-gram range, a match of l tokens is trusted for so many times l draft tokens.
_DRAFT_TOKENS_PER_MATCHED = 2

_MIN_INDEXED_TOKENS = 64
_MAX_INDEXED_TOKENS = 2_000_000


@dataclass(frozen=True)
class NgramOptions:
    """Options of `spec_method="ngram"`.

    With neither `prompt_lookup_min` nor `prompt_lookup_max`, matches have any length and a match of l tokens is
    followed by at most 2 l draft tokens. With one of the two, the other equals it, and drafts are as long as they can
    be: vLLM's rule.

    Raises:
        SpecConfigError: A value is out of range, or `prompt_lookup_min` is above `prompt_lookup_max`.
    """

    prompt_lookup_min: int | None = field(
        default=None,
        metadata={"help": "Shortest match that is drafted from, in tokens. Left out, `prompt_lookup_max`, or else 1."},
    )
    prompt_lookup_max: int | None = field(
        default=None,
        metadata={"help": "Longest match looked for, in tokens. Left out, `prompt_lookup_min`, or else no limit."},
    )
    match: Literal["last", "first"] | None = field(
        default=None,
        metadata={
            "help": "Which occurrence of the longest match counts. Left out, 'first' if `prompt_lookup_min` or "
            "`prompt_lookup_max` is given, as in vLLM, or else 'last'.",
            "key": "prompt_lookup_match",
        },
    )
    max_indexed_tokens: int = field(
        default=2**20,
        metadata={
            "help": "Tokens of a row that are searched, about 20 bytes each. A longer row forgets its oldest quarter.",
            "key": "prompt_lookup_max_indexed_tokens",
        },
    )

    def __post_init__(self):
        _check_int("prompt_lookup_min", self.prompt_lookup_min, 1, optional=True)
        _check_int("prompt_lookup_max", self.prompt_lookup_max, 1, optional=True)
        _check_int("max_indexed_tokens", self.max_indexed_tokens, _MIN_INDEXED_TOKENS, _MAX_INDEXED_TOKENS)
        if self.match not in ("last", "first", None):
            raise SpecConfigError(f"`match` must be 'last' or 'first', got {self.match!r}.")
        if self.has_fixed_range and self.min_match > self.max_match:
            raise SpecConfigError(
                f"`prompt_lookup_min` must not be above `prompt_lookup_max`, got prompt_lookup_min={self.min_match} "
                f"and prompt_lookup_max={self.max_match}."
            )

    @property
    def has_fixed_range(self) -> bool:
        """Whether the user chose the n-gram lengths, and with them vLLM's rule."""
        return self.prompt_lookup_min is not None or self.prompt_lookup_max is not None

    @property
    def min_match(self) -> int:
        """Shortest match in tokens."""
        return self.prompt_lookup_min or self.prompt_lookup_max or 1

    @property
    def max_match(self) -> int | None:
        """Longest match in tokens, `None` without a limit."""
        return self.prompt_lookup_max or self.prompt_lookup_min

    @property
    def takes_first(self) -> bool:
        """Whether the first occurrence of the longest match counts, not the last."""
        return self.match == "first" or (self.match is None and self.has_fixed_range)


class NgramCandidateGenerator(CandidateGenerator):
    """Drafts the continuation of the longest earlier occurrence of the text's end, row by row."""

    options_class = NgramOptions
    default_num_speculative_tokens = 24
    loaded_by = ()

    def __init__(self, config: SpeculativeConfig, resources: Any, session: Session):
        super().__init__(config, resources, session)
        self._indexes: dict[int, NgramIndex] = {}
        self._rows: list[int] = []

    def prefill(self, prompt: Prompt) -> None:
        self._rows = list(range(len(prompt.starts)))
        built: dict[tuple[int, ...], NgramIndex] = {}
        for row, tokens in enumerate(prompt.token_lists):
            # Rows of one prompt (`num_return_sequences`) sort it once.
            key = tuple(tokens)
            if key in built:
                self._indexes[row] = built[key].copy()
            else:
                self._indexes[row] = built[key] = NgramIndex(tokens, self.options.max_indexed_tokens)

    def propose(self, step: DraftStep) -> DraftTree:
        longest = self.shared_length(len(step.rows))
        drafts = [
            self._draft(self._indexes[row], min(longest, room, self._room_in_model(length)))
            for row, length, room in zip(step.rows, step.lengths, step.max_draft_tokens)
        ]
        return DraftTree.from_lists(drafts, self.session.device)

    def observe(self, commit: Commit) -> None:
        for row, tokens in zip(commit.rows, commit.token_lists):
            self._indexes[row].extend(tokens)

    def keep_rows(self, keep: list[int]) -> None:
        self._rows = [self._rows[position] for position in keep]
        self._indexes = {row: self._indexes[row] for row in self._rows}

    def close(self) -> None:
        self._rows, self._indexes = [], {}

    def _room_in_model(self, length: int) -> int:
        limit = self.config.max_model_len
        return self.num_speculative_tokens if limit is None else limit - length

    def _draft(self, index: NgramIndex, count: int) -> list[int]:
        if count <= 0:
            return []
        match, end = index.longest_match(self.options.max_match, self.options.takes_first)
        if match < self.options.min_match:
            return []
        if not self.options.has_fixed_range:
            count = min(count, _DRAFT_TOKENS_PER_MATCHED * match)
        return index.continuation(end, count)


def _check_int(name: str, value: Any, low: int, high: int | None = None, optional: bool = False) -> None:
    if optional and value is None:
        return
    is_int = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"between {low} and {high}"
        raise SpecConfigError(f"`{name}` must be an integer, {wanted}, got {value!r}.")
