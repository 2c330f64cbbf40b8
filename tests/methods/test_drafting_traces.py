"""Drafters draft what was recorded of them: every token, parent and acceptance, and first log-probabilities."""

import json

import pytest

from tests.helpers.drafting_traces import LOG_PROBS, TRACES, drafters, traced
from tests.helpers.levels import in_full


DRAFTERS = drafters()
assert {path.stem for path in TRACES.iterdir()} == set(DRAFTERS)
# One of each method, and those whose official runs have other shapes than the traces.
SHORT = ("demo-suffix", "demo-medusa", "mlp_speculator-tied_scaled", "mtp-glm4_moe", "dflash-dflash2_full_b8")


@pytest.mark.parametrize("name", [*SHORT, *in_full(*(name for name in DRAFTERS if name not in SHORT))])
def test_drafts_are_as_recorded(name):
    recorded, (found, log_probs) = json.loads((TRACES / f"{name}.json").read_text()), traced(DRAFTERS[name])
    assert found.keys() == recorded.keys()
    for case, cycles in found.items():
        for index, (cycle, expected) in enumerate(zip(cycles, recorded[case])):
            assert cycle == expected, f"{case}, cycle {index}"
        assert len(cycles) == len(recorded[case]), case
        assert any(row[1] for cycle in cycles for row in cycle), case
    recorded = json.loads(LOG_PROBS.read_text())
    assert {f"{name}, {case}" for case in log_probs} == {case for case in recorded if case.startswith(f"{name}, ")}
    for case, drafts in log_probs.items():
        for draft, expected in zip(drafts, recorded[f"{name}, {case}"], strict=True):
            for row, expected_row in zip(draft, expected, strict=True):
                assert row == pytest.approx(expected_row, abs=5e-3), case
