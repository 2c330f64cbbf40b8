"""The encoder's side of a call: read once, seen by the decoder in every forward.

Shapes: B rows, N tokens or frames of the source, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.utils import ModelOutput

from ...transfers import select_rows
from ..cache import SlotCache
from ..forward import Part, SlotNodes


@dataclass
class Source(Part):
    """Sources of the rows of a call, as a model's decoder sees them.

    Attributes:
        inputs (`dict`): Arguments of every forward of the model: the encoder's output `(B, N, H)` and its mask.
        keys (`EncoderDecoderCache`, *optional*): With the keys and values that cross-attention makes of the encoder's
            output, once the prompts have been read.
        given (`dict`): What the encoder has read: its arguments as `generate()` was given them, each `(B, N, ...)`.
        token_lists (`list[list[int]]`, *optional*): Its tokens in each row, where the decoder writes the same ones.
    """

    inputs: dict[str, Any]
    keys: EncoderDecoderCache | None = None
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    token_lists: list[list[int]] | None = None

    @classmethod
    def of_call(cls, model: torch.nn.Module, model_kwargs: dict[str, Any], given: dict[str, Any]) -> Source:
        """That of a prepared call.

        Args:
            model (`PreTrainedModel`): With an encoder.
            model_kwargs (`dict`): As `generate()` has prepared them, with the encoder's output.
            given (`dict`): What the encoder has read, of fewer rows where there are several sequences of each.
        """
        inputs = {name: model_kwargs[name] for name in ("encoder_outputs", "attention_mask") if name in model_kwargs}
        num_rows = len(inputs["encoder_outputs"][0])
        given = {
            name: value.repeat_interleave(num_rows // len(value), dim=0)
            for name, value in given.items()
            if torch.is_tensor(value)
        }
        tokens = given.get("input_ids")
        return cls(inputs, given=given, token_lists=_token_lists(model, tokens, inputs.get("attention_mask")))

    @property
    def states(self) -> torch.Tensor:
        """The encoder's output `(B, N, H)`, which a decoder without an encoder may take under another name."""
        encoded = self.inputs.get("encoder_outputs")
        return self.inputs["encoder_hidden_states"] if encoded is None else encoded[0]

    def with_slots(self, slots: SlotCache) -> EncoderDecoderCache:
        """The cache of the whole decoder, with self-attention in these slots."""
        if self.keys is None or self.keys.self_attention_cache is not slots:
            crossed = DynamicCache() if self.keys is None else self.keys.cross_attention_cache
            self.keys = EncoderDecoderCache(slots, crossed)
        return self.keys

    def reading(self, nodes: SlotNodes) -> AbstractContextManager[None]:
        nodes.inputs |= self.inputs
        return nullcontext()

    def keep_rows(self, keep: list[int]) -> None:
        chosen = self.of_rows(keep)
        self.inputs, self.given, self.token_lists = chosen.inputs, chosen.given, chosen.token_lists
        if self.keys is not None and chosen.keys is not None:
            # In the cache that the model knows.
            self.keys.cross_attention_cache = chosen.keys.cross_attention_cache

    def without_keys(self) -> Source:
        """The same without keys and values: what others than the target itself read of it."""
        return replace(self, keys=None)

    def of_rows(self, rows: Sequence[int]) -> Source:
        """The sources of these rows, in this order."""
        keys = None
        if self.keys is not None:
            crossed = DynamicCache()
            for index, layer in enumerate(self.keys.cross_attention_cache.layers):
                if layer.is_initialized:
                    crossed.update(select_rows(layer.keys, rows), select_rows(layer.values, rows), index)
            keys = EncoderDecoderCache(self.keys.self_attention_cache, crossed)
        return Source(
            _rows_of(self.inputs, rows, len(self.states)),
            keys,
            {name: select_rows(value, rows) for name, value in self.given.items()},
            None if self.token_lists is None else [self.token_lists[row] for row in rows],
        )


def _rows_of(value: Any, rows: Sequence[int], num_rows: int) -> Any:
    """The same structure with these rows of all tensors in it that have one for each row."""
    if torch.is_tensor(value):
        return select_rows(value, rows) if value.dim() and len(value) == num_rows else value
    if isinstance(value, dict):
        parts = {name: _rows_of(part, rows, num_rows) for name, part in value.items()}
        return type(value)(**parts) if isinstance(value, ModelOutput) else parts
    if isinstance(value, (tuple, list)):
        return type(value)(_rows_of(part, rows, num_rows) for part in value)
    return value


def _token_lists(
    model: torch.nn.Module, tokens: torch.Tensor | None, mask: torch.Tensor | None
) -> list[list[int]] | None:
    """Each row's tokens without padding; `None` where encoder and decoder do not read the same table of tokens."""
    if tokens is None or not _shares_tokens(model):
        return None
    if mask is None or mask.shape != tokens.shape:
        return tokens.tolist()
    return [row[seen].tolist() for row, seen in zip(tokens, mask.bool())]


def _shares_tokens(model: torch.nn.Module) -> bool:
    """Tells whether encoder and decoder embed tokens by the same weights, which is how they come to agree in them."""
    try:
        tables = [part.get_input_embeddings().weight for part in (model.get_encoder(), model.get_decoder())]
    except (AttributeError, NotImplementedError):
        return False
    return tables[0] is tables[1]
