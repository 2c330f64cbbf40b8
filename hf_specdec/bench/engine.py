"""Timed `generate()` calls in rounds: every way of decoding generates every batch, one after the other.

Speed-ups are ratios of throughputs of the same round, so that a machine that is busy with other things slows all ways
down alike. Each way begins in turn, and starts every round without memory of the texts of the rounds before. All calls
stream to a clock, so that all have a time to their first token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..call.entry import generate
from ..errors import SpecConfigError, SpecDecError
from ..metrics import SpecDecodingStats, record
from .decoders import PLAIN, STOCK, Decoder
from .prompts import Batch


# Raised by transformers for a target, a draft model or an argument that its assisted generation cannot serve.
_REFUSALS = (ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)


@dataclass
class Call:
    """One timed `generate()` call."""

    tokens: list[list[int]]  # generated ones of each row, with the end-of-sequence token
    seconds: float  # wall-clock time
    stats: SpecDecodingStats | None = None  # of a speculative call
    first_token_seconds: float = 0.0  # until the first token of every row was delivered
    # After the first token; without drafts the time between two deliveries.
    cycle_seconds: list[float] = field(default_factory=list)
    mean_acceptance_length: float = 1.0  # tokens of a row per cycle, after the first token
    memory_bytes: int | None = None  # peak on a GPU beyond what was in use before

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


# The calls of one round at one batch size: for each way of decoding one per batch.
Round = dict[str, list[Call]]


@dataclass
class Measurement:
    """Calls that were timed."""

    batches: dict[int, list[Batch]]  # by batch size
    rounds: list[dict[int, Round]] = field(default_factory=list)  # complete ones, by batch size
    # By batch size the reason of each way that cannot run.
    refused: dict[int, dict[str, str]] = field(default_factory=dict)
    interrupted: bool = False  # the user has ended it before the last round


# Begins a step of so many `generate()` calls, and returns what is to be called after each of them.
Begin = Callable[[str, int], Callable[[], None]]


def silently(title: str, steps: int) -> Callable[[], None]:
    """Shows no progress."""
    return lambda: None


# ------------------------------------------------------------------------------------------------------------- rounds


def measure(
    model: PreTrainedModel,
    decoders: Sequence[Decoder],
    batches: dict[int, list[Batch]],
    rounds: int,
    arguments: Mapping[str, Any],
    *,
    seed: int = 0,
    max_seconds: float | None = None,
    begin: Begin = silently,
) -> Measurement:
    """Warms up, then times up to `rounds` rounds; after the first, none that is likely to end beyond `max_seconds`."""
    refused = warm_up(model, decoders, batches, arguments, begin("Warming up", len(batches) * len(decoders)))
    found = Measurement(batches, refused=refused)
    num_calls = sum(len(batches[size]) * (len(decoders) - len(why)) for size, why in refused.items())
    on_step, began = begin("Measuring", num_calls * rounds), perf_counter()
    while (done := len(found.rounds)) < rounds:
        elapsed = perf_counter() - began
        if done and max_seconds is not None and elapsed * (1 + 1 / done) > max_seconds:
            break
        try:
            found.rounds.append(run_round(model, decoders, found, arguments, seed + done, on_step))
        except KeyboardInterrupt:
            if not done:
                raise
            found.interrupted = True
            break
    return found


def warm_up(
    model: PreTrainedModel,
    decoders: Sequence[Decoder],
    batches: Mapping[int, Sequence[Batch]],
    arguments: Mapping[str, Any],
    on_step: Callable[[], None],
) -> dict[int, dict[str, str]]:
    """Lets every way generate the first batch of every size; returns those that cannot run, with the reason."""
    refused: dict[int, dict[str, str]] = {size: {} for size in batches}
    for size, group in batches.items():
        for decoder in decoders:
            reason = _refusal(model, group[0], size, decoder, arguments)
            if reason is not None and decoder.name == PLAIN:
                raise SpecConfigError(f"Plain generation at batch size {size} fails: {reason}")
            if reason is not None:
                refused[size][decoder.name] = reason
            on_step()
    return refused


def _refusal(
    model: PreTrainedModel, batch: Batch, size: int, decoder: Decoder, arguments: Mapping[str, Any]
) -> str | None:
    if decoder.max_batch_size is not None and size > decoder.max_batch_size:
        return "transformers' assisted generation takes one row"
    refusals = _REFUSALS if decoder.name.startswith(STOCK) else (SpecDecError, torch.OutOfMemoryError)
    try:
        time_call(model, batch, {**arguments, **decoder.arguments})
    except refusals as error:
        first_line = next(iter(str(error).splitlines()), "")
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            return f"out of memory: {first_line}"
        return first_line or type(error).__name__
    return None


def run_round(
    model: PreTrainedModel,
    decoders: Sequence[Decoder],
    found: Measurement,
    arguments: Mapping[str, Any],
    seed: int,
    on_step: Callable[[], None],
) -> dict[int, Round]:
    """Times every batch in every way that can run, by batch size; a way other than that of the last round begins."""
    result: dict[int, Round] = {}
    for size, batches in found.batches.items():
        able = [decoder for decoder in decoders if decoder.name not in found.refused.get(size, {})]
        for decoder in able:
            decoder.forget_texts(model)
        result[size] = {decoder.name: [] for decoder in able}
        for index, batch in enumerate(batches):
            # The first call after another batch may find caches and clocks in another state: each takes its turn.
            turn = (len(found.rounds) + index) % len(able)
            for decoder in able[turn:] + able[:turn]:
                call = time_call(model, batch, {**arguments, **decoder.arguments}, seed)
                result[size][decoder.name].append(call)
                on_step()
    return result


# -------------------------------------------------------------------------------------------------------------- calls


class DeliveryClock(BaseStreamer):
    """Notes the times at which tokens are delivered, and their numbers."""

    def __init__(self):
        self.times: list[float] = []
        self.counts: list[int] = []
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self.times.append(perf_counter())
            self.counts.append(value.numel())
        self._has_prompt = True

    def end(self) -> None:
        """The last delivery was the end."""


def time_call(model: PreTrainedModel, batch: Batch, arguments: Mapping[str, Any], seed: int = 0) -> Call:
    """Times one call."""
    clock = DeliveryClock()
    torch.manual_seed(seed)
    is_on_gpu, before = model.device.type == "cuda", 0
    if is_on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device)
    with record(timings=True) as recorded:
        began = _now(model)
        sequences = generate(model, **batch.inputs, **arguments, max_new_tokens=batch.max_new_tokens, streamer=clock)
        seconds = _now(model) - began
    call = Call(_new_tokens(model, batch, sequences), seconds)
    call.first_token_seconds = clock.times[0] - began
    if is_on_gpu:
        call.memory_bytes = torch.cuda.max_memory_allocated(model.device) - before
    if recorded.calls:
        found = recorded.calls[0]
        call.stats, call.cycle_seconds = found.stats, found.cycle_seconds
        call.mean_acceptance_length = found.stats.mean_acceptance_length
    else:
        call.cycle_seconds = [later - earlier for earlier, later in pairwise(clock.times)]
        if len(batch.inputs["input_ids"]) == 1 and len(clock.counts) > 1:
            call.mean_acceptance_length = sum(clock.counts[1:]) / len(clock.counts[1:])
    return call


def greedy_texts(model: PreTrainedModel, batch: Batch, **arguments: Any) -> list[list[int]]:
    """Generated tokens of each row of a batch; greedily, unless the arguments of `generate()` say otherwise."""
    arguments = {"do_sample": False, "max_new_tokens": batch.max_new_tokens, **arguments}
    return _new_tokens(model, batch, generate(model, **batch.inputs, **arguments))


def _now(model: PreTrainedModel) -> float:
    """Seconds, once the model's device has done the work it was given."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return perf_counter()


def _new_tokens(model: PreTrainedModel, batch: Batch, sequences: torch.LongTensor) -> list[list[int]]:
    """Tokens that `generate()` has added to the rows of a batch, without the padding after their ends."""
    eos = model.generation_config.eos_token_id
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    rows = sequences[:, batch.inputs["input_ids"].shape[1] :].tolist()
    lengths = [next((index + 1 for index, token in enumerate(row) if token in ends), len(row)) for row in rows]
    return [row[:length] for row, length in zip(rows, lengths)]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, or of the place where the shorter text ends; `None` for equal texts."""
    if one == other:
        return None
    return next((i for i, (left, right) in enumerate(zip(one, other)) if left != right), min(len(one), len(other)))
