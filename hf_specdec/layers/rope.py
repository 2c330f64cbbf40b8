"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) in the layout of the Llama family.

The two halves of a head are the coordinates that turn: `(x, y)` becomes `(x cos - y sin, y cos + x sin)`. Sines are
kept with the sign that they have there. In some models the coordinates are neighbours instead of halves, and only the
first numbers of a head turn.

Shapes: R rows, T tokens, A numbers of a head that turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..kernels import angles
from ..kernels.angles import signed_angles
from .plan import Way, is_hooked, way_of
from .structure import form_of


# Kinds whose frequencies do not depend on the length of the text.
_STATIC_KINDS = ("default", "linear", "llama3", "yarn")


def has_static_frequencies(parameters: Mapping[str, Any] | None) -> bool:
    """Tells whether an embedding with these `rope_parameters` has the same frequencies at every length."""
    return (parameters or {}).get("rope_type", "default") in _STATIC_KINDS


class RotaryAngles:
    """Angles of positions, looked up in tables where frequencies are static and a bound is known.

    Made of transformers' rotary embedding, and of a type of layer where each has its own angles.
    """

    def __init__(self, embedding: nn.Module, layer_type: str | None = None, is_interleaved: bool = False):
        self.embedding: nn.Module = embedding
        self._is_interleaved = is_interleaved
        self._type, self._prefix = ((), "") if layer_type is None else ((layer_type,), f"{layer_type}_")
        parameters = embedding.config.rope_parameters
        self._is_static = has_static_frequencies(parameters if layer_type is None else parameters[layer_type])
        is_plain = self._is_static and not is_hooked(embedding)
        # Whether angles have the dtype of what turns, and not float32; `None` where others than kernels know it.
        self._rounds: bool | None = form_of(embedding, "rotary") if is_plain else None
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self, positions: torch.LongTensor | slice, like: torch.Tensor, bound: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine `(R | 1, T, 1, A)` of position ids `(R | 1, T)`, of a slice `(T, 1, A)`.

        The bound is above the size of all positions; those of padding may be negative, and get the angles of others.
        Without one nothing is looked up: a graph must not read a table that a later call replaces.
        """
        if isinstance(positions, torch.Tensor):
            positions = positions.to(like.device)
            if bound is None or not self._is_static:
                return self._angles(like, positions)
        assert bound is not None, "a slice of unknown size"
        # A network may be moved or cast between calls.
        place = (like.dtype, like.device)
        # Another thread may put a shorter table in this one's place.
        table = self._tables.get(place)
        if table is None or bound > len(table[0]):
            every = torch.arange(2 * bound, device=like.device)
            table = self._tables[place] = tuple(values[0] for values in self._angles(like, every[None]))
        return table[0][positions], table[1][positions]

    def _angles(self, like: torch.Tensor, positions: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._rounds is None or way_of(like) is Way.TORCH:
            return signed_angles(*self.embedding(like, positions, *self._type), self._is_interleaved)
        frequencies = getattr(self.embedding, f"{self._prefix}inv_freq").to(like.device)
        factor = getattr(self.embedding, f"{self._prefix}attention_scaling")
        dtype = like.dtype if self._rounds else torch.float32
        return angles.rotary_angles_triton(positions, frequencies, factor, dtype, self._is_interleaved)
