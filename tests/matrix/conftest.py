"""Gives every test that takes a `row` all rows of `tests/methods.py`, and none of them less."""

from __future__ import annotations

import pytest

from hf_specdec.candidate_generators.combined.policy import DrafterChoice
from tests.methods import EVERYTHING, exemption


def pytest_generate_tests(metafunc):
    if "row" in metafunc.fixturenames:
        metafunc.parametrize("row", [_cell(row, metafunc.function.__name__) for row in EVERYTHING])


def _cell(row, test: str):
    (name,) = row.values
    reason = exemption(name, test)
    marks = [*row.marks, *([pytest.mark.skip(reason=reason)] if reason else [])]
    return pytest.param(name, marks=marks, id=name.replace(" ", "_"))


@pytest.fixture(autouse=True)
def decided(monkeypatch):
    """Lets rows and cycles take turns in a combination, whose choice otherwise depends on measured times."""

    def asks(choice, rows, probs, num_retrieved, lengths, num_unread):
        choice.turn = getattr(choice, "turn", 0) + 1
        return [length > 0 and (row + choice.turn) % 3 > 0 for row, length in zip(rows, lengths)]

    monkeypatch.setattr(DrafterChoice, "asks", asks)
