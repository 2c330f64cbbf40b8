"""Streaming of a call's tokens while its rows advance by several tokens at a time."""

from __future__ import annotations

from typing import Any

import torch

from .sequences import Sequences, StopRules


class ColumnStreamer:
    """Hands over every column that all rows have reached or ended before, one token a row at a time.

    Args:
        streamer (`BaseStreamer`, *optional*): The user's.
        sequences (`Sequences`), stop (`StopRules`): Tokens of the call, and where its rows end.

    Attributes:
        has_shown (`bool`): The streamer has seen something of the call, which cannot begin anew from then on.
    """

    def __init__(self, streamer: Any, sequences: Sequences, stop: StopRules):
        self._streamer, self._sequences, self._stop = streamer, sequences, stop
        self._num_columns = 0
        self.has_shown = False

    def put_prompts(self, input_ids: torch.LongTensor) -> None:
        if self._streamer is not None:
            self._streamer.put(input_ids.cpu())
            self.has_shown = True

    def put_columns(self) -> None:
        """Hands over the columns that have become ready."""
        if self._streamer is None:
            return
        ready = self._stop.num_settled - self._sequences.prompt_length
        for column in self._sequences.new_columns(self._num_columns, ready).unbind(1):
            self._streamer.put(column.clone())
        self._num_columns = max(self._num_columns, ready)

    def end(self) -> None:
        self.put_columns()
        if self._streamer is not None:
            self._streamer.end()
