"""A cycle on a GPU: what it takes, part by part, beside the limit of the memory and beside transformers.

    python benchmarks/gpu.py --smoke                          # is everything right, in 90 seconds
    python benchmarks/gpu.py --first                          # the figures that matter, in 8 minutes
    python benchmarks/gpu.py --json gpu.json --markdown gpu.md
    python benchmarks/gpu.py --sizes qwen3-8b --batch-sizes 1 --max-minutes 8 --json gpu.json
    python benchmarks/gpu.py --sizes tiny                     # everything once, small, on a CPU too
    python benchmarks/gpu.py --read gpu-1.json gpu-2.json --markdown gpu.md

First what must be right (checks), then the cycles of drafts of given shapes (verification), then whole calls of every
method beside those of transformers (decoding). Targets and drafters are of random weights, made on the device. Every
section is shown when it is done and written to the files, so that a run that is cut off leaves its figures.
benchmarks/README.md says how it is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from common import MarkingStreamer
from gpu_checks import check_kernels, check_texts
from gpu_clocks import Stopwatch, copy_bandwidth, decoding_part, measure_parts
from gpu_models import (
    DRAFTERS,
    GREEDY,
    LOOKUP_LENGTH,
    LOOKUP_NGRAM,
    SAMPLED,
    SIZES,
    Drafter,
    Models,
    Text,
    bytes_of_token,
    bytes_of_weights,
    no_drafts,
    random_nodes,
    ring_text,
)
from gpu_report import (
    NO_DRAFTS,
    PLAIN,
    Grid,
    check_grid,
    closing_lines,
    cycle_grid,
    find_aims,
    grids,
    heading,
    joined,
    save,
    speed_grid,
    verification_grid,
)
from rich.console import Console
from transformers.utils import logging as transformers_logging

from hf_specdec import Speculator, generate, record
from hf_specdec.drafts import TokenTree
from hf_specdec.drafts.static import prior_accuracies
from hf_specdec.errors import MissingDependencyError
from hf_specdec.kernels._triton import HAS_TRITON, triton
from hf_specdec.loader import forget_speculators
from hf_specdec.machine import describe_environment, num_threads


SECTIONS = ("checks", "verification", "decoding")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Cycles of each shape of draft.
NUM_CYCLES = 12

# Tokens of the calls in which the device is held up before every part.
HELD_TOKENS = 48

COMPILED = "transformers: static cache, compiled"
LOOKUP = "transformers: prompt lookup"
ASSISTED = "transformers: assistant model"

# Values of options that are left out. A small model on a CPU is there to see that everything runs.
FULL = {
    "batch_sizes": [1, 4, 16],
    "contexts": [512, 8192],
    "nodes": [1, 4, 8, 16, 32, 64],
    "new_tokens": 128,
    "check_tokens": 48,
    "rounds": 3,
}
TINY = {
    "batch_sizes": [1, 2],
    "contexts": [64],
    "nodes": [1, 8],
    "new_tokens": 24,
    "check_tokens": 8,
    "rounds": 1,
}


# --------------------------------------------------------------------------------------------------------------- sides


@dataclass
class Side:
    """One way of decoding.

    Attributes:
        name (`str`): In the tables.
        make (`Callable`): Makes what drafts, if anything does; called once.
        arguments (`dict`): Arguments of transformers' `generate()` beyond the common ones.
        drafter (`Drafter`, *optional*): Of a side of ours that drafts.
        is_exact (`bool`): It must write the text of plain generation.
        speculator (`Speculator`, *optional*): What `make` has made, for sides of ours.
        parts (`dict`, *optional*): What its cycles consist of, see [`measure_parts`].
        samples (`list[Sample]`): One a round.
    """

    name: str
    make: Callable[[], Any] = lambda: None
    arguments: dict[str, Any] = field(default_factory=dict)
    drafter: Drafter | None = None
    is_exact: bool = True
    speculator: Speculator | None = None
    parts: dict[str, float | None] | None = None
    samples: list[Sample] = field(default_factory=list)


@dataclass
class Sample:
    """One call: its decoding part, without prefill and first cycle, and what it wrote.

    Attributes:
        tokens (`int`), seconds (`float`): Of the decoding part.
        same_rows (`int`): Rows with the text that is known to be right.
        tokens_per_cycle, nodes (`float`, *optional*): Tokens committed and nodes drafted in a cycle of a row; `None`
            where nothing was counted.
        attention, graphs (`str`): What computed the attention of the last verification, and whether graphs ran.
        peak_bytes (`int`, *optional*): Most memory in use on the GPU.
    """

    tokens: int
    seconds: float
    same_rows: int
    tokens_per_cycle: float | None
    nodes: float | None
    attention: str
    graphs: str
    peak_bytes: int | None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def is_side(name: str, starts: Sequence[str]) -> bool:
    """Tells sides whose names begin so, "ours: " left out; without any all do."""
    return not starts or name.startswith(tuple(starts)) or name.removeprefix("ours: ").startswith(tuple(starts))


def make_sides(models: Models, batch_size: int, is_wanted: Callable[[str], bool]) -> list[Side]:
    """All ways of decoding a batch, plain `generate()` first and what has to be compiled last."""
    sides = [Side(PLAIN)]
    if batch_size == 1:
        # Their assisted generation takes one row.
        rule = {"prompt_lookup_num_tokens": LOOKUP_LENGTH, "max_matching_ngram_size": LOOKUP_NGRAM}
        assistant = Side(ASSISTED)
        assistant.make = lambda: assistant.arguments.update(assistant_model=models.network("draft_model"))
        sides += [Side(LOOKUP, arguments=rule), assistant]
    sides.append(Side(NO_DRAFTS, make=no_drafts))
    for drafter in DRAFTERS:
        make, is_exact = partial(models.speculator, drafter), drafter.length is None
        sides.append(Side(f"ours: {drafter.name}", make, drafter=drafter, is_exact=is_exact))
    sides.append(Side(COMPILED, arguments={"cache_implementation": "static"}))
    # Without plain generation there is nothing to compare with.
    return [side for side in sides if side.name == PLAIN or is_wanted(side.name)]


def run(models: Models, side: Side, text: Text, new_tokens: int) -> Sample:
    """One call."""
    call, device = call_of(models, side.speculator, text.prompts, new_tokens, **side.arguments), models.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with record() as recorded:
        streamer = MarkingStreamer(recorded, perf_counter)
        output = call(streamer=streamer)
    stats = recorded.calls[-1].stats if recorded.calls else None
    written = output[:, text.prompts.shape[1] :].cpu()
    return Sample(
        *decoding_part(streamer.marks, len(text.prompts)),
        same_rows=sum(torch.equal(row, right) for row, right in zip(written, text.expected[:, :new_tokens])),
        tokens_per_cycle=stats and stats.mean_acceptance_length,
        nodes=stats and stats.num_draft_tokens / max(stats.num_row_cycles, 1),
        attention=stats.attention if stats else "",
        graphs=stats.graphs if stats else "",
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )


def call_of(models: Models, speculator: Speculator | None, prompts: torch.LongTensor, new_tokens: int, **arguments):
    """A call of `generate()`, to be made; without a speculator transformers' own."""
    prompts = prompts.to(models.device)
    common = {
        "input_ids": prompts,
        "attention_mask": torch.ones_like(prompts),
        "max_new_tokens": new_tokens,
        **models.decoding,
    }
    return partial(generate, models.target, **common, **arguments, assistant=speculator)


# ----------------------------------------------------------------------------------------------------------- measuring


class Bench:
    """Runs the sections; the report is written whenever something has been added.

    Args:
        options (`argparse.Namespace`): Of the command line.
        console (`Console`): Where tables go.
    """

    def __init__(self, options: argparse.Namespace, console: Console):
        self.options, self.console = options, console
        self.device, self.dtype = torch.device(options.device), DTYPES[options.dtype]
        self.began = perf_counter()
        self.report: dict[str, Any] = {
            "environment": environment(options, self.device, self.dtype),
            "checks": [],
            "bandwidth": None,
            "verification": [],
            "decoding": [],
            "not_run": [],
            "failures": [],
        }

    def run(self) -> None:
        self.report["bandwidth"] = copy_bandwidth(self.device)
        self.console.print(f"Copy bandwidth: {self.report['bandwidth'] / 1e9:.0f} GB/s, bytes read and written.")
        if "checks" in self.options.sections:
            self._check()
        self.watch = Stopwatch(self.device)
        for size in self.options.sizes:
            if {"verification", "decoding"} & set(self.options.sections):
                self._succeeds(size, partial(self._measure_size, size))

    def _measure_size(self, size: str) -> None:
        if self._is_late(size):
            return
        decoding = SAMPLED if self.options.sampled else GREEDY
        models = Models(SIZES[size], self.dtype, self.device, decoding)
        if "verification" in self.options.sections:
            for context, batch_size in self._shapes():
                self._verify(size, models, context, batch_size)
        if "decoding" in self.options.sections:
            for batch_size in self.options.batch_sizes:
                self._decode(size, models, min(self.options.contexts), batch_size)
        forget_speculators(models.target)
        del models
        gc.collect()
        if self.device.type == "cuda":
            torch.compiler.reset()
            torch.cuda.empty_cache()

    def _shapes(self) -> list[tuple[int, int]]:
        """The shortest context at all batch sizes, the others at the smallest one."""
        contexts, batch_sizes = sorted(self.options.contexts), sorted(self.options.batch_sizes)
        return [(contexts[0], size) for size in batch_sizes] + [(context, batch_sizes[0]) for context in contexts[1:]]

    def _is_late(self, what: str) -> bool:
        """Tells if the time is up, and notes what is not begun for that reason."""
        limit = self.options.max_minutes
        is_late = limit is not None and perf_counter() - self.began > 60 * limit
        if is_late:
            self.report["not_run"].append(what)
        return is_late

    def _succeeds(self, what: str, action: Callable[[], None]) -> bool:
        """Runs an action, and tells if it ended without an error; errors are noted, and cost no other figures."""
        try:
            action()
        except MissingDependencyError as error:
            self.report["not_run"].append(f"{what}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, the time on the device is paid for
            self.report["failures"].append(f"{what}: {type(error).__name__}: {error}")
            self.console.print(f"[red]{what} failed[/red]", highlight=False)
            self.console.print(traceback.format_exc(), markup=False, highlight=False)
        else:
            return True
        return False

    def _check(self) -> None:
        def add(checks: Iterator) -> None:
            for check in checks:
                self.report["checks"].append(asdict(check))
                if check.is_right is False:
                    self.report["failures"].append(f"{check.what}: {check.detail}")

        self._succeeds("checks of kernels", lambda: add(check_kernels(self.device)))
        self._succeeds("checks of texts", lambda: add(check_texts(self.device, self.options.check_tokens)))
        self._show(check_grid(self.report["checks"]))

    # Drafts of given shapes

    def _verify(self, size: str, models: Models, context: int, batch_size: int) -> None:
        where = f"{size}, context {context}, batch {batch_size}"
        case = {**self._case(size, models, context, batch_size), "rows": []}
        self.report["verification"].append(case)
        vocab_size = models.target.config.vocab_size
        for name, shape in draft_shapes(self.options.nodes):
            what = f"verification, {where}, {name}"
            speculator = random_nodes(shape, vocab_size) if shape else no_drafts()
            # Near the end of a text drafts are shorter.
            new_tokens = NUM_CYCLES + (shape.max_depth if shape else 0)
            text = ring_text(models.ring, batch_size, context, new_tokens)
            side = Side(name, speculator=speculator)

            def measure(side=side, text=text, new_tokens=new_tokens, shape=shape) -> None:
                warm_up = run(models, side, text, new_tokens)
                call = call_of(models, side.speculator, text.prompts, new_tokens)
                parts = measure_parts(call, side.speculator, models.target, self.watch, new_tokens)
                nodes = 1 + (len(shape) if shape else 0)
                figures = self._beside_the_limit(parts, case, nodes, new_tokens)
                ran = {"attention": warm_up.attention, "graphs": warm_up.graphs}
                case["rows"].append({"shape": side.name, "nodes": nodes, **ran, **figures})

            if not self._is_late(what) and self._succeeds(what, measure):
                self.save()
        if case["rows"]:
            self._show(verification_grid(case))

    def _case(self, size: str, models: Models, context: int, batch_size: int) -> dict[str, Any]:
        return {
            "size": size,
            "context": context,
            "batch_size": batch_size,
            "weight_bytes": bytes_of_weights(models.target),
            "token_bytes": bytes_of_token(models.target),
        }

    def _beside_the_limit(self, parts: dict, case: dict, nodes: float, new_tokens: int) -> dict[str, Any]:
        """Parts of a cycle, with the time to read weights and cache once, and the weights alone."""
        milliseconds = 1000 / self.report["bandwidth"]
        slots = case["context"] + new_tokens / 2 + nodes
        read = case["weight_bytes"] + case["batch_size"] * slots * case["token_bytes"]
        limit, weights = read * milliseconds, case["weight_bytes"] * milliseconds
        ratios = {"to_limit": parts["target"] / limit, "to_weights": parts["target"] / weights}
        return {**parts, "limit": limit, "weights": weights, **ratios}

    # Whole calls

    def _decode(self, size: str, models: Models, context: int, batch_size: int) -> None:
        where = f"decoding, {size}, context {context}, batch {batch_size}"
        new_tokens = self.options.new_tokens
        text = ring_text(models.ring, batch_size, context, new_tokens)
        case = {**self._case(size, models, context, batch_size), "new_tokens": new_tokens, "rows": []}
        self.report["decoding"].append(case)
        sides: list[Side] = []

        def update() -> None:
            case["rows"] = [self._decoding_row(side, sides[0], case) for side in sides]
            self.save()

        for side in make_sides(models, batch_size, self._is_wanted):
            what = f"{where}, {side.name}"
            if not self._is_late(what) and self._succeeds(what, partial(self._begin, models, side, text, where)):
                sides.append(side)
                update()
        for number in range(1, self.options.rounds):
            turn = number % max(len(sides), 1)
            for side in sides[turn:] + sides[:turn]:
                what = f"{where}, {side.name}, round {number + 1}"
                if not self._is_late(what):
                    self._succeeds(what, partial(self._sample, models, side, text))
            update()
        for side in sides:
            self._check_text(where, side, batch_size)
        if sides:
            self._show(speed_grid(case), cycle_grid(case))

    def _is_wanted(self, name: str) -> bool:
        return is_side(name, self.options.sides) and not (name == COMPILED and self.options.no_compile)

    def _begin(self, models: Models, side: Side, text: Text, where: str) -> None:
        """Makes what drafts, warms it up, takes the cycles of a side of ours apart, and does the first round."""
        side.speculator = side.make()
        run(models, side, text, self.options.new_tokens)
        if side.speculator is not None:
            call = call_of(models, side.speculator, text.prompts, self.options.new_tokens)
            held_tokens = min(HELD_TOKENS, self.options.new_tokens)
            side.parts = measure_parts(call, side.speculator, models.target, self.watch, held_tokens)
            if self.options.profile is not None:
                self._profile(call, f"{where}, {side.name}")
        self._sample(models, side, text)

    def _sample(self, models: Models, side: Side, text: Text) -> None:
        side.samples.append(run(models, side, text, self.options.new_tokens))

    def _profile(self, call: Callable, name: str) -> None:
        self.options.profile.mkdir(parents=True, exist_ok=True)
        with torch.profiler.profile() as profile:
            call(max_new_tokens=min(16, self.options.new_tokens))
        words = "".join(letter if letter.isalnum() else " " for letter in name).split()
        profile.export_chrome_trace(str(self.options.profile / f"{'-'.join(words)}.json"))

    def _decoding_row(self, side: Side, plain: Side, case: dict) -> dict[str, Any]:
        speeds = [sample.tokens_per_second for sample in side.samples]
        last = side.samples[-1]
        # A round in which only one of them was measured says nothing about their ratio.
        pairs = zip(speeds, plain.samples) if plain.name == PLAIN else ()
        ratios = [speed / other.tokens_per_second for speed, other in pairs]
        row = {
            "side": side.name,
            "tokens_per_second": statistics.median(speeds),
            "to_plain": [statistics.median(ratios), min(ratios), max(ratios)] if ratios else None,
            "rounds": len(speeds),
            "tokens_per_cycle": last.tokens_per_cycle,
            "length": side.drafter and side.drafter.length,
            "source": side.drafter and side.drafter.source,
            "nodes": last.nodes,
            "same_rows": last.same_rows if side.is_exact else None,
            "attention": last.attention,
            "graphs": last.graphs,
            "peak_bytes": last.peak_bytes,
        }
        if side.parts is not None:
            row["parts"] = self._beside_the_limit(side.parts, case, 1 + last.nodes, case["new_tokens"])
        return row

    def _check_text(self, where: str, side: Side, batch_size: int) -> None:
        same = min(sample.same_rows for sample in side.samples)
        if side.is_exact and same < batch_size:
            self.report["failures"].append(f"{where}, {side.name}: {batch_size - same} of {batch_size} texts differ")

    # Output

    def _show(self, *grids: Grid) -> None:
        for grid in grids:
            self.console.print(grid.rich())
        self.save()

    def save(self) -> None:
        self.report["seconds"] = perf_counter() - self.began
        self.report["aims"] = [asdict(aim) for aim in find_aims(self.report)]
        save(self.report, self.options)


def draft_shapes(nodes: Sequence[int]) -> Iterator[tuple[str, TokenTree | None]]:
    """Chains, and from eight nodes on trees, by how many nodes are verified; `None`: the anchor alone."""
    for count in nodes:
        if count == 1:
            yield "none", None
            continue
        yield "chain", TokenTree.chain(count - 1)
        if count >= 8:
            yield "tree", TokenTree.from_accuracies(prior_accuracies(7, 10), count - 1)


def environment(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    found = describe_environment(device, dtype)
    found["triton"] = triton.__version__ if HAS_TRITON else None
    found["cuda"] = torch.version.cuda
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu_memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count}
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    return {**found, "options": settings}


# ------------------------------------------------------------------------------------------------------------- command


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--smoke", action="store_true", help="is everything right: 90 seconds at most on an H200")
    kinds.add_argument("--first", action="store_true", help="the figures that matter, at batch 1, in 8 minutes")
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), help="all but tiny, the most telling first")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument(
        "--sides",
        nargs="+",
        default=[],
        help="only these of the decoding section, by how their names begin: transformers, ngram, eagle3, ...",
    )
    parser.add_argument("--sampled", action="store_true", help="temperature 0.6 and top-p 0.9 in the place of greedy")
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="1 4 16")
    parser.add_argument(
        "--contexts", nargs="+", type=int, help="tokens of a prompt; 512 8192, all at the least batch size"
    )
    parser.add_argument("--nodes", nargs="+", type=int, help="verified nodes, 1 to 64; 1 4 8 16 32 64")
    parser.add_argument("--new-tokens", type=int, help="tokens a row of the decoding section; 128")
    parser.add_argument("--check-tokens", type=int, help="tokens of the texts that are checked; 48")
    parser.add_argument("--rounds", type=int, help="turns of all sides; 3")
    parser.add_argument("--max-minutes", type=float, help="begin nothing after this time")
    parser.add_argument("--no-compile", action="store_true", help="leave out what transformers compiles first")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="bfloat16; float32 on a CPU")
    parser.add_argument("--json", type=Path, help="also write all figures to this file, whenever there are more")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    parser.add_argument("--profile", type=Path, help="also write a trace of each side of ours to this folder")
    parser.add_argument("--read", nargs="+", type=Path, help="measure nothing: show the figures of these files")
    options = parser.parse_args(arguments)
    is_cpu = torch.device(options.device).type == "cpu"
    options.dtype = options.dtype or ("float32" if is_cpu else "bfloat16")
    on_gpu = ["llama-8b"] if options.first else ["qwen3-8b", "llama-1b", "llama-8b", "qwen3-1.7b"]
    options.sizes = options.sizes or (["tiny"] if is_cpu else on_gpu)
    for name, value in (TINY if options.sizes == ["tiny"] else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if is_cpu and options.sizes != ["tiny"]:
        parser.error(f"{', '.join(options.sizes)} on a CPU would take hours; there is --sizes tiny")
    names = (PLAIN, COMPILED, LOOKUP, ASSISTED, NO_DRAFTS, *(drafter.name for drafter in DRAFTERS))
    unknown = [start for start in options.sides if not any(is_side(name, [start]) for name in names)]
    if unknown:
        parser.error(f"no side is called '{unknown[0]}...'; there are: {'; '.join(names)}")
    missing = [path for path in options.read or () if not path.is_file()]
    if missing:
        parser.error(f"--read takes files that earlier runs have written, and there is no {missing[0]}")
    if not is_cpu and not torch.cuda.is_available():
        parser.error(f"there is no GPU for --device {options.device}; on a CPU there is --sizes tiny")
    if not all(1 <= count <= 64 for count in options.nodes):
        parser.error(f"--nodes takes 1 to 64, got {options.nodes}")
    if options.rounds < 1 or options.new_tokens < 16 or min(options.batch_sizes) < 1 or min(options.contexts) < 16:
        parser.error("the least are --rounds 1, --new-tokens 16, --batch-sizes 1, --contexts 16")
    return options


def main() -> None:
    options = parse_options()
    console = Console(width=190)
    if options.read is not None:
        report = joined([json.loads(path.read_text()) for path in options.read])
        for grid in grids(report):
            console.print(grid.rich())
        save(report, options)
        console.print("\n".join(closing_lines(report)), markup=False, highlight=False)
        return
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    # That synthetic acceptance makes no sense of the text is known here.
    logging.getLogger("hf_specdec").setLevel(logging.ERROR)
    if options.smoke or options.first:
        # It imports this module.
        import gpu_first

        raise SystemExit(gpu_first.main(options, console))
    bench = Bench(options, console)
    console.print(heading(bench.report), highlight=False)
    with num_threads(1 if bench.device.type == "cpu" else None):
        bench.run()
    bench.save()
    console.print("\n".join(closing_lines(bench.report)), markup=False, highlight=False)
    if bench.report["failures"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
