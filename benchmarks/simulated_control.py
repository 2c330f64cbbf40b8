"""What does the controller of the speculation length lose in simulated worlds, whose best length is known?

    python -m benchmarks.simulated_control            # from the repository's root: the worlds are those of the tests
    python -m benchmarks.simulated_control --worlds 500 --json worlds.json

The times of a world have noise, and some of them are ten times too long. Its drafter and its target cost what they
cost, whatever this machine does, so the figures do not depend on it. Four questions:

- grid: four targets, draft costs from 0.02 to 1, acceptance from 0.02 to 0.9: throughput lost against the best fixed
  length, 0 included, in the first 200 cycles of the first call, and in the 1000 cycles behind them;
- any: worlds drawn at random, less kind ones among them: the same in a second call of 800 cycles;
- batches: calls of 128 tokens of each row whose rows are accepted alike or not and leave when they are done: the same
  of the fourth to seventh call, beside the best fixed length and beside plain decoding (negative: gained). The best of
  13 lengths is the luckiest of them, too, so that the first figure is somewhat too large;
- texts: 16 calls of 128 tokens of one row, whose texts are easy or hard by chance: beside the best length of each of
  them, which takes an oracle, and beside plain decoding.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hf_specdec.control import ControlProfile
from tests.control.worlds import MOST, TARGETS, World, any_batch, any_world, batch_of, world_of


def grid() -> dict[str, list[float]]:
    losses: dict[str, list[float]] = {"grid, cycles 1 to 200": [], "grid, cycles 201 to 1200": []}
    for target in TARGETS:
        for cost in (0.02, 0.1, 0.3, 0.6, 1.0):
            for rate in (0.02, 0.4, 0.9):
                for seed in range(2):
                    world = world_of(target, rate, cost, seed, noise=0.05, stalls=0.02)
                    controller = world.controller(MOST)
                    for found, cycles in zip(losses.values(), (200, 1000)):
                        found.append(world.loss(world.run(controller, cycles), MOST))
    return losses


def any_worlds(count: int) -> dict[str, list[float]]:
    chance = random.Random(0)
    return {"any, second call": [_loss_of_second_call(any_world(chance, seed)) for seed in range(count)]}


def _loss_of_second_call(world: World) -> float:
    profile = ControlProfile()
    first = world.controller(MOST, profile=profile)
    world.run(first, 400)
    first.profile_into(profile)
    return world.loss(world.run(world.controller(MOST, profile=profile), 800), MOST)


def batches(count: int) -> dict[str, list[float]]:
    chance = random.Random(3)
    losses: dict[str, list[float]] = {"batches, beside the best length": [], "batches, beside plain decoding": []}
    for seed in range(count):
        world, profile = any_batch(chance, seed), ControlProfile()
        for _ in range(3):
            world.call_under(profile, MOST)
        ours = statistics.mean(world.call_under(profile, MOST) for _ in range(4))
        others = [statistics.mean(world.fixed_length(k) for _ in range(3)) for k in range(MOST + 1)]
        for found, beside in zip(losses.values(), (min(others), others[0])):
            found.append(1 - beside / ours)
    return losses


def texts(count: int) -> dict[str, list[float]]:
    losses: dict[str, list[float]] = {"texts, beside the best length of each": [], "texts, beside plain decoding": []}
    for seed in range(count):
        chance, profile = random.Random(seed), ControlProfile()
        world = batch_of(chance.choice(sorted(TARGETS)), 0.0, chance.choice([0.02, 0.1, 0.3, 0.6]), seed)
        ours = best = plain = 0.0
        for _ in range(16):
            world.acceptance = [chance.choice([0.2, 0.85])]
            others = [statistics.mean(world.fixed_length(k) for _ in range(2)) for k in range(MOST + 1)]
            ours, best, plain = ours + world.call_under(profile, MOST), best + min(others), plain + others[0]
        for found, beside in zip(losses.values(), (best, plain)):
            found.append(1 - beside / ours)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=200, help="worlds that are drawn, of each kind")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    losses = grid() | any_worlds(arguments.worlds) | batches(arguments.worlds) | texts(arguments.worlds)
    table = Table("part of the throughput that is lost", "worlds", "mean", "95 of 100 lose less than", "most")
    rows = []
    for name, found in losses.items():
        row = {
            "case": name,
            "worlds": len(found),
            "mean": statistics.mean(found),
            "quantile_95": statistics.quantiles(found, n=20)[-1],
            "worst": max(found),
        }
        rows.append(row)
        table.add_row(name, str(len(found)), *(f"{row[key]:.1%}" for key in ("mean", "quantile_95", "worst")))
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
