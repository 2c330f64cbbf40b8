"""The controller in simulated worlds: what it finds, follows and loses, with times that are noisy and stall."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.control import ControlProfile, theory
from hf_specdec.control.acceptance import PastRates, RowOutcome
from hf_specdec.control.controller import Choice, SpeculationController
from hf_specdec.control.plan import batch_tokens
from tests.helpers.levels import full, in_full
from tests.helpers.worlds import MOST, TARGETS, World, any_batch, any_world, world_of


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


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_useless_drafter_drafts_a_few_times_in_its_first_call_and_seldom_later(looks_ahead):
    world = world_of("flat", 0.1, 2.0, looks_ahead=looks_ahead)
    cycles = world.run(world.controller(MOST), 100)
    assert sum(max(cycle.limits) > 0 for cycle in cycles) <= 5
    world = world_of("linear", 0.0, 0.5, looks_ahead=looks_ahead)
    controller = world.controller(MOST)
    world.run(controller, 100)
    cycles = world.run(controller, 4000)
    wasted = sum(cycle.seconds for cycle in cycles) - len(cycles) * world.seconds(0)
    assert any(max(cycle.limits) > 0 for cycle in cycles)
    assert wasted < 0.012 * len(cycles) * world.seconds(0)


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


def test_a_change_of_costs_is_followed():
    world = world_of("flat", 0.8, 0.02, seed=1, noise=0.05)
    controller = world.controller(MOST)
    world.run(controller, 150)
    assert used(world.run(controller, 50)) >= 6
    for milliseconds, cycles, least, most in ((0.4, 80, 0, 3), (0.1, 300, 3, MOST), (2.0, 80, 0, 0)):
        world.draft = lambda depth, cost=milliseconds: cost * 1e-3 * depth
        world.run(controller, cycles)
        assert least <= used(world.run(controller, 50)) <= most


def test_the_length_does_not_flap():
    world = world_of("linear", 0.45, 0.15, seed=2, noise=0.1, stalls=0.02)
    controller = world.controller(MOST)
    world.run(controller, 200)
    lengths = []
    for _ in range(400):
        world.cycle(controller)
        lengths.append(controller.length)
    assert sum(before != after for before, after in zip(lengths, lengths[1:])) < 40


# Batches


def test_a_batch_has_the_length_that_its_rows_want_together():
    world = world_of("linear", [0.9, 0.8, 0.05, 0.05], 0.1, seed=4, noise=0.05)
    controller = world.controller(MOST)
    world.run(controller, 150)
    assert world.loss(world.run(controller, 200), MOST) < 0.06


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
        others = [statistics.mean(world.fixed_length(k) for _ in range(3)) for k in range(MOST + 1)]
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


def moments(rates, length):
    """Expected tokens of a cycle of each row, and the expected squares that spread them."""
    row_tokens = [sum(rate**i for i in range(length + 1)) for rate in rates]
    return row_tokens, [sum((2 * i - 1) * rate**i for i in range(1, length + 1)) for rate in rates]


@pytest.mark.parametrize(
    ("rates", "length"), [([0.7] * 8, 4), *in_full(([0.5] * 2, 1), ([0.9] * 7 + [0.2], 4), ([0.7] * 8, 1))]
)
def test_one_of_equal_rows_is_the_slowest(rates, length):
    num_tokens, numbers = 200, random.Random(0)

    def row_cycles(rate):
        got = count = 0
        while got < num_tokens:
            accepted = next((i for i in range(length) if numbers.random() >= rate), length)
            got, count = got + accepted + 1, count + 1
        return count

    cycles = statistics.mean(max(map(row_cycles, rates)) for _ in range(300))
    (row_tokens, squares), left = moments(rates, length), [num_tokens] * len(rates)
    expected = sum(left) / batch_tokens(row_tokens, left, 1.0, squares)
    assert expected == pytest.approx(cycles, rel=0.015)
    assert expected > 1.01 * sum(left) / batch_tokens(row_tokens, left, 1.0) or len(set(rates)) > 1


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0, 0.99)), min_size=2, max_size=16), st.integers(1, 6))
def test_no_draft_makes_a_batch_worth_less_than_none(rows, length):
    left, rates = zip(*rows)
    row_tokens, squares = moments(rates, length)
    for fixed in (0.0, 0.6, 1.0):
        plain = batch_tokens([1.0] * len(rows), left, fixed) * (1 - 1e-9)
        assert plain <= batch_tokens(row_tokens, left, fixed, squares) <= len(rows) * max(row_tokens) * (1 + 1e-9)


def test_a_row_whose_drafts_are_bad_does_not_widen_the_batch():
    """One row drafts well now and then, the other always and badly: a verification is as wide as its widest row."""
    world = World([0.95, 0.02], lambda depth: 1e-6, lambda nodes: (1 + 0.15 * (nodes - 1)) * 1e-3, depths=(0.7, 1.0))
    controller = world.controller(MOST)
    world.run(controller, 150)
    limits = [cycle.limits for cycle in world.run(controller, 100)]
    good, bad = (statistics.median(row) for row in zip(*limits))
    assert good >= 1
    assert bad == 0


def test_limits_of_other_rows_are_taken_back():
    """A trial that rows have left counts for nothing, and the outcomes of the cycle before count for that."""
    world = world_of("linear", [0.9, 0.2], 0.1)
    controller = world.controller(MOST)
    world.run(controller, 60)
    one, both = world_of("linear", [0.9], 0.1), controller.limits([0, 1])
    for _ in range(40):
        controller.limits([0, 1])
        controller.take_back()
    controller.observe([RowOutcome(row, limit, limit, 0, 1) for row, limit in enumerate(both)], max(both), 1e-4, 1e-3)
    one.run(controller, 60)
    assert one.loss(one.run(controller, 60), MOST) < 0.06


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


def test_a_first_call_of_a_few_tokens_does_not_keep_later_ones_from_drafting():
    profile = ControlProfile()

    def call(world, num_cycles, num_unread, reading, slowness=1.0):
        """Limits of a call whose drafter reads the prompt first, and then what it has missed in a pause."""
        controller, limits = world.controller(MOST, profile=profile), []
        for _ in range(num_cycles):
            (limit,) = controller.limits([0], num_unread)
            limits.append(limit)
            accepted, told = world._run(world.acceptance[0], limit), None
            if limit:
                told, num_unread = (num_unread, reading if num_unread > 2 else 1e-4), 0
            draft = slowness * world.draft(limit) if limit else None
            outcome = RowOutcome(0, limit, limit, accepted, accepted + 1)
            controller.observe([outcome], limit, draft, world.verify(limit + 1), told)
            num_unread += 1
        controller.close()
        return limits

    # Everything is done for the first time, and nothing is accepted after a text of eight tokens.
    call(world_of("flat", 0.0, 0.1), 7, 8, reading=1e-3, slowness=4.0)
    used_lengths = call(world_of("flat", 0.9, 0.1), 120, 200, reading=3e-3)
    assert statistics.mean(used_lengths[-30:]) > 3


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


# Drafts that end early


def test_a_trial_is_compared_with_the_chosen_length_on_the_same_draft():
    controller = SpeculationController(8, 1)
    for _ in range(40):
        (limit,) = controller.limits([0])
        controller.observe([RowOutcome(0, limit, limit, min(limit, 4), min(limit, 4) + 1)], limit, 1e-5 * limit, 1e-3)
    plan = controller._plan
    shorter, longer = (Choice(limit, length=4, is_trial=True, plan=plan) for limit in (2, 8))
    # All of a shorter draft was accepted: more of a longer one would have been.
    assert controller._tokens_instead(shorter, plan, RowOutcome(0, 2, 2, 2, 3)) > 4
    # Both would have ended at the same token.
    assert controller._tokens_instead(shorter, plan, RowOutcome(0, 2, 2, 1, 2)) == 2
    assert controller._tokens_instead(longer, plan, RowOutcome(0, 8, 8, 6, 7)) == 5
    # As long as this one would have taken for them, if they ended on their own. Else that is not known.
    seconds = controller._costs([0])

    def instead(depth, choice):
        return controller._seconds_instead(choice, plan, seconds, [RowOutcome(0, choice.limit, depth, 0, 1)])

    assert [instead(depth, longer) for depth in (0, 2, 4, 6, 8)] == [seconds[min(k, 4)] for k in (0, 2, 4, 6, 8)]
    assert instead(1, shorter) == seconds[1]
    assert instead(2, shorter) == plan.seconds[4]


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
