"""Text that a drafter reads only when it drafts.

Where a call ends, or another drafter goes on with the text, it costs the drafter nothing.

Shapes: L tokens of a text, H hidden size of the target.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from ..protocol import Commit, Prompt
from ..transfers import upload


class _Text(NamedTuple):
    """A row's tokens, and the states of all but the last one, each `(L - 1, H)`."""

    tokens: list[int]
    states: dict[Any, torch.Tensor]


class UnreadText:
    """The prompt and commits that a candidate generator has not been told of, because it was not asked to draft."""

    def __init__(self, reader: Any):
        self.reader = reader  # the generator
        self.clear()

    def clear(self) -> None:
        self._prompt: Prompt | None = None
        self._rows: list[int] = []  # those of the prompt's rows that are left
        self.commits: list[Commit] = []
        self.num_tokens: int = 0  # of all rows, padding included

    def prefill(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._rows = list(range(len(prompt.starts)))
        self.num_tokens += prompt.input_ids.numel()

    def observe(self, commit: Commit) -> None:
        """Holds a commit that has no tokens of the reader's drafts."""
        self.commits.append(commit)
        self.num_tokens += commit.tokens.numel()

    def hand_over(self) -> None:
        """Tells the reader of all of it."""
        prompt, rows, commits = self._prompt, self._rows, self.commits
        self.clear()
        if prompt is not None:
            self.reader.prefill(prompt)
            if rows != list(range(len(prompt.starts))):
                self.reader.keep_rows(rows)
        if commits:
            self.reader.observe(Commit.joined(commits))

    def join(self, other: UnreadText, numbers: dict[int, int]) -> None:
        """Takes over the rows of another call, to be told of later where neither reader was told anything."""
        if not (self._is_whole and other._is_whole):
            self.hand_over()
            other.hand_over()
            self.reader.join(other.reader, numbers)
            return
        device = self.commits[0].tokens.device
        texts = self._texts() | {numbers[row]: text for row, text in other._texts().items()}
        self.clear()
        other.clear()
        # From now on as if all but their last tokens had been prompts.
        keys = next(iter(texts.values())).states
        # The rows of a prompt are numbered in their order, so numbers that are free get a token of no text.
        nothing = _Text([0, 0], {key: torch.zeros_like(value[:1]) for key, value in keys.items()})
        every = [texts.get(row, nothing) for row in range(max(texts) + 1)]
        length = max(len(text.tokens) for text in every) - 1
        starts = [length + 1 - len(text.tokens) for text in every]
        tokens = [[0] * start + text.tokens[:-1] for start, text in zip(starts, every)]
        states = {key: pad_sequence([text.states[key] for text in every], True, padding_side="left") for key in keys}
        self.prefill(Prompt(upload(tokens, device), starts, states))
        self._rows = list(texts)
        last = [text.tokens[-1:] for text in texts.values()]
        last_states = {key: torch.stack([text.states[key][-1:] for text in texts.values()]) for key in keys}
        self.observe(Commit(list(texts), upload(last, device), last, [0] * len(last), last_states))

    @property
    def _is_whole(self) -> bool:
        """All of the text is here, with the states of all of its tokens."""
        if self._prompt is None or not self.commits:
            return False
        length = self._prompt.input_ids.shape[1]
        return all(value.shape[1] >= length for value in self._prompt.hidden_states.values())

    def _texts(self) -> dict[int, _Text]:
        """The text of each active row by its number."""
        commit, prompt, texts = Commit.joined(self.commits), self._prompt, {}
        for place, (row, source) in enumerate(zip(commit.rows, self._rows)):
            old, new = prompt.token_lists[source], commit.token_lists[place]
            # The first state of a commit is that of the prompt's last token.
            states = {
                key: torch.cat([value[source, -len(old) :], commit.hidden_states[key][place, 1 : len(new)]])
                for key, value in prompt.hidden_states.items()
            }
            texts[row] = _Text([*old, *new], states)
        return texts

    def keep_rows(self, keep: list[int]) -> None:
        """Drops finished rows, those of the reader among them."""
        self.commits = [commit.select(keep) for commit in self.commits]
        if self._prompt is None:
            self.reader.keep_rows(keep)
        else:
            self._rows = [self._rows[index] for index in keep]

    def close(self) -> None:
        self.reader.close()
        self.clear()
