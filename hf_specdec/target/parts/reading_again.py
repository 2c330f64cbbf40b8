"""Texts that plain generation reads again from the beginning where their rotary embedding changes.

Phi-3 and its kin drop their cache when a text gets longer than `original_max_position_embeddings`, and read all of it
with the frequencies of long texts ("longrope"). Drafts end in front of that place, and a row that has come to it is
read again before it goes on.

Shapes: S slots of a row.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ...errors import UnsupportedModelError
from ..cache import SlotCache
from ..model import SlotModel
from ..prompts import Continuation
from ..request import Request
from .adapters import ADAPTED_ROW, RowAdapters


class ReadingAgain:
    """Rows of a call that will be read again.

    Args:
        target (`SlotModel`): Has read the prompts.
        sequences (`Sequences`): The texts of the call.
        place (`int`): S, tokens of a text, padding among them, in front of the one at which the frequencies change.
    """

    def __init__(self, target: SlotModel, sequences: Any, place: int):
        self._target, self._sequences, self._place = target, sequences, place

    @classmethod
    def of(
        cls, request: Request, target: SlotModel, sequences: Any, continuation: Continuation
    ) -> ReadingAgain | None:
        """That of a call whose prompts have been read; `None` where the rotary embedding changes without.

        Raises:
            UnsupportedModelError: The text to be read is not known, or its positions are not.
        """
        place = None if continuation.rotary is None else continuation.rotary.read_again_at
        if place is None or continuation.num_slots > place:
            return None
        is_known = continuation.num_slots == request.input_ids.shape[1] and not any(continuation.offsets)
        if not is_known or continuation.hidden is not None:
            raise UnsupportedModelError(
                f"{type(request.model).__name__} reads the whole text again where its rotary embedding changes, at "
                f"{place} tokens, and this call, which may get there, has not given all of it as left-padded tokens. "
                "Do so, or set `max_new_tokens` so that it stays below."
            )
        return cls(target, sequences, place)

    def limited(self, depths: list[int], more: int = 0) -> list[int]:
        """Depth that the rows may draft, of what they may otherwise, once they have so many tokens more.

        A depth below 0 is that of a row which may have come to the place by then.
        """
        last, lengths = self._place - 1, self._target.cache.lengths
        return [
            min(depth, last - length - more) if length <= last else depth for length, depth in zip(lengths, depths)
        ]

    def read(self, rows: list[int]) -> int:
        """Reads the rows that have come to the place, and counts the forwards of the target.

        Args:
            rows (`list[int]`): Numbers of all active rows.
        """
        target = self._target
        due = [index for index, length in enumerate(target.cache.lengths) if length == self._place]
        if not due:
            return 0
        tokens = self._sequences.prefix(self._place)[[rows[index] for index in due]]
        again = SlotModel(target.model, SlotCache(self._place))
        adapted = target.row_inputs.get(ADAPTED_ROW)
        adapters = nullcontext() if adapted is None else RowAdapters.of(target.model).of_rows(adapted[due, 0])
        with adapters, target.rotary.as_of(self._place - target.starts[due[0]], due[0], tokens.shape):
            again.prefill(tokens, [target.starts[index] for index in due])
        for own, other in zip(target.cache.layers, again.cache.layers):
            for buffer, read in zip(own.buffers, other.buffers):
                for index, row in enumerate(due):
                    buffer[row, :, : self._place].copy_(read[index, :, : self._place])
        return 1
