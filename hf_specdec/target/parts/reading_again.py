"""Texts that plain generation reads again from the beginning where their rotary embedding changes.

Phi-3 and its kin drop their cache when a text gets longer than `original_max_position_embeddings`, and read all of it
with the frequencies of long texts ("longrope"). Drafts end in front of that place, and a row that has come to it is
read again before it goes on.

Shapes: S slots of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING
from weakref import ref

import torch

from ...errors import UnsupportedModelError
from ..cache import SlotCache
from ..forward import Part
from ..model import SlotModel
from ..request import Request
from .adapters import RowInputs
from .rotary import ChangingRotary


if TYPE_CHECKING:
    from ..prompts import Continuation


class ReadingAgain(Part):
    """Rows of a call that will be read again.

    Args:
        target (`SlotModel`): Has read the prompts, and will have this part.
        rotary (`ChangingRotary`): Its rotary embeddings.
        place (`int`): S, tokens of a text, padding among them, in front of the one at which the frequencies change.
    """

    def __init__(self, target: SlotModel, rotary: ChangingRotary, place: int):
        self._target = ref(target)
        self._rotary = rotary
        self._place = place

    @classmethod
    def of(cls, request: Request, target: SlotModel, continuation: Continuation) -> ReadingAgain | None:
        """That of a call whose prompts have been read; `None` where the rotary embedding changes without."""
        rotary = continuation.rotary
        place = None if rotary is None else rotary.read_again_at
        if place is None or continuation.num_slots > place:
            return None
        is_known = continuation.num_slots == request.input_ids.shape[1] and not any(continuation.offsets)
        if not is_known or continuation.hidden is not None:
            raise UnsupportedModelError(
                f"{type(request.model).__name__} reads the whole text again where its rotary embedding changes, at "
                f"{place} tokens, and this call, which may get there, has not given all of it as left-padded tokens. "
                "Do so, or set `max_new_tokens` so that it stays below."
            )
        return cls(target, rotary, place)

    def depths(self, depths: list[int], more: int) -> list[int]:
        # A depth below 0 is that of a row which may have come to the place by then.
        last, lengths = self._place - 1, self._target().cache.lengths
        return [
            min(depth, last - length - more) if length <= last else depth for length, depth in zip(lengths, depths)
        ]

    def prepare(self, prefix: Callable[[int, list[int]], torch.LongTensor]) -> int:
        """Reads the rows that have come to the place."""
        target = self._target()
        due = [index for index, length in enumerate(target.cache.lengths) if length == self._place]
        if not due:
            return 0
        tokens = prefix(self._place, due)
        again, row_inputs = SlotModel(target.model, SlotCache(self._place)), target.find(RowInputs)
        start = target.starts[due[0]]
        with (
            nullcontext() if row_inputs is None else row_inputs.told(due),
            self._rotary.as_of(self._place - start, due[0], tokens.shape),
        ):
            again.prefill(tokens, [target.starts[index] for index in due])
        for layer, layer_again in zip(target.cache.layers, again.cache.layers):
            for buffer, read in zip(layer.buffers, layer_again.buffers):
                for index, row in enumerate(due):
                    buffer[row, :, : self._place].copy_(read[index, :, : self._place])
        return 1
