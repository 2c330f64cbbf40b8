"""The table of rows is complete, and every test that takes a row takes every row but those that are exempt."""

from __future__ import annotations

import ast
from pathlib import Path

from hf_specdec.method import NO_DRAFTS, built_in_methods, parts_of
from tests.helpers.methods import EVERYTHING, EXEMPT, NEED_GRAMMAR, REPRESENTATIVES


ROWS = {name for row in EVERYTHING for name in row.values}


def test_every_method_has_a_row_of_its_own_and_one_in_a_combination():
    methods = {method.name for method in built_in_methods()} - {NO_DRAFTS}
    assert methods <= ROWS | {*NEED_GRAMMAR}
    assert methods == {part for name in ROWS if "+" in name for part in parts_of(name)}
    assert REPRESENTATIVES < ROWS


def test_exemptions_are_of_tests_and_rows_that_exist():
    trees = [ast.parse(path.read_text()) for path in Path(__file__).parent.glob("test_*.py")]
    tests = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for name, rows in EXEMPT.items():
        assert "row" in [argument.arg for argument in tests[name].args.args]
        assert set(rows) < ROWS
        assert all(rows.values())
