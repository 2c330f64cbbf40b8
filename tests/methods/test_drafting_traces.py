"""Drafters draft what was recorded of them: every token, parent and acceptance, and first log-probabilities."""

import json

import pytest

from tests.helpers.drafting_traces import LOG_PROBS, TRACES, drafters, traced
from tests.helpers.levels import in_full, when_slow


DRAFTERS = drafters()
assert {path.stem for path in TRACES.iterdir()} == set(DRAFTERS)
# Of methods that have no official runs.
SHORT = ("demo-suffix", "demo-medusa", "mlp_speculator-tied_scaled")


# Other writings of a network that is among the others, and targets whose official runs say the same.
REPEATED = [f"medusa-{name}" for name in ("merged_v1", "v01_heads_pt", "v01_two_layers_pt")]
REPEATED += [f"medusa-vllm_{name}" for name in ("converted", "original_lm_head", "truncated_vocab")]
REPEATED += ["mlp_speculator-tied_plain", "mlp_speculator-untied_scaled"]
REPEATED += [f"eagle-eagle3_{name}" for name in ("qwen3", "specforge", "speculators")]
REPEATED += [f"mtp-{name}" for name in ("ernie4_5_moe", "longcat_flash", "mellum", "mimo", "qwen3_5")]
REPEATED += [f"dflash-{name}_b8" for name in ("qwen3_random", "trained", "trained_for_refinement")]
REPEATED += ["dflash-default_layer_ids_b4"]


@pytest.mark.parametrize(
    "name",
    [*SHORT, *in_full(*(name for name in DRAFTERS if name not in (*SHORT, *REPEATED))), *when_slow(*REPEATED)],
)
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
