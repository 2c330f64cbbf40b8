"""The loop of many requests: who is admitted when, and who has ended."""

from __future__ import annotations

from collections import deque
from contextlib import closing, nullcontext, suppress
from operator import attrgetter
from traceback import clear_frames
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin

from ..arguments import take_asked
from ..call.build import build
from ..call.entry import speculator_of_many
from ..errors import SpecConfigError, UnsupportedModelError
from ..loop.loop import DecodingLoop
from ..loop.rows import Rows
from ..machine import free_bytes
from ..metrics import SpecDecodingStats
from ..settings.checks import Bounds, checked
from ..speculator import Speculator
from ..target.facts import ModelProfile, model_profile
from ..target_facts import no_target, vocabulary_size
from .requests import RequestReader
from .row import Row, RowLogprobs


# Newcomers that are gathered are read together, as soon as this part of the places is free.
_FREE_PART = 4

# Tokens of prompts that are read before the rows that are being decoded get a turn.
_CHUNK_SIZE = 512


def engine_of_run(
    model: PreTrainedModel,
    arguments: dict[str, Any],
    tokenizer: Any,
    seed: int | None,
    batch_size: int,
    max_tokens: int | None,
    gathers: bool = False,
) -> Engine:
    """The engine of a run with these arguments of `generate()` for all requests, the speculative ones among them."""
    if not isinstance(model, GenerationMixin):
        raise no_target(model)
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} has an encoder, and requests that share a loop are read by a decoder alone. Call "
            "generate() with batches of sources."
        )
    checked("batch_size", batch_size, int, Bounds(least=1))
    checked("max_tokens_in_flight", max_tokens, int | None, Bounds(least=1))
    # The least that a row takes, before its keys and values: scores of all tokens, in float32.
    most = free_bytes(model.device) // (4 * vocabulary_size(model))
    if batch_size > max(most, 1):
        raise SpecConfigError(
            f"`batch_size`={batch_size}: there is memory for the scores of {most} rows at most. Pass fewer."
        )
    asked = take_asked(arguments)
    reader = RequestReader(model, arguments, tokenizer, seed, batch_size)
    speculator = speculator_of_many(model, reader.arguments, asked, tokenizer)
    reader.check()
    return Engine(speculator, reader, max_tokens, gathers=gathers)


class Engine:
    """Decodes rows in the reader's number of places; its `stats` are those of all loops that have ended."""

    def __init__(
        self,
        speculator: Speculator,
        reader: RequestReader,
        max_tokens: int | None = None,  # that rows may come to together
        chunk_size: int = _CHUNK_SIZE,  # tokens of prompts that are read at a time while others are decoded
        gathers: bool = False,  # newcomers wait for each other, which saves forwards where nobody waits for them
    ):
        model, batch_size = reader.model, reader.num_places
        self._speculator = speculator
        self.reader: RequestReader = reader
        self._profile: ModelProfile = model_profile(model)
        if batch_size > 1 and self._profile.counts_slots:
            raise UnsupportedModelError(
                f"{type(model).__name__} tells positions from the order of its cache, so rows that begin at different "
                "times cannot stand beside each other. Pass batch_size=1."
            )
        if batch_size > 1:
            speculator.check_joining(model)
        self._batch_size, self._max_tokens, self._chunk_size = batch_size, max_tokens, chunk_size
        self._gathers = gathers
        self._loop: DecodingLoop | None = None
        self._waiting: deque[Row] = deque()
        self._ended: list[Row] = []
        self.stats: SpecDecodingStats = SpecDecodingStats()

    @property
    def is_idle(self) -> bool:
        """Nothing is decoded, and nobody waits, or has ended unnoticed."""
        return self._loop is None and not self._waiting and not self._ended

    @property
    def num_wanted(self) -> int:
        """Requests that could be taken in now, beside those that wait."""
        return self._num_free - len(self._waiting)

    @property
    def _num_free(self) -> int:
        return self._batch_size if self._loop is None else len(self._loop.rows.free_numbers)

    def add(self, row: Row) -> None:
        """Lets a row wait for a place; one that can never have room ends with an error."""
        if self._max_tokens is not None and row.most_tokens > self._max_tokens:
            error = SpecConfigError(
                f"A prompt of {row.length} tokens that may grow to {row.most_tokens} does not fit into "
                f"max_tokens_in_flight={self._max_tokens}. Lower its `max_new_tokens`, or raise the limit."
            )
            row.stats.num_committed_tokens = 0
            self._fail(row, error)
            return
        self._waiting.append(row)

    def cancel(self, row: Row) -> None:
        """Lets a row end where it stands."""
        row.is_cancelled = True
        if row in self._waiting:
            self._waiting.remove(row)
            self._ended.append(row)

    # In the same mode each time, whatever that of the caller is.
    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> list[Row]:
        """Takes in who waits, as many as there is room for, and makes one cycle; returns the rows that have ended."""
        adapters = self.reader.adapters
        with nullcontext() if adapters is None else adapters.told():
            rows: list[Row] = []
            in_flight = 0 if self._loop is None else sum(row.most_tokens for row in self._loop.rows.groups)
            is_gathering = self._gathers and self._loop is not None and self._num_free * _FREE_PART < self._batch_size
            while self._waiting and len(rows) < self._num_free and not is_gathering:
                in_flight += self._waiting[0].most_tokens
                if self._max_tokens is not None and in_flight > self._max_tokens:
                    break
                rows.append(self._waiting.popleft())
            if rows:
                self._read(rows)
            self._cycle()
            self._end_empty_loop()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Gives up what is being decoded."""
        self._waiting.clear()
        self._ended.clear()
        if self._loop is not None:
            self._end(self._loop)

    def _fail(self, row: Row, error: Exception) -> None:
        row.error = error
        self._ended.append(row)

    def _cycle(self) -> None:
        # A loop whose rows have all ended waits for newcomers: it has the graphs, and the listeners.
        if self._loop is None or not self._loop.rows.groups:
            return
        try:
            self._loop.cycle()
            self._drop_ended(self._loop)
        except Exception as error:  # noqa: BLE001 - of any kind: it is that of some request
            clear_frames(error.__traceback__)
            rows = self._break_up(self._loop)
            # The newest may be the cause, and its memory helps the others where there was too little.
            if rows:
                self._fail(rows.pop(), error)
            self._waiting.extendleft(reversed(rows))

    def _drop_ended(self, loop: DecodingLoop) -> None:
        """Lets rows leave that have ended, or were cancelled. Not between a draft and its commit."""
        ended = [row for row in loop.rows.groups if row.has_ended]
        if ended:
            loop.observers.tell()
        loop.drop_finished()
        loop.rows.leave(ended)
        self._ended += ended

    def _break_up(self, loop: DecodingLoop) -> list[Row]:
        """Ends a loop that cannot go on; returns its rows that have not ended, in order, ready for another one."""
        rows = sorted(loop.rows.groups, key=attrgetter("index"))
        # Why it cannot go on is known.
        with suppress(Exception):
            self._end(loop)
        self._ended += [row for row in rows if row.has_ended]
        rows = [row for row in rows if not row.has_ended]
        for row in rows:
            # Its text so far is the prompt of another loop; where that cannot be, it begins anew.
            if row.top_logprobs is not None and len(row.logprobs) != len(row.tokens):
                row.restart()
            # One token more comes from what is read.
            row.stats.num_committed_tokens = len(row.tokens) + 1
        return rows

    def _end_empty_loop(self) -> None:
        if self._loop is not None and not self._loop.rows.groups:
            self._end(self._loop)

    def _end(self, loop: DecodingLoop) -> None:
        """Ends a loop that went on by itself, and adds its account, also where something fails."""
        if loop is self._loop:
            self._loop = None
        try:
            with closing(loop):
                loop.end()
        finally:
            self.stats.add(loop.stats)

    # Who comes in

    def _read(self, rows: list[Row]) -> None:
        """Reads the prompts of rows and lets them join; one by one where that fails for all together."""
        loop, host = None, self._loop
        try:
            request = self.reader.together(rows)
            # Mixers of some recurrent layers begin anew when they read several tokens at once.
            if host is not None and not self._profile.is_recurrent:
                request.chunk_size, request.between_chunks = self._chunk_size, self._cycle
            table = Rows(self._batch_size)
            observers, is_first = [RowLogprobs(table)], host is None
            loop = build(request, self._speculator, table, rows, observers=observers, is_first=is_first)
            for row in rows:
                for name in ("method", "rejection_sample_method", "num_spec_tokens"):
                    setattr(row.stats, name, getattr(loop.stats, name))
            loop.begin()
        except Exception as error:  # noqa: BLE001 - of any kind: it is that of some request
            self._read_one_by_one(rows, loop, error)
            return
        self._drop_ended(loop)
        if host is None:
            self._loop = loop
        elif self._loop is not host:
            # Those that it was to join have failed, and it has neither graphs nor listeners of its own.
            self._waiting.extendleft(reversed(self._break_up(loop)))
        elif loop.rows.groups:
            newcomers = loop.rows.groups
            try:
                host.join(loop)
            except Exception as error:  # noqa: BLE001 - as above
                clear_frames(error.__traceback__)
                others = [row for row in self._break_up(host) if row not in newcomers]
                if others:
                    self._read(others)
                self._read_one_by_one(newcomers, loop, error)
        else:
            host.stats.add(loop.stats)
            loop.close()
        self._end_empty_loop()  # newcomers cannot join a drafter that has read nothing

    def _read_one_by_one(self, rows: list[Row], loop: DecodingLoop | None, error: Exception) -> None:
        """Reads rows each for itself where something has failed for all of them; of a single one it is the error."""
        # Variables in its traceback hold the memory of a loop.
        clear_frames(error.__traceback__)
        if loop is not None:
            with suppress(Exception):
                loop.close()
        for row in rows:
            row.restart()
            if len(rows) == 1:
                self._fail(row, error)
            else:
                self._read([row])
