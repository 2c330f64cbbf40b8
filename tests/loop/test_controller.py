"""Lengths and sizes of trees that pay, in worlds of known costs whose times are noisy and stall."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec import forget_speculators, load_speculator, record
from hf_specdec.control import ControlProfile, LatencyModel
from hf_specdec.control.controller import SpeculationController, batch_tokens
from hf_specdec.control.rates import AcceptanceModel, Rate, RowOutcome
from hf_specdec.control.sizes import DraftSizes, TreeSize
from hf_specdec.drafts import DraftTree, TokenTree
from hf_specdec.drafts.static import prior_accuracies
from hf_specdec.protocol import Session
from tests.helpers.levels import in_full
from tests.helpers.methods import demo_inputs, demo_target, settings_of
from tests.helpers.models import tiny_llama


MOST = 12

# Relative times of a verification by nodes.
TARGETS = {
    "flat": lambda nodes: 1 + 0.01 * (nodes - 1),
    "linear": lambda nodes: 1 + 0.15 * (nodes - 1),
    "steep": lambda nodes: 1 + 0.5 * (nodes - 1),
    "float32 on a CPU": lambda nodes: {1: 1.0, 2: 2.05, 3: 2.6, 4: 2.0}.get(nodes, 1.8 + 0.06 * max(nodes - 8, 0)),
}


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

    def cycle(self, controller: SpeculationController) -> list[int]:
        """Limits of the rows in one cycle under the controller."""
        rows = list(range(len(self.acceptance)))
        limits, is_resting = self.following.pop(controller, None) or (controller.limits(rows), controller.is_resting)
        outcomes, deepest = self.outcomes(rows, limits), max(limits)
        measured = self.measured(self.draft(deepest)) if deepest else None
        if self.looks_ahead:
            self.following[controller] = controller.limits(rows), controller.is_resting
        if not (self.looks_ahead and is_resting):
            controller.observe(outcomes, deepest, measured, self.measured(self.verify(deepest + 1)))
        return limits

    def run(self, controller: SpeculationController, cycles: int) -> list[list[int]]:
        return [self.cycle(controller) for _ in range(cycles)]

    def controller(self, most: int, profile: ControlProfile | None = None) -> SpeculationController:
        return SpeculationController(most, len(self.acceptance), profile, 5)

    def loss(self, cycles: list[list[int]], most: int) -> float:
        """Part of the best fixed length's throughput that the lengths of these cycles lose, in expectation."""
        limits = [max(cycle) for cycle in cycles]
        ours = sum(map(self.tokens, limits)) / sum(map(self.seconds, limits))
        return 1 - ours / self.rate(self.best(most))


def world_of(target, acceptance, cost, seed=0, **settings) -> World:
    """A world in milliseconds, of a drafter that writes one token after the other."""
    rates = acceptance if isinstance(acceptance, list) else [acceptance]
    verify = TARGETS[target]
    return World(rates, lambda depth: cost * depth * 1e-3, lambda nodes: verify(nodes) * 1e-3, seed=seed, **settings)


def used(cycles):
    """The length that most cycles had."""
    return statistics.mode(max(cycle) for cycle in cycles)


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
        ("linear", 0.1, 0.7, True),
        *in_full(("flat", 0.02, 0.9, False)),
        *in_full(("steep", 0.3, 0.4, False), ("float32 on a CPU", 0.1, 0.9, True)),
        *in_full(("linear", 0.02, 0.02, False), ("flat", 1.0, 0.7, True)),
    ],
)
def test_the_best_length_is_found_within_a_few_dozen_cycles(target, cost, rate, looks_ahead):
    worlds = [world_of(target, rate, cost, seed, looks_ahead=looks_ahead) for seed in range(3)]
    losses = []
    for world in worlds:
        controller = world.controller(MOST)
        world.run(controller, 60)
        losses.append(world.loss(world.run(controller, 40), MOST))
    # Rates are known to a tenth after so many cycles; the best lengths lie close to each other.
    assert statistics.median(losses) < 0.06


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


# Calls one after the other


def test_a_profile_spares_the_next_call_the_search():
    world = world_of("flat", 0.9, 0.05, noise=0.05)
    assert world.loss(world.run(world.controller(MOST, profile=taught(world)), 20), MOST) < 0.06
    # A call that never drafts teaches nothing.
    past = [Rate(0.5, 4.0)]
    profile = ControlProfile(accepted=past)
    SpeculationController(4, 1, profile).close()
    assert (profile.accepted, profile.budget) == (past, 0.0)
    assert (past[0].mean, past[0].weight) == (0.5, 4.0)


@pytest.mark.parametrize("rate", [0.3, *in_full(0.0, 0.8)])
def test_a_first_call_loses_less_where_drafts_are_known_to_be_dear(rate):
    """A draft token that takes as long as a plain cycle, in calls of some 60 tokens."""

    def loss(draft_cost, seed):
        world = world_of("linear", rate, 1.0, seed, noise=0.05)
        return world.loss(world.run(SpeculationController(MOST, 1, None, 5, draft_cost=draft_cost), 50), MOST)

    known, unknown = (statistics.mean(loss(cost, seed) for seed in range(8)) for cost in (1.0, 0.0))
    assert known < unknown - 0.03


def test_bytes_of_a_draft_model_tell_what_its_tokens_cost():
    target = tiny_llama()

    def first_limits(draft_model):
        speculator = load_speculator(target, "draft_model", draft_model=draft_model, num_speculative_tokens="auto")
        generator = speculator.candidate_generator(Session(1, 100, torch.device("cpu"), supports_trees=False))
        return [generator.controller.limits([0]) for _ in range(3)]

    assert first_limits(tiny_llama(1)) == [[0], [1], [0]]
    assert first_limits(tiny_llama(1, num_hidden_layers=1, hidden_size=8)) == [[3], [0], [3]]
    assert first_limits(tiny_llama(1, num_hidden_layers=1, hidden_size=2, num_attention_heads=1)) == [[5], [0], [5]]


# Limits and rates


@given(st.integers(1, 5), st.integers(1, 8), st.data())
def test_limits_are_lengths_whatever_happens_and_fewer_rows_may_allow_less(num_rows, most, data):
    rows, times, halved = list(range(num_rows)), st.floats(0, 1), most // 2
    controller = SpeculationController(most, num_rows, None, None, lambda count: most if count == num_rows else halved)
    for cycle in range(30):
        if cycle == 15:
            rows = data.draw(st.permutations(rows))[: data.draw(st.integers(1, num_rows))]
        limits, outcomes = controller.limits(rows), []
        assert len(limits) == len(rows)
        assert all(0 <= limit <= (most if len(rows) == num_rows else halved) for limit in limits)
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
    assert not controller._chosen
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
            found.append([accepted for accepted, _ in model.of_rows([0, 1])[0]])
    means = [statistics.mean(column) for column in zip(*found)]
    assert means == pytest.approx([0.9, 0.0], abs=0.1)
    assert model.of_rows([2])[0][0][0] == pytest.approx(model.accepted.expected()[0])


# Trees: the number of nodes that pays, found from ratings, outcomes and times


def trees_with(verify, rows=1, draft=0.0):
    """Known times: of drafts, and of verifications by nodes."""
    model = LatencyModel()
    for _ in range(5):
        for nodes in (1, 2, 4, 8, 16, 24, 32, 33):
            model.observe_verification(rows, nodes, verify(nodes))
        model.observe_draft(rows, 4, 4, max(draft, 1e-9))
    return DraftSizes(model)


def rated(probs, rows=1):
    """A draft of children of the anchor for each row, rated so, in an order of its own."""
    order = random.Random(0).sample(range(len(probs)), len(probs))
    ratings = torch.tensor([[probs[rank] for rank in order]] * rows, dtype=torch.float64).log()
    tokens = torch.tensor([order] * rows)
    return DraftTree(tokens, torch.full_like(tokens[0], -1), [len(probs)] * rows, path_log_probs=ratings)


def test_combined_methods_have_trees_and_chains_cut():
    sizes = trees_with(lambda nodes: 1e-3 * nodes, draft=0.2e-3)
    for _ in range(4):
        chain = DraftTree.chain(torch.zeros((1, 4), dtype=torch.long))
        chain.path_log_probs = torch.tensor([[0.9, 0.8, 0.1, 0.01]]).log()
        drafts = []
        for draft, depth in ((chain, 4), (rated([0.9, *[0.01] * 7]), 1)):
            drafts.append(sizes.cut(draft, depth))
            sizes.observe(drafts[-1], [1])
    assert drafts[0].size < 4
    assert drafts[1].size < 8
    # A draft that nobody has rated teaches nothing.
    rating = sizes.rating.value
    unrated = sizes.cut(DraftTree.chain(torch.zeros((1, 4), dtype=torch.long)), 4)
    sizes.observe(unrated, [0])
    assert (unrated.size, sizes.rating.value) == (4, rating)


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
    kept = trees.trees.size or len(probs)
    assert values[kept] > 0.97 * max(values[1:])


TREES = {
    "eagle3": {"draft_tree_depth": 4, "draft_tree_top_k": 4, "num_draft_nodes": 23},
    "medusa": {"num_draft_nodes": 24},
    "eagle3 static tree": {"speculative_token_tree": TokenTree.from_accuracies(prior_accuracies(3, 10), 20)},
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
