"""The loop of many requests: who is admitted when, and who has ended."""

from __future__ import annotations

from collections import deque

import torch
from transformers import PreTrainedModel

from ..candidate_generators.base import CandidateGenerator, NoDrafts
from ..decoding.joint import JointLoop, Row
from ..decoding.profile import ModelProfile, model_profile
from ..decoding.source import Source
from ..errors import SpecConfigError, UnsupportedModelError
from ..metrics import SpecDecodingStats
from ..protocol import Session
from ..speculator import Speculator
from ..transfers import on_cpu_unless_said
from ..validation import Bounds, checked
from .requests import RequestReader


# Newcomers are read together, as soon as this part of the places is free.
_FREE_PART = 4

# Tokens of prompts that are read before the rows that are being decoded get a turn.
_CHUNK_SIZE = 512


class _OthersHaveFailedError(Exception):
    """Those that went on while a prompt was read in chunks."""


def check_room(batch_size: int, max_tokens_in_flight: int | None) -> None:
    """Checks the limits of a run.

    Raises:
        SpecConfigError: One is no whole number from 1 on.
    """
    checked("batch_size", batch_size, int, Bounds(least=1))
    checked("max_tokens_in_flight", max_tokens_in_flight, int | None, Bounds(least=1))


class PlainDecoding:
    """Stands for a speculator where nothing is drafted."""

    method = "plain"

    def candidate_generator(self, session: Session) -> CandidateGenerator:
        return NoDrafts(None, None, session)


class Engine:
    """Decodes rows in a limited number of places.

    Args:
        model (`PreTrainedModel`): The target.
        speculator (`Speculator`, *optional*): Its drafter; `None` for plain decoding.
        reader (`RequestReader`): Makes batches of prompts.
        batch_size (`int`): Places.
        max_tokens (`int`, *optional*): Tokens that the rows in them may come to together.
        chunk_size (`int`): Tokens of prompts that are read at a time.

    Attributes:
        stats (`SpecDecodingStats`): Those of all loops that have ended.

    Raises:
        SpecConfigError: The drafter does not take rows that join others.
        UnsupportedModelError: The target cannot have rows of different lengths.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        speculator: Speculator | None,
        reader: RequestReader,
        batch_size: int,
        max_tokens: int | None = None,
        chunk_size: int = _CHUNK_SIZE,
    ):
        self._model, self._speculator, self._reader = model, speculator or PlainDecoding(), reader
        self._profile: ModelProfile = model_profile(model)
        if batch_size > 1 and self._profile.counts_slots:
            raise UnsupportedModelError(
                f"{type(model).__name__} tells positions from the order of its cache, so rows that begin at different "
                "times cannot stand beside each other. Pass batch_size=1."
            )
        if batch_size > 1 and speculator is not None:
            speculator.check_joining(model)
        self._batch_size, self._max_tokens, self._chunk_size = batch_size, max_tokens, chunk_size
        self._loop: JointLoop | None = None
        self._waiting: deque[Row] = deque()
        self._ended: list[Row] = []
        self.stats: SpecDecodingStats = SpecDecodingStats()

    @property
    def is_idle(self) -> bool:
        """Nothing is decoded, and nobody waits."""
        return self._loop is None and not self._waiting

    @property
    def num_wanted(self) -> int:
        """Requests that could be taken in now, beside those that wait."""
        return self._num_free - len(self._waiting)

    @property
    def _num_free(self) -> int:
        return self._batch_size if self._loop is None else len(self._loop.free_numbers)

    def add(self, row: Row) -> None:
        """Lets a row wait for a place.

        Raises:
            SpecConfigError: There can never be room for it.
        """
        if self._max_tokens is not None and (most := _most_in_cache(row)) > self._max_tokens:
            raise SpecConfigError(
                f"A prompt of {len(row.prompt)} tokens that may grow to {most} does not fit into "
                f"max_tokens_in_flight={self._max_tokens}. Lower its `max_new_tokens`, or raise the limit."
            )
        self._waiting.append(row)

    def cancel(self, row: Row) -> None:
        """Lets a row end where it stands."""
        row.is_cancelled = True
        if row in self._waiting:
            self._waiting.remove(row)
            self._ended.append(row)

    # In the same mode each time, whatever that of the caller is.
    @on_cpu_unless_said
    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> list[Row]:
        """Takes in who waits, and makes one cycle; returns the rows that have ended."""
        with self._reader.telling_adapters():
            self._admit()
            if self._loop is not None:
                self._cycle()
        ended, self._ended = self._ended, []
        return ended

    def _cycle(self) -> None:
        self._loop.cycle()
        self._ended += self._loop.drop_ended()
        self._end_empty_loop()

    def _end_empty_loop(self) -> None:
        if self._loop is not None and not self._loop.active:
            loop, self._loop = self._loop, None
            loop.end()
            self.stats.add(loop.stats)

    # Who comes in

    def _admit(self) -> None:
        if not self._waiting:
            return
        if self._loop is not None and self._num_free * _FREE_PART < self._batch_size:
            return
        for rows in self._read_together(self._next_rows()):
            self._read(rows)

    def _next_rows(self) -> list[Row]:
        """Those that have waited longest, as many as there is room for."""
        rows: list[Row] = []
        in_flight = 0 if self._loop is None else sum(map(_most_in_cache, self._loop.active))
        while self._waiting and len(rows) < self._num_free:
            in_flight += _most_in_cache(self._waiting[0])
            if self._max_tokens is not None and in_flight > self._max_tokens:
                break
            rows.append(self._waiting.popleft())
        return rows

    def _read_together(self, rows: list[Row]) -> list[list[Row]]:
        """Rows whose prompts one forward reads as it reads each of them alone."""
        # Decoders beside an encoder may count the padding in front of a text.
        takes_padding = self._profile.padding == "masked" and not self._profile.has_encoder
        groups: dict[int, list[Row]] = {}
        for number, row in enumerate(rows):
            key = number if self._profile.mixes_rows else 0 if takes_padding else row.length
            groups.setdefault(key, []).append(row)
        return list(groups.values())

    def _read(self, rows: list[Row]) -> None:
        """Reads the prompts of rows and lets them join; one by one where that fails for all together."""
        loop = None
        try:
            loop = self._loop_of(rows)
            loop.begin(is_first=self._loop is None)
            if self._loop is not None and (source := self._loop.target.source) is not None:
                Source.check_joining([source, loop.target.source])
        except Exception as error:
            if loop is not None:
                loop.close()
            if isinstance(error, _OthersHaveFailedError):
                raise error.__cause__ or error from None
            if len(rows) == 1 and isinstance(error, UnsupportedModelError):
                # It would be that of all others, too.
                raise
            for row in rows:
                row.restart()
                if len(rows) == 1:
                    row.error = error
                    self._ended.append(row)
                else:
                    self._read([row])
            return
        self._ended += loop.drop_ended()
        # While a long prompt was read, all others may have ended.
        if self._loop is None:
            self._loop = loop
            self._end_empty_loop()
        elif loop.active:
            self._loop.join(loop)
        else:
            self._loop.stats.add(loop.stats)
            loop.close()

    def _loop_of(self, rows: list[Row]) -> JointLoop:
        request = self._reader.together(rows)
        # Mixers of some recurrent layers begin anew when they read several tokens at once; with an encoder it reads
        # what is long, and not in parts.
        if self._loop is not None and not (self._profile.is_recurrent or self._profile.has_encoder):
            request.chunk_size, request.between_chunks = self._chunk_size, self._cycle_of_others
        return JointLoop(request, self._speculator, rows, self._batch_size)

    def _cycle_of_others(self) -> None:
        try:
            if self._loop is not None:
                self._cycle()
        except Exception as error:
            raise _OthersHaveFailedError from error

    def close(self) -> None:
        """Gives up what is being decoded."""
        self._waiting.clear()
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.end()
            self.stats.add(loop.stats)


def _most_in_cache(row: Row) -> int:
    """Tokens that a row may come to have in the cache, those of its source among them."""
    return row.most_tokens + len(row.source or ())
