"""`generate_many`: any number of requests, as many at a time as there are places."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, nullcontext
from inspect import GEN_RUNNING, getgeneratorstate
from itertools import count, islice
from typing import Any

from transformers import PreTrainedModel

from ..errors import SpecConfigError, SpecDecError, shown
from ..metrics import SpecDecodingStats
from ..settings.checks import is_int
from .engine import Engine, engine_of_run
from .files import Journal, key_of
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

    A finished request's place is refilled by the next one. Its text depends on its own prompt, settings and seed,
    never on the others.

    Args:
        model (`PreTrainedModel`): The target.
        requests (`Iterable`): Each a text, a list of token ids, a chat (a list of messages), or a dict with one of
            these as `text`, `input_ids` or `messages` and settings of its own: `max_new_tokens`, `seed`, and whatever
            else `generate()` takes. They are taken when there is a place for them; the iterable need not end.
        batch_size (`int`): Places: requests that are decoded at a time.
        max_tokens_in_flight (`int`, *optional*): Most tokens of the running requests together, prompts included,
            which limits the memory of the cache.
        in_order (`bool`): Return results in the order of the requests, not as they end.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): For texts, chats, stop strings, and the text of results.
        journal (`str`, `os.PathLike` or `Journal`, *optional*): A file that gets every result. Results that it has
            from an interrupted run of the same requests are returned from there.
        progress (`bool`): Show a progress bar.
        seed (`int`, *optional*): For requests that sample without a seed; each gets numbers of its own. Without it
            torch's generator is used, as in `generate()`.
        shard (`tuple[int, int]`): `(rank, num_processes)`: take only every `num_processes`-th request, from `rank`
            on. Indices, and so sampled texts of one `seed`, are those of the whole.
        generate_arguments: Everything else that `generate()` takes, also the speculative arguments, for all requests.
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
    share = islice(enumerate(all_requests), shard[0], None, shard[1])
    results = _as_they_end(engine, share, journal)
    if progress:
        from tqdm.auto import tqdm

        size = len(range(shard[0], len(requests), shard[1])) if hasattr(requests, "__len__") else None
        results = tqdm(results, total=size, unit="request")
    return ManyResults(engine, _run(engine, journal, results, count(*shard) if in_order else None))


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


def _run(
    engine: Engine, journal: Journal | None, results: Iterable[RequestResult], order: Iterator[int] | None
) -> Generator[Any, None, None]:
    """The results after a `None`, in an order of their indices or as they come; closes in the end what is open."""
    with nullcontext() if journal is None else closing(journal), closing(engine):
        yield None
        early: dict[int, RequestResult] = {}
        next_index = None if order is None else next(order)
        for result in results:
            if order is None:
                yield result
                continue
            early[result.index] = result
            while next_index in early:
                yield early.pop(next_index)
                next_index = next(order)


def _as_they_end(
    engine: Engine, requests: Iterator[tuple[int, Any]], journal: Journal | None
) -> Iterator[RequestResult]:
    """Takes requests where there is room, from the journal or to be decoded, and gives their results."""
    reader, has_more, problem = engine.reader, True, None

    def noted(result: RequestResult, key: str | None) -> RequestResult:
        if journal is not None:
            journal.add(result, key)
        return result

    def begun(index: int, request: Any) -> RequestResult | None:
        """The result of a request that need not be decoded; all others wait for a place."""
        key = None
        try:
            tokens, settings = reader.read(request)
            key = key_of(tokens, {**reader.written_settings, **settings})
        except Exception as error:  # noqa: BLE001 - of any kind: it is this request's
            return noted(RequestResult(index, error=error), key)
        if journal is not None and (earlier := journal.find(index, key)) is not None:
            return earlier
        try:
            row = reader.row(index, tokens, settings)
        except Exception as error:  # noqa: BLE001 - as above
            return noted(RequestResult(index, error=error), key)
        row.owner = key
        engine.add(row)
        return None

    while has_more or not engine.is_idle:
        ready: list[RequestResult] = []
        # As many as there are places for, at most: some may need none.
        for _ in range(engine.num_wanted if has_more else 0):
            try:
                index, request = next(requests)
            except Exception as error:  # noqa: BLE001 - of any kind: the iterable is the user's
                # Results of the requests before it come first.
                has_more, problem = False, None if isinstance(error, StopIteration) else error
                break
            if (result := begun(index, request)) is not None:
                ready.append(result)
        if not ready:
            ready = [noted(RequestResult.of_row(row, reader.tokenizer), row.owner) for row in engine.step()]
        yield from ready
    if problem is not None:
        raise problem
