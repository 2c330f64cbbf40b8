"""Running rates by position: what they converge to, what they forget, and what is expected of unknown positions."""

import random

import pytest

from hf_specdec.control.acceptance import AcceptanceModel, PastRates, Rate, RowOutcome


def feed(model, rates, cycles, limit=None, row=0, seed=0, depths=None):
    """Drafts of a row whose position i is accepted with the i-th rate."""
    generator, limit = random.Random(seed), len(rates) if limit is None else limit
    for _ in range(cycles):
        depth = limit if depths is None else generator.choice(depths)
        accepted = 0
        while accepted < depth and generator.random() < rates[accepted]:
            accepted += 1
        model.observe(RowOutcome(row, limit, min(depth, limit), accepted, accepted + 1))


def test_each_position_has_its_own_rate():
    model, rates = AcceptanceModel(3, 1), [0.9, 0.6, 0.3]
    found = []
    for seed in range(30):
        feed(model, rates, 100, seed=seed)
        found.append(model.expected()[0])
    means = [sum(column) / len(found) for column in zip(*found)]
    assert means == pytest.approx(rates, abs=0.1)


def test_a_position_that_was_not_tried_is_expected_to_be_like_the_one_before():
    model = AcceptanceModel(6, 1)
    feed(model, [1.0, 1.0], 60)
    accepted, _ = model.expected()
    assert accepted[1] > 0.9
    assert accepted[5] == pytest.approx(accepted[1])


def test_a_token_that_was_not_drafted_was_not_accepted():
    model = AcceptanceModel(4, 1)
    feed(model, [1.0] * 4, 200, depths=[0, 4])
    accepted, drafted = model.expected()
    assert accepted[0] == pytest.approx(0.5, abs=0.25)
    assert drafted[0] == pytest.approx(0.5, abs=0.25)
    assert drafted[3] > 0.9


def test_nothing_is_learnt_after_the_end_of_a_row():
    model = AcceptanceModel(4, 1)
    feed(model, [1.0] * 4, 60)
    before = model.expected()[0]
    for _ in range(60):
        model.observe(RowOutcome(0, 4, 4, 2, 2))
    assert model.expected()[0][2:] == before[2:]


def test_a_change_is_followed_within_a_few_cycles():
    model = AcceptanceModel(4, 1)
    feed(model, [1.0] * 4, 200)
    for _ in range(8):
        model.observe(RowOutcome(0, 4, 4, 0, 1))
    assert model.expected()[0][0] < 0.4


def test_a_change_makes_what_is_known_of_deeper_positions_uncertain():
    model = AcceptanceModel(4, 1)
    feed(model, [1.0, 0.0, 0.0, 0.0], 100)
    feed(model, [0.0] * 4, 40)
    for _ in range(40):
        model.observe(RowOutcome(0, 1, 1, 1, 2))
    accepted, _ = model.expected()
    assert accepted[0] > 0.8
    assert accepted[2] > 0.3


def test_rows_have_rates_of_their_own():
    model = AcceptanceModel(2, 3)
    for cycle in range(40):
        for row, rates in enumerate(([1.0, 1.0], [0.0, 0.0])):
            feed(model, rates, 1, row=row, seed=cycle)
    (good, bad, unknown), _ = next(model.path_probabilities([0, 1, 2]))
    assert good > 0.9
    assert bad < 0.1
    assert unknown == pytest.approx(model.expected()[0][0])


def test_what_earlier_calls_found_is_where_a_call_begins():
    model = AcceptanceModel(3, 1, PastRates([0.2, 0.1], [50, 10]))
    before = model.expected()[0]
    assert before == pytest.approx([0.2, 0.1, 0.1], abs=0.1)
    # A few outcomes of its own weigh as much.
    for _ in range(4):
        model.observe(RowOutcome(0, 3, 3, 3, 4))
    assert all(now > old + 0.3 for now, old in zip(model.expected()[0], before))


def test_a_few_drafts_of_earlier_calls_count_for_no_more_than_they_are():
    few, many = (AcceptanceModel(3, 1, PastRates([0.0], [weight])) for weight in (1, 60))
    assert few.expected()[0][0] > many.expected()[0][0] + 0.2
    assert few.optimistic()[0] > many.optimistic()[0] + 0.5


def test_what_calls_leave_is_the_mean_of_calls_and_not_the_last_one():
    past = PastRates()
    for rate in (0.9, 0.1) * 6:
        model = AcceptanceModel(4, 1, past)
        feed(model, [rate] * 4, 200, seed=int(10 * rate))
        past = past.with_call(model.accepted.rates)
    assert past.means[0] == pytest.approx(0.5, abs=0.12)
    # Deep positions are seen where texts are easy.
    assert past.means[3] > 0.6


def test_a_call_counts_for_what_was_seen_in_it():
    past, model = PastRates([0.8, 0.8], [8, 8]), AcceptanceModel(2, 1)
    assert past.with_call(model.accepted.rates) == past
    for _ in range(2):
        model.observe(RowOutcome(0, 2, 2, 0, 1))
    later = past.with_call(model.accepted.rates)
    assert later.means == pytest.approx([0.64, 0.8])
    assert later.weights == [10, 8]
    # Calls that run at the same time have the same ones.
    assert past == PastRates([0.8, 0.8], [8, 8])


def test_a_rate_may_be_better_than_expected_while_little_is_known():
    model = AcceptanceModel(2, 1)
    few = model.optimistic()[0] - model.expected()[0][0]
    feed(model, [0.6, 0.6], 200)
    many = model.optimistic()[0] - model.expected()[0][0]
    assert few > 2 * many > 0


def test_a_rate_says_when_it_has_changed():
    rate = Rate()
    assert not any(rate.observe(True, 32) for _ in range(50))
    assert any(rate.observe(False, 32) for _ in range(8))
