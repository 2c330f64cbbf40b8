"""Divides the time of a cycle: our loop beside transformers' assisted generation and plain generate().

    python benchmarks/overhead.py                     # everything, 15 to 20 minutes on two cores
    python benchmarks/overhead.py --quick             # a small part of it, about two minutes
    python benchmarks/overhead.py --targets demo --contexts 128 --dtypes float32 --json out.json
    python benchmarks/overhead.py --against FOLDER    # this version of the package beside the one in a folder

In one run all sides decode the same prompts with the same model, dtype and matmul precision, in turn. Times are those
of decoding alone: the prefill and the first cycle, in which the drafters read the prompt, are left out. benchmarks/
README.md says what is compared with what.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter, process_time

import torch
from common import (
    Sample,
    Script,
    StockScriptedCandidateGenerator,
    demo_prompts,
    prefilled_cache,
    random_prompts,
    scripted_speculator,
    stock_drafts_from,
    time_call,
    without_end,
)
from gpu_models import model_sizes, random_model, random_ring
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging
from versions import compare as compare_versions

from hf_specdec import demo, generate, load_speculator
from hf_specdec.call.output import CACHE_FIELD
from hf_specdec.machine import describe_environment


# Name: dtype of weights and activations, and the precision of float32 matrix products.
PRECISIONS = {
    "float32": (torch.float32, "highest"),
    "float32-medium": (torch.float32, "medium"),
    "bfloat16": (torch.bfloat16, "highest"),
}

CLOCKS = {"wall": perf_counter, "cpu": process_time}

# The embedded models have 2048 positions; the generated tokens must fit after the prompt.
DEMO_CONTEXT = 1536
NUM_DEMO_PROMPTS = 4

WARM_UP_TOKENS = 16

# The layer shapes of Qwen3-0.6B; with 8 layers about 190 M parameters.
RANDOM_SIZES = model_sizes(32000, 1024, 3072, 8, 16, 8, 128)

DRAFT_LENGTH = 5
LOOKUP_LENGTH = 10
LOOKUP_NGRAM = 2

PLAIN = "plain"


@dataclass(frozen=True)
class Case:
    """Setting that all sides of a comparison share."""

    target: str
    precision: str
    context: int
    batch_size: int

    def __str__(self) -> str:
        return f"{self.target}, {self.precision}, context {self.context}, batch {self.batch_size}"


@dataclass(frozen=True)
class Job:
    """One generate() call: prompts `(B, P)`, keys and values of all but their last tokens, and the text to come."""

    input_ids: torch.LongTensor
    max_new_tokens: int
    cache: DynamicCache | None = None
    script: Script | None = None

    def arguments(self) -> dict:
        """Fresh arguments of a call; the cache is copied here, before the clock runs."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": torch.ones_like(self.input_ids),
            "max_new_tokens": self.max_new_tokens,
            "do_sample": False,
            CACHE_FIELD: copy.deepcopy(self.cache),
        }


@dataclass(frozen=True)
class Side:
    """One way of decoding.

    Attributes:
        name (`str`): In the table.
        make (`Callable`): From a job a function with the arguments of `generate()`.
        rival (`str`, *optional*): The side of transformers that does the same.
        same_cycles (`bool`): The rival must take exactly as many cycles.
    """

    name: str
    make: Callable[[Job], Callable[..., torch.LongTensor]]
    rival: str | None = None
    same_cycles: bool = False


@dataclass
class Figures:
    """Figures of one side over the rounds. Milliseconds are per cycle, of the fastest round.

    Ratios are `[median, least, greatest]` over the rounds, each within one round.
    """

    side: str
    rival: str | None
    tokens_per_second: float
    median_tokens_per_second: float
    cycles: int
    tokens_per_cycle: float
    cycle_ms: float
    target_ms: float
    draft_ms: float
    outside_ms: float
    outside_share: float
    ratio_to_rival: list[float] | None
    ratio_to_plain: list[float]
    same_texts: int
    num_texts: int
    rounds: list[dict] = field(default_factory=list)


# --------------------------------------------------------------------------------------------------------------- sides


def demo_sides(target: PreTrainedModel, draft: PreTrainedModel, batch_size: int) -> list[Side]:
    lookup = {"num_speculative_tokens": LOOKUP_LENGTH, "prompt_lookup_min": 1, "prompt_lookup_max": LOOKUP_NGRAM}
    theirs_lookup = {"prompt_lookup_num_tokens": LOOKUP_LENGTH, "max_matching_ngram_size": LOOKUP_NGRAM}
    ngram = load_speculator(target, method="ngram")
    same_ngram = load_speculator(target, method="ngram", **lookup)
    draft_settings = {"num_speculative_tokens": DRAFT_LENGTH, "same_tokenizer": True}
    draft_model = load_speculator(target, method="draft_model", draft_model=draft, **draft_settings)
    plain = [Side(PLAIN, _always(target.generate)), Side("ours: none", _always(generate, target, spec_method="none"))]
    ours_ngram = Side("ours: ngram, default rule", _always(generate, target, assistant=ngram))
    ours_draft = Side("ours: draft model", _always(generate, target, assistant=draft_model))
    if batch_size > 1:
        return [*plain, ours_ngram, ours_draft]
    return [
        *plain,
        Side("transformers: prompt lookup", _always(target.generate, **theirs_lookup)),
        Side("ours: ngram, same rule", _always(generate, target, assistant=same_ngram), "transformers: prompt lookup"),
        Side(ours_ngram.name, ours_ngram.make, "transformers: prompt lookup"),
        Side("transformers: assistant model", _always(target.generate, assistant_model=draft)),
        Side(ours_draft.name, ours_draft.make, "transformers: assistant model"),
    ]


def scripted_sides(target: PreTrainedModel, batch_size: int) -> list[Side]:
    def ours(job: Job):
        return partial(generate, target, assistant=scripted_speculator(job.script, DRAFT_LENGTH))

    def theirs(job: Job):
        generator = StockScriptedCandidateGenerator(job.script, DRAFT_LENGTH)

        def run(**arguments):
            with stock_drafts_from(target, generator):
                return target.generate(prompt_lookup_num_tokens=DRAFT_LENGTH, **arguments)

        return run

    plain = [Side(PLAIN, _always(target.generate)), Side("ours: none", _always(generate, target, spec_method="none"))]
    if batch_size > 1:
        return [*plain, Side("ours: scripted", ours)]
    rival = Side("transformers: scripted", theirs)
    return [*plain, rival, Side("ours: scripted", ours, rival.name, same_cycles=True)]


def _always(function: Callable, *args, **kwargs) -> Callable[[Job], Callable]:
    return lambda job: partial(function, *args, **kwargs)


# ----------------------------------------------------------------------------------------------------------- measuring


class Bench:
    """Runs cases; models and prefilled caches are kept from case to case.

    Args:
        options (`argparse.Namespace`): Of the command line.
        console (`Console`): Where tables go.
    """

    def __init__(self, options: argparse.Namespace, console: Console):
        self.options, self.console = options, console
        self.results: list[dict] = []
        self.differences: list[str] = []

    def run(self) -> None:
        for target in self.options.targets:
            for dtype in dict.fromkeys(PRECISIONS[name][0] for name in self.options.dtypes):
                self._run_model(target, dtype)

    def _run_model(self, target_name: str, dtype: torch.dtype) -> None:
        if target_name == "demo":
            target, draft = without_end(demo.load_target(dtype)), _demo_draft(dtype)
        else:
            ring = random_ring(RANDOM_SIZES["vocab_size"])
            target, draft = random_model("llama", RANDOM_SIZES, ring, dtype, torch.device("cpu")), None
        caches: dict[int, DynamicCache] = {}
        for precision in (name for name in self.options.dtypes if PRECISIONS[name][0] == dtype):
            for context, batch_size in self._shapes(target_name):
                case = Case(target_name, precision, context, batch_size)
                jobs = self._demo_jobs(case) if draft is not None else [self._random_job(case, target, caches)]
                sides = scripted_sides(target, batch_size) if draft is None else demo_sides(target, draft, batch_size)
                with _matmul_precision(PRECISIONS[precision][1]):
                    self._run_case(case, target, sides, jobs)

    def _shapes(self, target_name: str) -> list[tuple[int, int]]:
        """Every context at batch size 1, the shortest one at all batch sizes."""
        contexts = sorted(set(self.options.contexts))
        if target_name == "demo":
            contexts = sorted({min(context, DEMO_CONTEXT) for context in contexts})
        batches = [(contexts[0], size) for size in sorted(set(self.options.batch_sizes))]
        return batches + [(context, 1) for context in contexts if (context, 1) not in batches]

    def _demo_jobs(self, case: Case) -> list[Job]:
        prompts = demo_prompts(max(case.batch_size, NUM_DEMO_PROMPTS), case.context)
        return [Job(rows, self.options.new_tokens) for rows in prompts.split(case.batch_size)]

    def _random_job(self, case: Case, target: PreTrainedModel, caches: dict) -> Job:
        prompts = random_prompts(case.batch_size, case.context, target.config.vocab_size)
        if case.context not in caches:
            with _matmul_precision("medium"):
                caches[case.context] = prefilled_cache(target, prompts[:1])
        cache = copy.deepcopy(caches[case.context])
        cache.batch_repeat_interleave(case.batch_size)
        return Job(prompts, self.options.new_tokens, cache)

    def _run_case(self, case: Case, target: PreTrainedModel, sides: list[Side], jobs: list[Job]) -> None:
        # What plain generate writes is the script, and warms it up.
        texts = [target.generate(**job.arguments()).tolist() for job in jobs]
        jobs = [replace(job, script=Script(text, target.config.vocab_size)) for job, text in zip(jobs, texts)]
        warm_up = replace(jobs[0], max_new_tokens=WARM_UP_TOKENS)
        for side in sides[1:]:
            side.make(warm_up)(**warm_up.arguments())
        rounds: list[dict[str, Sample]] = []
        for number in range(self.options.rounds):
            turn = number % len(sides)
            order = sides[turn:] + sides[:turn]
            rounds.append({side.name: _run_side(side, target, jobs, CLOCKS[self.options.clock]) for side in order})
        figures = [_figures(side, rounds, texts) for side in sides]
        self._check(case, sides, rounds, figures)
        self.results.append({"case": asdict(case), "sides": [asdict(side) for side in figures]})
        self.console.print(_case_table(case, figures))

    def _check(self, case: Case, sides: list[Side], rounds: list[dict[str, Sample]], figures: list[Figures]) -> None:
        """Notes sides that wrote another text, or took other cycles with the same drafts."""
        for side, found in zip(sides, figures):
            if found.same_texts < found.num_texts and PRECISIONS[case.precision][0] == torch.float32:
                self.differences.append(f"{case}: {side.name} differs in {found.num_texts - found.same_texts} texts")
            cycles = {sample[name].cycles for sample in rounds for name in (side.name, side.rival) if name}
            if side.same_cycles and len(cycles) > 1:
                self.differences.append(f"{case}: {side.name} and {side.rival} took {sorted(cycles)} cycles")


def _demo_draft(dtype: torch.dtype) -> PreTrainedModel:
    draft = without_end(AutoModelForCausalLM.from_pretrained(demo.drafter_path("draft_model"), dtype=dtype).eval())
    draft.generation_config.num_assistant_tokens = DRAFT_LENGTH
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


@contextmanager
def _matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _run_side(side: Side, target: PreTrainedModel, jobs: list[Job], clock: Callable[[], float]) -> Sample:
    return sum((time_call(side.make(job), target, clock, **job.arguments()) for job in jobs), Sample())


def _figures(side: Side, rounds: list[dict[str, Sample]], texts: list[list[list[int]]]) -> Figures:
    samples = [samples[side.name] for samples in rounds]
    best = max(samples, key=lambda sample: sample.tokens_per_second)
    per_cycle = 1000 / best.cycles
    # The round in which the fewest rows agree.
    same_texts = min(
        sum(row == right for found, text in zip(sample.texts, texts) for row, right in zip(found, text))
        for sample in samples
    )
    return Figures(
        side=side.name,
        rival=side.rival,
        tokens_per_second=best.tokens_per_second,
        median_tokens_per_second=statistics.median(sample.tokens_per_second for sample in samples),
        cycles=best.cycles,
        tokens_per_cycle=best.tokens / best.cycles,
        cycle_ms=best.seconds * per_cycle,
        target_ms=best.target_seconds * per_cycle,
        draft_ms=best.draft_seconds * per_cycle,
        outside_ms=best.outside_seconds * per_cycle,
        outside_share=best.outside_seconds / best.seconds,
        ratio_to_rival=_ratio(rounds, side.name, side.rival) if side.rival else None,
        ratio_to_plain=_ratio(rounds, side.name, PLAIN),
        same_texts=same_texts,
        num_texts=sum(map(len, texts)),
        rounds=[{key: value for key, value in asdict(sample).items() if key != "texts"} for sample in samples],
    )


def _ratio(rounds: list[dict[str, Sample]], name: str, other: str) -> list[float]:
    """Tokens per second of one side over those of another: median, least and greatest of the rounds."""
    ratios = [samples[name].tokens_per_second / samples[other].tokens_per_second for samples in rounds]
    return [statistics.median(ratios), min(ratios), max(ratios)]


# -------------------------------------------------------------------------------------------------------------- output


def _case_table(case: Case, figures: list[Figures]) -> Table:
    table = Table(title=str(case), title_justify="left")
    table.add_column("side", no_wrap=True)
    counts = ("tokens/s\n(median)", "cycles", "tokens/\ncycle")
    times = ("ms/\ncycle", "target\nms", "draft\nms", "outside\nms", "outside\n%")
    for column in (*counts, *times, "x transformers\n(range)", "x plain\n(range)", "same\ntexts"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in figures:
        table.add_row(
            row.side,
            f"{row.tokens_per_second:.1f} ({row.median_tokens_per_second:.1f})",
            str(row.cycles),
            f"{row.tokens_per_cycle:.2f}",
            f"{row.cycle_ms:.2f}",
            f"{row.target_ms:.2f}",
            f"{row.draft_ms:.2f}",
            f"{row.outside_ms:.2f}",
            f"{100 * row.outside_share:.0f}",
            _spread(row.ratio_to_rival),
            _spread(row.ratio_to_plain) if row.side != PLAIN else "",
            f"{row.same_texts}/{row.num_texts}",
        )
    return table


def _spread(ratio: list[float] | None) -> str:
    return "" if ratio is None else f"{ratio[0]:.2f} ({ratio[1]:.2f}-{ratio[2]:.2f})"


# ------------------------------------------------------------------------------------------------------------- command


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="other defaults, for about two minutes")
    parser.add_argument("--targets", nargs="+", choices=("demo", "random"), default=["demo", "random"])
    parser.add_argument("--contexts", nargs="+", type=int, help="tokens; 128 2048 8192")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(PRECISIONS))
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="at the shortest context; 1 4 16")
    parser.add_argument("--rounds", type=int, help="turns of all sides; 4")
    parser.add_argument("--new-tokens", type=int, help="tokens a row; 64")
    parser.add_argument("--threads", type=int, default=1, help="of torch; above 1 set OMP_WAIT_POLICY=PASSIVE as well")
    parser.add_argument(
        "--clock",
        choices=tuple(CLOCKS),
        default="wall",
        help="cpu: the process's own time, for one thread on a busy machine",
    )
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FOLDER",
        help="only compare this version with the one in a folder, such as a checkout of an earlier commit, by the "
        "processor time of the same calls; --rounds (10) and --new-tokens apply",
    )
    options = parser.parse_args(arguments)
    quick = {"contexts": [128, 2048], "dtypes": ["float32", "bfloat16"], "batch_sizes": [1, 4], "rounds": 2}
    full = {"contexts": [128, 2048, 8192], "dtypes": list(PRECISIONS), "batch_sizes": [1, 4, 16], "rounds": 4}
    if options.against is not None:
        full["rounds"], options.clock = 10, "cpu"
    defaults = {**quick, "new_tokens": 32} if options.quick else {**full, "new_tokens": 64}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.clock == "cpu" and options.threads > 1:
        parser.error("--clock cpu adds up the time of all threads; use it with --threads 1")
    if options.rounds < 1 or options.new_tokens < 24:
        parser.error(f"--rounds 1 and --new-tokens 24 are the least, got {options.rounds} and {options.new_tokens}")
    if "demo" in options.targets and options.new_tokens > 2048 - DEMO_CONTEXT:
        parser.error(f"--new-tokens {2048 - DEMO_CONTEXT} is the most that fits the demo target")
    return options


def environment(options: argparse.Namespace) -> dict:
    found = describe_environment("cpu", torch.float32)
    # These differ from case to case.
    del found["dtype"], found["float32_matmul_precision"]
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    return {**found, "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"), "options": settings}


def main() -> None:
    options = parse_options()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    console = Console(width=160)
    began = perf_counter()
    if options.threads > 1 and os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        console.print("Set OMP_WAIT_POLICY=PASSIVE: waiting threads that spin make a busy machine many times slower.")
    described = environment(options)
    versions = ", ".join(f"{name} {described[name]}" for name in ("torch", "transformers", "hf_specdec"))
    console.print(
        f"{described['cpu']}, {options.threads} of {described['cores']} cores, load {described['load_average']}; "
        f"{versions}. {options.rounds} rounds, {options.new_tokens} tokens a row, {options.clock} time; milliseconds "
        "are those of the fastest round."
    )
    if options.against is not None:
        found = compare_versions(options.against, options.rounds, options.new_tokens, console)
        if options.json:
            rows = [asdict(row) for row in found]
            options.json.write_text(json.dumps({"environment": described, "versions": rows}, indent=2))
        return
    bench = Bench(options, console)
    bench.run()
    seconds = perf_counter() - began
    console.print(f"{seconds:.0f} seconds in all.")
    if options.json:
        report = {"environment": described, "results": bench.results}
        options.json.write_text(json.dumps({**report, "differences": bench.differences, "seconds": seconds}, indent=2))
    if bench.differences:
        raise SystemExit("\n".join(bench.differences))


if __name__ == "__main__":
    main()
