"""The encoder's side of a call: read once, seen by the decoder in every forward.

Shapes: R rows, N tokens or frames of the source, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ...transfers import select_rows
from ..forward import Part, SlotForward


if TYPE_CHECKING:
    from ..model import SlotModel


@dataclass
class Source(Part):
    """Sources of the rows of a call, as a model's decoder sees them."""

    inputs: dict[str, Any]  # arguments of every forward: the encoder's output (R, N, H) and its mask
    # With the keys and values that cross-attention makes of the encoder's output, once the prompts have been read.
    keys: EncoderDecoderCache | None = None
    encoder_inputs: dict[str, torch.Tensor] = field(default_factory=dict)  # arguments of the encoder, each (R, N, ...)
    token_lists: list[list[int]] | None = None  # its tokens, where the decoder writes the same ones

    @classmethod
    def of_call(cls, model: Any, model_kwargs: dict[str, Any], encoder_inputs: dict[str, Any]) -> Source:
        """That of a prepared call, whose encoder read fewer rows where there are several sequences of each."""
        inputs = {name: model_kwargs[name] for name in ("encoder_outputs", "attention_mask") if name in model_kwargs}
        num_rows = len(inputs["encoder_outputs"][0])
        encoder_inputs = {
            name: value.repeat_interleave(num_rows // len(value), dim=0)
            for name, value in encoder_inputs.items()
            if torch.is_tensor(value)
        }
        tokens, mask, token_lists = encoder_inputs.get("input_ids"), inputs.get("attention_mask"), None
        # Encoder and decoder agree in their tokens where they embed them by the same weights.
        tables: list[Any] = [None]
        with suppress(AttributeError, NotImplementedError):
            tables = [part.get_input_embeddings().weight for part in (model.get_encoder(), model.get_decoder())]
        if tokens is not None and tables[0] is tables[-1] is not None:
            is_masked = mask is not None and mask.shape == tokens.shape
            seen = mask.bool() if is_masked else torch.ones_like(tokens, dtype=torch.bool)
            token_lists = [row[seen_of_row].tolist() for row, seen_of_row in zip(tokens, seen)]
        return cls(inputs, encoder_inputs=encoder_inputs, token_lists=token_lists)

    @property
    def states(self) -> torch.Tensor:
        """The encoder's output `(R, N, H)`, which a decoder without an encoder may take under another name."""
        encoded = self.inputs.get("encoder_outputs")
        return self.inputs["encoder_hidden_states"] if encoded is None else encoded[0]

    def attach(self, slots: SlotModel) -> None:
        """Lets the decoder attend to the sources, one for each row, from now on."""
        slots.parts.append(self)
        self.keys = slots.forward_cache = EncoderDecoderCache(slots.cache, DynamicCache())

    def of_rows(self, rows: Sequence[int]) -> Source:
        """The same of these rows, in this order, for others than the target itself."""
        count = len(self.states)

        def select(values: torch.Tensor) -> torch.Tensor:
            return select_rows(values, rows) if values.dim() and len(values) == count else values

        inputs, encoder_inputs = tree_map_only(torch.Tensor, select, (self.inputs, self.encoder_inputs))
        token_lists = None if self.token_lists is None else [self.token_lists[row] for row in rows]
        return Source(inputs, None, encoder_inputs, token_lists)

    def reading(self, nodes: SlotForward) -> AbstractContextManager[None]:
        nodes.inputs |= self.inputs
        return nullcontext()

    def keep_rows(self, keep: list[int]) -> None:
        chosen = self.of_rows(keep)
        self.inputs, self.encoder_inputs, self.token_lists = chosen.inputs, chosen.encoder_inputs, chosen.token_lists
        # Rows that leave are left out in a copy, in the cache that the model knows.
        crossed = DynamicCache()
        for index, layer in enumerate(self.keys.cross_attention_cache.layers):
            if layer.is_initialized:
                crossed.update(select_rows(layer.keys, keep), select_rows(layer.values, keep), index)
        self.keys.cross_attention_cache = crossed
