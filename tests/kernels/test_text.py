"""Kernels over texts: against their definition in Python, and in several threads at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.candidate_generators.recycling.generator import NUM_SUCCESSORS, SuccessorTable
from hf_specdec.drafts import TokenTree
from hf_specdec.kernels import text as kernels


VOCAB_SIZE = 12

texts = st.lists(st.integers(-2, VOCAB_SIZE + 1), max_size=60)
paths = st.lists(st.lists(st.integers(0, NUM_SUCCESSORS - 1), min_size=1, max_size=4), max_size=20)


def in_python(name: str):
    """A kernel as it is where there is no numba."""
    return getattr(getattr(kernels, name), "py_func", getattr(kernels, name))


def learnt(text: list[int]) -> dict[int, list[int]]:
    """Successors of each token, the last one first."""
    known: dict[int, list[int]] = {}
    for token, successor in pairwise(text):
        if 0 <= token < VOCAB_SIZE and 0 <= successor < VOCAB_SIZE:
            others = [other for other in known.get(token, []) if other != successor]
            known[token] = [successor, *others][:NUM_SUCCESSORS]
    return known


@given(texts)
def test_learning_follows_the_definition(text):
    table = SuccessorTable(VOCAB_SIZE)
    table.learn_text(text)
    rows = {token: [known for known in row if known >= 0] for token, row in enumerate(table.successors.tolist())}
    assert {token: row for token, row in rows.items() if row} == learnt(text)
    as_python = SuccessorTable(VOCAB_SIZE)
    in_python("learn_text")(as_python.successors, np.array(text, dtype=np.int64))
    assert np.array_equal(table.successors, as_python.successors)


@given(texts, paths, st.integers(0, VOCAB_SIZE - 1))
def test_filling_follows_the_definition(text, leaves, anchor):
    table = SuccessorTable(VOCAB_SIZE)
    table.learn_text(text)
    tree = TokenTree.from_paths(tuple(leaf[:depth]) for leaf in leaves for depth in range(1, len(leaf) + 1))
    known = learnt(text)
    filled: dict[int, int] = {-1: anchor}
    for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks)):
        found = known.get(filled.get(parent), [])
        if rank < len(found):
            filled[node] = found[rank]
    nodes = sorted(filled)[1:]
    parents = [nodes.index(tree.parents[node]) if tree.parents[node] >= 0 else -1 for node in nodes]
    expected = [filled[node] for node in nodes], parents, nodes
    assert table.fill(tree, anchor) == expected
    arrays = (np.array(values, dtype=np.int64) for values in (tree.parents, tree.ranks))
    assert in_python("fill_tree")(table.successors, *arrays, anchor).tolist() == list(expected)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=80), st.integers(1, 9), st.integers(1, 90), st.booleans())
def test_scans_agree_with_python(text, count, limit, first):
    text = np.array(text, dtype=np.int32)
    ends = np.flatnonzero(text == text[-1]) + 1
    found, expected = (scan(text, ends, count, limit, first) for scan in (kernels._longest, in_python("_longest")))
    assert [values.tolist() for values in found] == [values.tolist() for values in expected]
