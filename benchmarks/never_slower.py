"""Compares `num_speculative_tokens="auto"` with plain `generate()`, to which it must not lose, and fixed lengths.

    python benchmarks/never_slower.py                  # --quick measures few rounds
    python benchmarks/never_slower.py --cases useless huge --json never_slower.json
    python benchmarks/never_slower.py --target random --sample
    python benchmarks/never_slower.py --target smollm2 --dtype bfloat16

Hostile cases, beside plain generation: a draft model of random weights, one as large as the target, drafters on random
text, batches of 8 and 32, short outputs, a long prompt, large draft trees. They are also compared with this package's
loop without drafts, which is faster than `generate()` on a small model and would hide what drafts lose. Friendly
cases, beside the best of the fixed lengths: the embedded drafters on the demo's prompts, all four of a kind one after
the other, since the best length for one short text is the luckiest one. All sides of a case generate the same greedy
text, in turns of some cycles each, so that a machine that is slow for a while is slow for all of them. Times are those
of each side's own thread. A ratio is the median of those of the rounds. Each side has been warmed up by two calls or
more, in which the controller learns; of the texts nothing is remembered. `--target` has the demo's model, one of
127 M random parameters, in whose forwards the loop has no advantage of its own, and a real one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from time import monotonic, thread_time
from typing import Any, TypeVar

import torch
from common import random_prompts, without_end
from gpu_models import no_drafts, random_model, random_ring
from overhead import RANDOM_SIZES
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_specdec import (
    SpecDecodingStats,
    demo,
    forget_speculators,
    load_speculator,
    record,
)
from hf_specdec.bench.prompts import as_chat
from hf_specdec.demo import smollm2
from hf_specdec.machine import describe_environment
from hf_specdec.method import names_without_weights, takes_model


T = TypeVar("T")

PLAIN, LOOP, AUTO = "plain", "loop without drafts", "auto"
FIXED_LENGTHS = {"ngram": (4, 8, 16, 24), "draft_model": (1, 3, 5, 8, 12), "eagle3": (1, 2, 3, 4)}

# Part of the throughput of plain generation in hostile cases, and of the best fixed length in friendly ones.
GOALS = {"hostile": 0.97, "friendly": 0.95}

# Of the methods without weights the one that is chosen where no drafter is found.
_PREFERRED = names_without_weights()[0]

# Rounds that are measured whatever they take.
_LEAST_ROUNDS = 3


@dataclass
class Case:
    """Prompts, and the drafter of their text.

    Attributes:
        name, kind (`str`): "hostile" is compared with plain generation, "friendly" with fixed lengths.
        method (`str`): The drafter.
        calls (`list[dict]`): Prompts of shape `(B, P)` of each call.
        max_new_tokens (`int`): Tokens of each row.
        draft_model (`PreTrainedModel`, *optional*): In place of the embedded one.
        options (`dict`): Further settings.
    """

    name: str
    kind: str
    method: str
    calls: list[dict]
    max_new_tokens: int
    draft_model: PreTrainedModel | None = None
    options: dict = field(default_factory=dict)


@dataclass
class Row:
    """The result of a case: throughput under the controller over that of `beside`, median and range of the rounds."""

    case: str
    ratio: float
    kind: str
    beside: str
    ratio_range: tuple[float, float]
    mean_acceptance_length: float
    rounds: int


def random_draft(target: PreTrainedModel, num_layers: int, hidden_size: int) -> LlamaForCausalLM:
    """A draft model of random weights with the target's vocabulary."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=target.config.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        max_position_embeddings=target.config.max_position_embeddings,
    )
    return LlamaForCausalLM(config).eval()


def noise(target: PreTrainedModel, batch_size: int, length: int = 64) -> list[dict]:
    """A call with random prompts."""
    tokens = random_prompts(batch_size, length, target.config.vocab_size)
    return [{"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}]


def encoded(tokenizer: PreTrainedTokenizerBase, texts: list[str], **options) -> dict:
    """A call with these prompts as its rows."""
    tokenizer.padding_side = "left"
    found = tokenizer(texts, return_tensors="pt", padding=True, **options)
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def useless_cases(target: PreTrainedModel) -> list[Case]:
    """Drafts of random weights and on random text, for any target."""
    useless = random_draft(target, 1, 64)
    cases = [Case("useless draft model, long prompt", "hostile", "draft_model", noise(target, 1, 1024), 64, useless)]
    for batch_size in (1, 8, 32):
        text, calls = f"random text, batch {batch_size}", noise(target, batch_size)
        cases.append(Case(f"useless draft model, {text}", "hostile", "draft_model", calls, 64, useless))
        cases += [Case(f"{method}, {text}", "hostile", method, calls, 64) for method in ("ngram", _PREFERRED)]
    return cases


def demo_cases(target: PreTrainedModel) -> list[Case]:
    """The demo's target: with the embedded drafters beside the others."""
    tokenizer, prompts = demo.load_tokenizer(), demo.prompts()
    useless, huge = random_draft(target, 1, 64), random_draft(target, 5, target.config.hidden_size)

    def texts(kind):
        return [encoded(tokenizer, [p.text]) for p in prompts if p.kind == kind]

    def all_texts(batch_size):
        return [encoded(tokenizer, [p.text for p in islice(cycle(prompts), batch_size)])]

    cases = [
        Case("useless draft model", "hostile", "draft_model", texts("complete")[:1], 128, useless),
        Case("huge draft model", "hostile", "draft_model", texts("complete")[:1], 128, huge),
        Case("useless draft model, short output", "hostile", "draft_model", texts("complete")[:1], 24, useless),
        *useless_cases(target),
    ]
    for batch_size in (1, 8, 32):
        cases += [
            Case(f"{method}, random text, batch {batch_size}", "hostile", method, noise(target, batch_size), 64)
            for method in ("draft_model", "eagle3")
        ]
    tree = {"draft_tree_depth": 5, "draft_tree_top_k": 8, "num_draft_nodes": 31, "draft_min_path_prob": 0.0}
    cases += [
        Case(f"eagle3 with trees of 31 nodes, batch {size}", "hostile", "eagle3", all_texts(size), 96, options=tree)
        for size in (1, 8)
    ]
    for kind in ("edit", "complete"):
        cases += [Case(f"{method}, {kind}", "friendly", method, texts(kind), 128) for method in FIXED_LENGTHS]
    return cases


def smollm2_cases(target: PreTrainedModel) -> list[Case]:
    """A real model: drafts without weights on text that repeats itself, and on text that does not."""
    tokenizer = smollm2.load_tokenizer()
    prompts = as_chat(smollm2.prompts(), tokenizer)

    def texts(kind):
        return [encoded(tokenizer, [p.text], add_special_tokens=False) for p in prompts if p.kind == kind]

    cases = [Case(f"ngram, {kind}", "friendly", "ngram", texts(kind), 96) for kind in ("edit", "quote")]
    for method in names_without_weights():
        cases += [Case(f"{method}, {kind}", "hostile", method, texts(kind), 64) for kind in ("chat", "story")]
    return [*cases, *useless_cases(target)]


def random_target(dtype: torch.dtype) -> PreTrainedModel:
    """A model in whose forwards the loop has no advantage of its own."""
    return random_model("llama", RANDOM_SIZES, random_ring(RANDOM_SIZES["vocab_size"]), dtype, torch.device("cpu"))


TARGETS = {
    "demo": (demo.load_target, demo_cases),
    "random": (random_target, useless_cases),
    "smollm2": (smollm2.load_target, smollm2_cases),
}


Texts = list[list[int]]
Run = Callable[[BaseStreamer], Texts]


def make_sides(target: PreTrainedModel, case: Case, sample: bool) -> dict[str, Callable[[], Run]]:
    """For each way, what prepares a round of it: a function that generates the case's texts."""

    def generate(streamer, speculator=None):
        settings = {"max_new_tokens": case.max_new_tokens, "do_sample": sample, "assistant": speculator}
        calls = [target.generate(**inputs, **settings, streamer=streamer) for inputs in case.calls]
        return [row for texts in calls for row in texts.tolist()]

    def drafted(speculator):
        # The texts of the last round are the same.
        return partial(generate, speculator=speculator.without_texts(target))

    def side(length):
        given = {"method": case.method, "num_speculative_tokens": length, **case.options}
        if case.draft_model is not None:
            given["draft_model"] = case.draft_model
        elif takes_model(case.method):
            given["model"] = demo.drafter_path(case.method)
        return partial(drafted, speculator=load_speculator(target, **given))

    sides: dict[str, Callable[[], Run]] = {PLAIN: lambda: generate, AUTO: side("auto")}
    if case.kind == "friendly":
        return sides | {f"k={length}": side(length) for length in FIXED_LENGTHS[case.method]}
    return sides | {LOOP: lambda: partial(generate, speculator=no_drafts())}


class _Baton:
    """Lets one of several threads run at a time, round after round, until each has ended.

    Args:
        count (`int`): Threads.
        slice_seconds (`float`): After so much work a thread hands on.
    """

    def __init__(self, count: int, slice_seconds: float):
        self.slice_seconds = slice_seconds
        self._turns = [threading.Semaphore(0) for _ in range(count)]
        self._running = list(range(count))
        self._began = 0.0

    def begin(self) -> None:
        self._turns[self._running[0]].release()

    def wait(self, index: int) -> None:
        self._turns[index].acquire()
        self._began = thread_time()

    def offer(self, index: int) -> None:
        """Hands on if the slice is used up, and returns when it is this thread's turn again."""
        if len(self._running) > 1 and thread_time() - self._began >= self.slice_seconds:
            place = self._running.index(index)
            self._turns[self._running[(place + 1) % len(self._running)]].release()
            self.wait(index)

    def leave(self, index: int) -> None:
        place = self._running.index(index)
        self._running.remove(index)
        if self._running:
            self._turns[self._running[place % len(self._running)]].release()


class _HandingStreamer(BaseStreamer):
    """Offers the baton with every delivery."""

    def __init__(self, baton: _Baton, index: int):
        self.baton, self.index = baton, index

    def put(self, value: torch.Tensor) -> None:
        self.baton.offer(self.index)

    def end(self) -> None:
        """Nothing: the call still has its output to make."""


def in_turns(sides: list[Callable[[BaseStreamer], T]], slice_seconds: float = 0.03) -> tuple[list[T], list[float]]:
    """Runs generate() calls side by side, each for a short while in turn, so that a machine that slows down for a
    second slows all of them down alike.

    Args:
        sides (`list[Callable]`): Each makes its calls with the streamer that it is given.
        slice_seconds (`float`): After so much time a call hands on with its next tokens.

    Returns:
        What the calls returned, and the seconds that their threads computed. Torch should compute in one thread: what
        it does in others is not counted.
    """
    baton = _Baton(len(sides), slice_seconds)
    results: list[Any] = [None] * len(sides)

    def run(index: int) -> None:
        baton.wait(index)
        try:
            began = thread_time()
            result = sides[index](_HandingStreamer(baton, index))
            results[index] = result, thread_time() - began
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            results[index] = error
        finally:
            baton.leave(index)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(sides))]
    for thread in threads:
        thread.start()
    baton.begin()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    values, seconds = zip(*results)
    return list(values), list(seconds)


def measure(target: PreTrainedModel, case: Case, rounds: int, seconds: float, sample: bool) -> list[Row]:
    """Runs a case, in at most so many rounds, and few more seconds on the wall."""
    # What the texts of other cases have taught is about those.
    forget_speculators(target)
    sides, end = make_sides(target, case, sample), monotonic() + seconds
    is_exact = not sample and target.dtype == torch.float32
    names = list(sides)
    for _ in range(1 if len(case.calls) > 1 else 2):
        in_turns([prepare() for prepare in sides.values()])
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        if number >= _LEAST_ROUNDS and monotonic() > end:
            break
        order = names[number % len(names) :] + names[: number % len(names)]
        with record(all_threads=True) as r:
            texts, spent_by_each = in_turns([sides[name]() for name in order])
        for name, text, spent in zip(order, texts, spent_by_each):
            times[name].append(spent)
            if is_exact and text != texts[order.index(PLAIN)]:
                raise RuntimeError(f"{case.name}: the text of '{name}' is not that of plain generation.")
        adaptive = [call.stats for call in r.calls if any("adaptive" in note for note in call.stats.notes)]
        length = SpecDecodingStats.total(adaptive).mean_acceptance_length
    others = [name for name in names if name != AUTO]
    if case.kind == "friendly":
        others = [min(others, key=lambda name: statistics.median(times[name]))]
    rows = []
    for beside in others:
        ratios = [theirs / ours for theirs, ours in zip(times[beside], times[AUTO])]
        spread = (min(ratios), max(ratios))
        rows.append(Row(case.name, statistics.median(ratios), case.kind, beside, spread, length, len(ratios)))
    return rows


def show(rows: list[Row], console: Console) -> None:
    table = Table("case", "beside", "ratio", "range", "acceptance length", "rounds")
    for row in rows:
        low, high = row.ratio_range
        mark = "" if row.ratio >= GOALS[row.kind] else " !"
        table.add_row(
            row.case,
            row.beside,
            f"{row.ratio:.2f}{mark}",
            f"{low:.2f}-{high:.2f}",
            f"{row.mean_acceptance_length:.2f}",
            str(row.rounds),
        )
    console.print(table)
    for kind, goal in GOALS.items():
        ratios = [row.ratio for row in rows if row.kind == kind]
        if ratios:
            missed = sum(ratio < goal for ratio in ratios)
            console.print(f"{kind}: least ratio {min(ratios):.2f}; {missed} of {len(ratios)} below the goal of {goal}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, default="demo")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--sample", action="store_true", help="at temperature 1; texts are not compared then")
    parser.add_argument("--rounds", type=int, default=9, help="how often each side makes its calls")
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--cases", nargs="*", help="only cases whose name has one of these words")
    parser.add_argument("--max-seconds", type=float, default=3000, help="all cases together, about")
    parser.add_argument("--json", type=Path, help="File for the figures.")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    load, make_cases = TARGETS[arguments.target]
    target = without_end(load(getattr(torch, arguments.dtype)))
    cases = make_cases(target)
    if arguments.cases:
        cases = [case for case in cases if any(word in case.name for word in arguments.cases)]
    asked = {"target": arguments.target, "sample": arguments.sample}
    result: dict[str, Any] = {"environment": describe_environment("cpu", target.dtype), **asked, "rows": []}
    rows = []
    rounds = _LEAST_ROUNDS if arguments.quick else arguments.rounds
    for case in cases:
        found = measure(target, case, rounds, arguments.max_seconds / len(cases), arguments.sample)
        rows += found
        console.print(f"{case.name}: {', '.join(f'{row.ratio:.2f} of {row.beside}' for row in found)}")
        if arguments.json is not None:
            # After each case, since all of them take long.
            result["rows"] = [asdict(row) for row in rows]
            arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    show(rows, console)


if __name__ == "__main__":
    main()
