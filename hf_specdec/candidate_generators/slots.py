"""Slots of drafts that read the target's states: their keys and values, from the prompt on.

Shapes: R active rows, C tokens of a chunk, th hidden size of the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..decoding.cache import SlotCache, SlotLayer
from .base import Prompt
from .tensors import upload


class DraftSlots:
    """A draft's keys and values of each row.

    Args:
        network (`nn.Module`): The draft, with `layers`, `device`.
        starts (`list[int]`): Slot of each row's first entry; what lies before is padding.
        offsets (`list[int]`): Position of that entry.
        capacity (`int`): Slots to allocate at first.
    """

    def __init__(self, network: torch.nn.Module, starts: list[int], offsets: list[int], capacity: int):
        self.device = network.device
        self.cache = SlotCache(capacity)
        self.cache.layers = [SlotLayer(capacity) for _ in network.layers]
        self.cache.start_slots(len(starts))
        self.starts, self.offsets = list(starts), list(offsets)

    def _next_positions(self) -> torch.LongTensor:
        """The position behind each row, as a column."""
        rows = zip(self.cache.lengths, self.starts, self.offsets)
        return self._column([length - start + offset for length, start, offset in rows])

    def _column(self, values: Sequence[int]) -> torch.LongTensor:
        """One number a row, `(R, 1)`, or `(1, 1)` where they are equal."""
        values = values[:1] if len(set(values)) == 1 else values
        return upload(values, self.device)[:, None]

    def keep_rows(self, keep: list[int]) -> None:
        self.cache.keep_rows(keep)
        self.starts = [self.starts[row] for row in keep]
        self.offsets = [self.offsets[row] for row in keep]


class KnownPrompt:
    """The tokens of a prompt whose states are known, without the last state, which comes again with the first token.

    A continued cache or embeddings may have left the first ones unknown; drafts are weaker then.

    Args:
        prompt (`Prompt`): The prompt, with its states.
    """

    def __init__(self, prompt: Prompt):
        num_tokens = prompt.input_ids.shape[1]
        self.prompt = prompt
        self.count = min(prompt.num_states - 1, num_tokens)
        first = max(num_tokens - 1 - self.count, 0)
        self.starts = [max(start - first, 0) for start in prompt.starts]
        self.offsets = [max(first - start, 0) for start in prompt.starts]

    def slots(self, max_length: int, num_ahead: int) -> dict[str, Any]:
        """Arguments of [`DraftSlots`] for a call.

        Args:
            max_length (`int`): Tokens that a row may hold.
            num_ahead (`int`): Slots of a draft, behind what is committed.
        """
        room = max_length - self.prompt.input_ids.shape[1]
        capacity = self.count + min(room, 1024) + num_ahead + 1
        return {"starts": self.starts, "offsets": self.offsets, "capacity": capacity}

    def chunks(self, size: int) -> Iterator[tuple[dict[Any, torch.Tensor], torch.LongTensor, list[int]]]:
        """States `(R, C, th)`, the tokens `(R, C)` behind them, C for each row; at most `size` at once."""
        tokens, states = self.prompt.input_ids, self.prompt.hidden_states
        first_token = tokens.shape[1] - self.count
        first_state = self.prompt.num_states - 1 - self.count
        for begin in range(0, self.count, size):
            end = min(begin + size, self.count)
            here = {key: value[:, first_state + begin : first_state + end] for key, value in states.items()}
            yield here, tokens[:, first_token + begin : first_token + end], [end - begin] * len(self.starts)
