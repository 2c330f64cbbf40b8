"""A candidate generator that drives others: what all of those have in common."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ..protocol import Commit, Lookups, Prompt, Session, VerifiedNodes
from ..settings import SpeculativeConfig
from .base import CandidateGenerator


class Wrapper(CandidateGenerator):
    """Drives other candidate generators in one call; the last one may read states and have a network."""

    def __init__(
        self,
        config: SpeculativeConfig | None,
        session: Session | None,
        generators: Sequence[CandidateGenerator],
        readers: Sequence[Any],  # told of the text for each: itself, or an [`UnreadText`] that tells it later
    ):
        self.config = config
        self.session = session
        self.options: Any = None if config is None else config.options
        self.generators: Sequence[CandidateGenerator] = generators
        self.readers: Sequence[Any] = readers
        last = generators[-1]
        self.num_speculative_tokens: int = max(generator.num_speculative_tokens for generator in generators)
        self.target_hidden_states: tuple[int | str, ...] = last.target_hidden_states
        self.num_best_tokens: int = last.num_best_tokens
        self.samples_drafts: bool | None = last.samples_drafts

    @property
    def longest_row(self) -> tuple[int, str] | None:
        limits = [generator.longest_row for generator in self.generators]
        return None if None in limits else max(limits)

    @property
    def lookups(self) -> Lookups | None:
        return next((one.lookups for one in reversed(self.generators) if one.lookups is not None), None)

    @property
    def num_draft_nodes(self) -> int:
        return max(generator.num_draft_nodes for generator in self.generators)

    def prefill(self, prompt: Prompt) -> None:
        for reader in self.readers:
            reader.prefill(prompt)

    def learn(self, nodes: VerifiedNodes) -> None:
        self.generators[-1].learn(nodes)

    def observe(self, commit: Commit) -> None:
        for reader in self.readers:
            reader.observe(commit)

    def keep_rows(self, keep: list[int]) -> None:
        for reader in self.readers:
            reader.keep_rows(keep)

    @property
    def takes_rows(self) -> bool:
        return all(generator.takes_rows for generator in self.generators)

    def join(self, other: Wrapper, numbers: dict[int, int]) -> None:
        for mine, theirs in zip(self.readers, other.readers):
            mine.join(theirs, numbers)

    def close(self) -> None:
        with ExitStack() as closing:
            for reader in self.readers:
                closing.callback(reader.close)
