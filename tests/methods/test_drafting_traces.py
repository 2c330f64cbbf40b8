"""Drafters draft what was recorded of them: every token, parent and acceptance of every cycle."""

import pytest

from tests.helpers.drafting_traces import TRACES, drafters, stored, traced


DRAFTERS = drafters()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_as_recorded(name):
    recorded, found = stored(name), traced(DRAFTERS[name])
    assert found.keys() == recorded.keys()
    for case, cycles in found.items():
        for index, (cycle, expected) in enumerate(zip(cycles, recorded[case])):
            assert cycle == expected, f"{case}, cycle {index}"
        assert len(cycles) == len(recorded[case]), case


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_shape_has_drafts(name):
    for case, cycles in stored(name).items():
        assert any(row[1] for cycle in cycles for row in cycle), case


def test_every_file_has_its_drafter():
    assert {path.stem for path in TRACES.iterdir()} == set(DRAFTERS)
