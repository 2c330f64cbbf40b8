"""What a forward over slots reads and returns, and what rare models and calls add to it.

Shapes: R active rows, T nodes (anchor included), M most committed tokens of a row, N draft nodes, K best tokens after
a node, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..drafts import TreeTopology
from ..kernels.tree_attention import SlotTree
from ..threads import cached_property
from ..transfers import PackedTables
from .masks import RowPlaces, Span, node_positions


@dataclass
class SlotForward:
    """What a forward reads: the nodes of a verification, or without a topology the tokens of prompts."""

    tokens: torch.Tensor  # (R, T), or embeddings (R, T, H)
    topology: TreeTopology | None = None  # who sees whom among the nodes
    rows: RowPlaces = field(default_factory=lambda: RowPlaces([], [], []))  # where the rows stand
    columns: int = 0  # slots that are read
    tree: SlotTree | None = None  # the nodes, where the tree attention kernel runs
    inputs: dict[str, Any] = field(default_factory=dict)  # further arguments of the model's own forward
    text_length: int | None = None  # for rotary embeddings that change: tokens of the text, the one read included
    readings: dict[int, Any] = field(default_factory=dict)  # what recurrent layers become by it, by their numbers
    reading: Any = None  # that of the layer that runs
    # What attention knows beside its masks: their spans by their memory, the same masks for more queries, and the
    # layers by what computed them.
    spans: dict[Any, tuple[Span, torch.Tensor]] = field(default_factory=dict)
    folded: dict[Any, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    layers: Counter[str] = field(default_factory=Counter)
    reads_by_kernel: bool = False  # prompts of a model whose layers hand all masks on to the tree attention kernel

    @cached_property
    def positions(self) -> torch.LongTensor:
        """Position ids of the nodes, `(R, T)`; parts may set others."""
        return node_positions(self.topology, self.rows)

    @property
    def slots(self) -> torch.LongTensor:
        """The slot `(R, T)` that each node takes when it is read as text."""
        return self.rows.lengths_on(self.tokens.device)[:, None] + self.topology.depths


# What runs in this thread; unset outside of a forward.
running: ContextVar[SlotForward | None] = ContextVar("hf_specdec_running", default=None)


@contextmanager
def told(forward: SlotForward) -> Iterator[None]:
    """Has it running inside of the block."""
    token = running.set(forward)
    try:
        yield
    finally:
        running.reset(token)


@dataclass
class SlotOutput:
    """Result of a forward over slots."""

    logits: torch.Tensor  # (R, T, V)
    # The states asked for, each `(R, T, H)`; with an outcome `(R, M, H)`, along the path.
    hidden_states: dict[int | str, torch.Tensor] = field(default_factory=dict)
    all_hidden_states: tuple[torch.Tensor, ...] | None = None  # those of all layers
    outcome: PackedTables | None = None  # of a graph that has judged the draft
    successors: torch.LongTensor | None = None  # of `with_successors`, (R, T, 1 + K), as asked for
    may_fail: bool = True  # scores may leave no token to choose, so that the verdict is an error


class Part:
    """What a rare model or call adds to the forwards of a [`SlotModel`]: it follows the rows by these verbs."""

    why_eager: ClassVar[str | None] = None  # why forwards with this part cannot run as graphs
    why_equal: ClassVar[str | None] = None  # what makes all rows advance by the same number of tokens
    note: str | None = None  # a limit of the call, for its statistics

    def reading(self, nodes: SlotForward) -> AbstractContextManager[Any]:
        """The context of a forward that reads the nodes; may change the nodes and the inputs of the forward."""
        return nullcontext()

    def commit(self, counts: list[int], path: torch.LongTensor | None) -> None:
        """Keeps what was accepted of the last forward; the arguments are those of [`SlotCache.commit`]."""

    def keep_rows(self, keep: list[int]) -> None:
        """Goes on with these rows, in this order."""

    def join(self, other: Any) -> None:
        """Takes over the rows of the same part of another call after its own."""

    def close(self) -> None:
        """Ends the call."""

    def depths(self, depths: list[int], more: int) -> list[int]:
        """How deep the rows may draft, of what they may otherwise, once they have `more` tokens."""
        return depths

    def prepare(self, prefix: Callable[[int, list[int]], torch.LongTensor]) -> int:
        """Brings rows up to date in front of a cycle, by their first tokens; counts the forwards that this takes."""
        return 0
