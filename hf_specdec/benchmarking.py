"""Measures ways of decoding against each other: one model, the same prompts, every way in turn in the same run.

Speed-ups are ratios of throughputs measured side by side, so that a machine that is busy with other things slows all
of them down alike. A method starts every round without memory of the rounds before.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers import __version__ as transformers_version

from . import __version__
from .errors import MissingDependencyError
from .integration import generate
from .metrics import SpecDecodingStats, record
from .speculator import Speculator, forget_speculators, load_speculator


PLAIN = "plain"

# Instructions with which a CPU multiplies bfloat16 matrices itself, as Linux names them.
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True)
class Batch:
    """Prompts that are generated from together.

    Attributes:
        names (`tuple[str, ...]`): Names of the B prompts.
        kind (`str`): What sort of text they ask for; results are also given by kind.
        inputs (`dict`): `input_ids` and `attention_mask` of shape `(B, P)`, padded on the left.
        max_new_tokens (`int`): How many tokens to generate.
    """

    names: tuple[str, ...]
    kind: str
    inputs: dict[str, torch.Tensor]
    max_new_tokens: int


@dataclass
class Sample:
    """One greedy `generate()` call.

    Attributes:
        tokens (`list[list[int]]`): Generated tokens of each row, its end-of-sequence token included.
        seconds (`float`): Wall-clock time.
        stats (`SpecDecodingStats`, *optional*): Of a speculative call.
    """

    tokens: list[list[int]]
    seconds: float
    stats: SpecDecodingStats | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


# What one round has measured: for each way of decoding one sample per batch.
Round = dict[str, list[Sample]]


@dataclass
class Throughput:
    """Speed of one way of decoding over some batches.

    Attributes:
        tokens_per_second (`float`): Of the fastest of all rounds, batch by batch.
        speedup (`float`): The same divided by plain generation's.
        speedup_range (`tuple[float, float]`): Smallest and largest speed-up that a single round gives.
        mean_acceptance_length (`float`): Tokens committed per target forward of a row; 1 for plain generation.
        acceptance_rate, draft_acceptance_rate (`float`, *optional*):
            Accepted draft tokens among those compared, and among all drafted. `None` for plain generation.
        num_tokens (`int`): Tokens generated in one round.
    """

    tokens_per_second: float
    speedup: float
    speedup_range: tuple[float, float]
    mean_acceptance_length: float
    acceptance_rate: float | None
    draft_acceptance_rate: float | None
    num_tokens: int


@dataclass
class Result(Throughput):
    """Speed of one way of decoding over all batches, and over those of each kind.

    Attributes:
        method (`str`): Name of the way of decoding.
        same_texts (`int`): Rows whose tokens are those of plain generation in the measured data type.
        num_texts (`int`): Rows.
        kinds (`dict[str, Throughput]`): By kind of prompt.
    """

    method: str = PLAIN
    same_texts: int = 0
    num_texts: int = 0
    kinds: dict[str, Throughput] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------------------- measuring


def make_batches(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Any],
    batch_size: int = 1,
    max_new_tokens: int | None = None,
    device: torch.device | str = "cpu",
    *,
    fill: bool = False,
    add_special_tokens: bool = True,
) -> list[Batch]:
    """Tokenised batches of prompts of the same kind and length of answer, in the order of the prompts.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The model's, with a padding token and padding on the left.
        prompts: Objects with `name`, `kind`, `text` and `max_new_tokens`.
        batch_size (`int`): Rows of a batch; the last ones of a kind may be smaller, unless they are filled.
        max_new_tokens (`int`, *optional*): Upper limit in tokens.
        device (`torch.device` or `str`): Where the model is.
        fill (`bool`): Fill the last batch of a kind with the kind's first prompts once more.
        add_special_tokens (`bool`): Those of the tokenizer; a chat template has written its own.
    """
    groups: dict[tuple[str, int], list] = {}
    for prompt in prompts:
        groups.setdefault((prompt.kind, prompt.max_new_tokens), []).append(prompt)
    batches = []
    for (kind, longest), group in groups.items():
        length = longest if max_new_tokens is None else min(longest, max_new_tokens)
        for start in range(0, len(group), batch_size):
            rows = group[start : start + batch_size]
            if fill:
                rows += list(itertools.islice(itertools.cycle(group), batch_size - len(rows)))
            inputs = tokenizer(
                [row.text for row in rows],
                return_tensors="pt",
                padding=len(rows) > 1,
                add_special_tokens=add_special_tokens,
            ).to(device)
            tensors = {key: inputs[key] for key in ("input_ids", "attention_mask")}
            batches.append(Batch(tuple(row.name for row in rows), kind, tensors, length))
    return batches


def find_available(
    model: PreTrainedModel, methods: Mapping[str, dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Which methods can run, and why the others cannot.

    Args:
        model (`PreTrainedModel`): The target.
        methods (`Mapping[str, dict]`): Flat settings of each method by the name that it has in the results.

    Returns:
        The methods that load, and the message of [`MissingDependencyError`] for each of the others.
    """
    available, missing = {}, {}
    for name, settings in methods.items():
        try:
            load_speculator(model, **settings)
        except MissingDependencyError as error:
            missing[name] = str(error)
        else:
            available[name] = settings
    return available, missing


def run_round(
    model: PreTrainedModel,
    methods: Mapping[str, dict[str, Any]],
    batches: Sequence[Batch],
    *,
    first: int = 0,
    on_step: Callable[[], None] | None = None,
) -> Round:
    """Generates every batch plainly and with every method, one after the other, batch by batch.

    The speculators of the model are loaded anew, so that none remembers an earlier round, and warmed up.

    Args:
        model (`PreTrainedModel`): The target.
        methods (`Mapping[str, dict]`): Flat settings of each method by name.
        batches (`Sequence[Batch]`): What to generate.
        first (`int`): Which way of decoding begins; give each round another.
        on_step (`Callable`, *optional*): Called after every `generate()` call.
    """
    forget_speculators(model)
    speculators: dict[str, Speculator | None] = {PLAIN: None}
    for name, settings in methods.items():
        # Two settings of one method must not find each other's texts.
        speculators[name] = load_speculator(model, **settings).without_texts(model)
    warm_up = Batch((), "", {key: value[:, -8:] for key, value in batches[0].inputs.items()}, 8)
    for speculator in speculators.values():
        run(model, warm_up, speculator)
    order = list(speculators)
    samples: Round = {name: [] for name in order}
    for index, batch in enumerate(batches):
        turn = (first + index) % len(order)
        for name in order[turn:] + order[:turn]:
            samples[name].append(run(model, batch, speculators[name]))
            if on_step is not None:
                on_step()
    return samples


def measure(
    model: PreTrainedModel,
    methods: Mapping[str, dict[str, Any]],
    batches: Sequence[Batch],
    rounds: int,
    *,
    max_seconds: float | None = None,
    on_step: Callable[[], None] | None = None,
) -> list[Round]:
    """Up to `rounds` rounds of [`run_round`]: none is begun that is likely to end after `max_seconds`, but the first.

    Args:
        model, methods, batches, on_step: As for [`run_round`].
        rounds (`int`): Rounds, at least 1.
        max_seconds (`float`, *optional*): Limit in seconds.
    """
    began = perf_counter()
    measured: list[Round] = []
    while len(measured) < rounds:
        elapsed = perf_counter() - began
        if measured and max_seconds is not None and elapsed * (1 + 1 / len(measured)) > max_seconds:
            break
        measured.append(run_round(model, methods, batches, first=len(measured), on_step=on_step))
    return measured


def run(model: PreTrainedModel, batch: Batch, speculator: Speculator | None) -> Sample:
    """One greedy call; without a speculator plain generation."""
    arguments = {"max_new_tokens": batch.max_new_tokens, "do_sample": False}
    with record() as recorded:
        began = now(model)
        sequences = generate(model, **batch.inputs, **arguments, assistant=speculator)
        seconds = now(model) - began
    stats = recorded.calls[0].stats if recorded.calls else None
    return Sample(new_tokens(model, batch, sequences), seconds, stats)


def now(model: PreTrainedModel) -> float:
    """Seconds, when the model's device has done what it was given to do."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return perf_counter()


def new_tokens(model: PreTrainedModel, batch: Batch, sequences: torch.LongTensor) -> list[list[int]]:
    """What `generate()` has added to the rows of a batch, without the padding behind their ends."""
    generated = sequences[:, batch.inputs["input_ids"].shape[1] :].tolist()
    return [_until_end(row, model.generation_config.eos_token_id) for row in generated]


def _until_end(tokens: list[int], eos_token_id: int | list[int] | None) -> list[int]:
    ends = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
    length = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:length]


# ------------------------------------------------------------------------------------------------------------ results


def find_differences(plain: Sequence[Sample], other: Sequence[Sample], batches: Sequence[Batch]) -> dict[str, int]:
    """Prompts whose generated tokens differ, each with the index of the first generated token that does."""
    differences = {}
    for batch, expected, found in zip(batches, plain, other):
        for name, right, tokens in zip(batch.names, expected.tokens, found.tokens):
            if right != tokens:
                pairs = zip(right, tokens)
                shorter = min(len(right), len(tokens))
                differences[name] = next((i for i, (one, two) in enumerate(pairs) if one != two), shorter)
    return differences


def summarise(rounds: Sequence[Round], batches: Sequence[Batch]) -> list[Result]:
    """One result for each way of decoding, plain generation first."""
    num_texts = sum(len(batch.names) for batch in batches)
    results = []
    for name in rounds[0]:
        everything = _throughput(rounds, name, range(len(batches)))
        results.append(
            Result(
                **vars(everything),
                method=name,
                same_texts=num_texts - len(find_differences(rounds[-1][PLAIN], rounds[-1][name], batches)),
                num_texts=num_texts,
                kinds={
                    kind: _throughput(rounds, name, [i for i, batch in enumerate(batches) if batch.kind == kind])
                    for kind in dict.fromkeys(batch.kind for batch in batches)
                },
            )
        )
    return results


def _throughput(rounds: Sequence[Round], name: str, indices: Sequence[int]) -> Throughput:
    speed = _tokens_per_second(rounds, name, indices)
    single = [_tokens_per_second([one], name, indices) / _tokens_per_second([one], PLAIN, indices) for one in rounds]
    last = [rounds[-1][name][index] for index in indices]
    stats = total_stats([sample.stats for sample in last if sample.stats is not None])
    return Throughput(
        tokens_per_second=speed,
        speedup=speed / _tokens_per_second(rounds, PLAIN, indices),
        speedup_range=(min(single), max(single)),
        mean_acceptance_length=stats.mean_acceptance_length,
        acceptance_rate=None if name == PLAIN else stats.acceptance_rate,
        draft_acceptance_rate=None if name == PLAIN else stats.draft_acceptance_rate,
        num_tokens=sum(sample.num_tokens for sample in last),
    )


def _tokens_per_second(rounds: Sequence[Round], name: str, indices: Sequence[int]) -> float:
    """Tokens of the batches over the time of the fastest round of each."""
    tokens = sum(rounds[-1][name][index].num_tokens for index in indices)
    return tokens / sum(min(one[name][index].seconds for one in rounds) for index in indices)


def total_stats(calls: Sequence[SpecDecodingStats]) -> SpecDecodingStats:
    """The statistics of several calls as if they were one."""
    total = SpecDecodingStats()
    for call in calls:
        for item in fields(SpecDecodingStats):
            value = getattr(call, item.name)
            if isinstance(value, (int, float)):
                setattr(total, item.name, getattr(total, item.name) + value)
        longer, shorter = sorted((total.num_accepted_tokens_per_pos, call.num_accepted_tokens_per_pos), key=len)[::-1]
        padded = [*shorter, *[0] * (len(longer) - len(shorter))]
        total.num_accepted_tokens_per_pos = [one + two for one, two in zip(longer, padded)]
        total.method = call.method
        total.rejection_sample_method = call.rejection_sample_method
        total.notes.extend(note for note in call.notes if note not in total.notes)
    return total


# -------------------------------------------------------------------------------------------------------- the machine


def suitable_dtype(device: torch.device | str) -> torch.dtype:
    """bfloat16 where the device computes in it, else float32."""
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    flags = set(f"{_cpuinfo('flags')} {_cpuinfo('Features')}".split())
    return torch.bfloat16 if flags & _BFLOAT16_FLAGS else torch.float32


@contextmanager
def num_threads(count: int | None):
    """Runs the block with `count` threads per operation; `None` leaves the number as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_environment(device: torch.device | str, dtype: torch.dtype) -> dict[str, Any]:
    """Hardware, versions and settings that the figures hold for, as plain JSON types."""
    device = torch.device(device)
    return {
        "hf_specdec": __version__,
        "torch": torch.__version__,
        "transformers": transformers_version,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "dtype": str(dtype).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _cpuinfo(key: str) -> str:
    """What Linux says about the first processor under this key; empty elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() == key), "")
    except OSError:
        return ""
