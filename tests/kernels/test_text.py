"""Kernels over texts: against their definition in Python, in threads and processes at once, and without numba."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.candidate_generators.recycling.generator import NUM_SUCCESSORS, SuccessorTable
from hf_specdec.drafts import TokenTree
from hf_specdec.kernels import text as kernels
from hf_specdec.kernels.compiled import compiled
from tests.helpers.paths import ROOT


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


@settings(max_examples=200, deadline=None)
@given(texts)
def test_learning_follows_the_definition(text):
    table = SuccessorTable(VOCAB_SIZE)
    table.learn_text(text)
    rows = {token: [known for known in row if known >= 0] for token, row in enumerate(table.successors.tolist())}
    assert {token: row for token, row in rows.items() if row} == learnt(text)
    as_python = SuccessorTable(VOCAB_SIZE)
    in_python("learn_text")(as_python.successors, np.array(text, dtype=np.int64))
    assert np.array_equal(table.successors, as_python.successors)


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=80), st.integers(1, 9), st.integers(1, 90), st.booleans())
def test_scans_agree_with_python(text, count, limit, first):
    text = np.array(text, dtype=np.int32)
    ends = np.flatnonzero(text == text[-1]) + 1
    found, expected = (scan(text, ends, count, limit, first) for scan in (kernels._longest, in_python("_longest")))
    assert [values.tolist() for values in found] == [values.tolist() for values in expected]


def test_ranks_and_anchors_beyond_the_table_have_no_successors():
    table = SuccessorTable(VOCAB_SIZE)
    table.successors[:] = 1
    tree = TokenTree.from_paths([(0,), (NUM_SUCCESSORS,)])
    assert table.fill(tree, 3) == ([1], [-1], [0])
    for anchor in (-1, VOCAB_SIZE):
        assert table.fill(tree, anchor) == ([], [], [])


# ------------------------------------------------------------------------------------------------------- the compiler

SCAN = """
import sys
import numpy as np
{before}
from hf_specdec.kernels import text
from hf_specdec.candidate_generators.recycling.generator import SuccessorTable
from hf_specdec.drafts import TokenTree
tokens = np.random.default_rng(0).integers(0, 5, 500).astype(np.int32)
print([text.best_matches(tokens[:size], 4, limit, first) for size in (0, 1, 200, 500) for limit in (2, 500)
       for first in (False, True)])
table = SuccessorTable(5)
table.learn_text(tokens.tolist())
print(table.successors.tolist(), table.fill(TokenTree.from_paths([(0,), (1,), (0, 4), (1, 0)]), 3))
{after}
"""


def start(before: str = "", after: str = "", **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCAN.format(before=before, after=after)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_without_numba_the_answers_are_the_same_and_one_warning_says_so():
    numba_is_missing = "sys.modules['numba'] = None"
    (expected, errors), (answers, warnings) = start().communicate(), start(numba_is_missing).communicate()
    assert answers == expected != ""
    assert "numba" not in errors
    assert warnings.count("numba cannot be imported") == 1
    assert "pip install numba" in warnings


def test_processes_share_what_one_has_compiled(tmp_path):
    hits = "print([sum(kernel.stats.cache_hits.values()) for kernel in (text._longest, text.learn_text)])"
    started = [start(after=hits, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    first, second = (process.communicate()[0].splitlines() for process in started)
    assert first[:2] == second[:2] != []
    third = start(after=hits, NUMBA_CACHE_DIR=str(tmp_path)).communicate()[0].splitlines()
    assert third == [*first[:2], "[1, 1]"]


def test_other_methods_do_not_import_them():
    code = (
        "import sys, hf_specdec; from hf_specdec import demo; from hf_specdec.settings import describe_settings;"
        "target = demo.load_target(); inputs = demo.load_tokenizer()('def add', return_tensors='pt');"
        "head = demo.drafter_path('eagle3'); describe_settings();"
        "target.generate(**inputs, max_new_tokens=8, spec_method='eagle3', spec_model=head);"
        "print('hf_specdec.kernels.text' in sys.modules);"
        "target.generate(**inputs, max_new_tokens=8, spec_method='ngram');"
        "print('hf_specdec.kernels.text' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def double(number):
    return 2 * number


@pytest.mark.parametrize("fault", ["no folder", "disk full"])
def test_code_that_cannot_be_kept_is_compiled_all_the_same(monkeypatch, fault):
    caching = pytest.importorskip("numba.core.caching")

    def fail(*arguments):
        raise OSError("No space left on device")

    if fault == "no folder":
        monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    else:
        monkeypatch.setattr(caching.IndexDataCacheFile, "save", fail)
    assert compiled("int64(int64)")(double)(4) == 8


def test_threads_at_once():
    random = np.random.default_rng(0)
    rows = [random.integers(0, 3, 2000).astype(np.int32) for _ in range(64)]
    table, tree = SuccessorTable(3), TokenTree.from_paths([(0,), (1,), (0, 0), (0, 1)])

    def work(row):
        table.learn_text(row.tolist())
        # One of 3 tokens, whichever thread has written last.
        assert set(table.fill(tree, 1)[0]) <= {0, 1, 2}
        return kernels.best_matches(row, 4, len(row), False)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, rows)) == [kernels.best_matches(row, 4, len(row), False) for row in rows]
    assert all(sorted(row) == [-1] * (NUM_SUCCESSORS - 3) + [0, 1, 2] for row in table.successors.tolist())
