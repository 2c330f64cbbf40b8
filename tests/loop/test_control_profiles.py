"""Profiles of a controller, in JSON and in files, and the clock that times its cycles."""

import json
import os
from math import isnan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hf_specdec import SpecConfigError, SpeculativeConfig, forget_speculators, load_speculator
from hf_specdec.cli import app
from hf_specdec.control import ControlProfile, LatencyModel
from hf_specdec.control.acceptance import PastRates
from hf_specdec.control.clock import CycleClock, CycleTimes
from hf_specdec.control.store import find_profile, load_profile, profile_identity, profile_path, save_profile
from hf_specdec.decoding.graphs import CallGraphs
from hf_specdec.diagnosis.calibration import calibrate
from hf_specdec.reading import MAX_SETTINGS_BYTES
from tests.helpers.levels import full
from tests.helpers.models import prompts, tiny_llama


# Profiles, which are files and may hold anything


SECONDS, RATES = st.floats(1e-6, 1e3), st.lists(st.floats(0, 1), max_size=4)
SIZES = st.integers(1, 64).map(str)
TABLES = st.dictionaries(SIZES, st.dictionaries(SIZES, SECONDS, min_size=1, max_size=5), max_size=3)
PROFILES = st.fixed_dictionaries(
    {
        **{"draft_seconds": TABLES, "verify_seconds": TABLES, "accepted": RATES, "drafted": RATES},
        "reading_seconds": st.dictionaries(SIZES, SECONDS, max_size=3),
    }
)


@given(PROFILES)
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


DAMAGED = [
    ({"verify_seconds": None}, "holds `draft_seconds` and `verify_seconds`"),
    ({"verify_seconds": {"1": {"1": -2.0}}}, "positive numbers of seconds, got -2.0"),
    ({"verify_seconds": {"1": {"1": "fast"}}}, "positive numbers of seconds, got 'fast'"),
    ({"verify_seconds": {"0": {"1": 2.0}}}, "integers of at least 1, got '0'"),
    ({"draft_seconds": {"1": {"x": 2.0}}}, "integers of at least 0, got 'x'"),
    ({"reading_seconds": [1.0]}, "`reading_seconds`, {tokens: seconds}"),
    ({"accepted": [1.5]}, "`accepted` of a profile must be a list of rates"),
    ({"accepted": [0.5], "accepted_weights": [1.0, 1.0]}, "`accepted_weights` .* must be a list of 1 num"),
    ({"rating_factor": -1}, "rating_factor"),
]


def test_a_damaged_profile_is_refused():
    for change, message in DAMAGED:
        with pytest.raises(SpecConfigError, match=message):
            ControlProfile.from_dict(ControlProfile().to_dict() | change)
    assert ControlProfile.from_dict(ControlProfile(rating_factor=0.25).to_dict()).rating_factor == 0.25
    # Depths that nobody drafts cost nothing to know.
    stored = {**ControlProfile().to_dict(), "draft_seconds": {"1": {"2": 1.0, "1000000000": 5.0}}}
    model = ControlProfile.from_dict(stored).latency
    assert model.draft_seconds_up_to(4, 1) == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0], abs=1e-6)


# The clock of cycles


def test_a_draft_that_ran_ahead_belongs_to_the_next_cycle():
    clock, now = CycleClock(torch.device("cpu")), 0.0
    clock.now = lambda: now
    clock.begin()
    now += 1.0
    clock.drafted()
    now += 2.0
    with clock.ahead():
        now += 4.0
    assert clock.end() == CycleTimes(rest=2.0, draft=1.0)
    clock.begin()
    clock.drafted()
    now += 3.0
    assert clock.end() == CycleTimes(rest=3.0, draft=4.0)


def test_a_cycle_with_a_capture_has_no_times(monkeypatch):
    monkeypatch.setattr(CallGraphs, "all_captures", CallGraphs.all_captures)
    clock, latency = CycleClock(torch.device("cpu")), LatencyModel()
    clock.begin()
    clock.read()
    clock.drafted()
    CallGraphs.all_captures += 1
    times = clock.end()
    for spoilt in (times.draft, 0.0, -1.0, float("inf")):
        latency.observe_draft(1, 3, spoilt, (8, times.reading))
        latency.observe_verification(1, 4, spoilt)
        latency.observe_reading(1, spoilt)
    assert not any((latency.draft, latency.verify, latency.reading.sizes))
    # A capture for the next draft, which ran ahead, spoils both cycles.
    for is_ahead, is_spoilt in ((True, True), (False, True), (False, False)):
        clock.begin()
        clock.drafted()
        if is_ahead:
            with clock.ahead():
                CallGraphs.all_captures += 1
        times = clock.end()
        assert isnan(times.rest) == is_spoilt
        assert is_ahead or isnan(times.draft) == is_spoilt


# Profiles in files


AUTO = {"method": "ngram", "num_speculative_tokens": "auto"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_PROFILES", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture
def identity(model):
    return profile_identity(model, SpeculativeConfig(**AUTO), None)


def test_all_batch_sizes_are_measured_and_the_next_process_begins_with_it(model, folder, identity):
    speculator = load_speculator(model, AUTO)
    profile = calibrate(model, speculator, [prompts(1), prompts(2)], max_new_tokens=32, rounds=1)
    assert {1, 2} <= set(profile.latency.verify)
    assert profile.latency.knows_anything
    assert profile.accepted.means
    assert save_profile(profile, identity).parent == folder
    forget_speculators(model)
    assert load_speculator(model, AUTO).profile.to_dict().keys() == profile.to_dict().keys()
    assert load_speculator(model, AUTO).profile.accepted == profile.accepted
    forget_speculators(model)
    # A file of other versions is left alone.
    save_profile(profile, {**identity, "torch": "1.0"})
    assert find_profile(model, SpeculativeConfig(**AUTO), None).accepted == PastRates()
    with pytest.raises(SpecConfigError, match="A fixed length needs no profile"):
        calibrate(model, load_speculator(model, "ngram", num_speculative_tokens=3), [prompts(1)])


@full
def test_the_command_stores_what_calls_find(folder):
    arguments = ["--spec", "ngram", "-n", "8", "--rounds", "1", "--prompts", "a = 1; a = 1; a =", "--json"]
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["file"].startswith(str(folder))


def test_another_drafter_or_target_has_a_file_of_its_own(model, identity, tmp_path):
    other = profile_identity(model, SpeculativeConfig(**AUTO, prompt_lookup_max=3), None)
    with_draft = profile_identity(model, SpeculativeConfig(**AUTO), model)
    smaller = profile_identity(tiny_llama(num_hidden_layers=1), SpeculativeConfig(**AUTO), None)
    assert len({profile_path(one) for one in (identity, other, with_draft, smaller)}) == 4
    path = save_profile(ControlProfile(), other, tmp_path / "other.json")
    for name, words in ((path, "was measured with the drafter .*prompt_lookup_max.*calibrate"), ("no", "be read")):
        with pytest.raises(SpecConfigError, match=words):
            load_speculator(model, AUTO, control_profile=str(name))
    named = SpeculativeConfig(**AUTO, control_profile=path)
    assert SpeculativeConfig.from_dict(named.to_dict()) == named


NO_PROFILES = ["", "[]", "{}", '{"format": 1, "profile": 3}', '{"format": 99, "profile": {}}', "[" * 10**5, "9" * 5000]
HUGE = [
    {"accepted": "x" * 10**5},
    {"draft_seconds": {"9" * 5000: {"1": 1.0}}},
    {"draft_seconds": {"1": {"1": 10**400}}},
]


def test_damaged_files_are_refused_by_name(identity, tmp_path):
    path = tmp_path / "profile.json"
    for text in NO_PROFILES:
        path.write_text(text)
        with pytest.raises(SpecConfigError, match="again"):
            load_profile(path, identity)
    save_profile(ControlProfile(), identity, path)
    content = json.loads(path.read_text())
    for changed in HUGE:
        path.write_text(json.dumps(content | {"profile": content["profile"] | changed}))
        with pytest.raises(SpecConfigError) as caught:
            load_profile(path, identity)
        assert str(path) in str(caught.value)
        assert len(str(caught.value)) < 700


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_pipes_devices_and_large_files_are_not_read(model, tmp_path):
    pipe, large = tmp_path / "pipe", tmp_path / "large.json"
    os.mkfifo(pipe)
    large.write_bytes(b" " * (MAX_SETTINGS_BYTES + 1))
    for path, why in ((pipe, "no regular file"), ("/dev/zero", "no regular file"), (large, "more than")):
        with pytest.raises(SpecConfigError, match=why):
            model.generate(**prompts(1), speculative={**AUTO, "control_profile": str(path)}, max_new_tokens=2)
