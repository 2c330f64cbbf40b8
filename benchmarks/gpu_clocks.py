"""Clocks of the GPU benchmark: bandwidth, and the parts of a cycle.

A part is timed in two passes. As it runs: from what the device did before the part to what it did last in it, the time
that it waited for the host included. On its own: the device is first held up, so that the host has launched everything
when it begins; then the same events enclose the device's own work. What a cycle takes beyond its parts' own work is
time in which the device waited for the host: the host gap. Events are recorded in passing, nothing waits for them.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from hf_specdec import Speculator
from hf_specdec.candidate_generators.dflash.network import DFlashNetwork
from hf_specdec.candidate_generators.eagle.network import EagleNetwork
from hf_specdec.candidate_generators.medusa.network import MedusaHeads
from hf_specdec.candidate_generators.mtp.network import MtpNetwork
from hf_specdec.logits.rules import StandardRule, SyntheticRule
from hf_specdec.loop.judging import AllNodes, Verifier
from hf_specdec.loop.loop import DecodingLoop
from hf_specdec.loop.observers import Observers
from hf_specdec.target import graphs
from hf_specdec.target.graphs import CapturedForward
from hf_specdec.target.model import SlotModel


class Stopwatch:
    """Marks in the work of a device, on a GPU events of its stream, and the milliseconds between them."""

    def __init__(self, device: torch.device):
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._cycles_per_ms = self._calibrate() if self.is_cuda else 0.0

    def mark(self) -> Any:
        if not self.is_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def milliseconds(self, first: Any, last: Any) -> float:
        """Milliseconds between two marks; the device must have come past both."""
        return first.elapsed_time(last) if self.is_cuda else 1000 * (last - first)

    def times(self, run: Callable[[], object], count: int) -> list[float]:
        """Milliseconds of so many runs."""
        marks = [self.mark()]
        for _ in range(count):
            run()
            marks.append(self.mark())
        self.synchronize()
        return list(map(self.milliseconds, marks, marks[1:]))

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
        return cycles / self.times(lambda: torch.cuda._sleep(cycles), 2)[-1]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes together; the best of several."""
    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (min(Stopwatch(device).times(lambda: target.copy_(source), 20)) / 1000)


# ----------------------------------------------------------------------------------------------------- parts of cycles


# Forwards of draft networks without graphs, their heads included. Of those that call each other the outermost counts.
_NETWORK_FORWARDS = (
    (DFlashNetwork, ("forward", "context", "fuse", "logits")),
    (EagleNetwork, ("forward", "fuse", "logits")),
    (MtpNetwork, ("forward", "fuse", "logits")),
    (MedusaHeads, ("short_logits",)),
)

# Work of the device in a cycle, one after the other: until the draft is there, what was committed being read first;
# the target's forward (positions, masks, layers, head; a graph of greedy drafts also accepts and moves what is
# accepted); which draft tokens are kept, and the new one, outside of a graph; and accepted keys and values moved into
# place, with everything that is told of the new tokens.
WORK = ("draft", "target", "accept", "commit")
# Parts of these: `network`, of a draft the forwards of the draft network and the graphs in their place; `verify`,
# acceptance with its transfer to the host and the rules that end a text, but neither a draft that is launched before
# them nor its verification.
_PARTS = (*WORK, "network", "verify", "cycle")


@dataclass
class Parts:
    """The cycles of a call in parts, as it runs or with the device held up for milliseconds before each part."""

    watch: Stopwatch
    target: PreTrainedModel
    held: dict[str, float] = field(default_factory=dict)
    _cycles: list[list[tuple]] = field(default_factory=list)
    _inside: set[str] = field(default_factory=set)

    @contextmanager
    def attached(self, speculator: Speculator) -> Iterator[Parts]:
        """Times the cycles of the calls with this speculator inside, through the classes and not any object."""
        places = [
            (Observers, "see", "commit"),
            (speculator.generator_class, "observe", "commit"),
            (Verifier, "begin", "verify"),
            (AllNodes, "wait", "verify"),
            (speculator.generator_class, "propose", "draft"),
            (speculator.generator_class, "draft_ahead", "draft"),
            *((rule, "judge", "accept") for rule in (StandardRule, SyntheticRule)),
            *((kind, name, "network") for kind, names in _NETWORK_FORWARDS for name in names),
        ]
        timed = [(kind, name, lambda *_, part=part: part) for kind, name, part in places]
        timed += [(SlotModel, name, self._whose) for name in ("verify", "forward")]
        timed.append((SlotModel, "commit", lambda slots, *_: "commit" if slots.model is self.target else "network"))
        timed.append((CapturedForward, "replay", self._whose_replay))
        with ExitStack() as stack:
            for kind, name, part_of in timed:
                stack.enter_context(patch.object(kind, name, self._timed(getattr(kind, name), part_of)))
            stack.enter_context(patch.object(DecodingLoop, "cycle", self._cycle(DecodingLoop.cycle)))
            yield self

    def _whose(self, slots: SlotModel, *args) -> str:
        return "target" if slots.model is self.target else "network"

    def _whose_replay(self, captured: CapturedForward) -> str:
        # Those of the target may run ahead of its verification.
        known = graphs._models[self.target].forwards.values() if self.target in graphs._models else ()
        return "target" if any(captured is one for one in known) else "network"

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
            if part in self.held:
                self.watch.hold(self.held[part])
            began, first = perf_counter(), self.watch.mark()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside.discard(part)
                host = 1000 * (perf_counter() - began)
                self._cycles[-1].append((part, first, self.watch.mark(), host, "verify" in self._inside))

        return timed

    def median_cycle(self) -> dict[str, float]:
        """Milliseconds of the parts, medians over cycles, so that shorter drafts at the end of a text do not count.

        `outside` is outside of the forwards of target and draft network, `wait` from the last of the acceptance on the
        device until the host knows and has ended rows, `work` all that keeps the device busy. Waits for the device.
        """
        self.watch.synchronize()
        found = []
        for entries in self._cycles:
            cycle = dict.fromkeys(_PARTS, 0.0)
            for part, first, last, _, is_ahead in entries:
                spent = self.watch.milliseconds(first, last)
                cycle[part] += spent
                if part in ("draft", "target") and is_ahead:
                    cycle["verify"] -= spent
            cycle["outside"] = cycle["cycle"] - cycle["target"] - cycle["network"]
            cycle["wait"] = cycle["verify"] - cycle["accept"]
            cycle["work"] = sum(cycle[part] for part in WORK)
            found.append(cycle)
        return {part: statistics.median(cycle[part] for cycle in found) for part in found[0]}

    def host_milliseconds(self, part: str) -> float:
        """The longest that the host took for a part."""
        return max((host for entries in self._cycles for name, _, _, host, _ in entries if name == part), default=0.0)


def measure_parts(
    generate: Callable[..., object],
    speculator: Speculator,
    target: PreTrainedModel,
    watch: Stopwatch,
    held_tokens: int,
) -> dict[str, float | None]:
    """Milliseconds of the parts of a call's cycles; `*_work` of each part of `WORK` and `gap`, the host gap, on a GPU.

    The call takes `max_new_tokens`, since it takes long while the device is held up.
    """
    with Parts(watch, target).attached(speculator) as running:
        generate()
    found: dict[str, float | None] = dict(running.median_cycle())
    found |= dict.fromkeys((*(f"{part}_work" for part in WORK), "gap"))
    if watch.is_cuda:
        # Longer than the host has ever taken.
        holds = {part: 1.5 * running.host_milliseconds(part) + 0.5 for part in WORK}
        with Parts(watch, target, holds).attached(speculator) as held:
            generate(max_new_tokens=held_tokens)
        own = held.median_cycle()
        found |= {f"{part}_work": own[part] for part in WORK}
        found["gap"] = max(found["cycle"] - own["work"], 0.0)
    return found
