"""Rows that have left the batch, and the cache that the call returns.

Rows end apart, and nothing is read of one after its end: in what is returned, zeros stand there.

Shapes: B rows, H key/value heads, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache

from ..target.cache import fill_cache
from ..target.model import SlotModel
from ..target.parts.recurrent import RecurrentLayers
from ..target.parts.recurrent_state import RecurrentState, store_states
from ..target.request import Request
from .sequences import Sequences


class EndedRows:
    """What rows have in the target's cache when they leave the batch.

    Args:
        request (`Request`): The call.
        target (`SlotModel`): Its target, which has read the prompts.
        sequences (`Sequences`): The tokens of the rows.
    """

    def __init__(self, request: Request, target: SlotModel, sequences: Sequences):
        self._request, self._target, self._sequences = request, target, sequences
        # Of all rows: those that leave are left out in a copy.
        source = target.source if request.keeps_cache else None
        self._crossed = None if source is None else source.keys.cross_attention_cache
        # The slots may begin before the given tokens: a continued cache, or embeddings.
        self._num_unknown: int = target.cache.get_seq_length() - request.input_ids.shape[1]
        # Rows whose slots lie behind those of the active rows, in this order, and copies of those that would not stay.
        self._behind: list[int] = []
        self._copies: dict[int, list[tuple[torch.Tensor, ...]]] = {}
        self._recurrent: dict[int, dict[int, RecurrentState]] = {}

    def leave(self, rows: list[int], indices: list[int]) -> list[int]:
        """Takes note of the rows that leave, of the active `rows` those at `indices`.

        Returns:
            Those of them whose slots are to stay behind the others'.
        """
        self._keep_states(rows, indices)
        if self._target.cache.store is not None:
            # Graphs write to the slots of rows that they do not need.
            self._copies |= {rows[index]: self._target.cache.row_states(index) for index in indices}
            return []
        self._behind = [rows[index] for index in indices] + self._behind
        return indices

    def _keep_states(self, rows: list[int], indices: Iterable[int]) -> None:
        if (recurrent := self._target.find(RecurrentLayers)) is not None:
            self._recurrent |= {rows[index]: recurrent.row_states(index) for index in indices}

    def cache(self, rows: list[int]) -> Any:
        """Keys and values of all rows, without those of their last tokens; `rows` are the active ones.

        They are put into the user's cache object, or the static one asked for: transformers has made the latter before
        it called the loop.
        """
        self._keep_states(rows, range(len(rows)))
        places = rows + self._behind
        states = [self._recurrent.get(row, {}) for row in range(self._request.batch_size)]
        prepared = self._request.model_kwargs.get(self._target.profile.cache_name)
        is_static = type(prepared) is StaticCache
        if is_static:
            # Compiled code may know the addresses of its tensors, which stay.
            prepared.reset()
        config = self._request.model.config.get_text_config(decoder=True)
        cache: Cache = prepared if is_static else DynamicCache(config=config)
        fill_cache(cache, self._layers(places))
        store_states(cache, states)
        user_cache = self._request.user_cache
        if self._crossed is not None:
            return EncoderDecoderCache(cache, self._crossed)
        if user_cache is None or is_static:
            return cache
        user_cache.layers = cache.layers
        return user_cache

    def _layers(self, places: list[int]) -> Iterator[list[torch.Tensor]]:
        """What each layer has in its slots, `(B, H, S, D)`. The call's own are given up, one layer after the other."""
        # Of rows that were cut back, more has been read than is left.
        ends = [self._num_unknown + length - 1 for length in self._sequences.lengths]
        is_whole = places == sorted(places) and len(places) == len(ends) and min(ends) == max(ends)
        for number, layer in enumerate(self._target.cache.layers):
            found = []
            for kind, buffer in enumerate(layer.buffers):
                whole = buffer[: len(ends), :, : max(ends)]
                if not is_whole:
                    whole = torch.zeros_like(whole)
                    for row, end in enumerate(ends):
                        source = buffer[places.index(row)] if row in places else self._copies[row][number][kind]
                        whole[row, :, :end] = source[:, :end]
                found.append(whole)
            yield found
            for copies in self._copies.values():
                copies[number] = ()
            if self._target.cache.store is None:
                layer.keys = layer.values = layer.indexer_keys = None
