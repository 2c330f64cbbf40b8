"""Slots of a whole language model that drafts: it reads what is new of each row, then what it has drafted itself.

Shapes: R active rows (of a graph: with those of padding), T tokens, U logits of the model, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

import torch

from ..drafts import chain_topology
from ..transfers import RowNumbers, last_of_each
from .cache import SlotCache
from .forward import SlotOutput
from .graphed import in_a_graph
from .masks import RowPlaces
from .model import SlotModel
from .parts.recurrent import RecurrentLayers


class ModelSlots:
    """A model over its slots, see [`~drafting.slots.DraftSlots`]."""

    is_allocated = True  # by the prompt

    def __init__(self, model: SlotModel):
        self.model = model
        self.num_read: int = 0  # tokens of the last draft that lie after those of each row
        self._host_model = model  # also where a graph has another one

    @property
    def cache(self) -> SlotCache:
        return self.model.cache

    # What a graph reads of them

    @property
    def numbers(self) -> dict[str, RowNumbers]:
        return self.model.places.numbers

    def in_a_graph(self, numbers: dict[str, torch.LongTensor], columns: int) -> ModelSlots:
        """The slots as a graph sees them that reads `columns` of them, those in use among them."""
        slots = copy(self)
        slots.model = in_a_graph(self.model, RowPlaces.in_a_graph(numbers), columns)
        return slots

    def skip(self, counts: list[int]) -> None:
        """Keeps tokens that a graph has read, or the first ones of the last draft."""
        self.cache.commit(counts)
        self.num_read = 0

    # Forwards

    def read(self, tokens: torch.Tensor, counts: RowNumbers, logits_from: int = 0) -> SlotOutput:
        """Reads tokens `(R, T)` or embeddings `(R, T, H)`, and keeps the first `counts[r]` of each row."""
        device = self.model.model.device
        output = self.model.forward(tokens.to(device), chain_topology(tokens.shape[1] - 1, device), logits_from)
        # What has computed the attention, which decides about masks.
        self._host_model.attention_layers = self.model.attention_layers
        self.model.commit(counts)
        return output

    def read_last(self, tokens: torch.Tensor, counts: RowNumbers) -> torch.Tensor:
        """Reads and keeps tokens, or embeddings; the logits `(R, U)` after the last ones."""
        # Logits of what was committed in a pause would cost more than reading it.
        first = min(counts) - 1 if isinstance(counts, list) else 0
        logits = self.read(tokens, counts, first).logits
        return last_of_each(logits, [count - first for count in counts] if first else counts)

    def step(
        self, tokens: torch.LongTensor, hidden: torch.Tensor, parents: torch.LongTensor | slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads the next tokens of chains, see [`~drafting.growth.Step`]; no state is handed on."""
        self.num_read += 1
        return hidden, self.read(tokens, [1] * len(tokens)).logits

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Forgets at the end of the block what was read in it; what does not change a state stays where it lies."""
        lengths, recurrent = self.cache.lengths, self.model.find(RecurrentLayers)
        states = {} if recurrent is None else dict(recurrent.states)
        self.num_read = 0
        try:
            yield
        finally:
            self.cache.lengths = lengths
            if recurrent is not None:
                recurrent.put(states)
                self.num_read = 0

    # The rows

    def select(self, keep: list[int]) -> ModelSlots:
        self.model.keep_rows(keep)
        return self

    def cat(self, other: ModelSlots) -> ModelSlots:
        """Takes over the rows of another call after its own."""
        self.model.join(other.model)
        return self

    def close(self) -> None:
        self.model.close()
