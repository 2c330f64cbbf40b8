"""Rows that have left the batch, and the cache that the call returns.

Rows end apart. What an ended row has in the slots is copied out, and in the end all rows are put into one cache of
transformers, as plain generation would have left it.

Shapes: R rows, T tokens of a forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache

from ..drafts import chain_topology
from ..logits.processors import ProcessorStack
from ..metrics import SpecDecodingStats
from .adapters import ADAPTED_ROW
from .cache import SlotCache, fill_cache
from .continuation import Continuation
from .output import OutputRecorder
from .own_states import returned_cache
from .recurrent_state import store_states
from .request import Request
from .sequences import Sequences
from .target import SlotModel


# Padding tokens that one forward reads of a row that has ended, where outputs hold them.
_PADDING_AT_ONCE = 64


class EndedRows:
    """Copies of what rows have in the target's cache, taken when they leave the batch.

    Args:
        request (`Request`): The call.
        target (`SlotModel`): Its target.
        continuation (`Continuation`): Where its rows went on after the prompts.
        sequences (`Sequences`): Their tokens.
    """

    def __init__(self, request: Request, target: SlotModel, continuation: Continuation, sequences: Sequences):
        self._request, self._target = request, target
        self._continuation, self._sequences = continuation, sequences
        # Of all rows: those that leave are left out in a copy.
        self._source = target.source if request.keeps_cache else None
        # The slots may begin before the given tokens: a continued cache, or embeddings.
        self._num_unknown = continuation.num_slots - request.input_ids.shape[1]
        self._states: dict[int, tuple] = {}
        self._num_read: dict[int, int] = {}

    def store(self, rows: list[int], indices: Iterable[int]) -> None:
        """Copies what the active rows at `indices` have in the cache; `rows` are the numbers of all active rows."""
        for index in indices:
            self._states[rows[index]] = self._target.row_states(index)

    def read_padding(self, recorder: OutputRecorder, stack: ProcessorStack, stats: SpecDecodingStats) -> None:
        """Reads what plain generation feeds to rows that have ended, and records what it says there.

        Such rows have left the batch, so this costs forwards of their own: of calls that return something per token,
        and one for the last tokens of rows, where only the cache is returned.
        """
        lengths, last, device = self._sequences.lengths, max(self._sequences.lengths), self._request.device
        for length in sorted(set(lengths) - {last}):
            rows = [row for row, own in enumerate(lengths) if own == length]
            target = self._continued(rows)
            # The last token has not been read, and what is after the last padding is not wanted.
            end = last - 1 if recorder.wants_steps else length
            for first in range(length - 1, end, _PADDING_AT_ONCE):
                nodes = min(_PADDING_AT_ONCE, end - first)
                tokens = self._sequences.prefix(first + nodes)[rows, first:]
                output = target.forward(tokens, chain_topology(nodes - 1, device))
                target.commit([nodes] * len(rows))
                stats.num_target_forwards += 1
                logits, counts = output.logits.to(device), [nodes] * len(rows)
                path = torch.arange(nodes, device=device).expand(len(rows), -1)
                recorder.add(rows, path, counts, logits, output.all_hidden_states)
                if recorder.scores is not None and stack.knows_all:
                    recorder.scores.add(rows, self._scores_after(stack, rows, first + 1, logits), counts)
            for index, row in enumerate(rows):
                self._states[row], self._num_read[row] = target.row_states(index), end

    def _continued(self, rows: list[int]) -> SlotModel:
        """A target with ended rows of equal length in its slots."""
        cache = SlotCache(self._target.cache.capacity, limit=self._target.cache.limit)
        target = SlotModel(self._request.model, cache, forward_kwargs=self._target.forward_kwargs)
        self._filled(cache, rows)
        for state in cache.recurrent_states().values():
            state.num_read = self._num_slots(rows[0])
        self._continuation.start_slots(target, rows)
        if self._source is not None:
            target.see(self._source.of_rows(rows))
        target.max_position = self._target.max_position
        target.row_inputs = {name: values[rows] for name, values in self._request.row_inputs().items()}
        if ADAPTED_ROW in target.row_inputs:
            target.adapting = target.telling_adapters
        return target

    def _scores_after(self, stack: ProcessorStack, rows: list[int], length: int, logits: torch.Tensor) -> torch.Tensor:
        """Processed scores of logits `(R, T, V)`, the first of which follow `length` columns of the rows."""
        steps = []
        for node in range(logits.shape[1]):
            texts = [self._sequences.prefix(length + node, row)[0] for row in rows]
            steps.append(stack.rows(texts, logits[:, node], rows))
        return torch.stack(steps, dim=1)

    def cache(self) -> Any:
        """Keys and values of all tokens but the last: in the user's cache object, or in the static one asked for.

        transformers has made the latter before it called the loop. Some models have a cache of a class of their own.
        """
        rows, prepared = (
            list(range(self._request.batch_size)),
            self._request.model_kwargs.get(self._target.profile.cache_name),
        )
        if self._target.profile.is_recurrent:
            own = returned_cache(self._target.model, [self._states[row][1] for row in rows])
            if own is not None:
                return self._filled(own, rows, takes_states=False)
        if type(prepared) is StaticCache:
            # Compiled code may know the addresses of its tensors, which stay.
            prepared.reset()
            return self._filled(prepared, rows)
        cache, user_cache = self._filled(self._empty_cache(), rows), self._request.user_cache
        if self._source is not None:
            return EncoderDecoderCache(cache, self._source.keys.cross_attention_cache)
        if user_cache is None:
            return cache
        user_cache.layers = cache.layers
        return user_cache

    def _empty_cache(self) -> DynamicCache:
        return DynamicCache(config=self._request.model.config.get_text_config(decoder=True))

    def _filled(self, cache: Cache, rows: list[int], takes_states: bool = True) -> Cache:
        """An empty cache with keys and values of all tokens of these rows but the last, and with recurrent states."""
        # Of rows that were cut back, more has been read than is left.
        ends = zip(rows, map(self._num_slots, rows))
        fill_cache(cache, [[tuple(b[:, :end] for b in layer) for layer in self._states[row][0]] for row, end in ends])
        if takes_states:
            store_states(cache, [self._states[row][1] for row in rows])
        return cache

    def _num_slots(self, row: int) -> int:
        """Slots of an ended row. Its last token has not been read, unless it was for what follows."""
        return self._num_unknown + self._num_read.get(row, self._sequences.lengths[row] - 1)
