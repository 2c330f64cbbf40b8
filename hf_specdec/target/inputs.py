"""Nodes of captured forwards: the buffers that they are copied into, and where graphs read them.

Shapes: R rows and T nodes of a graph, r and t of them in use; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..drafts import DraftTree, TreeTopology
from ..logits.captured import CapturedJudge
from ..logits.randomness import RowKeys
from ..transfers import RowNumbers
from .graphs import GraphInputs
from .masks import GrownTopology, RowState


@dataclass
class NewNodes:
    """Nodes that a forward reads after the committed slots, as a graph takes them."""

    tokens: Sequence[torch.LongTensor]  # (r, t), in one or more parts
    parents: torch.LongTensor  # (t - 1,) or (r, t - 1): those of [`DraftTree`]
    num_drafted: RowNumbers  # (r,): valid draft nodes of each row
    probs: torch.FloatTensor | None = None  # (r, t - 1, V): the distributions that they were drawn from
    keys: RowKeys | None = None  # of the rows' random numbers
    more: torch.LongTensor | None = None  # (r,): by how many tokens rows are longer than the host knows
    states: Callable[[], dict[Any, torch.Tensor]] = dict  # of tokens, each (r, t, X)


# Integers of the rows; those of rows of padding are 0.
_NUMBERS = dict.fromkeys(
    ("lengths", "starts", "leads", "last_positions", "num_drafted", "seeds", "row_numbers", "positions"), 0
)

_NO_LIMIT = torch.iinfo(torch.long).max


class NodeInputs(GraphInputs):
    """The buffers of a forward over slots.

    Rows of padding are empty, and write to slots that no row uses. Nodes of padding are children of the anchor after
    the nodes in use.

    States like the given ones belong to the first tokens of a row, at most `most_stated`. A judge may judge the nodes;
    `probs` `(R, T - 1, V)` is room for the distributions that they were drawn from, in memory that others may write to
    between two forwards.
    """

    def __init__(
        self,
        rows: int,
        nodes: int,
        device: torch.device,
        states: dict[Any, torch.Tensor] | None = None,
        most_stated: int | None = None,
        judge: CapturedJudge | None = None,
        probs: torch.FloatTensor | None = None,
    ):
        super().__init__(rows, device, _NUMBERS, states or {}, most_stated)
        self.num_nodes = nodes
        self.judge: CapturedJudge | None = judge
        self.probs: torch.FloatTensor | None = probs
        with torch.inference_mode(False):
            # The tokens of all nodes, the parents of those that were drafted, and tokens unknown to the host.
            self._nodes = torch.zeros((rows, 2 * nodes), dtype=torch.long, device=device)
            self._padding_nodes = torch.zeros((2, 1, nodes), dtype=torch.long, device=device)
            self._padding_nodes[1] = -1

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [*super().buffers, self._nodes, *(() if self.probs is None else (self.probs,))]

    def fill_nodes(self, count: int, new: NewNodes, rows: RowState, max_position: int | None = None) -> None:
        """Copies in the nodes of the first rows; `max_position` is that of [`SlotModel`]."""
        limit = _NO_LIMIT if max_position is None else max_position
        keys = new.keys or ([0] * count,) * 3
        numbers = (rows.lengths, rows.starts, rows.leads, [limit] * count, new.num_drafted, *keys)
        self.fill(count, dict(zip(_NUMBERS, numbers)), new.states())
        if self.probs is not None and new.probs is not None:
            # Those of padding may be any numbers.
            self.probs[:count, : new.probs.shape[1]].copy_(new.probs[:count])
        missing = self.num_nodes - 1 - new.parents.shape[-1]
        zeros, anchors = self._padding_nodes[..., :missing].expand(-1, count, -1)
        none = self._padding_nodes[0, :, :1]
        added = none.expand(count, -1) if new.more is None else new.more[:count, None]
        parents = new.parents if new.parents.dim() == 1 else new.parents[:count]
        parts = [*(part[:count] for part in new.tokens), zeros, parents.expand(count, -1), anchors, added]
        torch.cat([part for part in parts if part.shape[1]], dim=1, out=self._nodes[:count])
        if count < len(self._nodes):
            self._nodes[count:] = self._nodes[:1]
            if new.more is not None:
                self._nodes[count:, -1:] = none

    # What the graph that runs reads

    @property
    def rows(self) -> RowState:
        added = self._nodes[:, -1]
        return RowState(self.numbers["lengths"] + added, self.numbers["starts"], self.numbers["leads"])

    @property
    def max_positions(self) -> torch.LongTensor:
        """Last position id that a node of a row may have, `(R, 1)`."""
        return self.numbers["last_positions"][:, None]

    @property
    def keys(self) -> RowKeys:
        """Of the rows' random numbers."""
        positions = self.numbers["positions"] + self._nodes[:, -1]
        return RowKeys(self.numbers["seeds"], self.numbers["row_numbers"], positions)

    def read(self) -> tuple[torch.LongTensor, TreeTopology, DraftTree]:
        """Tokens `(R, T)` of the nodes, who sees whom, and the drafted nodes."""
        split = self._nodes.tensor_split([self.num_nodes, 2 * self.num_nodes - 1], dim=1)
        tokens, parents = (part.contiguous() for part in split[:2])
        topology, draft = GrownTopology(parents), DraftTree(tokens[:, 1:], parents, self.numbers["num_drafted"])
        if self.judge is not None:
            draft.probs, draft.is_chain = self.probs, self.judge.is_chain
            # One of a chain would be that of no padding.
            draft.topology = topology
        return tokens, topology, draft
