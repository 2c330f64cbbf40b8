"""Is everything right on a GPU, and what does a cycle take there? One command, which has its own order.

    python benchmarks/gpu.py --smoke                       # is everything right: 90 seconds on an H200
    python benchmarks/gpu.py --max-minutes 9               # that, then figures, the most telling first
    python benchmarks/gpu.py --max-minutes 9 --resume      # goes on with what was left out for want of time
    python benchmarks/gpu.py --parts decoding "batch 1: eagle3" --sampled --json sampled.json
    python benchmarks/gpu.py --device cpu                  # everything once, small

A text of every method comes first (`--smoke` goes on with the tests of kernels, graphs and waits), then the speeds of
all ways of decoding with the parts of their cycles, beside plain generate(), the fastest way of transformers and our
loop without drafts, then what they consist of, at last texts and tests in full. Targets and drafters are of random
weights, made on the device. A part that fails costs no other: where it leaves the GPU unusable for this process, as an
access to wrong memory does, another process goes on after it. The file is written after every part. README.md says how
it is measured.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from common import CONSOLE, NONE, PLAIN, Row, beside, show, write_report
from gpu_checks import check_text, drafts, target_and_batches, ways_through_a_model
from gpu_clocks import Stopwatch, copy_bandwidth, measure_parts
from gpu_kernels import attention, drawn_tokens, products
from gpu_models import (
    ASSISTED,
    COMPILED,
    DRAFTERS,
    GREEDY,
    LOOKUP,
    SAMPLED,
    SIZES,
    Models,
    Text,
    bytes_of_token,
    bytes_of_weights,
    call_of,
    draft_shapes,
    make_sides,
    random_nodes,
    ring_text,
    run,
)
from transformers.utils import logging as transformers_logging

from hf_specdec import record
from hf_specdec.drafts import TokenTree
from hf_specdec.errors import MissingDependencyError
from hf_specdec.kernels import launching, projections
from hf_specdec.kernels._triton import HAS_TRITON, triton
from hf_specdec.machine import describe_environment, num_threads
from hf_specdec.target import graphs
from hf_specdec.target.graphs import CapturedForward, forget_graphs


PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
LATE = "the time was up"
# Exit code beside 0 and 1: parts were left out because the time was up.
EXIT_INCOMPLETE = 3

# The part that every process needs for itself.
MODELS = "models"

# Values of options that are left out. A small model on a CPU is there to see that everything runs.
FULL = {"size": "llama-8b", "batch_sizes": [1, 4, 16], "contexts": [512, 8192], "new_tokens": 128}
TINY = {"size": "tiny", "batch_sizes": [1, 2], "contexts": [64], "new_tokens": 24}
NODES = {"full": (1, 4, 8, 16, 32, 64), "tiny": (1, 8)}

# Ways of decoding, the most telling first; the others follow.
FIRST_SIDES = (PLAIN, NONE, ASSISTED, "eagle3, tree of 59", "eagle3, chain of 3", "dflash, block of 16", "ngram")
LAST_SIDES = tuple(drafter.name for drafter in DRAFTERS if drafter.name not in FIRST_SIDES) + (LOOKUP, COMPILED)

SMOKE_TOKENS, TEXT_TOKENS = 24, 48
# Calls that are timed, cycles of each shape of draft, and tokens of calls in which the device is held up.
ROUNDS, NUM_CYCLES, HELD_TOKENS = 3, 12, 48

# Verified nodes of the forward whose kernels are looked at, and drafts that run as graphs.
PROFILED_NODES, TOP_KERNELS = 16, 20
PROFILED_DRAFTS = ("eagle, tree of 59", "eagle3, tree of 59", "eagle3, chain of 3", "dflash, block of 16")
PROFILED_DRAFTS += ("draft_model, chain of 5",)

# What the kernels of a forward may do in the place of the usual: attributes, and what they are.
_takes = projections.takes_linears
WAYS: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "usual": (),
    "kernels begin early": ((launching, "LAUNCHES_EARLY", True),),
    "norms apart from products": ((projections, "can_norm", lambda norm: False),),
    "torch's products where one is alone": (
        (projections, "takes_linears", lambda linears: len(linears) > 1 and _takes(linears)),
    ),
}
WAYS_NODES, WAYS_ROUNDS = (1, PROFILED_NODES, 60), 12

# Its rows are those of the table that the part's name begins with, up to a comma or colon.
Part = tuple[str, Callable[[], list[Row]]]


class SkippedError(Exception):
    """A part cannot be run here, and why."""


class Run:
    """Runs parts, and keeps what became of each, and the figures that they return."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.device = options, torch.device(options.device)
        self.began = perf_counter() - options.spent
        self.environment = describe_environment(self.device, getattr(torch, options.dtype))
        self.environment |= {"triton": triton.__version__ if HAS_TRITON else None, "cuda": torch.version.cuda}
        self.parts: list[Row] = []
        self.rows: list[Row] = []
        if options.resume:
            before = json.loads(options.json.read_text(encoding="utf-8"))
            self.parts = [part for part in before["parts"] if part["part"] != MODELS and part.get("detail") != LATE]
            self.rows = [row for row in before["rows"] if row["table"] != MODELS]

    def run(self, parts: Iterator[Part]) -> int:
        """All parts in turn that are not done; the exit code."""
        done = {part["part"] for part in self.parts}
        for name, part in parts:
            is_lost = name not in done and not self._run_part(name, part) and is_unusable(self.device)
            # The models would be made, and the device lost, again and again.
            if is_lost and name != MODELS:
                spent = str(perf_counter() - self.began)
                os.execv(sys.executable, [sys.executable, *sys.argv, "--resume", "--spent", spent])
        found = {
            status: [part for part in self.parts if part["status"] == status] for status in (PASSED, FAILED, SKIPPED)
        }
        is_late = any(part["detail"] == LATE for part in found[SKIPPED])
        exit_code = 1 if found[FAILED] else EXIT_INCOMPLETE if is_late else 0
        self.save(exit_code)
        show([row for row in self.rows if row["table"] not in ("texts", "tests")])
        told = ", ".join(f"{len(parts)} {status}" for status, parts in found.items())
        CONSOLE.print(f"{told}, in {perf_counter() - self.began:.0f} s; written to {self.options.json}")
        return exit_code

    def _run_part(self, name: str, part: Callable[[], list[Row]]) -> bool:
        """Runs a part and notes what it has found; whether it has not failed."""
        outcome: Row = {"part": name, "status": PASSED}
        began = perf_counter()
        if began - self.began > 60 * self.options.max_minutes:
            outcome |= {"status": SKIPPED, "detail": LATE}
        else:
            try:
                table = name.replace(":", ",").partition(",")[0]
                self.rows += [{"table": table, **row} for row in part()]
            except (SkippedError, MissingDependencyError) as reason:
                outcome |= {"status": SKIPPED, "detail": str(reason)}
            except Exception as error:  # noqa: BLE001 - whatever it is, the other parts are wanted
                outcome |= {"status": FAILED, "detail": f"{type(error).__name__}: {error}"[:2000]}
                outcome["traceback"] = traceback.format_exc()[-6000:]
        outcome["seconds"] = perf_counter() - began
        self.parts.append(outcome)
        compare([row for row in self.rows if row["table"] == "decoding"])
        self.save()
        told = f"{outcome['status']:8}{outcome['seconds']:7.1f} s  {name}  {outcome.get('detail', '')[:300]}"
        CONSOLE.print(told, markup=False, highlight=False)
        return outcome["status"] != FAILED

    def save(self, exit_code: int | None = None) -> None:
        facts = {"seconds": perf_counter() - self.began, "exit_code": exit_code, "parts": self.parts}
        write_report(self.options.json, self.rows, self.environment, **facts)


def compare(rows: list[Row]) -> None:
    """Adds to rows of speeds how they compare with the baselines, as far as these have been measured."""
    for row in rows:
        same = [other for other in rows if other["batch_size"] == row["batch_size"]]
        seconds = {other["side"]: [1 / other["tokens_per_second"]] for other in same}
        row |= {name: ratios and ratios[0] for name, ratios in beside(row["side"], seconds).items()}


def is_unusable(device: torch.device) -> bool:
    """Tells if nothing can be computed on a device any more, because something has failed there before."""
    try:
        return torch.ones(1, device=device).add(1).item() != 2
    except (AssertionError, RuntimeError):
        return True


# --------------------------------------------------------------------------------------------------------------- parts


def all_parts(options: argparse.Namespace) -> Iterator[Part]:
    """The parts that are asked for, in their order."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    # A tree where the method has one.
    methods = {name.partition(",")[0]: settings for name, settings in drafts().items()}
    parts: list[Part] = [
        (f"texts, quick: {method}", partial(text, method, settings, device, SMOKE_TOKENS, is_quick=True))
        for method, settings in methods.items()
    ]
    if options.smoke:
        parts.append(("tests, smoke", partial(run_tests, device, "gpu and smoke", "tests")))
    else:
        parts += figure_parts(Figures(options, device), options)
        parts += [
            ("attention", partial(attention, device, dtype)),
            ("products", partial(products, device, dtype)),
            ("drawn tokens", partial(drawn_tokens, device, dtype)),
            *text_parts(device),
            ("tests, kernels", partial(run_tests, device, "gpu and not slow", "tests/kernels")),
        ]
    for name, part in parts:
        if not options.parts or name == MODELS or any(word in name for word in options.parts):
            yield name, part


def text_parts(device: torch.device) -> Iterator[Part]:
    """All shapes of all methods, by all ways through a model, on several prompts."""
    for way, (context, further) in ways_through_a_model(device).items():
        for name, settings in drafts().items():
            yield (
                f"texts, {way}: {name}",
                partial(text, name, settings | further, device, TEXT_TOKENS, context=context),
            )


def run_tests(device: torch.device, marks: str, folder: str) -> list[Row]:
    """Runs tests of this repository in a process of its own: of kernels beside references, graphs, and waits."""
    if device.type != "cuda":
        raise SkippedError("no GPU")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, folder]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=400)
    if done.returncode:
        raise AssertionError((done.stdout + done.stderr)[-1500:])
    return [{"tests": f"{folder}, {marks}", "result": done.stdout.strip().rpartition("\n")[2]}]


def text(
    name: str,
    settings: dict[str, Any],
    device: torch.device,
    tokens: int,
    is_quick: bool = False,
    context: Callable = nullcontext,
) -> list[Row]:
    target, batches = target_and_batches(device, tokens, is_quick)
    with context():
        return [check_text(name, target, settings, batches)]


# ------------------------------------------------------------------------------------------------------------- figures


def figure_parts(figures: Figures, options: argparse.Namespace) -> list[Part]:
    """Speeds of the ways of decoding, then what they consist of, then larger batches and contexts."""
    nodes = NODES["tiny" if options.size == "tiny" else "full"]
    context, *contexts = options.contexts
    size, *sizes = options.batch_sizes

    def decoding(sides: Sequence[str], size: int) -> list[Part]:
        return [(f"decoding, batch {size}: {side}", partial(figures.decode, side, size)) for side in sides]

    def verification(context: int, size: int) -> list[Part]:
        where = f"verification, context {context}, batch {size}"
        shapes = draft_shapes(nodes)
        return [(f"{where}: {name}", partial(figures.verify, name, shape, context, size)) for name, shape in shapes]

    return [
        (MODELS, figures.make),
        *decoding(FIRST_SIDES, size),
        *verification(context, size),
        ("kernels of a verification", figures.kernels),
        ("ways of a forward", figures.ways),
        *((f"kernels of a draft: {side}", partial(figures.draft_kernels, side)) for side in PROFILED_DRAFTS),
        ("first calls and captures", figures.captures),
        ("memory of graphs", figures.memory),
        *decoding(LAST_SIDES, size),
        *(part for size in sizes for part in decoding((*FIRST_SIDES, *LAST_SIDES), size)),
        *(part for size in sizes for part in verification(context, size)),
        *(part for context in contexts for part in verification(context, size)),
    ]


class Figures:
    """The ways of decoding with one target, and what its graphs consist of."""

    def __init__(self, options: argparse.Namespace, device: torch.device):
        self.options, self.device = options, device
        self.context, self.new_tokens = options.contexts[0], options.new_tokens
        self._models: Models | None = None

    def make(self) -> list[Row]:
        """The target, and what reading its weights takes at least."""
        size, dtype = self.options.size, getattr(torch, self.options.dtype)
        self.watch, self.bandwidth = Stopwatch(self.device), copy_bandwidth(self.device)
        self._models = Models(SIZES[size], dtype, self.device, SAMPLED if self.options.sampled else GREEDY)
        weights = bytes_of_weights(self.models.target)
        self.weights_ms = 1000 * weights / self.bandwidth
        found = {"size": size, "context": self.context, "weight_gb": weights / 1e9, "weights_ms": self.weights_ms}
        return [{**found, "copy_gb_per_second": self.bandwidth / 1e9}]

    @property
    def models(self) -> Models:
        if self._models is None:
            raise SkippedError("there are no models")
        return self._models

    def decode(self, name: str, batch_size: int) -> list[Row]:
        """Tokens a second, and of ours the parts of a cycle."""
        models, new_tokens = self.models, self.new_tokens
        sides = make_sides(models, batch_size)
        if name not in sides:
            raise SkippedError("it takes one row")
        side, text = sides[name], ring_text(models.ring, batch_size, self.context, new_tokens)
        arguments, began = side.make(), perf_counter()
        run(models, arguments, text, new_tokens)
        first_seconds = perf_counter() - began
        samples = [run(models, arguments, text, new_tokens) for _ in range(ROUNDS)]
        speed = statistics.median(sample["tokens_per_second"] for sample in samples)
        if side.is_exact and min(sample["same_texts"] for sample in samples) < batch_size:
            raise AssertionError(f"another text, at {speed:.1f} tokens/s")
        last = samples[-1]
        place = {"batch_size": batch_size, "side": name}
        facts = {"first_call_seconds": first_seconds}
        if side.drafter is not None:
            facts |= {"published_length": side.drafter.length, "source": side.drafter.source}
        rows = [{**place, **last, "tokens_per_second": speed, **facts}]
        if "assistant" in arguments:
            cycle = self._cycle(arguments, text, last["nodes"], min(HELD_TOKENS, new_tokens))
            rows.append({"table": "cycles", **place, **cycle})
        return rows

    def verify(self, name: str, shape: TokenTree | None, context: int, batch_size: int) -> list[Row]:
        """The parts of cycles with drafts of random tokens."""
        models, speculator = self.models, random_nodes(self.models.target, shape)
        # Near the end of a text drafts are shorter.
        new_tokens = NUM_CYCLES + (shape.max_depth if shape else 0)
        text, arguments = ring_text(models.ring, batch_size, context, new_tokens), {"assistant": speculator}
        warm_up, nodes = run(models, arguments, text, new_tokens), 1 + (len(shape) if shape else 0)
        parts = self._cycle(arguments, text, nodes, new_tokens)
        place = {"context": context, "batch_size": batch_size, "draft": name, "nodes": nodes}
        return [{**place, **parts, **{key: warm_up[key] for key in ("attention", "graphs")}}]

    def _cycle(self, arguments: dict[str, Any], text: Text, nodes: float, held_tokens: int) -> Row:
        """Milliseconds of a cycle's parts, and of the target beside the time to read weights and cache once."""
        target, (batch_size, context), new_tokens = self.models.target, text.prompts.shape, text.expected.shape[1]
        call = call_of(self.models, arguments, text.prompts, new_tokens)
        parts = measure_parts(call, arguments["assistant"], target, self.watch, held_tokens)
        cache = batch_size * (context + new_tokens / 2 + nodes) * bytes_of_token(target)
        limit = self.weights_ms + 1000 * cache / self.bandwidth
        shown = ("cycle", "draft", "network", "target", "target_work", "accept", "wait", "commit", "outside", "gap")
        ratios = {"to_limit": parts["target"] / limit, "to_weights": parts["target"] / self.weights_ms}
        return {**{f"{name}_ms": parts[name] for name in shown}, "limit_ms": limit, **ratios}

    # What graphs consist of

    def _run(self, arguments: dict[str, Any]) -> Row:
        """A call of one row."""
        text = ring_text(self.models.ring, 1, self.context, self.new_tokens)
        return run(self.models, arguments, text, self.new_tokens)

    def _nodes(self, count: int) -> dict[str, Any]:
        """Arguments of calls that verify so many nodes in a cycle."""
        shape = TokenTree.chain(count - 1) if count > 1 else None
        return {"assistant": random_nodes(self.models.target, shape)}

    def _captured(self, count: int) -> CapturedForward:
        """The graph of a verification of so many nodes."""
        arguments = self._nodes(count)
        for _ in range(2):
            self._run(arguments)
        known = graphs._models[self.models.target].forwards
        found = [captured for (_, _, nodes, *_), captured in known.items() if nodes == count]
        if not found:
            raise SkippedError(f"no forward over {count} nodes was captured")
        return found[-1]

    def kernels(self) -> list[Row]:
        """Kernels of a replay of the target's forward, the longest first."""
        return self._kernels(f"verification of {PROFILED_NODES} nodes", self._captured(PROFILED_NODES))

    def draft_kernels(self, name: str) -> list[Row]:
        """Kernels of a replay of the graph that drafts, the longest first."""
        arguments = make_sides(self.models, 1)[name].make()
        for _ in range(2):
            self._run(arguments)
        replayed: list[CapturedForward] = []
        replay = CapturedForward.replay
        with patch.object(CapturedForward, "replay", lambda captured: replayed.append(captured) or replay(captured)):
            self._run(arguments)
        of_target = set(map(id, graphs._models[self.models.target].forwards.values()))
        drafts = [captured for captured in replayed if id(captured) not in of_target]
        if not drafts:
            raise SkippedError("its drafts did not run as graphs")
        # The last draft may be a shorter one.
        return self._kernels(name, max(drafts, key=lambda one: sum(one is other for other in drafts)))

    def _kernels(self, what: str, captured: CapturedForward) -> list[Row]:
        """What a replay takes, and its kernels."""
        milliseconds = self.watch.times(captured.replay, 2)[-1]
        is_cuda = self.watch.is_cuda
        # What the profiler knows of is also on the CPU, where there is nothing else.
        kinds = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * is_cuda]
        with torch.profiler.profile(activities=kinds) as profile:
            captured.replay()
            self.watch.synchronize()
        kernels = [
            (event.key, event.count, event.self_device_time_total if is_cuda else event.self_cpu_time_total)
            for event in profile.key_averages()
        ]
        kernels = sorted((kernel for kernel in kernels if kernel[2] > 0), key=lambda kernel: -kernel[2])
        of_all = {"launches": sum(count for _, count, _ in kernels), "ms": sum(time for *_, time in kernels) / 1000}
        rows = [
            {"kernel": "a replay", "ms": milliseconds, "to_weights": milliseconds / self.weights_ms},
            {"kernel": "all kernels", **of_all},
            *({"kernel": short(name), "launches": count, "ms": time / 1000} for name, count, time in kernels),
        ]
        return [{"table": "kernels", "of": what, **row} for row in rows[: TOP_KERNELS + 2]]

    def ways(self) -> list[Row]:
        """Replays of verifications whose kernels run in other ways than the usual one, in turn; texts are checked."""
        target, replayed, held = self.models.target, [], []
        for way, changes in WAYS.items():
            forget_graphs(target)
            with ExitStack() as stack:
                for change in changes:
                    stack.enter_context(patch.object(*change))
                if launching.LAUNCHES_EARLY and not launching.launches_early(target.get_input_embeddings().weight):
                    continue
                replayed += [(way, count, self._captured(count), []) for count in WAYS_NODES]
                if self._run(self._nodes(1))["same_texts"] < 1:
                    raise AssertionError(f"another text from: {way}")
            # Their memory is theirs until all have been replayed.
            held.append(graphs._models.pop(target, None))
        for _ in range(WAYS_ROUNDS):
            for _, _, captured, times in replayed:
                # The first replay finds the caches of others.
                times += self.watch.times(captured.replay, 4)[1:]
        del held
        rows = []
        for way, count, _, times in replayed:
            ms = statistics.median(times)
            rows.append(
                {"way": way, "nodes": count, "ms": ms, "least_ms": min(times), "to_weights": ms / self.weights_ms}
            )
        return rows

    def captures(self) -> list[Row]:
        """A first call without graphs, with compiled kernels, the one that captures them, and a later one."""
        arguments = self._nodes(PROFILED_NODES)
        forget_graphs(self.models.target)
        rows = []
        with record() as made:
            for number in range(3):
                began = perf_counter()
                self._run(arguments)
                stats = made.calls[-1].stats
                spent = {"seconds": perf_counter() - began, "prefill_seconds": stats.prefill_seconds}
                rows.append({"call": number + 1, **spent, "captures": stats.num_graph_captures})
        return rows

    def memory(self) -> list[Row]:
        """Bytes of the slots and graphs that outlive the calls."""
        known = list(graphs._models.values())
        slots = [buffer for each in known for place in each.store.places.values() for buffer in place.values()]
        outputs = [each.outputs.memory for each in known if each.outputs.memory is not None]
        found = {
            "graphs": sum(len(each.forwards) for each in known),
            "slot_gib": sum(buffer.nbytes for buffer in slots) / 2**30,
            "output_gib": sum(memory.nbytes for memory in outputs) / 2**30,
        }
        return [found]


def short(kernel: str) -> str:
    """Its name without the arguments of a template."""
    return kernel.removeprefix("void ").partition("<")[0]


# ------------------------------------------------------------------------------------------------------------- command


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="only see if everything is right")
    parser.add_argument("--parts", nargs="+", help="only those whose names have one of these texts in them")
    parser.add_argument("--max-minutes", type=float, default=28.0, help="begin nothing after this time; 28")
    parser.add_argument("--resume", action="store_true", help="go on with the parts that are not in the file")
    parser.add_argument("--spent", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=tuple(SIZES), help="of the target; llama-8b, and on a CPU tiny")
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="1 4 16")
    parser.add_argument(
        "--contexts", nargs="+", type=int, help="tokens of a prompt: the first one everywhere; 512 8192"
    )
    parser.add_argument("--new-tokens", type=int, help="tokens a row; 128")
    parser.add_argument("--sampled", action="store_true", help="temperature 0.6 and top-p 0.9 in the place of greedy")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16; float32 on a CPU")
    parser.add_argument("--json", type=Path, help="file of the figures; gpu.json or gpu-smoke.json")
    options = parser.parse_args()
    is_cpu = torch.device(options.device).type == "cpu"
    options.dtype = options.dtype or ("float32" if is_cpu else "bfloat16")
    options.json = options.json or Path("gpu-smoke.json" if options.smoke else "gpu.json")
    for name, value in (TINY if is_cpu or options.size == "tiny" else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if is_cpu and options.size != "tiny":
        parser.error(f"{options.size} on a CPU would take hours; there is --size tiny")
    if not is_cpu and not torch.cuda.is_available():
        parser.error(f"there is no GPU for --device {options.device}; there is --device cpu")
    if options.resume and not options.json.is_file():
        parser.error(f"--resume goes on with a file of an earlier run, and there is no {options.json}")
    if options.new_tokens < 16 or min(options.batch_sizes) < 1 or min(options.contexts) < 16:
        parser.error("the least are --new-tokens 16, --batch-sizes 1, --contexts 16")
    return options


def main() -> None:
    options = parse_options()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    # That synthetic acceptance makes no sense of the text is known here.
    logging.getLogger("hf_specdec").setLevel(logging.ERROR)
    with num_threads(1 if options.device == "cpu" else None):
        raise SystemExit(Run(options).run(all_parts(options)))


if __name__ == "__main__":
    main()
