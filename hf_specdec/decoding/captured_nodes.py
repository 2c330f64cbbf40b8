"""Nodes of captured forwards: the buffers that they are copied into, and what a graph makes of these.

Shapes: R rows and T nodes of a graph, r and t of them in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..drafts import DraftTree
from ..kernels.ancestors import grow_ancestors
from ..kernels.tree_attention import SlotTree
from .masks import RowState


class NodeInputs:
    """The buffers from which a captured forward reads what changes.

    Args:
        rows (`int`): R.
        nodes (`int`): T.
        device (`torch.device`): Where they lie.
    """

    def __init__(self, rows: int, nodes: int, device: torch.device):
        self._num_nodes = nodes
        # A call may run in inference mode, and a later one outside of it.
        with torch.inference_mode(False):
            # The tokens of all nodes, and the parents of those that were drafted.
            self._nodes = torch.zeros((rows, 2 * nodes - 1), dtype=torch.long, device=device)
            # Each part begins at a multiple of 16 bytes, for which kernels are compiled in any case.
            self._rows = torch.zeros((5, rows + rows % 2), dtype=torch.long, device=device)
            self._padding = torch.zeros((2, 1, nodes), dtype=torch.long, device=device)
            self._padding[1] = -1
        self._row_parts = self._rows[:, :rows]

    def fill(
        self,
        tokens: Sequence[torch.LongTensor],
        parents: torch.LongTensor,
        num_drafted: list[int] | torch.LongTensor,
        rows: RowState,
        max_position: int | None = None,
    ) -> None:
        """Copies in the nodes of a forward: `tokens` `(r, t)` in one or more parts, and `parents` of [`DraftTree`].

        Rows of padding are empty, and write to slots that no row uses. Nodes of padding are children of the anchor
        after the nodes in use.

        Args:
            num_drafted (`list[int]` or `torch.LongTensor` of shape `(r,)`): Valid draft nodes of each row.
            rows (`RowState`): Where the rows stand.
            max_position (`int`, *optional*): As for [`SlotModel`].
        """
        count, missing = len(rows.lengths), self._num_nodes - 1 - parents.shape[-1]
        zeros, anchors = self._padding[..., :missing].expand(-1, count, -1)
        parts = [*tokens, zeros, parents.expand(count, -1), anchors]
        torch.cat([part for part in parts if part.shape[1]], dim=1, out=self._nodes[:count])
        if count < len(self._nodes):
            self._nodes[count:] = self._nodes[:1]
        first = [length - start + offset for length, start, offset in zip(rows.lengths, rows.starts, rows.offsets)]
        last = [_NO_LIMIT if max_position is None else max_position] * count
        is_known = isinstance(num_drafted, list)
        padding = [0] * (self._rows.shape[1] - count)
        parts = (rows.lengths, rows.starts, first, last, num_drafted if is_known else [0] * count)
        self._rows.copy_(torch.tensor([values + padding for values in parts]), non_blocking=True)
        if not is_known:
            self._row_parts[4, :count].copy_(num_drafted)

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [self._nodes, self._rows]

    def read(self) -> CapturedNodes:
        """The nodes of the graph that runs."""
        lengths, starts, first_positions, last_positions, num_drafted = self._row_parts
        tokens, parents = (part.contiguous() for part in self._nodes.tensor_split([self._num_nodes], dim=1))
        ancestors, depths = grow_ancestors(parents)
        positions = torch.minimum(first_positions[:, None] + depths, last_positions[:, None])
        draft = DraftTree(tokens[:, 1:], parents, num_drafted)
        return CapturedNodes(tokens, positions, SlotTree(lengths, starts, ancestors, depths), draft)

    def one_more(self, tokens: torch.LongTensor, ahead: torch.LongTensor) -> CapturedNodes:
        """Nodes of a graph that goes on with a token of each row `(R,)`, after `ahead` `(R,)` that it has read."""
        lengths, starts, first_positions, last_positions, _ = self._row_parts
        depths = torch.zeros_like(tokens)[:, None]
        positions = torch.minimum(first_positions + ahead, last_positions)[:, None]
        return CapturedNodes(tokens[:, None], positions, SlotTree(lengths + ahead, starts, depths + 1, depths))


_NO_LIMIT = torch.iinfo(torch.long).max


class CapturedNodes(NamedTuple):
    """The nodes of a captured forward.

    Attributes:
        tokens (`torch.LongTensor` of shape `(R, T)`): Anchors and draft tokens.
        positions (`torch.LongTensor` of shape `(R, T)`): Their position ids.
        tree (`SlotTree`): Who sees whom, and where the rows stand.
        draft (`DraftTree`, *optional*): All nodes but the first one of each row.
    """

    tokens: torch.LongTensor
    positions: torch.LongTensor
    tree: SlotTree
    draft: DraftTree | None = None
