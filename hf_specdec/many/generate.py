"""`generate_many`: any number of requests, as many at a time as there are places."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from inspect import GEN_RUNNING, getgeneratorstate
from itertools import islice
from typing import Any

from transformers import PreTrainedModel

from ..errors import SpecConfigError, SpecDecError, shown
from ..metrics import SpecDecodingStats
from ..validation import is_int
from .engine import Engine, engine_of_run
from .journal import Journal, key_of
from .requests import several
from .row import RequestResult


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
    all_requests = several(requests)
    is_pair = isinstance(shard, (list, tuple)) and len(shard) == 2 and all(map(is_int, shard))
    if not (is_pair and 0 <= shard[0] < shard[1]):
        raise SpecConfigError(
            f"`shard` takes (rank, num_processes) with 0 <= rank < num_processes, got {shown(shard)}."
        )
    engine = engine_of_run(model, generate_arguments, tokenizer, seed, batch_size, max_tokens_in_flight, gathers=True)
    if journal is not None and not isinstance(journal, Journal):
        journal = Journal(journal)
    bar = None
    if progress:
        from tqdm.auto import tqdm

        size = len(range(shard[0], len(requests), shard[1])) if hasattr(requests, "__len__") else None
        bar = tqdm(total=size, unit="request")
    run = _Run(engine, all_requests, shard, in_order, journal, bar)
    return ManyResults(engine, run.results())


class ManyResults(Iterator[RequestResult]):
    """The results of a run, which goes on as they are asked for.

    Attributes:
        stats (`SpecDecodingStats`): Of all requests together, complete when the run has ended.
    """

    def __init__(self, engine: Engine, results: Generator[Any, None, None]):
        self._engine, self._results = engine, results
        # Begun, it ends what it has opened when it is closed, or when nobody holds it.
        next(results)

    @property
    def stats(self) -> SpecDecodingStats:
        return self._engine.stats

    def __next__(self) -> RequestResult:
        if getgeneratorstate(self._results) == GEN_RUNNING:
            raise SpecDecError("A result is being made already: ask for the next one in one thread, when it has come.")
        return next(self._results)

    def close(self) -> None:
        """Ends the run; requests that have not ended are given up, and results that were not asked for."""
        self._results.close()


class _Run:
    """Takes requests where there is room, from the journal or to be decoded, and gives their results."""

    def __init__(
        self,
        engine: Engine,
        requests: Iterator[Any],
        shard: tuple[int, int],
        in_order: bool,
        journal: Journal | None,
        bar: Any,
    ):
        self._engine, self._journal, self._bar = engine, journal, bar
        self._next_index, self._num_processes = shard
        self._requests = islice(enumerate(requests), self._next_index, None, self._num_processes)
        self._has_more = True
        self._error: Exception | None = None  # that of the iterable: results of requests before it come first
        self._ready: deque[RequestResult] = deque()
        self._early: dict[int, RequestResult] | None = {} if in_order else None

    def results(self) -> Generator[Any, None, None]:
        """The results, after a `None`."""
        with ExitStack() as parts:
            for part in (self._bar, self._journal, self._engine):
                if part is not None:
                    parts.callback(part.close)
            yield None
            while self._has_more or not self._engine.is_idle:
                # As many as there are places for, at most: some may need none.
                for _ in range(self._engine.num_wanted):
                    self._take()
                if not self._ready:
                    for row in self._engine.step():
                        self._end(RequestResult.of_row(row, self._engine.reader.tokenizer), row.owner)
                while self._ready:
                    yield self._ready.popleft()
            if self._error is not None:
                raise self._error

    def _take(self) -> None:
        """Takes the next request, if there is one."""
        if not self._has_more:
            return
        try:
            index, request = next(self._requests)
        except Exception as error:  # noqa: BLE001 - of any kind: the iterable is the user's
            self._has_more = False
            self._error = None if isinstance(error, StopIteration) else error
            return
        reader, key = self._engine.reader, None
        try:
            tokens, settings = reader.read(request)
            key = key_of(tokens, {**reader.written_settings, **settings})
        except Exception as error:  # noqa: BLE001 - of any kind: it is this request's
            self._end(RequestResult(index, error=error), key)
            return
        if self._journal is not None and (earlier := self._journal.find(index, key)) is not None:
            self._give(earlier)
            return
        try:
            row = reader.row(index, tokens, settings)
        except Exception as error:  # noqa: BLE001 - as above
            self._end(RequestResult(index, error=error), key)
            return
        row.owner = key
        self._engine.add(row)

    def _end(self, result: RequestResult, key: str | None) -> None:
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
        while self._next_index in self._early:
            self._ready.append(self._early.pop(self._next_index))
            self._next_index += self._num_processes
