"""The first minutes on a GPU, in parts: is everything right (`gpu.py --smoke`), then what matters (`gpu.py --first`).

A part that fails costs no other: where it leaves the GPU unusable for this process, as an access to wrong memory does,
another process goes on after it. What would begin when the time is up is left out. The JSON is written after every
part, so that a run that is cut off leaves what it has found.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from gpu import ASSISTED, HELD_TOKENS, NO_DRAFTS, PLAIN, Side, call_of, environment, is_side, make_sides, run
from gpu_checks import Check, check_text, drafts, kernel_checks, target_and_batches
from gpu_clocks import Stopwatch, copy_bandwidth, measure_parts, noted_waits
from gpu_kernels import attention_bandwidth, drawn_tokens, products_together
from gpu_models import GREEDY, SAMPLED, SIZES, Models, bytes_of_weights, no_drafts, random_nodes, ring_text
from gpu_report import write_json
from rich.console import Console

from hf_specdec import demo, load_speculator, record
from hf_specdec.drafts import TokenTree
from hf_specdec.errors import MissingDependencyError
from hf_specdec.kernels import early, projections
from hf_specdec.loop.loop import DecodingLoop
from hf_specdec.target import graphs
from hf_specdec.target.graphs import CallGraphs, CapturedForward, forget_graphs


PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

# Of `--smoke` and `--first`, unless an option says otherwise.
MINUTES = {"smoke": 1.3, "first": 8.0}

# Exit codes beside 0 and 1: parts were left out because the time was up.
EXIT_INCOMPLETE = 3

SMOKE_TOKENS = 24

# The part that every process needs for itself.
MODELS = "models"

# Ours, the most telling first.
FIRST_SIDES = (PLAIN, NO_DRAFTS, ASSISTED, "ours: eagle3, tree", "ours: eagle3, chain", "ours: dflash", "ours: ngram")
LAST_SIDES = ("ours: mtp", "ours: medusa", "ours: eagle, tree", "ours: draft_model", "ours: mlp_speculator")

# Verified nodes of the forward whose kernels are looked at, and drafts that run as graphs.
PROFILED_NODES, TOP_KERNELS = 16, 20
PROFILED_DRAFTS = (
    "ours: eagle, tree",
    "ours: eagle3, tree",
    "ours: eagle3, chain",
    "ours: dflash",
    "ours: draft_model",
)

# What the kernels of a forward may do in the place of the usual: attributes, and what they are.
_takes = projections.takes
WAYS: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "usual": (),
    "kernels begin early": ((early, "LAUNCHES_EARLY", True),),
    "norms apart from products": ((projections, "goes_along", lambda norm: False),),
    "torch's products where one is alone": (
        (projections, "takes", lambda x, linears: len(linears) > 1 and _takes(x, linears)),
    ),
}
WAYS_NODES, WAYS_ROUNDS = (1, PROFILED_NODES, 60), 12


class SkippedError(Exception):
    """A part cannot be run here, and why."""


class FirstRun:
    """Runs parts, and keeps what they return.

    Args:
        kind (`str`): "smoke" or "first".
        options (`argparse.Namespace`): Of the command line.
        console (`Console`): Gets a line a part.
    """

    def __init__(self, kind: str, options: argparse.Namespace, console: Console):
        self.kind, self.options, self.console = kind, options, console
        self.device = torch.device(options.device)
        self.file = options.json or Path(f"gpu-{kind}.json")
        self.limit = 60 * (MINUTES[kind] if options.max_minutes is None else options.max_minutes)
        dtype = getattr(torch, options.dtype)
        self.report: dict[str, Any] = {"kind": kind, "environment": environment(options, self.device, dtype)}
        self.report |= {"limit_seconds": self.limit, "seconds": 0.0, "exit_code": None, "parts": []}
        if options.resume:
            self.report |= {key: json.loads(self.file.read_text())[key] for key in ("seconds", "parts")}
        self.done = {part["part"] for part in self.report["parts"]} - {MODELS}
        self.began = perf_counter() - self.report["seconds"]

    def run(self, parts: Iterator[tuple[str, Callable[[], Any]]]) -> int:
        """All parts in turn; the exit code."""
        for name, part in parts:
            is_lost = name not in self.done and not self._run_part(name, part) and is_unusable(self.device)
            # The models would be made, and the device lost, again and again.
            if is_lost and name != MODELS:
                # With the arguments of this one; what was done is in the file.
                os.execv(sys.executable, [sys.executable, *sys.argv, "--resume"])
        self.report["exit_code"] = self._exit_code()
        self.save()
        counts = {status: len(self._with(status)) for status in (PASSED, FAILED, SKIPPED)}
        told = ", ".join(f"{count} {status}" for status, count in counts.items())
        self.console.print(f"{told}, in {self.report['seconds']:.0f} s; written to {self.file}", highlight=False)
        return self.report["exit_code"]

    def _run_part(self, name: str, part: Callable[[], Any]) -> bool:
        """Runs a part and notes what it has found; whether it has not failed."""
        found: dict[str, Any] = {"part": name, "status": PASSED}
        began = perf_counter()
        if began - self.began > self.limit:
            found |= {"status": SKIPPED, "detail": "the time was up"}
        else:
            try:
                found["found"] = part()
            except (SkippedError, MissingDependencyError) as reason:
                found |= {"status": SKIPPED, "detail": str(reason)}
            except Exception as error:  # noqa: BLE001 - whatever it is, the other parts are wanted
                found |= {"status": FAILED, "error": f"{type(error).__name__}: {error}"[:2000]}
                found["traceback"] = traceback.format_exc()[-6000:]
        found["seconds"] = perf_counter() - began
        self.report["parts"].append(found)
        self.save()
        told = found.get("error") or found.get("detail") or ""
        self.console.print(
            f"{found['status']:8}{found['seconds']:7.1f} s  {name}  {told[:300]}", markup=False, highlight=False
        )
        return found["status"] != FAILED

    def _with(self, status: str) -> list[dict]:
        return [part for part in self.report["parts"] if part["status"] == status]

    def _exit_code(self) -> int:
        if self._with(FAILED):
            return 1
        is_late = any(part["detail"] == "the time was up" for part in self._with(SKIPPED))
        return EXIT_INCOMPLETE if is_late else 0

    def save(self) -> None:
        self.report["seconds"] = perf_counter() - self.began
        write_json(self.file, self.report)


def is_unusable(device: torch.device) -> bool:
    """Tells if nothing can be computed on a device any more, because something has failed there before."""
    try:
        return torch.ones(1, device=device).add(1).item() != 2
    except (AssertionError, RuntimeError):
        return True


def main(options: argparse.Namespace, console: Console) -> int:
    """The exit code of `--smoke` or `--first`."""
    kind = "smoke" if options.smoke else "first"
    first_run = FirstRun(kind, options, console)
    return first_run.run((smoke_parts if kind == "smoke" else first_parts)(options, first_run.device))


# --------------------------------------------------------------------------------------------------------------- smoke


def smoke_parts(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each kernel beside its reference, one text of each method beside plain generation, one captured cycle."""
    for name, checks in kernel_checks(device, is_quick=True).items():
        yield f"kernel: {name}", partial(_all_right, checks)
    texts: list = []

    def text(name: str, settings: dict) -> dict:
        if not texts:
            texts.extend(target_and_batches(device, SMOKE_TOKENS, is_quick=True))
        target, batches = texts
        return _right(check_text(name, target, settings, batches))

    for method, settings in one_of_each_method().items():
        yield f"text: {method}", partial(text, method, settings)
    yield "captured cycle", partial(captured_cycle, device)


def one_of_each_method() -> dict[str, dict[str, Any]]:
    """A tree where the method has one."""
    chosen = {}
    for name, settings in drafts().items():
        chosen[name.partition(",")[0]] = settings
    return chosen


def _all_right(checks: Callable[[], Iterator[Check]]) -> list[dict]:
    return [_right(check) for check in checks()]


def _right(check: Check) -> dict:
    if check.is_right is None:
        raise SkippedError(check.detail)
    if not check.is_right:
        raise AssertionError(f"{check.what}: {check.detail}")
    return {"what": check.what, "detail": check.detail}


def captured_cycle(device: torch.device) -> dict:
    """Calls until nothing more is captured: graphs run, the text stays, and on a GPU a cycle waits once."""
    if graphs.capture_backend(device) is None:
        raise SkippedError(f"no graphs on a {device.type} device")
    target, batches = target_and_batches(device, SMOKE_TOKENS, is_quick=True)
    speculator = load_speculator(target, method="eagle3", model=demo.drafter_path("eagle3"), num_speculative_tokens=4)
    arguments = {**batches[0].inputs, "max_new_tokens": SMOKE_TOKENS, "do_sample": False}
    plain = target.generate(**arguments)
    waits: list[list[str]] = []
    with record() as made:
        for _ in range(3):
            output = target.generate(**arguments, assistant=speculator)
        if device.type == "cuda":
            with _waits_of_cycles(waits):
                output = target.generate(**arguments, assistant=speculator)
    if not torch.equal(output, plain):
        raise AssertionError("graphs write another text")
    stats = made.calls[-1].stats
    found = {
        "graphs": stats.graphs,
        "draft_graphs": stats.draft_graphs,
        "replays": stats.num_graph_replays,
        "draft_replays": stats.num_draft_graph_replays,
        "captures": [call.stats.num_graph_captures + call.stats.num_draft_graph_captures for call in made.calls],
        "waits": [len(seen) for seen in waits],
    }
    if not (stats.graphs == stats.draft_graphs == "on" and stats.num_graph_replays and stats.num_draft_graph_replays):
        raise AssertionError(f"not all forwards ran as graphs: {found}")
    if set(found["waits"]) - {1}:
        raise AssertionError(f"a cycle should wait once: {found['waits']}; {waits}"[:1500])
    return found


@contextmanager
def _waits_of_cycles(waits: list[list[str]]) -> Iterator[None]:
    one_cycle = DecodingLoop.cycle

    def watched(loop) -> None:
        with noted_waits() as seen:
            one_cycle(loop)
        waits.append(seen)

    with patch.object(DecodingLoop, "cycle", watched):
        yield


# --------------------------------------------------------------------------------------------------------------- first


def first_parts(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Speeds of the ways of decoding, then what they consist of."""
    figures = Figures(options, device)
    yield MODELS, figures.make
    for start in _wanted(FIRST_SIDES, options):
        yield f"decoding: {start}", partial(figures.decode, start)
    yield "kernels of a replay", figures.kernels
    yield "ways of a forward", figures.ways
    for start in PROFILED_DRAFTS:
        yield f"kernels of a draft: {start}", partial(figures.draft_kernels, start)
    yield "attention", partial(attention_bandwidth, device, options)
    yield "products", partial(products_together, device, options)
    yield "drawn tokens", partial(drawn_tokens, device, options)
    yield "first calls and captures", figures.captures
    yield "memory of graphs", figures.memory
    for start in _wanted(LAST_SIDES, options):
        yield f"decoding: {start}", partial(figures.decode, start)


def _wanted(starts: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Plain generation, and the sides that the command line asks for."""
    return [start for start in starts if start == PLAIN or is_side(start, options.sides)]


class Figures:
    """The sides of one target, at batch 1."""

    def __init__(self, options: argparse.Namespace, device: torch.device):
        self.options, self.device = options, device
        self.watch: Stopwatch | None = None
        self.models: Models | None = None
        self.plain_speed: float | None = None

    def make(self) -> dict:
        """The target, and what reading its weights takes at least."""
        size, dtype = self.options.sizes[0], getattr(torch, self.options.dtype)
        self.watch, bandwidth = Stopwatch(self.device), copy_bandwidth(self.device)
        self.models = Models(SIZES[size], dtype, self.device, SAMPLED if self.options.sampled else GREEDY)
        weights = bytes_of_weights(self.models.target)
        self.weights_ms = 1000 * weights / bandwidth
        self.new_tokens = self.options.new_tokens
        self.text = ring_text(self.models.ring, 1, min(self.options.contexts), self.new_tokens)
        return {
            "size": size,
            "context": self.text.prompts.shape[1],
            "bandwidth": bandwidth,
            "weight_bytes": weights,
            "weights_ms": self.weights_ms,
        }

    def _made(self) -> Models:
        if self.models is None:
            raise SkippedError("there are no models")
        return self.models

    def decode(self, start: str) -> dict:
        """Tokens a second, and of ours the parts of a cycle."""
        models, side = self._made(), self._side(start)
        first, first_seconds = self._timed(side)
        samples = [self._timed(side)[0] for _ in range(2 + (side.name == PLAIN))]
        speed = statistics.median(sample.tokens_per_second for sample in samples[-2:])
        if side.name == PLAIN:
            self.plain_speed = speed
        last = samples[-1]
        if side.is_exact and last.same_rows < 1:
            raise AssertionError(f"another text, at {speed:.1f} tokens/s")
        found = {
            "side": side.name,
            "tokens_per_second": speed,
            "to_plain": self.plain_speed and speed / self.plain_speed,
            "tokens_per_cycle": last.tokens_per_cycle,
            "first_call_seconds": first_seconds,
            "first_tokens_per_second": first.tokens_per_second,
            "attention": last.attention,
            "graphs": last.graphs,
            "peak_bytes": last.peak_bytes,
        }
        if side.speculator is not None:
            call = call_of(models, side.speculator, self.text.prompts, self.new_tokens)
            held = min(HELD_TOKENS, self.new_tokens)
            found["parts"] = measure_parts(call, side.speculator, models.target, self.watch, held)
        return found

    def _side(self, start: str) -> Side:
        """The side whose name begins so, and its drafter."""
        [side] = make_sides(self._made(), 1, lambda name: name.startswith(start))[-1:]
        if not side.name.startswith(start):
            raise SkippedError(f"there is no side '{start}'")
        side.speculator = side.make()
        return side

    def _timed(self, side: Side) -> tuple[Any, float]:
        began = perf_counter()
        sample = run(self.models, side, self.text, self.new_tokens)
        return sample, perf_counter() - began

    def _nodes(self, count: int = PROFILED_NODES) -> Side:
        """A side that verifies so many nodes in a cycle."""
        vocab_size = self._made().target.config.vocab_size
        drafts = random_nodes(TokenTree.chain(count - 1), vocab_size) if count > 1 else no_drafts()
        return Side("nodes", speculator=drafts)

    def kernels(self) -> dict:
        """Kernels of a replay of the target's forward over 16 nodes, the longest first."""
        return {"nodes": PROFILED_NODES, **self._kernels(self._captured(PROFILED_NODES))}

    def _captured(self, count: int) -> CapturedForward:
        """The graph of a verification of so many nodes."""
        side = self._nodes(count)
        for _ in range(2):
            run(self.models, side, self.text, self.new_tokens)
        known = graphs._models[self.models.target].forwards
        found = [captured for (_, _, nodes, *_), captured in known.items() if nodes == count]
        if not found:
            raise SkippedError(f"no forward over {count} nodes was captured")
        return found[-1]

    def ways(self) -> list[dict]:
        """Replays of verifications whose kernels run in other ways than the usual one, in turn; texts are checked."""
        target, replayed, held = self._made().target, [], []
        for way, changes in WAYS.items():
            forget_graphs(target)
            with ExitStack() as stack:
                for change in changes:
                    stack.enter_context(patch.object(*change))
                if early.LAUNCHES_EARLY and not early.launches_early(target.get_input_embeddings().weight):
                    continue
                replayed += [(way, count, self._captured(count), []) for count in WAYS_NODES]
                if self._timed(self._side(NO_DRAFTS))[0].same_rows < 1:
                    raise AssertionError(f"another text from: {way}")
            # Their memory is theirs until all have been replayed.
            held.append(graphs._models.pop(target, None))
        for _ in range(WAYS_ROUNDS):
            for _, _, captured, times in replayed:
                captured.replay()
                marks = [self.watch.mark()]
                for _ in range(3):
                    captured.replay()
                    marks.append(self.watch.mark())
                self.watch.synchronize()
                times += map(self.watch.milliseconds, marks, marks[1:])
        del held
        return [
            {
                "way": way,
                "nodes": count,
                "milliseconds": statistics.median(times),
                "least": min(times),
                "to_weights": statistics.median(times) / self.weights_ms,
            }
            for way, count, _, times in replayed
        ]

    def draft_kernels(self, start: str) -> dict:
        """Kernels of a replay of the graph that drafts, the longest first."""
        side = self._side(start)
        for _ in range(2):
            run(self.models, side, self.text, self.new_tokens)
        replayed: list[CapturedForward] = []
        replay = CapturedForward.replay
        with patch.object(CapturedForward, "replay", lambda captured: replayed.append(captured) or replay(captured)):
            run(self.models, side, self.text, self.new_tokens)
        of_target = set(map(id, graphs._models[self.models.target].forwards.values()))
        drafts = [captured for captured in replayed if id(captured) not in of_target]
        if not drafts:
            raise SkippedError("its drafts did not run as graphs")
        # The last draft may be a shorter one.
        usual = max(drafts, key=lambda captured: sum(captured is other for other in drafts))
        return {"side": side.name, **self._kernels(usual)}

    def _kernels(self, captured: CapturedForward) -> dict:
        """What a replay takes, and its kernels."""
        captured.replay()
        self.watch.synchronize()
        began = self.watch.mark()
        captured.replay()
        ended = self.watch.mark()
        self.watch.synchronize()
        # What the profiler knows of is also on the CPU, where there is nothing else.
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if self.watch.is_cuda else []
        with torch.profiler.profile(activities=kinds) as profile:
            captured.replay()
            self.watch.synchronize()
        kernels = [
            (event.key, event.count, event.self_device_time_total if self.watch.is_cuda else event.self_cpu_time_total)
            for event in profile.key_averages()
        ]
        kernels = sorted((kernel for kernel in kernels if kernel[2] > 0), key=lambda kernel: -kernel[2])
        return {
            "milliseconds": self.watch.milliseconds(began, ended),
            "num_kernels": sum(count for _, count, _ in kernels),
            "kernel_milliseconds": sum(time for *_, time in kernels) / 1000,
            "top": [
                {"kernel": name[:200], "count": count, "microseconds": time}
                for name, count, time in kernels[:TOP_KERNELS]
            ],
        }

    def captures(self) -> dict:
        """A first call without graphs, with compiled kernels; what each capture takes; the calls after it."""
        side = self._nodes()
        forget_graphs(self.models.target)
        seconds: list[float] = []
        capture = CallGraphs._capture

        def timed(*args):
            self.watch.synchronize()
            began = perf_counter()
            try:
                return capture(*args)
            finally:
                self.watch.synchronize()
                seconds.append(perf_counter() - began)

        with patch.object(CallGraphs, "_capture", timed), record() as made:
            calls = [self._timed(side)[1] for _ in range(3)]
        return {
            "call_seconds": calls,
            "prefill_seconds": [call.stats.prefill_seconds for call in made.calls],
            "capture_seconds": seconds,
        }

    def memory(self) -> dict:
        """Bytes of the slots and graphs that outlive the calls."""
        known = list(graphs._models.values())
        found = {
            "num_graphs": sum(len(each.forwards) for each in known),
            "slot_bytes": sum(each.store.num_bytes for each in known),
            "output_bytes": sum(each.outputs.num_bytes for each in known),
            "freed_bytes": None,
        }
        del known
        if self.watch is not None and self.watch.is_cuda:
            before = self._reserved()
            forget_graphs()
            found["freed_bytes"] = before - self._reserved()
        return found

    def _reserved(self) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)
