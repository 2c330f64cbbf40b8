"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) in the layout of the Llama family.

The two halves of a head are the coordinates that turn: `(x, y)` becomes `(x cos - y sin, y cos + x sin)`. Sines are
kept with the sign that they have there.

Shapes: R rows, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


# Kinds whose frequencies do not depend on the length of the text.
_STATIC_KINDS = ("default", "linear", "llama3", "yarn")


def has_static_frequencies(parameters: Mapping | None) -> bool:
    """Tells whether an embedding with these `rope_parameters` has the same frequencies at every length."""
    return (parameters or {}).get("rope_type", "default") in _STATIC_KINDS


def signed_angles(cosine: torch.Tensor, sine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine `(..., T, 1, D)` from those of transformers `(..., T, D)`."""
    half = sine.shape[-1] // 2
    return cosine[..., None, :], torch.cat((-sine[..., :half], sine[..., half:]), dim=-1)[..., None, :]


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Heads `(R, T, heads, D)`, turned by signed angles that broadcast to `(R, T, 1, D)`."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return heads * cosine + swapped * sine


class RotaryTable:
    """Angles of all positions of a text that grows, of an embedding with static frequencies.

    Args:
        embedding (`nn.Module`): transformers' rotary embedding.
    """

    def __init__(self, embedding: nn.Module):
        self.embedding = embedding
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None

    def up_to(self, count: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of at least the first `count` positions, each `(positions, 1, D)`.

        Args:
            like (`torch.Tensor`): Has the dtype and the device of the angles.
        """
        # Another thread may put a shorter table in this one's place.
        angles = self._angles
        if angles is None or count > len(angles[0]):
            every = torch.arange(2 * count, device=like.device)
            angles = self._angles = signed_angles(*(values[0] for values in self.embedding(like, every[None])))
        return angles


class RotaryAngles:
    """Angles of a draft's positions, looked up in tables where frequencies are static and a bound is known.

    Args:
        embedding (`nn.Module`): transformers' rotary embedding.
    """

    def __init__(self, embedding: nn.Module):
        self.embedding = embedding
        self._is_static = has_static_frequencies(embedding.config.rope_parameters)
        self._tables: dict[tuple[torch.dtype, torch.device], RotaryTable] = {}

    def __call__(
        self, positions: torch.LongTensor, like: torch.Tensor, bound: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine `(R | 1, T, 1, D)`.

        Args:
            positions (`torch.LongTensor` of shape `(R | 1, T)`): Position ids.
            like (`torch.Tensor`): Has the dtype and the device of the angles.
            bound (`int`, *optional*): Above the size of all position ids; those of padding may be negative, and get
                the angles of others. `None`: nothing is looked up; a graph must not read a table that a later call
                replaces.
        """
        positions = positions.to(like.device)
        if bound is None or not self._is_static:
            return signed_angles(*self.embedding(like, positions))
        # A network may be moved or cast between calls.
        place = (like.dtype, like.device)
        table = self._tables.get(place)
        if table is None:
            table = self._tables[place] = RotaryTable(self.embedding)
        cosine, sine = table.up_to(bound, like)
        return cosine[positions], sine[positions]
