"""The controller in simulated worlds: lengths and sizes of trees that pay, where times are noisy and stall."""

import random
import statistics
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec import forget_speculators, load_speculator, record
from hf_specdec.control import ControlProfile, LatencyModel, theory
from hf_specdec.control.acceptance import AcceptanceModel, PastRates, RowOutcome
from hf_specdec.control.controller import SpeculationController
from hf_specdec.control.plan import batch_tokens
from hf_specdec.control.tree_size import TreeSize
from hf_specdec.drafts import DraftTree, TokenTree
from tests.helpers.levels import full, in_full
from tests.helpers.methods import demo_inputs, demo_target, settings_of
from tests.helpers.worlds import MOST, TARGETS, any_world, world_of


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
        *in_full(("steep", 0.3, 0.4, False), ("float32 on a CPU", 0.1, 0.9, True)),
        *in_full(("linear", 0.02, 0.02, False), ("flat", 1.0, 0.7, True)),
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


@full
@pytest.mark.parametrize("looks_ahead", [False, True])
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


@pytest.mark.parametrize(("target", "cost"), [("flat", 0.3), *in_full(("float32 on a CPU", 5.0))])
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


def test_drafting_stops_where_the_text_changes_and_begins_again():
    world = world_of("linear", 0.8, 0.1, seed=3, noise=0.05)
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


def test_the_slowest_row_counts_as_far_as_cycles_cost_the_same_for_any_number_of_rows():
    left = [64, 64, 64, 64]
    assert batch_tokens([2, 2, 2, 2], left, fixed=1.0) == 8
    assert batch_tokens([4, 4, 4, 1], left, fixed=1.0) == 4
    assert batch_tokens([4, 4, 4, 1], left, fixed=0.0) == pytest.approx(16 / (3 / 4 + 1))
    # A row that is nearly done is not the slowest one.
    assert batch_tokens([4, 4, 4, 1], [64, 64, 64, 1], fixed=1.0) == pytest.approx(193 / 16)


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
            controller.observe(outcomes, max(limits), 1e-4 if max(limits) else None, generator.uniform(0.5e-3, 1.5e-3))


# Calls one after the other


def test_a_profile_spares_the_next_call_the_search():
    world = world_of("flat", 0.9, 0.05, noise=0.05)
    again = ControlProfile.from_dict(taught(world).to_dict())
    assert world.loss(world.run(world.controller(MOST, profile=again), 20), MOST) < 0.06
    # A call that never drafts teaches nothing.
    profile = ControlProfile(accepted=PastRates([0.5], [4.0]))
    SpeculationController(4, 1, profile).close()
    assert profile.to_dict() == ControlProfile(accepted=PastRates([0.5], [4.0])).to_dict()


# Limits and rates


@given(st.integers(1, 5), st.integers(1, 8), st.data())
def test_limits_are_lengths_whatever_happens(num_rows, most, data):
    controller, rows, times = SpeculationController(most, num_rows), list(range(num_rows)), st.floats(0, 1)
    for _ in range(30):
        limits, outcomes = controller.limits(rows), []
        assert all(0 <= limit <= most for limit in limits)
        for row, limit in zip(rows, limits):
            depth = data.draw(st.integers(0, limit))
            accepted = data.draw(st.integers(0, depth))
            outcomes.append(RowOutcome(row, limit, depth, accepted, max(accepted + data.draw(st.integers(0, 1)), 1)))
        nodes = max(outcome.depth for outcome in outcomes) * data.draw(st.integers(1, 3))
        controller.observe(outcomes, nodes, data.draw(times) if max(limits) else None, data.draw(times))


def test_limits_of_other_rows_are_taken_back():
    """A trial that rows have left counts for nothing, and the outcomes of the cycle before count for that."""
    world, one = world_of("linear", [0.9, 0.2], 0.1), world_of("linear", [0.9], 0.1)
    controller = world.controller(MOST)
    world.run(controller, 60)
    both = controller.limits([0, 1])
    for _ in range(40):
        controller.limits([0, 1])
        controller.take_back()
    controller.observe([RowOutcome(row, limit, limit, 0, 1) for row, limit in enumerate(both)], max(both), 1e-4, 1e-3)
    one.run(controller, 60)
    assert one.loss(one.run(controller, 60), MOST) < 0.06


def test_positions_and_rows_have_rates_of_their_own():
    model, rates, generator = AcceptanceModel(3, 3), {0: [0.9, 0.6, 0.3], 1: [0.0] * 3}, random.Random(0)
    found = []
    for cycle in range(3000):
        for row in (0, 1):
            accepted = next((i for i, rate in enumerate(rates[row]) if generator.random() >= rate), 3)
            model.observe(RowOutcome(row, 3, 3, accepted, accepted + 1))
        if cycle >= 60:
            found.append([next(model.path_probabilities([row]))[0][0] for row in (0, 1)])
    means = [statistics.mean(column) for column in zip(*found)]
    assert means == pytest.approx([0.9, 0.0], abs=0.1)
    assert next(model.path_probabilities([2]))[0][0] == pytest.approx(model.expected()[0][0])


# Trees: the number of nodes that pays, found from ratings, outcomes and times


def trees_with(verify, rows=1, draft=0.0):
    """Known times: of drafts, and of verifications by nodes."""
    model = LatencyModel()
    for _ in range(5):
        for nodes in (1, 2, 4, 8, 16, 24, 32, 33):
            model.observe_verification(rows, nodes, verify(nodes))
        model.observe_draft(rows, 4, max(draft, 1e-9))
    return TreeSize(model)


def rated(probs, rows=1):
    """A draft of children of the anchor for each row, rated so, in an order of its own."""
    order = random.Random(0).sample(range(len(probs)), len(probs))
    ratings = torch.tensor([[probs[rank] for rank in order]] * rows, dtype=torch.float64).log()
    tokens = torch.tensor([order] * rows)
    return DraftTree(tokens, torch.full_like(tokens[0], -1), [len(probs)] * rows, path_log_probs=ratings)


@pytest.mark.parametrize(("slope", "rate"), [(0.03, 0.6), *in_full((0.1, 1.0), (0.0, 1.0), (1.0, 0.6))])
def test_the_size_is_the_best_one(slope, rate):
    """Ratings that are right by a factor: what is kept is the analytic optimum over all sizes, or nearly so."""
    random_numbers = random.Random(1)
    probs = [0.5 / rank for rank in range(1, 33)]

    def verify(nodes):
        return (1 + slope * (nodes - 1)) * 1e-3

    trees = trees_with(verify, draft=0.2e-3)
    for _ in range(400):
        draft = trees.cut(rated(probs), 4)
        accepted = sum(random_numbers.random() < rate * probs[token] for token in draft.token_lists()[0])
        trees.observe(draft, [accepted])
    assert trees.rating.value == pytest.approx(rate, rel=0.25)
    tokens = [1 + rate * total for total in accumulate(probs, initial=0.0)]
    values = [value / (0.2e-3 + verify(size + 1)) for size, value in enumerate(tokens)]
    kept = trees.size or len(probs)
    assert values[kept] > 0.97 * max(values[1:])


def test_what_is_not_rated_is_left_alone():
    """Chains that foresee nothing, and trees that were found in a text, also between others."""
    trees = trees_with(lambda nodes: nodes * 1e-3)
    for _ in range(20):
        trees.cut(rated([0.5, 0.3, 0.1]), 4)
    chain = DraftTree.chain(torch.arange(8)[None])
    found = DraftTree.from_lists([[5, 6, 7]], parents=[[-1, -1, 0]])
    for draft in [chain, found] * 20:
        assert trees.cut(draft, 8) is draft
        trees.observe(draft, [3])
    assert trees.rating.value == 1.0


TREES = {
    "eagle3": {"draft_tree_depth": 4, "draft_tree_top_k": 4, "num_draft_nodes": 23},
    "medusa": {"num_draft_nodes": 24},
    "eagle3 static tree": {"speculative_token_tree": TokenTree.of_size(20, 3)},
}


@pytest.mark.parametrize(
    ("name", "batch_size", "do_sample"),
    [("eagle3", 3, True), *in_full(("medusa", 1, False), ("eagle3 static tree", 3, True))],
)
def test_the_text_does_not_depend_on_the_size(name, batch_size, do_sample, monkeypatch):
    target = demo_target()
    settings = settings_of(name, num_speculative_tokens="auto", **TREES[name])
    speculator = load_speculator(target, settings)
    monkeypatch.setattr(
        "hf_specdec.control.controller.SpeculationController.limits",
        lambda controller, rows, *more: [controller.most] * len(rows),
    )

    def run(size):
        monkeypatch.setattr(TreeSize, "_plan", lambda trees, *given: setattr(trees, "size", size))
        torch.manual_seed(3)
        call = {**demo_inputs(batch_size), "max_new_tokens": 12, "do_sample": do_sample}
        with record() as r:
            text = target.generate(**call, assistant=speculator)
        return text, r.calls[0].stats

    text, whole = run(None)
    for size in (1, 7):
        other, cut = run(size)
        assert torch.equal(other, text)
        assert cut.num_draft_tokens / cut.num_drafts < whole.num_draft_tokens / whole.num_drafts
    forget_speculators(target)
