"""Requests that share a loop, from prompts to rows that have ended: for an iterator, and for a manager's thread."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..arguments import ARGUMENTS, SpeculativeArguments
from ..call.entry import speculator_of_many
from .engine import Engine, check_run
from .requests import RequestReader
from .row import Row


class Run:
    """A target, its drafter, and the rows that are decoded; each of them belongs to an owner that was named for it."""

    def __init__(
        self,
        model: PreTrainedModel,
        arguments: dict[str, Any],
        tokenizer: Any,
        seed: int | None,
        batch_size: int,
        max_tokens: int | None,
        gathers: bool = False,
    ):
        check_run(model, batch_size, max_tokens)
        asked = SpeculativeArguments(**{name: arguments.pop(name, None) for name in ARGUMENTS})
        self.reader: RequestReader = RequestReader(model, arguments, tokenizer, seed, batch_size)
        speculator = speculator_of_many(model, self.reader.arguments, asked, tokenizer)
        self.reader.check()
        self.engine: Engine = Engine(model, speculator, self.reader, batch_size, max_tokens, gathers=gathers)
        self.owners: dict[Row, Any] = {}

    def add(self, owner: Any, row: Row) -> None:
        """Lets a row wait for a place, unless there can never be one for it."""
        self.engine.add(row)
        self.owners[row] = owner

    def step(self) -> list[tuple[Any, Row]]:
        """Makes one cycle; returns the rows that have ended, each with its owner."""
        return [(self.owners.pop(row), row) for row in self.engine.step()]

    def close(self) -> None:
        """Gives up what has not ended."""
        self.owners.clear()
        self.engine.close()
