"""Gives every test that takes a `row` all rows of `tests/helpers/methods.py`, and none of them less.

In the default run each test has the rows of all methods, and of their variants and combinations one in four: another
one in each test. The others are `slow`.
"""

from __future__ import annotations

import pytest

from hf_specdec.candidate_generators.combined.policy import DrafterChoice
from tests.helpers.methods import EVERYTHING, exemption
from tests.helpers.turns import has_turn


def pytest_generate_tests(metafunc):
    if "row" in metafunc.fixturenames and not any(
        "row" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")
    ):
        test = metafunc.function.__name__
        cells = [_cell(row, test, has_turn(test, place, 4)) for place, row in enumerate(EVERYTHING)]
        metafunc.parametrize("row", cells)


def _cell(row, test: str, is_in_turn: bool):
    (name,) = row.values
    reason = exemption(name, test)
    marks = [*row.marks, *([pytest.mark.skip(reason=reason)] if reason else [])]
    if not is_in_turn and (" " in name or "+" in name):
        marks.append(pytest.mark.slow)
    return pytest.param(name, marks=marks, id=name.replace(" ", "_"))


@pytest.fixture(autouse=True)
def decided(monkeypatch):
    """Lets rows and cycles take turns in a combination, whose choice otherwise depends on measured times."""

    def asks(choice, rows, probs, num_retrieved, lengths, num_unread):
        choice.turn = getattr(choice, "turn", 0) + 1
        return [length > 0 and (row + choice.turn) % 3 > 0 for row, length in zip(rows, lengths)]

    monkeypatch.setattr(DrafterChoice, "asks", asks)
