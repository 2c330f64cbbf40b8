"""Nodes of captured forwards: the buffers that they are copied into, and where graphs read them.

Shapes: R rows and T nodes of a graph, r and t of them in use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..drafts import DraftTree, TreeTopology
from ..logits.captured import CapturedJudge
from ..logits.randomness import RowKeys
from ..transfers import RowNumbers, fill_table
from .masks import GrownTopology, RowState


class NodeInputs:
    """The buffers from which a captured forward reads what changes.

    Args:
        rows (`int`): R.
        nodes (`int`): T.
        device (`torch.device`): Where they lie.

    Attributes:
        starts, leads (`torch.LongTensor` of shape `(R,)`): Those of [`RowState`].
        max_positions (`torch.LongTensor` of shape `(R, 1)`): Last position id that a node of a row may have.
    """

    def __init__(self, rows: int, nodes: int, device: torch.device):
        self._num_nodes = nodes
        # A call may run in inference mode, and a later one outside of it.
        with torch.inference_mode(False):
            # The tokens of all nodes, the parents of those that were drafted, and tokens unknown to the host.
            self._nodes = torch.zeros((rows, 2 * nodes), dtype=torch.long, device=device)
            # Each part begins at a multiple of 16 bytes, for which kernels are compiled in any case.
            self._rows = torch.zeros((8, rows + rows % 2), dtype=torch.long, device=device)
            self._padding = torch.zeros((2, 1, nodes), dtype=torch.long, device=device)
            self._padding[1] = -1
        self.starts: torch.Tensor
        self.leads: torch.Tensor
        self._lengths, self.starts, self.leads, last_positions, self._num_drafted, *keys = self._rows[:, :rows]
        self.max_positions: torch.Tensor = last_positions[:, None]
        self._seeds, self._numbers, self._positions = keys

    @property
    def lengths(self) -> torch.LongTensor:
        """Those of [`RowState`], `(R,)`, as the graph that runs computes them."""
        return self._lengths + self._nodes[:, -1]

    @property
    def keys(self) -> RowKeys:
        """Of the rows' random numbers, in the same way."""
        return RowKeys(self._seeds, self._numbers, self._positions + self._nodes[:, -1])

    def fill(
        self,
        tokens: Sequence[torch.LongTensor],
        parents: torch.LongTensor,
        num_drafted: RowNumbers,
        rows: RowState,
        max_position: int | None = None,
        keys: RowKeys | None = None,
        more: torch.LongTensor | None = None,
    ) -> None:
        """Copies in the nodes of a forward: `tokens` `(r, t)` in one or more parts, and `parents` of [`DraftTree`].

        Rows of padding are empty, and write to slots that no row uses. Nodes of padding are children of the anchor
        after the nodes in use.

        Args:
            num_drafted (`list[int]` or `torch.LongTensor` of shape `(r,)`): Valid draft nodes of each row.
            rows (`RowState`): Where the rows stand.
            max_position (`int`, *optional*): As for [`SlotModel`].
            keys (`RowKeys`, *optional*): Of their random numbers.
            more (`torch.LongTensor` of shape `(r,)`, *optional*): By how many tokens rows are longer than the
                host knows, and stand further on.
        """
        count, missing = len(rows.lengths), self._num_nodes - 1 - parents.shape[-1]
        zeros, anchors = self._padding[..., :missing].expand(-1, count, -1)
        none = self._padding[0, :, :1]
        added = none.expand(count, -1) if more is None else more[:, None]
        parts = [*tokens, zeros, parents.expand(count, -1), anchors, added]
        torch.cat([part for part in parts if part.shape[1]], dim=1, out=self._nodes[:count])
        if count < len(self._nodes):
            self._nodes[count:] = self._nodes[:1]
            if more is not None:
                self._nodes[count:, -1:] = none
        last = [_NO_LIMIT if max_position is None else max_position] * count
        parts = (rows.lengths, rows.starts, rows.leads, last, num_drafted, *(keys or [[0] * count] * 3))
        fill_table(self._rows, parts, [0] * len(parts), count)

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [self._nodes, self._rows]

    def read(self) -> tuple[torch.LongTensor, TreeTopology, DraftTree]:
        """Tokens `(R, T)` of the nodes of the graph that runs, who sees whom, and the drafted nodes."""
        split = self._nodes.tensor_split([self._num_nodes, 2 * self._num_nodes - 1], dim=1)
        tokens, parents = (part.contiguous() for part in split[:2])
        return tokens, GrownTopology(parents), DraftTree(tokens[:, 1:], parents, self._num_drafted)


class JudgedInputs(NodeInputs):
    """Nodes of a forward that judges them.

    Args:
        rows (`int`), nodes (`int`), device (`torch.device`): As for [`NodeInputs`].
        judge (`CapturedJudge`): Judges them.
        probs (`torch.FloatTensor` of shape `(R, T - 1, V)`, *optional*): The distributions that they were drawn from,
            in memory that others may write to between two forwards.
    """

    def __init__(
        self, rows: int, nodes: int, device: torch.device, judge: CapturedJudge, probs: torch.FloatTensor | None = None
    ):
        super().__init__(rows, nodes, device)
        self.judge = judge
        self._probs = probs

    @property
    def buffers(self) -> list[torch.Tensor]:
        return super().buffers + ([] if self._probs is None else [self._probs])

    def fill_probs(self, probs: torch.FloatTensor | None, count: int) -> None:
        """Copies in those of the first rows; of padding they are any numbers."""
        if self._probs is not None and probs is not None:
            self._probs[:count, : probs.shape[1]].copy_(probs[:count])

    def read(self) -> tuple[torch.LongTensor, TreeTopology, DraftTree]:
        tokens, topology, draft = super().read()
        draft.probs, draft.is_chain = self._probs, self.judge.is_chain
        # One of a chain would be that of no padding.
        draft.topology = topology
        return tokens, topology, draft


_NO_LIMIT = torch.iinfo(torch.long).max
