"""Simulated drafters and targets, whose costs and acceptance are known exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hf_specdec.control import ControlProfile, SpeculationController
from hf_specdec.control.controller import RowOutcome, batch_tokens


@dataclass
class Cycle:
    """Limits of the rows, tokens committed, and true seconds."""

    limits: list[int]
    num_committed: int
    seconds: float


@dataclass
class World:
    """A drafter, a target and a text.

    Attributes:
        acceptance (`list[float]`): Of each row: how often a token is accepted behind accepted ones.
        draft (`Callable`): Depth -> seconds of a draft.
        verify (`Callable`): Nodes, the anchor included -> seconds.
        depths (`Sequence[float]`): Of each row: the chance that a draft goes on by one more token.
        noise (`float`): Standard deviation of the logarithm of measured times.
        stalls (`float`): How many of the measured times are ten times too long.
    """

    acceptance: list[float]
    draft: Callable[[int], float]
    verify: Callable[[int], float]
    depths: Sequence[float] = (1.0,)
    noise: float = 0.0
    stalls: float = 0.0
    seed: int = 0
    random: random.Random = field(init=False)

    def __post_init__(self):
        self.random = random.Random(self.seed)

    def tokens(self, limit: int) -> float:
        """Expected tokens of a cycle with full drafts of this length, which end with the slowest row."""
        return batch_tokens([sum(rate**position for position in range(limit + 1)) for rate in self.acceptance])

    def seconds(self, limit: int) -> float:
        return self.verify(1) if limit == 0 else self.draft(limit) + self.verify(limit + 1)

    def rate(self, limit: int) -> float:
        """Tokens per second of a fixed length."""
        return self.tokens(limit) / self.seconds(limit)

    def best(self, most: int) -> int:
        return max(range(most + 1), key=self.rate)

    def measured(self, seconds: float) -> float:
        seconds *= self.random.lognormvariate(0.0, self.noise)
        return seconds * (10.0 if self.random.random() < self.stalls else 1.0)

    def _run(self, chance: float, most: int) -> int:
        count = 0
        while count < most and self.random.random() < chance:
            count += 1
        return count

    def cycle(self, controller: SpeculationController) -> Cycle:
        """One cycle under the controller."""
        rows = list(range(len(self.acceptance)))
        limits = controller.limits(rows)
        outcomes = []
        for row, limit, rate in zip(rows, limits, self.acceptance):
            chance = self.depths[row % len(self.depths)]
            depth = limit if chance == 1 else self._run(chance, limit)
            accepted = self._run(rate, depth)
            outcomes.append(RowOutcome(row, limit, depth, accepted, accepted + 1))
        deepest, is_asked = max(outcome.depth for outcome in outcomes), max(limits) > 0
        draft = self.draft(deepest) if is_asked else 0.0
        verify = self.verify(deepest + 1)
        measured = self.measured(draft) if is_asked else None
        controller.observe(outcomes, deepest, measured, self.measured(verify))
        return Cycle(limits, sum(outcome.num_committed for outcome in outcomes), draft + verify)

    def run(self, controller: SpeculationController, cycles: int) -> list[Cycle]:
        return [self.cycle(controller) for _ in range(cycles)]

    def controller(self, most: int, usual: int = 5, profile: ControlProfile | None = None) -> SpeculationController:
        return SpeculationController(most, len(self.acceptance), profile, usual)

    def loss(self, cycles: list[Cycle], most: int) -> float:
        """Part of the best fixed length's throughput that the lengths of these cycles lose, without chance."""
        limits = [max(cycle.limits) for cycle in cycles]
        ours = sum(map(self.tokens, limits)) / sum(map(self.seconds, limits))
        return 1 - ours / self.rate(self.best(most))
