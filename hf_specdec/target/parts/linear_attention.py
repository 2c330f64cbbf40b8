"""Linear attention with decays over the nodes of a verification, chains or trees, in closed form:

    state_i = decay_i * state_parent(i) + key_i x written_i,    output_i = query_i . state_i

of which the gated delta rule (arXiv 2412.06464) writes beta * (value - what the state says of the key), with a decay
for each channel in Kimi's form (arXiv 2510.26692), and Mamba-2 (arXiv 2405.21060) the value itself. Products of decays
along a way through the tree are differences of their sums from the root on, so that a matrix of who descends from whom
takes the place of causality.

Shapes: R rows, H heads, T nodes, K size of keys, V size of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class DecayedSums:
    """Values from which the states after all nodes follow, without these states."""

    start: torch.Tensor  # the state in front of the nodes, (R, H, K, V)
    keys: torch.Tensor  # what each node adds, (R, H, T, K) and (R, H, T, V)
    written: torch.Tensor
    decays: torch.Tensor  # logarithms, summed up from the root on, (R, H, T, 1 | K)
    visible: torch.BoolTensor  # of `Nodes`, (1 | R, 1, T, T)
    has_values_first: bool = False  # the model keeps states as (R, H, V, K)

    def to(self, *args: Any) -> DecayedSums:
        """Itself: what a mixer does with the state after its last token."""
        return self

    def after(self, last: torch.LongTensor) -> torch.Tensor:
        """The states `(R, ...)` after node `last` `(R,)` of each row and its ancestors."""
        last = last.to(self.keys.device, non_blocking=True)
        rows = torch.arange(len(last), device=last.device)
        decay = self.decays[rows, :, last][:, :, None]
        kept = self.visible.expand(len(last), -1, -1, -1)[rows, :, last]
        weights = (decay - self.decays).masked_fill(~kept[..., None], float("-inf")).exp()
        state = self.start * decay.exp().mT + (self.keys * weights).mT @ self.written
        return state.mT if self.has_values_first else state


def read_nodes(
    query: torch.Tensor,  # (R, H, T, K) as the key, float32 like all others
    key: torch.Tensor,
    value: torch.Tensor,  # what is written, or by the delta rule aimed at, (R, H, T, V)
    decay: torch.Tensor,  # logarithms, (R, H, T, 1 | K)
    start: torch.Tensor,  # the state in front of the nodes, (R, H, K, V)
    visible: torch.BoolTensor,  # of `Nodes`, (1 | R, 1, T, T)
    beta: torch.Tensor | None = None,  # rates of the delta rule, (R, H, T, 1); without them the values are written
) -> tuple[torch.Tensor, DecayedSums]:
    """Outputs `(R, H, T, V)` of all nodes, each by the state in front of them and its ancestors, and their states."""
    total = visible.to(decay.dtype) @ decay
    # The decay on the way from node j to node i, which has to be an ancestor: nothing may overflow elsewhere.
    between = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(~visible[..., None], float("-inf")).exp()
    by_channel = between.shape[-1] > 1

    def scores(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if by_channel:
            return (left[..., :, None, :] * right[..., None, :, :] * between).sum(-1)
        return left @ right.mT * between[..., 0]

    from_start = total.exp()
    if beta is not None:
        rated = key * beta
        # What a node writes depends on what its ancestors have written; parents come first.
        value = torch.linalg.solve_triangular(
            scores(rated, key), value * beta - (rated * from_start) @ start, upper=False, unitriangular=True
        )
    output = (query * from_start) @ start + scores(query, key) @ value
    return output, DecayedSums(start, key, value, total, visible)
