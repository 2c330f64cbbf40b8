"""`generate_many`: any number of requests, as many at a time as there are places."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from transformers import PreTrainedModel

from ..arguments import ARGUMENTS, SpeculativeArguments
from ..call.entry import speculator_of_many
from ..errors import SpecConfigError, SpecDecError, shown
from ..metrics import SpecDecodingStats
from ..validation import is_int
from .engine import Engine, check_run
from .journal import Journal, key_of
from .requests import RequestReader, several
from .results import RequestResult
from .row import Row


def generate_many(
    model: PreTrainedModel,
    requests: Iterable[Any],
    batch_size: int = 8,
    max_tokens_in_flight: int | None = None,
    in_order: bool = False,
    tokenizer: Any = None,
    journal: str | os.PathLike[str] | Journal | None = None,
    progress: bool = False,
    seed: int | None = None,
    shard: tuple[int, int] = (0, 1),
    **generate_arguments: Any,
) -> ManyResults:
    """Generates for many requests, with or without speculation, while keeping the batch full.

    A request's place is given to the next one as soon as it has ended. What it says depends on its own prompt,
    settings and seed, never on the others.

    Args:
        model (`PreTrainedModel`): The target.
        requests (`Iterable`): Each a text, a list of token ids, a chat (a list of messages), or a dict with one of
            these as `text`, `input_ids` or `messages` and settings of its own: `max_new_tokens`, `seed`, and whatever
            else `generate()` takes. They are taken when there is a place for them; the iterable need not end.
        batch_size (`int`): Places: requests that are decoded at a time.
        max_tokens_in_flight (`int`, *optional*): Tokens that the requests in them may come to together, prompts
            included, which bounds the memory of the cache.
        in_order (`bool`): Results come in the order of the requests, not as they end. Those that end earlier wait.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): For texts, chats, stop strings, and the text of results.
        journal (`str`, `os.PathLike` or `Journal`, *optional*): A file that gets every result. If it has some from a
            run of the same requests that was stopped, these are returned from there.
        progress (`bool`): Show a bar.
        seed (`int`, *optional*): Of the requests that sample and name none; each has numbers of its own. Without it
            torch's generator is asked, as in `generate()`.
        shard (`tuple[int, int]`): `(rank, num_processes)`: take only every `num_processes`-th request, from `rank`
            on. Indices, and so sampled texts of one `seed`, are those of the whole.
        generate_arguments: All else that `generate()` takes, the speculative arguments among them, for all requests.
            Processors and criteria that remember something are copied for each request.

    Returns:
        [`ManyResults`], an iterator of [`RequestResult`]. A request that fails is a result with an `error`.

    Raises:
        SpecConfigError: The arguments cannot be honoured: what was asked, what was found, what to do.
        UnsupportedModelError: The target's architecture cannot be driven by the loop, or it has an encoder.
    """
    check_run(model, batch_size, max_tokens_in_flight)
    asked_for = several(requests)
    pair = shard if isinstance(shard, (list, tuple)) and len(shard) == 2 and all(map(is_int, shard)) else (0, 0)
    rank, num_processes = pair
    if not 0 <= rank < num_processes:
        raise SpecConfigError(
            f"`shard` takes (rank, num_processes) with 0 <= rank < num_processes, got {shown(shard)}."
        )
    asked = SpeculativeArguments(**{name: generate_arguments.pop(name, None) for name in ARGUMENTS})
    reader = RequestReader(model, generate_arguments, tokenizer, seed, batch_size)
    speculator = speculator_of_many(model, reader.arguments, asked, tokenizer)
    reader.check()
    engine = Engine(model, speculator, reader, batch_size, max_tokens_in_flight, gathers=True)
    if journal is not None and not isinstance(journal, Journal):
        journal = Journal(journal)
    size = len(range(rank, len(requests), num_processes)) if hasattr(requests, "__len__") else None
    return ManyResults(engine, reader, asked_for, (rank, num_processes), in_order, journal, progress, size)


class ManyResults(Iterator[RequestResult]):
    """The results of a run, which goes on as they are asked for.

    Attributes:
        stats (`SpecDecodingStats`): Of all requests together, complete when the run has ended.
    """

    def __init__(
        self,
        engine: Engine,
        reader: RequestReader,
        requests: Iterator[Any],
        shard: tuple[int, int],
        in_order: bool,
        journal: Journal | None,
        progress: bool,
        size: int | None,
    ):
        self._engine, self._reader, self._journal = engine, reader, journal
        rank, self._num_processes = shard
        numbered = enumerate(requests)
        self._requests = ((index, one) for index, one in numbered if index % self._num_processes == rank)
        self._indices: dict[int, tuple[int, str]] = {}  # by id of a row: number and key of its request
        self._ready: deque[RequestResult] = deque()
        self._early: dict[int, RequestResult] | None = {} if in_order else None
        self._next_given = rank
        self._has_more = True
        self._turn = threading.Lock()  # held while a result is made
        self._bar = _bar(size) if progress else None

    @property
    def stats(self) -> SpecDecodingStats:
        return self._engine.stats

    def __next__(self) -> RequestResult:
        if not self._turn.acquire(blocking=False):
            raise SpecDecError("A result is being made already: ask for the next one in one thread, when it has come.")
        try:
            while not self._ready:
                self._take()
                if self._ready:
                    break
                if self._engine.is_idle and not self._has_more:
                    raise StopIteration
                for row in self._engine.step():
                    self._finish(row)
            return self._ready.popleft()
        except BaseException:
            self.close()
            raise
        finally:
            self._turn.release()

    def _take(self) -> None:
        """Takes as many requests as there are places for, at most: some may need none."""
        for _ in range(self._engine.num_wanted if self._has_more else 0):
            try:
                index, request = next(self._requests)
            except StopIteration:
                self._has_more = False
                return
            self._begin(index, request)

    def _begin(self, index: int, request: Any) -> None:
        known = key = None
        try:
            tokens, settings = self._reader.read(request)
            key = key_of(tokens, {**self._reader.written_settings, **settings})
        except Exception as error:  # noqa: BLE001 - of any kind: it is this request's
            self._keep(RequestResult(index, [], None, "error", error), key)
            return
        if self._journal is not None:
            known = self._journal.find(index, key)
        if known is not None:
            self._give(known)
            return
        try:
            row = self._reader.row(index, tokens, settings)
            self._engine.add(row)
        except Exception as error:  # noqa: BLE001 - as above
            self._keep(RequestResult(index, [], None, "error", error), key)
            return
        self._indices[id(row)] = index, key

    def _finish(self, row: Row) -> None:
        index, key = self._indices.pop(id(row))
        tokens, tokenizer = row.tokens, self._reader.tokenizer
        text = None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)
        length = len(row.prompt)
        logprobs = None if row.top_logprobs is None else row.logprobs[: len(tokens)]
        self._keep(RequestResult(index, tokens, text, row.finish_reason, row.error, length, row.stats, logprobs), key)

    def _keep(self, result: RequestResult, key: str | None) -> None:
        if self._journal is not None:
            self._journal.add(result, key)
        self._give(result)

    def _give(self, result: RequestResult) -> None:
        if self._bar is not None:
            self._bar.update()
        if self._early is None:
            self._ready.append(result)
            return
        self._early[result.index] = result
        while self._next_given in self._early:
            self._ready.append(self._early.pop(self._next_given))
            self._next_given += self._num_processes

    def close(self) -> None:
        """Ends the run; requests that have not ended are given up, and results that were not asked for."""
        with ExitStack() as parts:
            self._has_more = False
            self._ready.clear()
            self._indices.clear()
            for part in (self._bar, self._journal):
                if part is not None:
                    parts.callback(part.close)
            parts.callback(self._engine.close)

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None and not self._engine.is_idle:
            self.close()


def _bar(size: int | None):
    from tqdm.auto import tqdm

    return tqdm(total=size, unit="request")
