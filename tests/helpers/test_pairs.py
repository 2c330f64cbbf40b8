"""Tests of the choice of pairs."""

from itertools import combinations, product

import pytest

from tests.helpers.pairs import covering


@pytest.mark.parametrize("sizes", [(2, 3), (2, 2, 5, 2), (8, 6, 3)])
def test_every_pair_occurs_and_few_do_twice(sizes):
    rows = covering(*sizes)
    for first, second in combinations(range(len(sizes)), 2):
        assert {(row[first], row[second]) for row in rows} == set(product(range(sizes[first]), range(sizes[second])))
    largest = sorted(sizes)[-2:]
    assert len(rows) <= 1.3 * largest[0] * largest[-1] + 2
