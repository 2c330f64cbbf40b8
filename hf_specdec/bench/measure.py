"""Timed calls: every way of decoding generates every batch, one after the other, round by round.

All calls stream to a clock that notes when tokens come, so that all have a time to their first token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel, set_seed
from transformers.generation.streamers import BaseStreamer

from ..benchmarking import PLAIN, Batch, Sample, new_tokens, now
from ..errors import SpecConfigError, SpecDecError
from ..integration import generate
from ..metrics import record
from .decoders import STOCK, Decoder


# What transformers raises for a target, a draft model or an argument that its assisted generation cannot serve.
_REFUSALS = (ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)


@dataclass
class Call(Sample):
    """One timed `generate()` call.

    Attributes:
        first_token_seconds (`float`): Until the first token of every row was delivered.
        cycle_seconds (`list[float]`): Of each cycle behind the first token: draft and verification, or for the others
            what lies between two deliveries, which for plain generation is a token.
        mean_acceptance_length (`float`): Tokens of a row per cycle, behind the first token.
        memory_bytes (`int`, *optional*): Most GPU memory in use during the call beyond what was before. `None` on a
            CPU.
    """

    first_token_seconds: float = 0.0
    cycle_seconds: list[float] = field(default_factory=list)
    mean_acceptance_length: float = 1.0
    memory_bytes: int | None = None


# What one round has measured at one batch size: for each way of decoding one call per batch.
Round = dict[str, list[Call]]


@dataclass
class Measurement:
    """What has been measured.

    Attributes:
        batches (`dict[int, list[Batch]]`): By batch size.
        rounds (`list[dict[int, Round]]`): Complete rounds, by batch size.
        refused (`dict[int, dict[str, str]]`): By batch size why some ways of decoding cannot run, by name.
        interrupted (`bool`): The user has ended it before the last round.
    """

    batches: dict[int, list[Batch]]
    rounds: list[dict[int, Round]] = field(default_factory=list)
    refused: dict[int, dict[str, str]] = field(default_factory=dict)
    interrupted: bool = False


class DeliveryClock(BaseStreamer):
    """Notes when tokens come, and how many."""

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


def time_call(
    model: PreTrainedModel, batch: Batch, decoder: Decoder, arguments: Mapping[str, Any], seed: int = 0
) -> Call:
    """Times one call.

    Args:
        model (`PreTrainedModel`): The target.
        batch (`Batch`): What to generate.
        decoder (`Decoder`): How.
        arguments (`Mapping`): Of `generate()`, shared by all ways of decoding, such as `do_sample`.
        seed (`int`): Of the sampling.
    """
    clock = DeliveryClock()
    set_seed(seed)
    before = _reset_memory(model)
    with record(timings=True) as recorded:
        began = now(model)
        sequences = generate(
            model,
            **batch.inputs,
            **arguments,
            **decoder.arguments,
            max_new_tokens=batch.max_new_tokens,
            streamer=clock,
        )
        seconds = now(model) - began
    call = Call(new_tokens(model, batch, sequences), seconds)
    call.first_token_seconds = clock.times[0] - began
    if before is not None:
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


def _reset_memory(model: PreTrainedModel) -> int | None:
    """Bytes in use; the peak begins there."""
    if model.device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(model.device)
    return torch.cuda.memory_allocated(model.device)


def warm_up(
    model: PreTrainedModel,
    decoders: Sequence[Decoder],
    batches: Mapping[int, Sequence[Batch]],
    arguments: Mapping[str, Any],
    on_step: Callable[[], None],
) -> dict[int, dict[str, str]]:
    """Every way of decoding generates the first batch of every size.

    Returns:
        By batch size why some cannot, by name.

    Raises:
        SpecConfigError: Plain generation cannot.
    """
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
        time_call(model, batch, decoder, arguments)
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return f"out of memory: {_first_line(error)}"
    except refusals as error:
        return _first_line(error) or type(error).__name__
    return None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


def measure(
    model: PreTrainedModel,
    decoders: Sequence[Decoder],
    found: Measurement,
    rounds: int,
    arguments: Mapping[str, Any],
    *,
    seed: int = 0,
    max_seconds: float | None = None,
    on_step: Callable[[], None],
) -> None:
    """Adds up to `rounds` rounds: none is begun that is likely to end after `max_seconds`, but the first.

    An interrupt ends the measurement, and is passed on only if no round is complete.

    Args:
        model (`PreTrainedModel`): The target.
        decoders (`Sequence[Decoder]`): The ways of decoding.
        found (`Measurement`): The batches and what cannot run; the rounds are added to it.
        rounds (`int`): Rounds, at least 1.
        arguments (`Mapping`): Of `generate()`.
        seed (`int`): Of the first round's sampling; the others have the next ones.
        max_seconds (`float`, *optional*): Limit in seconds.
        on_step (`Callable`): Called after every `generate()` call.
    """
    began = perf_counter()
    while (done := len(found.rounds)) < rounds:
        elapsed = perf_counter() - began
        if done and max_seconds is not None and elapsed * (1 + 1 / done) > max_seconds:
            break
        try:
            found.rounds.append(_run_round(model, decoders, found, arguments, seed + done, done, on_step))
        except KeyboardInterrupt:
            if not done:
                raise
            found.interrupted = True
            break


def _run_round(
    model: PreTrainedModel,
    decoders: Sequence[Decoder],
    found: Measurement,
    arguments: Mapping[str, Any],
    seed: int,
    first: int,
    on_step: Callable[[], None],
) -> dict[int, Round]:
    result: dict[int, Round] = {}
    for size, batches in found.batches.items():
        able = [decoder for decoder in decoders if decoder.name not in found.refused.get(size, {})]
        for decoder in able:
            decoder.forget_texts(model)
        result[size] = {decoder.name: [] for decoder in able}
        for index, batch in enumerate(batches):
            # Each begins in turn: what comes first behind another batch may find caches and clocks in another state.
            turn = (first + index) % len(able)
            for decoder in able[turn:] + able[:turn]:
                result[size][decoder.name].append(time_call(model, batch, decoder, arguments, seed))
                on_step()
    return result
