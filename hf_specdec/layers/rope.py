"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) in the layout of the Llama family.

The two halves of a head are the coordinates that turn: `(x, y)` becomes `(x cos - y sin, y cos + x sin)`. Sines are
kept with the sign that they have there.

Shapes: R rows, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


# Kinds whose frequencies do not depend on the length of the text.
_STATIC_KINDS = ("default", "linear", "llama3", "yarn")


def has_static_frequencies(parameters: Mapping[str, Any] | None) -> bool:
    """Tells whether an embedding with these `rope_parameters` has the same frequencies at every length."""
    return (parameters or {}).get("rope_type", "default") in _STATIC_KINDS


def signed_angles(cosine: torch.Tensor, sine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine `(..., T, 1, D)` from those of transformers `(..., T, D)`."""
    half = sine.shape[-1] // 2
    return cosine[..., None, :], torch.cat((-sine[..., :half], sine[..., half:]), dim=-1)[..., None, :]


class RotaryAngles:
    """Angles of positions, looked up in tables where frequencies are static and a bound is known.

    Args:
        embedding (`nn.Module`): transformers' rotary embedding.
    """

    def __init__(self, embedding: nn.Module):
        self.embedding = embedding
        self._is_static = has_static_frequencies(embedding.config.rope_parameters)
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self, positions: torch.LongTensor | slice, like: torch.Tensor, bound: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine `(R | 1, T, 1, D)`, of a slice `(T, 1, D)`.

        Args:
            positions (`torch.LongTensor` of shape `(R | 1, T)` or `slice`): Position ids; a slice needs a bound.
            like (`torch.Tensor`): Has the dtype and the device of the angles.
            bound (`int`, *optional*): Above the size of all position ids; those of padding may be negative, and get
                the angles of others. `None`: nothing is looked up; a graph must not read a table that a later call
                replaces.
        """
        if isinstance(positions, torch.Tensor):
            positions = positions.to(like.device)
            if bound is None or not self._is_static:
                return signed_angles(*self.embedding(like, positions))
        assert bound is not None, "a slice of unknown size"
        # A network may be moved or cast between calls.
        place = (like.dtype, like.device)
        # Another thread may put a shorter table in this one's place.
        table = self._tables.get(place)
        if table is None or bound > len(table[0]):
            every = torch.arange(2 * bound, device=like.device)
            table = self._tables[place] = signed_angles(*(values[0] for values in self.embedding(like, every[None])))
        return table[0][positions], table[1][positions]
