"""Gives every test that takes a `row` the rows of `tests/helpers/methods.py` to which it applies.

`make test` has those of `REPRESENTATIVES`, and of a test that is marked `every_row` all; the others are `full`. A test
that is marked `as_users_run` has adaptive lengths and products of few rows, which all other tests switch off.
"""

from __future__ import annotations

import pytest

from hf_specdec.candidate_generators.combined.policy import DrafterChoice
from hf_specdec.kernels import products
from hf_specdec.target import check
from tests.helpers.levels import full
from tests.helpers.methods import EVERYTHING, REPRESENTATIVES, exemption


def pytest_generate_tests(metafunc):
    if "row" not in metafunc.fixturenames:
        return
    everywhere = metafunc.definition.get_closest_marker("every_row") is not None
    cells = []
    for row in EVERYTHING:
        (name,) = row.values
        if exemption(name, metafunc.function.__name__) is None:
            marks = row.marks if everywhere or name in REPRESENTATIVES else (*row.marks, full)
            cells.append(pytest.param(name, marks=marks, id=name.replace(" ", "_")))
    metafunc.parametrize("row", cells)


@pytest.fixture(autouse=True)
def settings_of_the_test(request, monkeypatch):
    """What users run where a test asks for it; elsewhere parts of a combination take turns instead of being timed."""
    if request.node.get_closest_marker("as_users_run") is None:
        monkeypatch.setattr(DrafterChoice, "asks", _asks_in_turn)
        return
    monkeypatch.delenv("HF_SPECDEC_ADAPTIVE")
    monkeypatch.setattr(products, "is_used", True)
    monkeypatch.setattr(products, "LEAST_BYTES", 0)


@pytest.fixture
def unchecked(monkeypatch):
    """Forgets which classes of models have been checked."""
    monkeypatch.setattr(check, "_checked", {})


def _asks_in_turn(choice, rows, probs, num_retrieved, lengths, num_unread):
    choice.turn = getattr(choice, "turn", 0) + 1
    return [length > 0 and (row + choice.turn) % 3 > 0 for row, length in zip(rows, lengths)]
