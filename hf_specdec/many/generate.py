"""`generate_many`: any number of requests, as many at a time as there are places.

`generate_batch` has transformers' signature, and outputs of its kind.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from inspect import GEN_RUNNING, getgeneratorstate
from itertools import count, islice
from time import perf_counter
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ..call.refusals import effective
from ..errors import SpecConfigError, SpecDecError, shown
from ..metrics import SpecDecodingStats
from ..settings.checks import Bounds, checked, is_int
from ..target_facts import no_target
from .engine import Engine, engine_of_run
from .files import Journal, key_of
from .requests import several
from .row import RequestResult, error_text


# Arguments of generate_many() that are set here.
_OF_MANY = ("in_order", "progress", "requests", "shard")


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


@dataclass
class SpeculativeGenerationOutput(GenerationOutput):
    """`GenerationOutput` with more fields.

    Args:
        speculative (`SpecDecodingStats`): What was drafted and accepted for the request.
        finish_reason (`str`, *optional*): "stop", "length" or "error", once it has ended.
        top_logprobs (`list[list[tuple[int, float]]]`): For each generated token the most probable ones and their
            log-probabilities, and in `logprobs` its own, where a setting `top_logprobs` asks for them: those of the
            model, before temperature, filters and penalties.
        is_refused (`bool`): The error is that of the request: it was wrong as it came.
    """

    speculative: SpecDecodingStats | None = None
    finish_reason: str | None = None
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    is_refused: bool = False


def generate_batch(
    model: PreTrainedModel,
    inputs: Sequence[Sequence[int]],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    batch_size: int | None = None,
    **kwargs: Any,
) -> dict[str, SpeculativeGenerationOutput]:
    """`model.generate_batch()` with speculative decoding: transformers' signature over this package's loop.

    Args:
        model (`PreTrainedModel`): The target.
        inputs (`Sequence[Sequence[int]]`): Prompts, without padding.
        generation_config (`GenerationConfig`, *optional*): Of all requests.
        continuous_batching_config (`ContinuousBatchingConfig`, *optional*): Of it `max_requests_per_batch` and `seed`
            are read; the rest is about transformers' paged cache.
        progress_bar (`bool`): Show a bar.
        persistent_manager, warmup (`bool`): About transformers' own manager; nothing here.
        batch_size (`int`, *optional*): Requests that are decoded at a time, if the config does not say it; 8.
        kwargs: The speculative arguments, and everything else that `generate()` takes, which is honoured.

    Returns:
        `dict[str, SpeculativeGenerationOutput]`: By request id, "req_0", "req_1", ..., in the order of the inputs.
        With `num_return_sequences` the further ones are "req_0__child#0" and so on, in front of "req_0".

    Raises:
        SpecConfigError: The arguments cannot be honoured.
        UnsupportedModelError: The target's architecture cannot be driven by the loop.
    """
    if record_timestamps:
        raise SpecConfigError("`record_timestamps`: tokens come several at a time and are not timed. Leave it out.")
    if getattr(continuous_batching_config, "return_logprobs", None):
        raise SpecConfigError(
            "`return_logprobs` of the continuous batching config: Pass `top_logprobs=0`: log-probabilities here are "
            "those of the model itself."
        )
    if not isinstance(model, GenerationMixin):
        raise no_target(model)
    if foreign := [name for name in _OF_MANY if name in kwargs]:
        raise SpecConfigError(f"generate_batch() has no argument `{foreign[0]}`. See generate_many().")
    prompts: list[list[Any]] | None = None
    with suppress(TypeError):
        if isinstance(inputs, Sequence) and not any(isinstance(one, (str, bytes, dict)) for one in (inputs, *inputs)):
            prompts = [list(one) for one in inputs]
    if prompts is None:
        raise SpecConfigError(f"generate_batch() takes lists of token ids, got {shown(inputs)}. See generate_many().")
    if not prompts:
        return {}
    if generation_config is not None:
        kwargs["generation_config"] = generation_config
    copies = effective(model, kwargs, "num_return_sequences")
    copies = checked("num_return_sequences", copies, int | None, Bounds(least=1)) or 1
    # A request has one text.
    kwargs["num_return_sequences"] = 1
    if batch_size is None:
        batch_size = getattr(continuous_batching_config, "max_requests_per_batch", None) or 8
    checked("batch_size", batch_size, int, Bounds(least=1))
    of_copies = [*(f"__child#{place}" for place in range(copies - 1)), ""]
    names = [f"req_{number}{of_copy}" for number in range(len(prompts)) for of_copy in of_copies]
    requests: list[Any] = [prompt for prompt in prompts for _ in range(copies)]
    adapters = kwargs.pop("adapter_names", None)
    if adapters is not None:
        # As in generate(), one for each prompt.
        if not isinstance(adapters, (list, tuple)) or len(adapters) != len(prompts):
            raise SpecConfigError(
                f"`adapter_names` takes a name for each of the {len(prompts)} prompts, got {shown(adapters)}."
            )
        named = [[name] for name in adapters for _ in range(copies)]
        requests = [{"input_ids": ids, "adapter_names": name} for ids, name in zip(requests, named)]
        kwargs["adapter_names"] = named[0]
    # More rows than requests would only cost memory.
    places = min(batch_size, len(requests))
    kwargs = {"seed": getattr(continuous_batching_config, "seed", None), **kwargs}
    began = perf_counter()
    results = generate_many(model, requests, places, progress=progress_bar, in_order=True, **kwargs)
    outputs = {}
    for number, (name, result) in enumerate(zip(names, results)):
        outputs[name] = output_of(name, prompts[number // copies], result)
        outputs[name].created_time = began
        outputs[name].lifespan = (began, perf_counter())
    return outputs


def output_of(name: str, prompt: list[int], result: RequestResult) -> SpeculativeGenerationOutput:
    """A request's output, at its end or, without a `finish_reason`, on the way."""
    status = RequestStatus.FINISHED if result.finish_reason else RequestStatus.DECODING
    logprobs = result.logprobs or []
    return SpeculativeGenerationOutput(
        request_id=name,
        prompt_ids=prompt,
        generated_tokens=result.tokens,
        logprobs=[one.own for one in logprobs],
        top_logprobs=[one.top for one in logprobs],
        error=error_text(result.error),
        status=status if result.error is None else RequestStatus.FAILED,
        speculative=result.stats,
        finish_reason=result.finish_reason,
    )
