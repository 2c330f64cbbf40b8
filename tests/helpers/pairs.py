"""Parametrisation by pairs: any two values of two parameters meet in a test, but not all values of all parameters."""

from __future__ import annotations

from itertools import combinations, product

import pytest


def every_pair(**values) -> pytest.MarkDecorator:
    """Few combinations of parameters, with every pair of their values, which are lists, or dicts by their ids."""
    lists = [
        list(options.items()) if isinstance(options, dict) else [(str(option), option) for option in options]
        for options in values.values()
    ]
    rows = [[lists[name][value] for name, value in enumerate(row)] for row in covering(*map(len, lists))]
    params = [pytest.param(*(option for _, option in row), id="-".join(name for name, _ in row)) for row in rows]
    return pytest.mark.parametrize(list(values), params)


def covering(*sizes: int) -> list[tuple[int, ...]]:
    """Few tuples of indices below `sizes` that have every pair of indices at every two places."""
    rows = list(product(*map(range, sizes)))
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        chosen.append(max(rows, key=lambda row: len(missing.intersection(_pairs(row)))))
        missing.difference_update(_pairs(chosen[-1]))
    return sorted(chosen)


def _pairs(row: tuple[int, ...]):
    return combinations(enumerate(row), 2)
