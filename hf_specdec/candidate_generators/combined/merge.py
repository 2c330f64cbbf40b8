"""The drafts of two drafters in one cycle: each row has one of them.

Shapes: B active rows, N draft nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ...drafts import DraftTree
from ...transfers import upload


def merged(retrieved: DraftTree, drafted: DraftTree, from_model: Sequence[bool]) -> DraftTree:
    """Merges two drafts of all rows, of which each row has one.

    Beside sampled drafts a retrieved one is a chain, sampled from point masses on its tokens, for which rejection
    sampling is the same as following the target.

    Args:
        retrieved (`DraftTree`): Drafts of all rows, without `probs`.
        drafted (`DraftTree`): Others.
        from_model (`Sequence[bool]`): Rows that have the draft in `drafted`.
    """
    if drafted.probs is not None and not retrieved.is_chain:
        retrieved = _first_paths(retrieved)
    device, size = drafted.tokens.device, max(retrieved.size, drafted.size)
    is_drafted = upload(from_model, device).bool()
    column = is_drafted[:, None]

    def widened(values: torch.Tensor, filler: int = 0) -> torch.Tensor:
        return F.pad(values, (0, size - values.shape[1]), value=filler)

    tokens = torch.where(column, widened(drafted.tokens), widened(retrieved.tokens))
    num_nodes = _merged_counts(retrieved, drafted, from_model)
    if num_nodes is None:
        num_nodes = torch.where(is_drafted, drafted.num_nodes, retrieved.num_nodes)
    if not (retrieved.is_chain and drafted.is_chain):
        both = (widened(tree.parents.expand(len(from_model), -1), -1) for tree in (drafted, retrieved))
        return DraftTree(tokens, torch.where(column, *both), num_nodes)
    if drafted.probs is None:
        return DraftTree.chain(tokens, num_nodes)
    probs = F.pad(drafted.probs, (0, 0, 0, size - drafted.size))
    point_masses = torch.zeros_like(probs).scatter_(2, tokens[..., None], 1.0)
    return DraftTree.chain(tokens, num_nodes, torch.where(column[..., None], probs, point_masses))


def _merged_counts(retrieved: DraftTree, drafted: DraftTree, from_model: Sequence[bool]) -> list[int] | None:
    """Valid nodes of each row, if the host knows them."""
    if drafted.node_counts is None:
        return None
    rows = zip(retrieved.node_counts, drafted.node_counts, from_model)
    return [theirs if is_drafted else ours for ours, theirs, is_drafted in rows]


def _first_paths(draft: DraftTree) -> DraftTree:
    """Keeps of each row's tree the path that always takes the first child."""
    chains = []
    for tokens, parents in zip(draft.token_lists(), draft.parent_lists()):
        node, chain = -1, []
        for place, (token, parent) in enumerate(zip(tokens, parents)):
            if parent == node:
                node = place
                chain.append(token)
        chains.append(chain)
    return DraftTree.from_lists(chains, draft.tokens.device)
