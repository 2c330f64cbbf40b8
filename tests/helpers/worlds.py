"""Simulated drafters and targets, whose costs and acceptance are known exactly."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from hf_specdec.control import ControlProfile, SpeculationController
from hf_specdec.control.acceptance import RowOutcome
from hf_specdec.control.plan import batch_tokens


MOST = 12

# Relative times of a verification by nodes.
TARGETS = {
    "flat": lambda nodes: 1 + 0.01 * (nodes - 1),
    "linear": lambda nodes: 1 + 0.15 * (nodes - 1),
    "steep": lambda nodes: 1 + 0.5 * (nodes - 1),
    "float32 on a CPU": lambda nodes: {1: 1.0, 2: 2.05, 3: 2.6, 4: 2.0}.get(nodes, 1.8 + 0.06 * max(nodes - 8, 0)),
}


@dataclass
class Cycle:
    """Limits of the rows, and true seconds."""

    limits: list[int]
    seconds: float


@dataclass
class World:
    """A drafter, a target and a text."""

    acceptance: list[float]  # of each row: how often a token is accepted after accepted ones
    draft: Callable[[int], float]  # depth -> seconds of a draft
    verify: Callable[[int], float]  # nodes, the anchor included -> seconds
    noise: float = 0.0  # standard deviation of the logarithm of measured times
    stalls: float = 0.0  # how many of the measured times are ten times too long
    seed: int = 0
    looks_ahead: bool = False  # limits are asked for before the outcome of the cycle before is known

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.following = {}  # by controller: limits of the next cycle, and whether it is one of rest

    def tokens(self, limit: int) -> float:
        """Expected tokens of a cycle with full drafts of this length, which end with the slowest row."""
        rows = [sum(rate**position for position in range(limit + 1)) for rate in self.acceptance]
        return batch_tokens(rows, [1.0] * len(rows), fixed=0.5)

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

    def outcomes(self, rows: list[int], limits: list[int]) -> list[RowOutcome]:
        outcomes = []
        for row, limit in zip(rows, limits):
            accepted = 0
            while accepted < limit and self.random.random() < self.acceptance[row]:
                accepted += 1
            outcomes.append(RowOutcome(row, limit, limit, accepted, accepted + 1))
        return outcomes

    def cycle(self, controller: SpeculationController) -> Cycle:
        """One cycle under the controller."""
        rows = list(range(len(self.acceptance)))
        limits, is_resting = self.following.pop(controller, None) or (controller.limits(rows), controller.is_resting)
        outcomes, deepest = self.outcomes(rows, limits), max(limits)
        measured = self.measured(self.draft(deepest)) if deepest else None
        if self.looks_ahead:
            self.following[controller] = controller.limits(rows), controller.is_resting
        if not (self.looks_ahead and is_resting):
            controller.observe(outcomes, deepest, measured, self.measured(self.verify(deepest + 1)))
        return Cycle(limits, self.seconds(deepest))

    def run(self, controller: SpeculationController, cycles: int) -> list[Cycle]:
        return [self.cycle(controller) for _ in range(cycles)]

    def controller(self, most: int, profile: ControlProfile | None = None) -> SpeculationController:
        return SpeculationController(most, len(self.acceptance), profile, 5)

    def loss(self, cycles: list[Cycle], most: int) -> float:
        """Part of the best fixed length's throughput that the lengths of these cycles lose, in expectation."""
        limits = [max(cycle.limits) for cycle in cycles]
        ours = sum(map(self.tokens, limits)) / sum(map(self.seconds, limits))
        return 1 - ours / self.rate(self.best(most))


def world_of(target, acceptance, cost, seed=0, **settings) -> World:
    """A world in milliseconds, of a drafter that writes one token after the other."""
    rates = acceptance if isinstance(acceptance, list) else [acceptance]
    verify = TARGETS[target]
    return World(rates, lambda depth: cost * depth * 1e-3, lambda nodes: verify(nodes) * 1e-3, seed=seed, **settings)


def any_world(numbers: random.Random, seed: int) -> World:
    """One row, any acceptance, cheap and expensive drafters, quiet and noisy machines."""
    target, rate, cost = numbers.choice(sorted(TARGETS)), numbers.uniform(0, 0.95), numbers.uniform(0.005, 1.5)
    return world_of(target, rate, cost, seed, noise=numbers.choice([0, 0.05, 0.2]), stalls=numbers.choice([0, 0.02]))
