"""The controller in simulated worlds: what it finds, follows and loses, with times that are noisy and stall."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.control import ControlProfile, theory
from hf_specdec.control.acceptance import PastRates, RowOutcome
from hf_specdec.control.controller import SpeculationController
from hf_specdec.control.plan import batch_tokens
from tests.helpers.levels import full, in_full
from tests.helpers.worlds import MOST, TARGETS, any_batch, any_world, world_of


def used(cycles):
    """The length that most cycles had."""
    return statistics.mode(max(cycle.limits) for cycle in cycles)


def taught(world, cycles=200):
    """The profile that a call of some cycles leaves."""
    profile = ControlProfile()
    controller = world.controller(MOST, profile=profile)
    world.run(controller, cycles)
    controller.close()
    return profile


@pytest.mark.parametrize(
    ("target", "cost", "rate", "looks_ahead"),
    [
        ("flat", 0.02, 0.9, False),
        ("linear", 0.1, 0.7, True),
        ("steep", 0.3, 0.4, False),
        ("float32 on a CPU", 0.1, 0.9, True),
        *in_full(
            ("flat", 1.0, 0.7, True),
            ("linear", 0.02, 0.02, False),
            ("steep", 0.02, 0.9, True),
            ("float32 on a CPU", 0.3, 0.4, False),
        ),
    ],
)
def test_the_best_length_is_found_within_a_few_dozen_cycles(target, cost, rate, looks_ahead):
    worlds = [world_of(target, rate, cost, seed, looks_ahead=looks_ahead) for seed in range(3)]
    best = theory.optimal_length(rate, lambda k: cost * k, lambda k: TARGETS[target](k + 1), MOST)
    assert worlds[0].best(MOST) == best
    losses = []
    for world in worlds:
        controller = world.controller(MOST)
        world.run(controller, 60)
        losses.append(world.loss(world.run(controller, 40), MOST))
    # Rates are known to a tenth after so many cycles; the best lengths lie close to each other.
    assert statistics.median(losses) < 0.06


@pytest.mark.parametrize("looks_ahead", [False, *in_full(True)])
def test_little_is_lost_against_the_best_fixed_length(looks_ahead):
    """Worlds of any kind; a few expensive drafters are given up too soon, where times are noisy."""
    numbers, losses = random.Random(0), []
    for seed in range(40):
        world = any_world(numbers, seed)
        world.looks_ahead = looks_ahead
        profile = taught(world, 400)
        losses.append(world.loss(world.run(world.controller(MOST, profile=profile), 800), MOST))
    assert statistics.mean(losses) < 0.03
    assert statistics.quantiles(losses, n=20)[-1] < 0.1


@pytest.mark.parametrize(
    ("target", "cost"), [("flat", 0.3), ("float32 on a CPU", 5.0), *in_full(("linear", 0.02), ("steep", 1.0))]
)
def test_a_useless_drafter_costs_two_parts_in_a_hundred(target, cost):
    """Costs on average: a call may spend what earlier ones have saved up for trials."""
    losses = []
    for seed in range(3):
        world = world_of(target, 0.0, cost, seed, noise=0.05, stalls=0.02)
        profile = taught(world)
        for _ in range(3):
            controller = world.controller(MOST, profile=profile)
            losses.append(world.loss(world.run(controller, 300), MOST))
            controller.close()
    assert max(losses) < 0.06
    assert statistics.mean(losses) < 0.02


@pytest.mark.parametrize("target", ["linear", *in_full("flat")])
def test_drafting_stops_where_the_text_changes_and_begins_again(target):
    world = world_of(target, 0.8, 0.1, seed=3, noise=0.05)
    controller = world.controller(MOST)
    world.run(controller, 150)
    assert used(world.run(controller, 30)) >= 2
    world.acceptance = [0.02]
    world.run(controller, 60)
    assert used(world.run(controller, 50)) == 0
    world.acceptance = [0.8]
    world.run(controller, 150)
    assert used(world.run(controller, 50)) >= 2
    assert world.loss(world.run(controller, 200), MOST) < 0.06


# Batches


@full
def test_batches_whose_rows_end_at_different_times_lose_little():
    """The gain of fast rows is lost in waiting for the slow ones, as far as a cycle costs the same with fewer rows."""
    numbers, losses, beside_plain = random.Random(3), [], []
    for seed in range(25):
        world = any_batch(numbers, seed)
        profile = ControlProfile()
        for _ in range(3):
            world.call_under(profile, MOST)
        ours = statistics.mean(world.call_under(profile, MOST) for _ in range(4))
        others = [
            statistics.mean(world.call(lambda rows, left, k=k: [k] * len(rows)) for _ in range(3))
            for k in range(MOST + 1)
        ]
        losses.append(1 - min(others) / ours)
        beside_plain.append(others[0] / ours)
    assert statistics.mean(losses) < 0.05
    assert statistics.quantiles(losses, n=20)[-1] < 0.15
    assert statistics.quantiles(beside_plain, n=20)[0] > 0.9


def test_the_slowest_row_counts_as_far_as_cycles_cost_the_same_for_any_number_of_rows():
    left = [64, 64, 64, 64]
    assert batch_tokens([2, 2, 2, 2], left, fixed=1.0) == 8
    assert batch_tokens([4, 4, 4, 1], left, fixed=1.0) == 4
    assert batch_tokens([4, 4, 4, 1], left, fixed=0.0) == pytest.approx(16 / (3 / 4 + 1))
    # A row that is nearly done is not the slowest one.
    assert batch_tokens([4, 4, 4, 1], [64, 64, 64, 1], fixed=1.0) == pytest.approx(193 / 16)


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0, 0.99)), min_size=2, max_size=16), st.integers(1, 6))
def test_no_draft_makes_a_batch_worth_less_than_none(rows, length):
    left, rates = zip(*rows)
    # Expected tokens of a cycle of each row, and the expected squares that spread them.
    row_tokens = [sum(rate**i for i in range(length + 1)) for rate in rates]
    squares = [sum((2 * i - 1) * rate**i for i in range(1, length + 1)) for rate in rates]
    for fixed in (0.0, 0.6, 1.0):
        plain = batch_tokens([1.0] * len(rows), left, fixed) * (1 - 1e-9)
        assert plain <= batch_tokens(row_tokens, left, fixed, squares) <= len(rows) * max(row_tokens) * (1 + 1e-9)


def test_rows_that_leave_may_allow_less():
    """Fewer rows have another limit, whatever is tried next."""
    for seed in range(20):
        generator, rows = random.Random(seed), list(range(5))
        controller = SpeculationController(6, 5, None, None, lambda rows: 6 if rows > 4 else 2)
        for cycle in range(60):
            if cycle == seed + 5:
                rows = rows[:-1] if seed % 2 else [2, 0]
            limits = controller.limits(rows)
            assert len(limits) == len(rows)
            assert max(limits) <= (6 if len(rows) > 4 else 2)
            accepted = [generator.randint(0, limit) for limit in limits]
            outcomes = [RowOutcome(row, k, k, a, a + 1) for row, k, a in zip(rows, limits, accepted)]
            draft = 1e-4 if max(limits) else None
            controller.observe(outcomes, max(limits), draft, 1e-3 * generator.uniform(0.5, 1.5))


@given(st.integers(1, 5), st.integers(1, 8), st.randoms(use_true_random=False))
def test_limits_are_lengths_whatever_happens(num_rows, most, numbers):
    controller = SpeculationController(most, num_rows)
    for _ in range(30):
        limits = controller.limits(list(range(num_rows)))
        assert all(0 <= limit <= most for limit in limits)
        outcomes = []
        for row, limit in enumerate(limits):
            depth = numbers.randint(0, limit)
            accepted = numbers.randint(0, depth)
            outcomes.append(RowOutcome(row, limit, depth, accepted, numbers.randint(accepted, accepted + 1) or 1))
        nodes = max(outcome.depth for outcome in outcomes) * numbers.randint(1, 3)
        draft, verification = (numbers.choice([0.0, 1e-6, numbers.random(), 1.0]) for _ in range(2))
        controller.observe(outcomes, nodes, draft if max(limits) else None, verification)


# Calls one after the other


def test_a_profile_spares_the_next_call_the_search():
    world = world_of("flat", 0.9, 0.05, noise=0.05)
    again = ControlProfile.from_dict(taught(world).to_dict())
    assert world.loss(world.run(world.controller(MOST, profile=again), 20), MOST) < 0.06
    # A call that never drafts teaches nothing.
    profile = ControlProfile(accepted=PastRates([0.5], [4.0]))
    SpeculationController(4, 1, profile).close()
    assert profile.to_dict() == ControlProfile(accepted=PastRates([0.5], [4.0])).to_dict()


def test_trials_of_all_calls_together_pay_for_the_reading_of_prompts():
    """A useless drafter must read 60 cycles' worth of text before it can draft anything in a call."""
    world, profile = world_of("flat", 0.0, 0.5), ControlProfile()
    readings, num_calls, cycles = 0, 200, 50
    reading = 60 * world.verify(1)
    for _ in range(num_calls):
        controller, num_unread = world.controller(MOST, profile=profile), 64
        for _ in range(cycles):
            (limit,) = controller.limits([0], num_unread)
            told = None
            if limit and num_unread:
                told, num_unread, readings = (num_unread, reading), 0, readings + 1
            draft = world.draft(limit) if limit else None
            controller.observe([RowOutcome(0, limit, limit, 0, 1)], limit, draft, world.verify(limit + 1), told)
        controller.close()
    # The first call cannot know.
    assert 2 <= readings <= 1 + 0.012 * num_calls * cycles * world.verify(1) / reading


@pytest.mark.parametrize("noise", [0.1, *in_full(0.0)])
def test_trials_of_drafts_that_end_early_gain_nothing(noise):
    """Text is found in one of ten cycles only: the other nine are short ones, whatever was allowed."""
    controller, follow_ups, numbers = SpeculationController(12, 1, usual=6), 0, random.Random(0)
    for cycle in range(600):
        (limit,) = controller.limits([0])
        depth = limit if cycle % 10 == 0 else 0
        seconds = 1e-3 * (1 + 0.05 * depth) * numbers.lognormvariate(0.0, noise)
        controller.observe([RowOutcome(0, limit, depth, depth, depth + 1)], depth, 1e-5, seconds)
        follow_ups += controller._follow_up is not None
    assert controller.length == 12
    assert follow_ups < 12
