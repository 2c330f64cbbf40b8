"""The table is complete: every method has its rows, and every test of this folder goes through all of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hf_specdec.method import NO_DRAFTS, built_in_methods, parts_of
from tests.helpers.methods import EVERYTHING, EXEMPT, NEED_GRAMMAR


ROWS = [name for row in EVERYTHING for name in row.values]
FILES = [path for path in sorted(Path(__file__).parent.glob("test_*.py")) if path.name != Path(__file__).name]


def functions_of(path: Path) -> list[ast.FunctionDef]:
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


@pytest.mark.parametrize("method", [method.name for method in built_in_methods() if method.name != NO_DRAFTS])
def test_every_method_has_a_row_of_its_own_and_one_in_a_combination(method):
    assert method in ROWS or method in NEED_GRAMMAR
    assert any(method in parts_of(name) for name in ROWS if "+" in name)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_test_takes_every_row(path):
    for test in functions_of(path):
        assert "row" in [argument.arg for argument in test.args.args], test.name


def test_exemptions_are_of_tests_and_rows_that_exist():
    tests = {test.name for path in FILES for test in functions_of(path)}
    assert set(EXEMPT) <= tests
    for rows in EXEMPT.values():
        assert set(rows) < set(ROWS)
        assert all(rows.values())
