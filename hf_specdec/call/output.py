"""What `generate()` returns: transformers' own output, with the statistics attached.

Rows end apart, and nothing is read of one after its end: in what is returned for each token zeros stand there.

Shapes: B rows, H key/value heads, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ..loop.loop import DecodingLoop
from ..loop.observers import Observer
from ..loop.recorder import OutputRecorder
from ..loop.rows import Group
from ..metrics import SpecDecodingStats
from ..target.cache import fill_cache
from ..target.model import SlotModel
from ..target.parts.recurrent import RecurrentLayers
from ..target.parts.recurrent_state import RecurrentState, store_states
from ..target.parts.source import Source
from ..target_facts import cache_name_among


# The host's field for the cache.
CACHE_FIELD = cache_name_among([field.name for field in fields(GenerateDecoderOnlyOutput)])


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with one more field.

    Args:
        speculative (`SpecDecodingStats`): Drafts, acceptance and time of the call.
    """

    speculative: SpecDecodingStats | None = None


@dataclass
class SpeculativeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """`GenerateEncoderDecoderOutput` with the attribute `speculative`, a [`SpecDecodingStats`].

    It is no field: Whisper's `generate()` cuts all fields of an output into rows.
    """

    @property
    def speculative(self) -> SpecDecodingStats | None:
        return vars(self).get("_speculative")


def returned(
    loop: DecodingLoop, group: Group, recorder: OutputRecorder
) -> torch.LongTensor | SpeculativeOutput | SpeculativeEncoderDecoderOutput:
    """Token ids `(B, L)` of a loop that has ended, or the output that the config asks for."""
    kept = next((observer for observer in loop.observers if isinstance(observer, KeptCache)), None)
    cache = None if kept is None else kept.cache(loop.rows.active)
    sequences, request = group.texts.output(), group.request
    if not request.generation_config.return_dict_in_generate:
        return sequences
    lengths = [length - group.texts.prompt_length for length in group.texts.lengths]
    fields = {"sequences": sequences, CACHE_FIELD: cache, **recorder.fields(lengths)}
    if loop.target.find(Source) is None:
        return SpeculativeOutput(speculative=loop.stats, **fields)
    states = fields.pop("hidden_states")
    if states is not None:
        encoder_states = getattr(request.model_kwargs["encoder_outputs"], "hidden_states", None)
        fields |= {"decoder_hidden_states": states, "encoder_hidden_states": encoder_states}
    output = SpeculativeEncoderDecoderOutput(**fields)
    vars(output)["_speculative"] = loop.stats
    return output


@dataclass(eq=False)
class KeptCache(Observer):
    """What rows have in the target's cache when they leave the batch, for a call that returns the cache."""

    group: Group
    target: SlotModel
    # Rows whose slots lie behind those of the active rows, in this order, and copies of those that would not stay.
    _behind: list[int] = field(default_factory=list)
    _copies: dict[int, list[tuple[torch.Tensor, ...]]] = field(default_factory=dict)
    _states: dict[int, dict[int, RecurrentState]] = field(default_factory=dict)

    def begin(self, prompt: Any) -> None:
        # Of all rows: those that leave are left out in a copy.
        source = self.target.find(Source)
        self._crossed = None if source is None else source.keys.cross_attention_cache
        self._recurrent = self.target.find(RecurrentLayers)
        # The slots may begin before the given tokens: a continued cache, or embeddings.
        self._num_unknown: int = self.target.cache.get_seq_length() - self.group.request.input_ids.shape[1]

    def leave(self, rows: list[int], indices: list[int]) -> list[int]:
        if self._recurrent is not None:
            self._states |= {rows[index]: self._recurrent.of_rows([index]) for index in indices}
        if self.target.cache.store is not None:
            # Graphs write to the slots of rows that they do not need.
            self._copies |= {rows[index]: self.target.cache.row_states(index) for index in indices}
            return []
        self._behind = [rows[index] for index in indices] + self._behind
        return indices

    def cache(self, rows: list[int]) -> Any:
        """Keys and values of all rows, without those of their last tokens; `rows` are the active ones.

        They are put into the user's cache object, or the static one asked for: transformers has made the latter before
        it called the loop.
        """
        request = self.group.request
        prepared = request.model_kwargs.get(self.target.profile.cache_name)
        is_static = type(prepared) is StaticCache
        if is_static:
            # Compiled code may know the addresses of its tensors, which stay.
            prepared.reset()
        config = request.model.config.get_text_config(decoder=True)
        cache: Cache = prepared if is_static else DynamicCache(config=config)
        fill_cache(cache, self._layers(rows + self._behind))
        if self._recurrent is not None:
            self._states |= {row: self._recurrent.of_rows([index]) for index, row in enumerate(rows)}
            store_states(cache, [self._states.get(row, {}) for row in range(request.batch_size)])
        if self._crossed is not None:
            return EncoderDecoderCache(cache, self._crossed)
        if request.user_cache is None or is_static:
            return cache
        request.user_cache.layers = cache.layers
        return request.user_cache

    def _layers(self, places: list[int]) -> Iterator[list[torch.Tensor]]:
        """What each layer has in its slots, `(B, H, S, D)`. The call's own are given up, one layer after the other."""
        # Of rows that were cut back, more has been read than is left.
        ends = [self._num_unknown + length - 1 for length in self.group.texts.lengths]
        is_whole = places == sorted(places) and len(places) == len(ends) and min(ends) == max(ends)
        for number, layer in enumerate(self.target.cache.layers):
            buffers = []
            for kind, buffer in enumerate(layer.buffers):
                whole = buffer[: len(ends), :, : max(ends)]
                if not is_whole:
                    whole = torch.zeros_like(whole)
                    for row, end in enumerate(ends):
                        source = buffer[places.index(row)] if row in places else self._copies[row][number][kind]
                        whole[row, :, :end] = source[:, :end]
                buffers.append(whole)
            yield buffers
            for copies in self._copies.values():
                copies[number] = ()
            if self.target.cache.store is None:
                layer.keys = layer.values = layer.indexer_keys = None
