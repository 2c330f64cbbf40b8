"""Times of drafts and verifications: tables, outliers, drift, batches, and what is stored of them."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec import SpecConfigError
from hf_specdec.control import ControlProfile, LatencyModel
from hf_specdec.control.latency import TimeTable


# Relative times of a verification as a CPU has them in float32.
PLATEAUS = {1: 1.0, 2: 2.05, 3: 2.6, 4: 2.0, 8: 1.8, 16: 2.3}


def fill(table, times, repeats=5):
    for _ in range(repeats):
        for size, seconds in times.items():
            table.observe(size, seconds)


def test_nothing_is_known_at_first():
    model = LatencyModel()
    assert not model.knows_anything
    assert model.draft_seconds(4, 1) == 0
    assert model.verify_seconds(5, 1) > 0


def test_times_that_are_not_monotonic_are_kept():
    table = TimeTable()
    fill(table, PLATEAUS)
    assert {size: table.predict(size) for size in PLATEAUS} == pytest.approx(PLATEAUS)


def test_between_sizes_lies_a_line_and_beyond_them_the_mean_slope():
    table = TimeTable()
    fill(table, {2: 1.0, 6: 3.0})
    assert table.predict(3) == pytest.approx(1.5)
    assert table.predict(10) == pytest.approx(5.0)
    assert table.predict(1) == pytest.approx(1.0)


@given(st.lists(st.floats(5, 100), min_size=1, max_size=2), st.integers(0, 4))
def test_some_stalls_do_not_move_a_size(stalls, place):
    table = TimeTable()
    times = [1.0] * 5
    times[place:place] = stalls
    for seconds in times:
        table.observe(4, seconds)
    assert table.predict(4) == pytest.approx(1.0, rel=0.05)


def test_one_stalled_measurement_of_a_new_size_is_not_believed():
    table = TimeTable()
    fill(table, {1: 1.0, 8: 1.5})
    table.observe(4, 50.0)
    assert table.predict(4) < 3


def test_a_size_that_is_measured_seldom_follows_its_median():
    table = TimeTable()
    fill(table, {1: 1.0, 6: 2.0}, repeats=8)
    for _ in range(4):
        fill(table, {6: 2.0}, repeats=30)
        table.observe(1, 1.8)
    assert table.predict(1) == pytest.approx(1.8)


def test_a_machine_that_gets_busy_slows_down_all_sizes():
    model, factor = LatencyModel(), 1.0
    for cycle in range(200):
        if cycle == 100:
            factor = 3.0
        model.observe_verification(1, 1 if cycle % 10 == 0 and cycle < 100 else 6, factor)
        model.observe_draft(1, 5, factor * 0.5)
    # Plain decoding was not measured since.
    assert model.verify_seconds(1, 1) == pytest.approx(3.0, rel=0.1)
    assert model.draft_seconds(5, 1) == pytest.approx(1.5, rel=0.1)


def test_noise_does_not_carry_the_levels_away():
    model, noise = LatencyModel(), random.Random(1)
    for cycle in range(3000):
        seconds = 2.0 if cycle % 40 else 1.0
        stall = 10.0 if noise.random() < 0.02 else 1.0
        model.observe_verification(1, 6 if cycle % 40 else 1, seconds * stall * noise.lognormvariate(0, 0.05))
    assert model.verify_seconds(6, 1) / model.verify_seconds(1, 1) == pytest.approx(2.0, rel=0.1)


def test_drafts_that_were_not_measured_lie_on_a_line_from_nothing():
    model = LatencyModel()
    for _ in range(3):
        model.observe_draft(1, 5, 10.0)
    assert model.draft_seconds(2, 1) == pytest.approx(4.0)
    assert model.draft_seconds(10, 1) == pytest.approx(20.0)
    assert model.draft_seconds(0, 1) == 0


def test_another_number_of_rows_is_expected_to_take_what_as_many_tokens_take():
    model = LatencyModel()
    fill(table := TimeTable(), {4: 1.0, 8: 1.4, 16: 2.2})
    model.verify[1] = table
    assert model.verify_seconds(2, 4) == pytest.approx(1.4)
    assert model.verify_seconds(4, 4) == pytest.approx(2.2)


def test_fewer_nodes_than_were_measured_take_less_as_with_other_numbers_of_rows():
    model = LatencyModel()
    fill(table := TimeTable(), {1: 1.0, 8: 2.0})
    model.verify[4] = table
    fill(table := TimeTable(), {8: 1.5})
    model.verify[2] = table
    assert model.verify_seconds(1, 2) == pytest.approx(0.75)
    assert model.verify_seconds(8, 2) == pytest.approx(1.5)


def test_the_fixed_part_of_a_cycle_is_found_from_numbers_of_rows():
    model = LatencyModel()
    for rows in (2, 8):
        fill(table := TimeTable(), {1: 0.6 + 0.05 * rows})
        model.verify[rows] = table
    assert model.fixed_part(8) == pytest.approx(0.6)
    assert model.fixed_part(2) == pytest.approx(0.6 / 0.7)
    fill(table := TimeTable(), {1: 0.5})
    model.verify[16] = table
    # More rows took no longer: all of it is fixed.
    assert model.fixed_part(8) == 1.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_not_taken(seconds):
    model = LatencyModel()
    model.observe_verification(1, 1, seconds)
    model.observe_draft(1, 1, seconds)
    model.observe_reading(1, seconds)
    assert not model.draft
    assert not model.verify
    assert not model.reading.sizes


def test_what_reading_takes_is_known_by_tokens():
    model = LatencyModel()
    assert model.reading_seconds(100) == 0
    model.observe_reading(16, 1.0)
    model.observe_reading(250, 5.0)
    assert model.reading_seconds(0) == 0
    assert model.reading_seconds(16) == pytest.approx(1.0)
    assert model.reading_seconds(256) == pytest.approx(5.0)
    assert 1.0 < model.reading_seconds(60) < 5.0
    assert model.for_another_call().reading_seconds(16) == pytest.approx(1.0)


def test_more_than_was_ever_read_is_taken_for_as_cheap_until_it_is_read():
    model = LatencyModel()
    # The first tokens that a drafter reads are slow ones: their slope would make a prompt look endless.
    for _ in range(3):
        model.observe_reading(1, 1.0)
    model.observe_reading(8, 9.0)
    assert model.reading_seconds(1000) == pytest.approx(9.0)
    model.observe_reading(1000, 30.0)
    assert model.reading_seconds(1000) == pytest.approx(30.0)
    assert model.for_another_call().reading_seconds(1000) == pytest.approx(30.0)


def keyed(keys, values, **size):
    """Dicts as JSON has them."""
    return st.dictionaries(keys.map(str), values, **size)


tables = keyed(st.integers(1, 64), keyed(st.integers(0, 64), st.floats(1e-6, 1e3), min_size=1, max_size=5), max_size=3)
rates = st.lists(st.floats(0, 1), max_size=4)
stored = st.fixed_dictionaries(
    {
        "draft_seconds": tables,
        "verify_seconds": tables,
        "reading_seconds": keyed(st.integers(1, 4096), st.floats(1e-6, 1e3), max_size=3),
        "accepted": rates,
        "drafted": rates,
    }
)


@given(stored)
def test_a_profile_comes_back_from_json(values):
    profile = ControlProfile.from_dict(json.loads(json.dumps(values)))
    again = profile.to_dict()
    assert again.pop("draft_seconds").keys() == values["draft_seconds"].keys()
    for rows, times in values["verify_seconds"].items():
        assert again["verify_seconds"][rows] == pytest.approx(times)
    assert again["reading_seconds"] == pytest.approx(values["reading_seconds"])
    assert all(again[name] == values[name] for name in ("accepted", "drafted"))
    assert len(again["accepted_weights"]) == len(values["accepted"])
    assert ControlProfile.from_dict(again | {"draft_seconds": {}}).accepted == profile.accepted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verify_seconds": None}, "holds `draft_seconds` and `verify_seconds`"),
        ({"verify_seconds": {"1": {"1": -2.0}}}, "positive numbers of seconds, got -2.0"),
        ({"verify_seconds": {"1": {"1": "fast"}}}, "positive numbers of seconds, got 'fast'"),
        ({"verify_seconds": {"0": {"1": 2.0}}}, "integers of at least 1, got '0'"),
        ({"draft_seconds": {"1": {"x": 2.0}}}, "integers of at least 0, got 'x'"),
        ({"reading_seconds": [1.0]}, "`reading_seconds`, {tokens: seconds}"),
        ({"accepted": [1.5]}, "`accepted` of a profile must be a list of rates"),
        ({"drafted": None}, "`drafted` of a profile must be a list of rates"),
        (
            {"accepted": [0.5], "accepted_weights": [-1.0]},
            "`accepted_weights` of a profile must be a list of 1 numbers",
        ),
        (
            {"accepted": [0.5], "accepted_weights": [1.0, 1.0]},
            "`accepted_weights` of a profile must be a list of 1 num",
        ),
        ({"rating_factor": "high"}, "`rating_factor` of a profile must be a number of at least 0, got 'high'"),
    ],
)
def test_a_damaged_profile_is_refused(change, message):
    empty = {name: {} for name in ("draft_seconds", "verify_seconds", "reading_seconds")}
    values = {**empty, "accepted": [], "drafted": [], **change}
    with pytest.raises(SpecConfigError, match=message):
        ControlProfile.from_dict(values)


def test_a_fall_is_believed_after_two_measurements():
    table = TimeTable()
    fill(table, {1: 1.0, 6: 2.0}, repeats=8)
    table.observe(6, 0.2)
    assert table.predict(6) > 1.5
    fill(table, {1: 1.0}, repeats=30)
    table.observe(6, 0.2)
    assert table.predict(6) == pytest.approx(0.2)


def after_plain_cycles(*seconds):
    """The knowledge of a model when one row has had plain cycles of these times."""
    model = LatencyModel()
    for measured in seconds:
        model.observe_verification(1, 1, measured)
    return model


def test_what_follows_a_stall_is_not_taken_for_fast():
    model = after_plain_cycles(*[1.0] * 10, *[50.0] * 5, 1.0)
    model.observe_verification(1, 8, 2.0)
    assert model.verify_seconds(8, 1) == pytest.approx(2.0, rel=0.3)


def test_a_draft_costs_no_more_in_proportion_than_a_shallower_one():
    model = LatencyModel()
    for _ in range(5):
        model.observe_draft(1, 4, 1.0)
        model.observe_draft(1, 8, 20.0)
    assert model.draft_seconds(8, 1) == pytest.approx(2.0)


def test_a_depth_in_front_of_what_was_measured_follows_the_deeper_ones():
    model = LatencyModel()
    # The only draft of four tokens was a slow one.
    model.observe_draft(1, 4, 10.0)
    for _ in range(5):
        model.observe_draft(1, 5, 5.0)
    assert model.draft_seconds(4, 1) == pytest.approx(5.0)
    assert model.draft_seconds(2, 1) == pytest.approx(2.5)


def test_another_call_remembers_what_was_measured_seldom():
    model = after_plain_cycles(*[1.0] * 5)
    for _ in range(2):
        model.observe_verification(1, 6, 3.5)
    # It counts as twice a plain one at most, so that it is measured again; that is not what was measured.
    assert model.verify_seconds(6, 1) == pytest.approx(2.0)
    stored = ControlProfile(latency=model).to_dict()
    for later in (model.for_another_call(), ControlProfile.from_dict(stored).latency):
        later.observe_verification(1, 6, 3.5)
        assert later.verify_seconds(6, 1) == pytest.approx(3.5)


def test_a_few_stalls_do_not_set_the_pace():
    model = after_plain_cycles(*[1.0] * 10, 10.0, 10.0, 1.0, 1.0, 10.0)
    assert model.pace.factor == pytest.approx(1.0)


def test_depths_that_nobody_drafts_cost_nothing_to_know():
    """Profiles are files, which may hold anything."""
    stored = {**ControlProfile().to_dict(), "draft_seconds": {"1": {"2": 1.0, "1000000000": 5.0}}}
    model = ControlProfile.from_dict(stored).latency
    assert model.draft_seconds_up_to(4, 1) == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0], abs=1e-6)
