"""Sizes and weights that a draft network takes from its target before it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..target_facts import hidden_size, numbers_of, vocabulary_size


# Of heads where the target has none: the usual size of small models.
_HEAD_DIM = 64


def layer_sizes(target: PreTrainedModel, size: int, intermediate_size: int, num_layers: int) -> dict[str, Any]:
    """Returns the sizes of Llama layers of hidden size `size` for a target; an `intermediate_size` of 0 is its own."""
    text = target.config.get_text_config(decoder=True)
    # Targets without attention have none.
    heads = getattr(text, "num_attention_heads", None) or max(size // _HEAD_DIM, 1)
    rope = getattr(text, "rope_parameters", None) or {}
    return {
        "hidden_size": size,
        "target_hidden_size": hidden_size(target),
        "vocab_size": vocabulary_size(target),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        # Rotary embeddings turn pairs.
        "head_dim": max(2, size // heads // 2 * 2),
        "intermediate_size": intermediate_size or getattr(text, "intermediate_size", None) or 4 * size,
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "max_position_embeddings": getattr(text, "max_position_embeddings", 2048),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(rope.get("rope_theta") or 10000.0)},
    }


@torch.no_grad()
def begin_as(own_layer: nn.Module, layer: nn.Module) -> None:
    """Initialises a draft's layer with the target's where names agree; a narrower MLP takes the first part."""
    mine = dict(own_layer.named_parameters())
    for name, weight in layer.named_parameters():
        if name in mine and (weight := numbers_of(weight)) is not None and weight.dim() == mine[name].dim():
            part = tuple(slice(size) for size in mine[name].shape)
            if weight[part].shape == mine[name].shape:
                mine[name].copy_(weight[part])


@torch.no_grad()
def begin_near(fusion: nn.Linear, shares: Sequence[float]) -> None:
    """Initialises a projection of concatenated vectors near their sum, weighted by `shares`; some noise is left."""
    identity = torch.eye(fusion.out_features, device=fusion.weight.device)
    fusion.weight.mul_(0.3)
    fusion.weight += torch.cat([share * identity for share in shares], dim=1)


@torch.no_grad()
def copy_rows(
    table: nn.Embedding | nn.Linear, source: nn.Embedding | nn.Linear, ids: torch.LongTensor | None = None
) -> None:
    """Initialises a draft's embedding or lm_head with rows of the target's, those of `ids` or the first ones."""
    # A narrower draft takes their coordinates along the main directions of all rows. A wider one, and one whose target
    # has packed weights that only their module can read, keeps its random weights.
    width, rows = table.weight.shape[1], numbers_of(source.weight)
    if rows is None or width > rows.shape[1]:
        return
    rows = rows.float()
    if width < rows.shape[1]:
        rows = rows @ main_directions(rows, width)
    rows = rows[: table.weight.shape[0]] if ids is None else rows[ids.to(rows.device)]
    table.weight.copy_(rows)


def main_directions(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the eigenvectors `(H, count)` of the greatest eigenvalues of the rows' `(N, H)` second moments."""
    return torch.linalg.eigh(rows.T @ rows).eigenvectors[:, -count:].flip(1)
