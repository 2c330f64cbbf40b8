"""When a test runs: `make test` has those without a mark, `make test-all` those that are `full`, a release the `slow`.

pytestmark = full                                               # a whole file
@full                                                           # a test
@pytest.mark.parametrize("size", [1, *in_full(2, 3, 5)])        # some of its cases
@pytest.mark.parametrize(("size", "dtype"), [(1, "float32"), *in_full((2, "float32"), (3, "bfloat16"))])
"""

from __future__ import annotations

import pytest


full = pytest.mark.full
slow = pytest.mark.slow


def in_full(*cases) -> list:
    """Cases that run in `make test-all` alone; a tuple has a value for each parameter."""
    return [_marked(case, full) for case in cases]


def when_slow(*cases) -> list:
    """Cases that run before a release alone; a tuple has a value for each parameter."""
    return [_marked(case, slow) for case in cases]


def split(cases, short) -> list:
    """All cases, of which `short` run in `make test`, and the others in `make test-all` alone."""
    return [*short, *in_full(*(case for case in cases if case not in short))]


def _marked(case, mark):
    if hasattr(case, "marks"):  # a pytest.param
        return pytest.param(*case.values, marks=(*case.marks, mark), id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
