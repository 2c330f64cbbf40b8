"""The optional fields of what `generate()` returns: tensors of each generated token, of rows at their own pace.

Shapes: B rows of the call, R rows that a value is added to, M tokens of each, P prompt length, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..transfers import take_nodes
from .cycle import Cycle
from .observers import Observer


if TYPE_CHECKING:
    from transformers import GenerationConfig


class StepRecorder:
    """Collects tensors of tokens of B rows, and returns them step by step: `(B, ...)` for each generated token.

    Rows hold zeros where nothing was added.
    """

    def __init__(self, batch_size: int):
        self.rows: list[list[torch.Tensor]] = [[] for _ in range(batch_size)]

    def add(self, rows: list[int], values: torch.Tensor, counts: list[int]) -> None:
        """Adds the first `counts[i]` entries of `values[i]` (shape `(R, M, ...)`) to row `rows[i]`."""
        for row, value, count in zip(rows, values, counts):
            self.rows[row].extend(value[:count])

    def step(self, index: int) -> torch.Tensor:
        """Values of one generated token, `(B, ...)`."""
        nothing = torch.zeros_like(next(steps[index] for steps in self.rows if len(steps) > index))
        return torch.stack([steps[index] if len(steps) > index else nothing for steps in self.rows])

    def steps(self, lengths: list[int]) -> tuple[torch.Tensor, ...]:
        """One tensor `(B, ...)` per generated token; what goes beyond the rows' `lengths` is dropped."""
        self.rows = [steps[:length] for steps, length in zip(self.rows, lengths)]
        return tuple(map(self.step, range(max(map(len, self.rows)))))


class OutputRecorder(Observer):
    """Scores, logits and hidden states of B rows, as far as the config asks for them.

    Scores come from the verifier, which has them when the stopping rules see a token.
    """

    def __init__(self, batch_size: int, config: GenerationConfig):
        wants_dict = config.return_dict_in_generate
        self.scores: StepRecorder | None = StepRecorder(batch_size) if wants_dict and config.output_scores else None
        self.logits: StepRecorder | None = StepRecorder(batch_size) if wants_dict and config.output_logits else None
        self.wants_states: bool = bool(wants_dict and config.output_hidden_states)
        self.reads_logits: bool = self.wants_states or self.scores is not None or self.logits is not None
        # The first token comes from the prompt's states, which are returned whole; then those of each layer.
        self._prompt_states: tuple[Any, ...] = ()
        self._states: list[StepRecorder] = []

    def see(self, cycle: Cycle) -> None:
        path, counts, all_states = cycle.verdict.path, cycle.verdict.counts, cycle.output.all_hidden_states or ()
        if self.logits is not None:
            self.logits.add(cycle.rows, take_nodes(cycle.output.logits, path).float(), counts)
        if not self.wants_states:
            return
        if cycle.is_first:
            self._prompt_states = all_states
            self._states = [StepRecorder(len(cycle.rows)) for _ in all_states]
            return
        for recorder, states in zip(self._states, all_states):
            recorder.add(cycle.rows, take_nodes(states, path), counts)

    def fields(self, lengths: list[int]) -> dict[str, tuple[Any, ...] | None]:
        """What is asked for, by name, of rows that have generated so many tokens.

        Hidden states are tuples over layers: `(B, P, H)` for the first token, then `(B, 1, H)`.
        """
        states = None
        if self.wants_states:
            layers = [recorder.steps([length - 1 for length in lengths]) for recorder in self._states]
            states = (self._prompt_states, *(tuple(state[:, None] for state in step) for step in zip(*layers)))
        return {
            "scores": self.scores and self.scores.steps(lengths),
            "logits": self.logits and self.logits.steps(lengths),
            "hidden_states": states,
        }
