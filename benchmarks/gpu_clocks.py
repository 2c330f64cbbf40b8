"""Clocks of the GPU benchmark: bandwidth, deliveries of a call, and the parts of a cycle.

A part is timed in two passes. As it runs: from what the device did before the part to what it did last in it, the time
that it waited for the host included. On its own: the device is first held up, so that the host has launched everything
when it begins; then the same events enclose the device's own work. What a cycle takes beyond its parts' own work is
time in which the device waited for the host: the host gap. Events are recorded in passing, nothing waits for them.
"""

from __future__ import annotations

import functools
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from hf_specdec import Speculator
from hf_specdec.candidate_generators.dflash.network import DFlashNetwork
from hf_specdec.candidate_generators.eagle.network import Eagle3Network, EagleNetwork
from hf_specdec.candidate_generators.medusa.network import MedusaHeads
from hf_specdec.candidate_generators.mlp_speculator.network import MLPStage
from hf_specdec.candidate_generators.mtp.network import MtpNetwork
from hf_specdec.logits.rules import StandardRule, SyntheticRule
from hf_specdec.loop.judging import AllNodes, Verifier
from hf_specdec.loop.loop import DecodingLoop
from hf_specdec.target.graphs import CapturedForward
from hf_specdec.target.model import SlotModel


class Stopwatch:
    """Marks in the work of a device, and the milliseconds between them.

    Args:
        device (`torch.device`): On a GPU marks are events of its stream, elsewhere times of the host.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._cycles_per_ms = self._calibrate() if self.is_cuda else 0.0

    def mark(self):
        if not self.is_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def milliseconds(self, first, last) -> float:
        """Milliseconds between two marks; the device must have come past both."""
        return first.elapsed_time(last) if self.is_cuda else 1000 * (last - first)

    def is_capturing(self) -> bool:
        """Tells if launches are recorded for a graph, so that no event may be."""
        return self.is_cuda and torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def hold(self, milliseconds: float) -> None:
        """Holds up a GPU for about so long, so that the host gets ahead of it."""
        torch.cuda._sleep(int(milliseconds * self._cycles_per_ms))

    def _calibrate(self) -> float:
        cycles = 10_000_000
        torch.cuda._sleep(cycles)
        first = self.mark()
        torch.cuda._sleep(cycles)
        last = self.mark()
        self.synchronize()
        return cycles / self.milliseconds(first, last)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes together; the best of several."""
    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target, watch = torch.empty_like(source), Stopwatch(device)
    times = []
    for _ in range(20):
        first = watch.mark()
        target.copy_(source)
        last = watch.mark()
        watch.synchronize()
        times.append(watch.milliseconds(first, last))
    return 2 * size / (min(times) / 1000)


# What torch warns of; a warning of the mode itself has other words.
_WAITS = "called a synchronizing CUDA operation"


@contextmanager
def noted_waits() -> Iterator[list[str]]:
    """Yields a list that has, after the block, a message for each time that the host has waited for a GPU.

    Torch tells of its own waits, and nothing of those for an event.
    """
    waits: list[str] = []
    wait_for = torch.cuda.Event.synchronize

    def noted(event) -> None:
        waits.append("an event was waited for")
        wait_for(event)

    with ExitStack() as stack:
        seen = stack.enter_context(warnings.catch_warnings(record=True))
        stack.enter_context(patch.object(torch.cuda.Event, "synchronize", noted))
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
            waits += [message for message in (str(warning.message) for warning in seen) if _WAITS in message]


# --------------------------------------------------------------------------------------------------------- whole calls


def decoding_part(marks: list[tuple[float, int]], batch_size: int) -> tuple[int, float]:
    """Tokens and seconds of a call after its first cycle, in which drafters read the prompt, by its marks."""
    first = next((mark for mark in marks if mark[1] > batch_size), None)
    ended, tokens = marks[-1]
    if first is None or first[1] == tokens:
        raise RuntimeError(f"the call ended within two cycles, after {tokens} tokens: raise --new-tokens")
    return tokens - first[1], ended - first[0]


# ----------------------------------------------------------------------------------------------------- parts of cycles


# Forwards of draft networks without graphs, their heads included. Of those that call each other the outermost counts.
_NETWORK_FORWARDS = (
    (DFlashNetwork, ("forward", "context", "fuse", "logits")),
    (EagleNetwork, ("forward", "fuse", "logits")),
    (Eagle3Network, ("fuse",)),
    (MtpNetwork, ("forward", "fuse", "logits")),
    (MedusaHeads, ("short_logits",)),
    (MLPStage, ("__call__",)),
)

# Work of the device in a cycle, one after the other.
WORK = ("draft", "target", "accept", "commit")


@dataclass
class Cycle:
    """Milliseconds of one cycle.

    Attributes:
        draft (`float`): Until the draft is there, what was committed being read first.
        network (`float`): Of it, inside of the forwards of the draft network, and of the graphs in their place.
        target (`float`): The target's forward over anchor and draft: positions, masks, layers, head. A graph of
            greedy drafts also accepts and moves what is accepted.
        accept (`float`): Which draft tokens are kept, and the new one, outside of a graph.
        verify (`float`): The same with the transfer to the host, and the rules that end a text, but neither a draft
            that is launched before them nor its verification.
        commit (`float`): Accepted keys and values moved into place, everything that is told of the new tokens.
        cycle (`float`): All of it.
    """

    draft: float = 0.0
    network: float = 0.0
    target: float = 0.0
    accept: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    cycle: float = 0.0

    @property
    def outside(self) -> float:
        """Outside of the forwards of target and draft network."""
        return self.cycle - self.target - self.network

    @property
    def wait(self) -> float:
        """Time from the last of the acceptance on the device until the host knows and has ended rows."""
        return self.verify - self.accept

    @property
    def work(self) -> float:
        """The parts that keep the device busy."""
        return sum(getattr(self, part) for part in WORK)


@dataclass
class Parts:
    """The cycles of a call in parts, as it runs or with the device held up.

    Args:
        watch (`Stopwatch`): Of the target's device.
        target (`PreTrainedModel`): The target.
        held (`dict[str, float]`, *optional*): For each part of `WORK` how long the device is held up before it, in
            milliseconds.
    """

    watch: Stopwatch
    target: PreTrainedModel
    held: dict[str, float] | None = None
    _cycles: list[list[tuple]] = field(default_factory=list)
    _inside: set[str] = field(default_factory=set)

    @contextmanager
    def attached(self, speculator: Speculator) -> Iterator[Parts]:
        """Times the cycles of the calls with this speculator inside, through the classes and not any object."""
        places = [
            (DecodingLoop, "commit", "commit"),
            (Verifier, "begin", "verify"),
            (AllNodes, "wait", "verify"),
            (speculator.generator_class, "propose", "draft"),
            (speculator.generator_class, "draft_ahead", "draft"),
            *((rule, "judge", "accept") for rule in (StandardRule, SyntheticRule)),
            *((kind, name, "network") for kind, names in _NETWORK_FORWARDS for name in names),
        ]
        with ExitStack() as stack:
            for kind, name, part in places:
                stack.enter_context(patch.object(kind, name, self._timed(getattr(kind, name), lambda *_, p=part: p)))
            for name in ("verify", "verify_ahead", "forward"):
                stack.enter_context(patch.object(SlotModel, name, self._timed(getattr(SlotModel, name), self._whose)))
            replay = self._timed(CapturedForward.replay, self._whose_replay)
            stack.enter_context(patch.object(CapturedForward, "replay", replay))
            stack.enter_context(patch.object(DecodingLoop, "cycle", self._cycle(DecodingLoop.cycle)))
            yield self

    def _whose(self, slots: SlotModel, *args) -> str:
        return "target" if slots.model is self.target else "network"

    def _whose_replay(self, captured: CapturedForward) -> str:
        # Those of the target run inside of its verification.
        return "target" if "target" in self._inside else "network"

    def _cycle(self, cycle: Callable) -> Callable:
        timed = self._timed(cycle, lambda *_: "cycle")

        @functools.wraps(cycle)
        def begun(*args):
            self._cycles.append([])
            return timed(*args)

        return begun

    def _timed(self, function: Callable, part_of: Callable[..., str]) -> Callable:
        @functools.wraps(function)
        def timed(*args, **kwargs):
            part = part_of(*args)
            if part in self._inside or not self._cycles or self.watch.is_capturing():
                return function(*args, **kwargs)
            self._inside.add(part)
            if self.held is not None and part in self.held:
                self.watch.hold(self.held[part])
            began, first = perf_counter(), self.watch.mark()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside.discard(part)
                host = 1000 * (perf_counter() - began)
                self._cycles[-1].append((part, first, self.watch.mark(), host, "verify" in self._inside))

        return timed

    def cycles(self) -> list[Cycle]:
        """Cycles that were timed; waits for the device."""
        self.watch.synchronize()
        found = []
        for entries in self._cycles:
            cycle = Cycle()
            for part, first, last, _, is_ahead in entries:
                spent = self.watch.milliseconds(first, last)
                setattr(cycle, part, getattr(cycle, part) + spent)
                if part in ("draft", "target") and is_ahead:
                    cycle.verify -= spent
            found.append(cycle)
        return found

    def host_milliseconds(self) -> dict[str, float]:
        """The longest that the host took for each part of `WORK`."""
        return {
            part: max(
                (host for entries in self._cycles for name, _, _, host, _ in entries if name == part), default=0.0
            )
            for part in WORK
        }


def median_cycle(cycles: list[Cycle]) -> dict[str, float]:
    """Medians over cycles, so that shorter drafts at the end of a text do not count."""
    names = (*vars(Cycle()), "outside", "wait", "work")
    return {name: statistics.median(getattr(cycle, name) for cycle in cycles) for name in names}


def measure_parts(
    generate: Callable[..., object],
    speculator: Speculator,
    target: PreTrainedModel,
    watch: Stopwatch,
    held_tokens: int,
) -> dict[str, float | None]:
    """Medians of the cycles of a call.

    Args:
        generate (`Callable`): Makes the call, with this speculator; takes `max_new_tokens`.
        speculator (`Speculator`): What drafts.
        target (`PreTrainedModel`): The target.
        watch (`Stopwatch`): Of its device.
        held_tokens (`int`): How many tokens to generate while the device is held up, which takes time.

    Returns:
        Milliseconds as in [`Cycle`]; `*_work` of each part of `WORK` and `gap`, the host gap, `None` where there is no
        GPU to hold up.
    """
    with Parts(watch, target).attached(speculator) as running:
        generate()
    found: dict[str, float | None] = dict(median_cycle(running.cycles()))
    found |= dict.fromkeys((*(f"{part}_work" for part in WORK), "gap"))
    if watch.is_cuda:
        # Longer than the host has ever taken.
        holds = {part: 1.5 * host + 0.5 for part, host in running.host_milliseconds().items()}
        with Parts(watch, target, holds).attached(speculator) as held:
            generate(max_new_tokens=held_tokens)
        own = median_cycle(held.cycles())
        found |= {f"{part}_work": own[part] for part in WORK}
        found["gap"] = max(found["cycle"] - own["work"], 0.0)
    return found
