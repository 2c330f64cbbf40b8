"""Profiles in files: measured on purpose, found again, and refused where they are damaged or another's."""

from __future__ import annotations

import json
import os

import pytest
from transformers.utils import logging as hf_logging
from typer.testing import CliRunner

from hf_specdec import SpecConfigError, SpeculativeConfig, forget_speculators, load_speculator
from hf_specdec.cli import app
from hf_specdec.control import ControlProfile
from hf_specdec.control.acceptance import PastRates
from hf_specdec.control.store import find_profile, load_profile, profile_identity, profile_path, save_profile
from hf_specdec.diagnosis.calibration import SweepingController, calibrate
from hf_specdec.reading import MAX_SETTINGS_BYTES
from tests.helpers.models import prompts, tiny_llama


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
    with pytest.raises(SpecConfigError, match="A fixed length needs no profile"):
        calibrate(model, load_speculator(model, "ngram", num_speculative_tokens=3), [prompts(1)])
    # Whole trees are measured.
    assert SweepingController(4, 1).tree_size is None


def test_the_command_stores_what_calls_find(folder):
    arguments = ["--spec", "ngram", "-n", "8", "--rounds", "1", "--prompts", "a = 1; a = 1; a =", "--json"]
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["file"].startswith(str(folder))
    assert report["verify_seconds"]["1"]


def test_another_drafter_or_target_has_a_file_of_its_own(model, identity, tmp_path):
    other = profile_identity(model, SpeculativeConfig(**AUTO, prompt_lookup_max=3), None)
    others = [
        other,
        profile_identity(model, SpeculativeConfig(**AUTO), model),
        profile_identity(tiny_llama(num_hidden_layers=1), SpeculativeConfig(**AUTO), None),
    ]
    assert len({profile_path(one) for one in [identity, *others]}) == 4
    path = save_profile(ControlProfile(), other, tmp_path / "other.json")
    for name, words in ((path, "was measured with the drafter .*prompt_lookup_max.*calibrate"), ("no", "be read")):
        with pytest.raises(SpecConfigError, match=words):
            load_speculator(model, AUTO, control_profile=str(name))
    named = SpeculativeConfig(**AUTO, control_profile=path)
    assert SpeculativeConfig.from_dict(named.to_dict()) == named
    with pytest.raises(SpecConfigError, match="is for num_speculative_tokens='auto', got 3"):
        SpeculativeConfig(method="ngram", num_speculative_tokens=3, control_profile="a.json")


def test_a_stale_file_of_the_folder_is_left_alone(model, identity, monkeypatch):
    save_profile(ControlProfile(accepted=PastRates([0.5], [4.0])), {**identity, "torch": "1.0"})
    said = []
    monkeypatch.setattr(hf_logging.get_logger("hf_specdec.control.store"), "warning", said.append)
    assert find_profile(model, SpeculativeConfig(**AUTO), None).accepted == PastRates()
    assert "torch" in said[0]


NO_PROFILES = ["", "[]", "{}", '{"format": 1, "profile": 3}', '{"format": 99, "profile": {}}', "[" * 10**5, "9" * 5000]
DAMAGED = [
    {"accepted": "x" * 10**5},
    {"accepted": [2.0]},
    {"accepted": {"0": 0.5}},
    {"accepted_weights": [1.0, 2.0, 3.0]},
    {"rating_factor": [1]},
    {"draft_seconds": {"9" * 5000: {"1": 1.0}}},
    {"draft_seconds": {"1": {"1": 10**400}}},
    {"verify_seconds": [1]},
    {"reading_seconds": {"x": 1.0}},
]


def test_damaged_files_are_refused_by_name(identity, tmp_path):
    path = tmp_path / "profile.json"
    for text in NO_PROFILES:
        path.write_text(text)
        with pytest.raises(SpecConfigError, match="again"):
            load_profile(path, identity)
    save_profile(ControlProfile(), identity, path)
    content = json.loads(path.read_text())
    for changed in DAMAGED:
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
