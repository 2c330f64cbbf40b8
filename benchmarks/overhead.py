"""A cycle of our loop beside one of transformers' assisted generation, with the same drafts.

    python benchmarks/overhead.py                     # everything, 15 minutes on two cores
    python benchmarks/overhead.py --quick             # a small part of it, about two minutes
    python benchmarks/overhead.py --targets demo --contexts 128 --dtypes float32 --json out.json
    python benchmarks/overhead.py --against HEAD~20   # this version of the package beside another one

All sides decode the same prompts with the same model and dtype, in turn, greedily; in float32 all texts must be equal.
Drafts are scripted, four of five right, so that both loops draft alike and take the same cycles. Times are those of
decoding alone: the prefill and the first cycle are left out. README.md says more.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from common import (
    CONSOLE,
    NONE,
    PLAIN,
    MarkingStreamer,
    Row,
    beside,
    demo_prompts,
    in_turn,
    random_prompts,
    random_target,
    show,
    without_end,
    write_report,
)
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator as HfCandidateGenerator
from transformers.utils import logging
from versions import compare as compare_versions

from hf_specdec import (
    CandidateGenerator,
    DraftTree,
    SpeculativeConfig,
    Speculator,
    demo,
    generate,
    record,
    register_candidate_generator,
)
from hf_specdec.call.output import CACHE_FIELD
from hf_specdec.machine import describe_environment
from hf_specdec.method import methods
from hf_specdec.protocol import DraftStep
from hf_specdec.target.model import SlotModel


CLOCKS = {"wall": perf_counter, "cpu": process_time}

# The embedded model has 2048 positions; the generated tokens must fit after the prompt.
TARGETS = {"demo": (demo.load_target, 1536), "random": (random_target, 32000)}

WARM_UP_TOKENS = 16
DRAFT_LENGTH = 5
OURS, THEIRS = "scripted drafts", "transformers: scripted drafts"

# -------------------------------------------------------------------------------------------------------------- clocks


@dataclass
class Forwards:
    """How many forwards of the target there were, and their seconds."""

    count: int = 0
    seconds: float = 0.0
    is_inside: bool = False


@contextmanager
def timed_forwards(target: PreTrainedModel, is_ours: bool, clock: Callable[[], float]) -> Iterator[Forwards]:
    """Counts and times the forwards inside the block, through their classes and not any object.

    In transformers' loops these are the model's own, in ours those of the slot model, which makes masks and positions
    before it calls the model. This costs about a microsecond a forward.
    """
    found = Forwards()

    def timed(forward: Callable) -> Callable:
        @functools.wraps(forward)
        def run(*args, **kwargs):
            if found.is_inside:
                return forward(*args, **kwargs)
            found.is_inside = True
            began = clock()
            try:
                return forward(*args, **kwargs)
            finally:
                found.is_inside = False
                found.seconds += clock() - began
                found.count += 1

        return run

    places = [(SlotModel, "verify"), (SlotModel, "forward")] if is_ours else [(type(target), "forward")]
    with ExitStack() as stack:
        for kind, name in places:
            stack.enter_context(patch.object(kind, name, timed(getattr(kind, name))))
        yield found


class Sample(NamedTuple):
    """The decoding part of a call: without prefill and first cycle, in which drafters read the prompt.

    Attributes:
        tokens (`int`): Tokens committed.
        cycles (`int`): Target forwards.
        seconds, forward_seconds (`float`): All time, and that inside forwards.
        texts (`list[list[int]]`): The rows of the output, prompts included.
    """

    tokens: int
    cycles: int
    seconds: float
    forward_seconds: float
    texts: list[list[int]]


def time_call(
    generate: Callable[..., torch.LongTensor], target: PreTrainedModel, is_ours: bool, clock: Callable, job: Job
) -> Sample:
    """Times one generate() call of a model by a clock of seconds."""
    with timed_forwards(target, is_ours, clock) as forwards, record() as recorded:
        streamer = MarkingStreamer(recorded, lambda: (clock(), forwards.count, forwards.seconds))
        output = generate(streamer=streamer, **job.arguments())
    # The first cycle has ended.
    first = next((mark for mark in streamer.marks if mark[1] > len(job.input_ids)), None)
    (ended, cycles, forward_seconds), tokens = streamer.marks[-1]
    if first is None or first[1] == tokens:
        raise SystemExit(f"The call ended within two cycles, after {tokens} tokens. Raise --new-tokens.")
    (began, cycles_before, forward_seconds_before), tokens_before = first
    return Sample(
        tokens - tokens_before,
        cycles - cycles_before,
        ended - began,
        forward_seconds - forward_seconds_before,
        output.tolist(),
    )


# ----------------------------------------------------------------------------------------------------- scripted drafts


def scripted(texts: list[list[int]], vocab_size: int) -> list[list[int]]:
    """What is drafted for each position of each text, prompt included: four of five tokens are right."""
    draws = random.Random(0)
    return [[token if draws.random() < 0.8 else (token + 1) % vocab_size for token in text] for text in texts]


class ScriptedCandidateGenerator(CandidateGenerator):
    """Scripted drafts in our loop."""

    def __init__(self, config, resources: list[list[int]], session):
        super().__init__(config, resources, session)
        self.script = resources

    def propose(self, step: DraftStep) -> DraftTree:
        counts = (min(room, self.num_speculative_tokens) for room in step.max_draft_tokens)
        places = zip(step.rows, step.lengths, counts)
        drafts = [self.script[row][length : length + count] for row, length, count in places]
        return DraftTree.from_lists(drafts, self.session.device)


class StockScriptedCandidateGenerator(HfCandidateGenerator):
    """Scripted drafts in transformers' loop.

    Its first cycle, which also reads the prompt, gets no draft: our loop drafts only after the first token, and so
    both see the same drafts in the same cycles.
    """

    def __init__(self, script: list[list[int]]):
        self.script = script
        self.has_begun = False

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs) -> tuple[torch.LongTensor, None]:
        [drafts], length = self.script, input_ids.shape[1]
        draft = drafts[length : min(length + DRAFT_LENGTH, len(drafts) - 1)] if self.has_begun else []
        self.has_begun = True
        return torch.cat([input_ids, input_ids.new_tensor([draft])], dim=1) if draft else input_ids, None

    def update_candidate_strategy(self, input_ids, scores, num_matches) -> None:
        pass


def scripted_speculator(script: list[list[int]]) -> Speculator:
    """Speculator for `generate(assistant=...)`."""
    if "scripted_benchmark" not in methods():
        register_candidate_generator("scripted_benchmark", ScriptedCandidateGenerator)
    config = SpeculativeConfig(method="scripted_benchmark", num_speculative_tokens=DRAFT_LENGTH)
    return Speculator(config, ScriptedCandidateGenerator, script)


@contextmanager
def stock_drafts_from(model: PreTrainedModel, generator: HfCandidateGenerator) -> Iterator[None]:
    """Lets transformers' assisted decoding of `model` draft with `generator`.

    Assisted decoding reads the whole prompt even if it is given keys and values of it; inside it continues from them,
    as plain generate does.
    """
    prepare = model.prepare_inputs_for_generation

    @functools.wraps(prepare)
    def prepare_the_rest(input_ids, *args, **kwargs):
        cache = kwargs.get(CACHE_FIELD)
        if kwargs.get("is_first_iteration") and cache is not None and cache.get_seq_length():
            kwargs["next_sequence_length"] = input_ids.shape[1] - cache.get_seq_length()
        return prepare(input_ids, *args, **kwargs)

    model._get_candidate_generator = lambda *args, **kwargs: generator
    model.prepare_inputs_for_generation = prepare_the_rest
    try:
        yield
    finally:
        del model._get_candidate_generator, model.prepare_inputs_for_generation


# --------------------------------------------------------------------------------------------------------------- sides


@dataclass(frozen=True)
class Job:
    """One generate() call: prompts `(B, P)`, keys and values of all but their last tokens, and the drafts."""

    input_ids: torch.LongTensor
    max_new_tokens: int
    cache: DynamicCache
    script: list[list[int]] | None = None

    def arguments(self) -> dict[str, Any]:
        """Fresh arguments of a call; the cache is copied here, before the clock runs."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": torch.ones_like(self.input_ids),
            "max_new_tokens": self.max_new_tokens,
            "do_sample": False,
            CACHE_FIELD: copy.deepcopy(self.cache),
        }


def ways(target: PreTrainedModel, job: Job) -> dict[str, Callable[..., torch.LongTensor]]:
    """What takes the arguments of `generate()`, by side; transformers' assisted generation takes one row only."""

    def theirs(**arguments: Any) -> torch.LongTensor:
        with stock_drafts_from(target, StockScriptedCandidateGenerator(job.script)):
            return target.generate(prompt_lookup_num_tokens=DRAFT_LENGTH, **arguments)

    found = {PLAIN: target.generate, NONE: partial(generate, target, spec_method="none")}
    if len(job.input_ids) == 1:
        found[THEIRS] = theirs
    return {**found, OURS: partial(generate, target, assistant=scripted_speculator(job.script))}


# ----------------------------------------------------------------------------------------------------------- measuring


def measure(
    name: str, target: PreTrainedModel, job: Job, rounds: int, clock: Callable[[], float]
) -> tuple[list[Row], list[str]]:
    """Rows of all sides of a case, and which of them wrote another text or took other cycles with the same drafts."""
    # What plain generate writes is the script, and warms it up.
    texts = target.generate(**job.arguments()).tolist()
    job = replace(job, script=scripted(texts, target.config.vocab_size))
    sides = ways(target, job)
    for side in list(sides.values())[1:]:
        side(**replace(job, max_new_tokens=WARM_UP_TOKENS).arguments())
    samples: dict[str, list[Sample]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in in_turn(list(sides), number):
            samples[side].append(time_call(sides[side], target, side in (NONE, OURS), clock, job))
    seconds = {side: [sample.seconds / sample.tokens for sample in found] for side, found in samples.items()}
    batch_size, context = job.input_ids.shape
    case = {"target": name, "dtype": str(target.dtype).removeprefix("torch."), "context": context}
    rows, differences = [], []
    for side, found in samples.items():
        best = min(found, key=lambda sample: sample.seconds / sample.tokens)
        # The round in which the fewest rows agree.
        same = min(sum(map(list.__eq__, sample.texts, texts)) for sample in found)
        rows.append(
            {
                **case,
                "batch_size": batch_size,
                "side": side,
                "tokens_per_second": 1 / statistics.median(seconds[side]),
                "tokens_per_cycle": best.tokens / best.cycles,
                "cycle_ms": 1000 * best.seconds / best.cycles,
                "outside_ms": 1000 * (best.seconds - best.forward_seconds) / best.cycles,
                **beside(side, seconds),
                "same_texts": f"{same} of {batch_size}",
            }
        )
        if same < batch_size and target.dtype == torch.float32:
            differences.append(f"{case}: {side} differs in {batch_size - same} texts")
    cycles = {side: {sample.cycles for sample in samples.get(side, ())} for side in (OURS, THEIRS)}
    if THEIRS in sides and cycles[OURS] != cycles[THEIRS]:
        differences.append(f"{case}: the same drafts took {cycles} cycles")
    return rows, differences


def prefilled_job(target: PreTrainedModel, context: int, batch_size: int, new_tokens: int) -> Job:
    """Prompts that differ in their last token only, and the keys and values of the others."""
    prompts = random_prompts(batch_size, context, target.config.vocab_size)
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(prompts[:1, :-1], **{CACHE_FIELD: cache}, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(batch_size)
    return Job(prompts, new_tokens, cache)


def measure_all(options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Every context at batch size 1, the shortest one at all batch sizes, for all targets and dtypes."""
    rows, differences = [], []
    for name in options.targets:
        load, longest = TARGETS[name]
        contexts = sorted({min(context, longest) for context in options.contexts})
        shapes = [(contexts[0], size) for size in options.batch_sizes] + [(context, 1) for context in contexts[1:]]
        for dtype in options.dtypes:
            target = without_end(load(getattr(torch, dtype)))
            for context, batch_size in shapes:
                job = prefilled_job(target, context, batch_size, options.new_tokens)
                found, wrong = measure(name, target, job, options.rounds, CLOCKS[options.clock])
                show(found)
                rows += found
                differences += wrong
    return rows, differences


# ------------------------------------------------------------------------------------------------------------- command


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="other defaults, for about two minutes")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--contexts", nargs="+", type=int, help="tokens; 128 2048 8192")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="at the shortest context; 1 4 16")
    parser.add_argument("--rounds", type=int, help="turns of all sides; 4")
    parser.add_argument("--new-tokens", type=int, help="tokens a row; 64")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall", help="cpu: of the process, in one thread")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument(
        "--against",
        metavar="VERSION",
        help="only compare this version with that of a commit, or one in a folder, by the processor time of the same "
        "calls; --rounds (10) and --new-tokens apply",
    )
    options = parser.parse_args()
    quick = {"contexts": [128, 2048], "batch_sizes": [1, 4], "rounds": 2, "new_tokens": 32}
    full = {"contexts": [128, 2048, 8192], "batch_sizes": [1, 4, 16], "rounds": 4, "new_tokens": 64}
    if options.against is not None:
        full["rounds"], options.clock = 10, "cpu"
    for name, value in (quick if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.rounds < 1 or not 24 <= options.new_tokens <= 512:
        parser.error("--rounds 1 and --new-tokens 24 are the least, --new-tokens 512 the most")
    return options


def main() -> None:
    options = parse_options()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    environment, differences = describe_environment("cpu", torch.float32), []
    if options.against is None:
        rows, differences = measure_all(options)
    else:
        rows = compare_versions(options.against, options.rounds, options.new_tokens, demo_prompts(4, 128).tolist())
        show(rows)
    write_report(options.json, rows, environment, clock=options.clock, rounds=options.rounds)
    CONSOLE.print(*differences, sep="\n")
    if differences:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
