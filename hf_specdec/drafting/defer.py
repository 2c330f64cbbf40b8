"""Deferred reading: committed text that a drafter reads only when it drafts.

Where a call ends, or another drafter goes on with the text, it costs the drafter nothing.
"""

from __future__ import annotations

from typing import Protocol

from ..protocol import Commit, Prompt


class TextReader(Protocol):
    """A candidate generator, as far as it is told of the text."""

    def prefill(self, prompt: Prompt) -> None: ...

    def observe(self, commit: Commit) -> None: ...

    def keep_rows(self, keep: list[int]) -> None: ...


class UnreadText:
    """The prompt and the commits that a candidate generator has not been told of, because it was not asked to draft.

    Args:
        reader (`TextReader`): The generator.

    Attributes:
        num_tokens (`int`): Tokens of all rows, padding included.
    """

    def __init__(self, reader: TextReader):
        self.reader = reader
        self.clear()

    def clear(self) -> None:
        """Forgets all of it."""
        self._prompt: Prompt | None = None
        self._rows: list[int] = []  # those of the prompt's rows that are left
        self._commits: list[Commit] = []
        self.num_tokens = 0

    @property
    def num_commits(self) -> int:
        return len(self._commits)

    def begin(self, prompt: Prompt) -> None:
        """Holds the prompt."""
        self._prompt, self._rows = prompt, list(range(len(prompt.starts)))
        self.num_tokens += prompt.input_ids.numel()

    def add(self, commit: Commit) -> None:
        """Holds a commit that has no tokens of the reader's drafts."""
        self._commits.append(commit)
        self.num_tokens += commit.tokens.numel()

    def hand_over(self) -> None:
        """Tells the reader of all of it."""
        prompt, rows, commits = self._prompt, self._rows, self._commits
        self.clear()
        if prompt is not None:
            self.reader.prefill(prompt)
            if rows != list(range(len(prompt.starts))):
                self.reader.keep_rows(rows)
        if commits:
            self.reader.observe(Commit.joined(commits))

    def keep_rows(self, keep: list[int]) -> None:
        """Drops finished rows, those of the reader among them."""
        self._commits = [commit.of_rows(keep) for commit in self._commits]
        if self._prompt is None:
            self.reader.keep_rows(keep)
        else:
            self._rows = [self._rows[index] for index in keep]
