"""Linear attention with decays over the nodes of a verification, chains or trees, in closed form:

    state_i = decay_i * state_parent(i) + key_i x written_i,    output_i = query_i . state_i

of which the gated delta rule (arXiv 2412.06464) writes beta * (value - what the state says of the key), with a decay
for each channel in Kimi's form (arXiv 2510.26692), Mamba-2 (arXiv 2405.21060) the value itself, and mLSTM (arXiv
2405.04517) the value, weighted by a gate. Products of decays along a way through the tree are differences of
their sums from the root on, so that a matrix of who descends from whom takes the place of causality.

Shapes: R rows, H heads, T nodes, K size of keys, V size of values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .recurrent_state import NodeStates


@dataclass
class DecayedSums(NodeStates):
    """Values from which the states after all nodes follow, without these states.

    Attributes:
        start (`torch.Tensor` of shape `(R, H, K, V)`): The state in front of the nodes.
        keys, written (`torch.Tensor` of shape `(R, H, T, K)` and `(R, H, T, V)`): What each node adds.
        decays (`torch.Tensor` of shape `(R, H, T, 1 | K)`): Logarithms, summed up from the root on.
        visible (`torch.BoolTensor` of shape `(1 | R, 1, T, T)`): Of [`Nodes`].
        has_values_first (`bool`): The model keeps states as `(R, H, V, K)`.
        scales (`torch.Tensor` of shape `(R, H, T)`, *optional*): Factors of the states as the model keeps them.
    """

    start: torch.Tensor
    keys: torch.Tensor
    written: torch.Tensor
    decays: torch.Tensor
    visible: torch.BoolTensor
    has_values_first: bool = False
    scales: torch.Tensor | None = None

    def after(self, last: torch.LongTensor) -> torch.Tensor:
        last = last.to(self.keys.device, non_blocking=True)
        rows = torch.arange(len(last), device=last.device)
        decay = self.decays[rows, :, last][:, :, None]
        kept = self.visible.expand(len(last), -1, -1, -1)[rows, :, last]
        weights = (decay - self.decays).masked_fill(~kept[..., None], float("-inf")).exp()
        state = self.start * decay.exp().mT + (self.keys * weights).mT @ self.written
        if self.scales is not None:
            state = state * self.scales[rows, :, last][..., None, None]
        return state.mT if self.has_values_first else state


def read_nodes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    start: torch.Tensor,
    visible: torch.BoolTensor,
    beta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, DecayedSums]:
    """Linear attention of every node to the state in front of them and to its ancestors.

    Args:
        query, key (`torch.Tensor` of shape `(R, H, T, K)`): float32, like all others.
        value (`torch.Tensor` of shape `(R, H, T, V)`): What is written, or by the delta rule aimed at.
        decay (`torch.Tensor` of shape `(R, H, T, 1 | K)`): Logarithms.
        start (`torch.Tensor` of shape `(R, H, K, V)`): The state in front of the nodes.
        visible (`torch.BoolTensor` of shape `(1 | R, 1, T, T)`): Of [`Nodes`].
        beta (`torch.Tensor` of shape `(R, H, T, 1)`, *optional*): Rates of the delta rule; `None` writes the values.

    Returns:
        `tuple`: The outputs `(R, H, T, V)`, and what the states follow from.
    """
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


def read_gated_nodes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    decay: torch.Tensor,
    start: torch.Tensor,
    largest: torch.Tensor,
    visible: torch.BoolTensor,
    eps: float,
) -> tuple[torch.Tensor, DecayedSums, torch.Tensor]:
    """Means of values by mLSTM's exponential gates: the memory of what was written over that of the keys alone.

    Both are kept over the exponential of the largest logarithm of a weight in them, so that nothing overflows.

    Args:
        query, key (`torch.Tensor` of shape `(R, H, T, K)`): float32, like all others.
        value (`torch.Tensor` of shape `(R, H, T, V)`).
        gate, decay (`torch.Tensor` of shape `(R, H, T)`): Logarithms of what a value and its past are weighted by.
        start (`torch.Tensor` of shape `(R, H, K, V + 1)`): The memory in front of the nodes; last, that of the keys.
        largest (`torch.Tensor` of shape `(R, H, 1)`): The logarithm that it is over.
        visible (`torch.BoolTensor` of shape `(1 | R, 1, T, T)`): Of [`Nodes`].
        eps (`float`): Added to the denominators.

    Returns:
        `tuple`: The means `(R, H, T, V)`, what the memories follow from, and the logarithms `(R, H, T)` of all nodes.
    """
    # One unit for all nodes: no weight is above 1 in it.
    unit = torch.maximum(largest, gate.amax(-1, keepdim=True))
    values = torch.cat([value, torch.ones_like(value[..., :1])], dim=-1)
    output, sums = read_nodes(
        query,
        key * (gate - unit).exp()[..., None],
        values,
        decay[..., None],
        start * (largest - unit).exp()[..., None],
        visible,
    )
    total = sums.decays[..., 0]
    written = (total[..., :, None] - total[..., None, :] + gate[..., None, :]).masked_fill(~visible, float("-inf"))
    logarithms = torch.maximum(total + largest, written.amax(-1))
    sums.scales = (unit - logarithms).exp()
    sums_of_nodes, weights = (output * sums.scales[..., None]).split([value.shape[-1], 1], dim=-1)
    means = sums_of_nodes / (torch.maximum(weights.abs(), (-logarithms).exp()[..., None]) + eps)
    return means, sums, logarithms
