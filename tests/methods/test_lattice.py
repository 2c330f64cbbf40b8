"""The most probable prefixes: against all that there are, and against a heap, on either way they are found."""

from __future__ import annotations

import heapq
import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hf_specdec.candidate_generators.dflash import lattice
from hf_specdec.candidate_generators.dflash.lattice import Lattice, best_candidates, best_prefixes
from hf_specdec.drafts import DraftTree, node_depths
from tests.helpers.pairs import every_pair
from tests.helpers.paths import FIXTURES


PUBLISHED = FIXTURES / "dflash"
RECORDED = load_file(PUBLISHED / "trained_b8" / "expected.safetensors")
JETSPEC = load_file(PUBLISHED / "jetspec_b8" / "expected.safetensors")

# Devices whose trees come from a heap on the host; without the CPU its trees are built on the device.
WAYS = {"heap": ("cpu",), "levels": ()}


@pytest.fixture(params=WAYS, autouse=True)
def way(request, monkeypatch):
    monkeypatch.setattr(lattice, "_HOST_DEVICES", WAYS[request.param])


def numbered(log_probs: torch.Tensor) -> Lattice:
    """Candidates whose tokens say where they stand: 100 * position + rank."""
    rows, depth, width = log_probs.shape
    tokens = 100 * torch.arange(depth)[:, None] + torch.arange(width)
    return Lattice.independent(tokens.expand(rows, depth, width), log_probs)


def rank_paths(tree: DraftTree) -> list[list[tuple[int, ...]]]:
    """Every row's nodes as their ranks from the anchor on, of drafts of `numbered`."""
    rows = []
    for tokens, parents in zip(tree.token_lists(), tree.parent_lists()):
        paths: list[tuple[int, ...]] = []
        for node, (token, parent) in enumerate(zip(tokens, parents)):
            assert -1 <= parent < node
            above = paths[parent] if parent >= 0 else ()
            assert token // 100 == len(above)
            paths.append((*above, token % 100))
        rows.append(paths)
    return rows


def drafted_paths(log_probs: torch.Tensor, budget: int, limits=None) -> list[list[tuple[int, ...]]]:
    return rank_paths(best_prefixes(numbered(log_probs), budget, limits))


def all_prefixes(log_probs: list[list[float]], budget: int) -> list[tuple[int, ...]]:
    """The best of all prefixes that there are."""
    ranks = [range(len(scores)) for scores in log_probs]
    prefixes = [path for depth in range(1, len(ranks) + 1) for path in product(*ranks[:depth])]

    def key(path):
        # Left to right: sums of floats depend on the order.
        total = 0.0
        for scores, rank in zip(log_probs, path):
            total += scores[rank]
        return -total, path

    return sorted(prefixes, key=key)[:budget]


def heap_prefixes(log_probs: list[list[float]], budget: int) -> list[tuple[int, ...]]:
    """The best prefixes, without listing them all."""
    chosen: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = []

    def push(path):
        if len(path) <= len(log_probs) and path[-1] < len(log_probs[0]):
            total = 0.0
            for scores, rank in zip(log_probs, path):
                total += scores[rank]
            heapq.heappush(heap, (-total, path))

    push((0,))
    while heap and len(chosen) < budget:
        _, path = heapq.heappop(heap)
        chosen.append(path)
        push((*path[:-1], path[-1] + 1))
        push((*path, 0))
    return chosen


@st.composite
def lattices(draw, most: int = 4):
    """Log-probabilities of few rows, among them ties within and across positions, and sums that are rounded."""
    rows, depth, width = draw(st.integers(1, 3)), draw(st.integers(1, most)), draw(st.integers(1, most))
    scores = st.one_of(
        st.sampled_from([0.0, -0.5, -1.0, -2.0]),
        st.sampled_from([-1e-12, -3e-20, -17.0]),
        st.floats(-20, 0, width=32),
        st.just(-math.inf),
    )
    values = draw(st.lists(scores, min_size=rows * depth * width, max_size=rows * depth * width))
    return torch.tensor(values, dtype=torch.float32).view(rows, depth, width).sort(-1, descending=True).values


def random_lattice(rows: int, depth: int, width: int, seed: int = 0) -> torch.FloatTensor:
    logits = torch.randn((rows, depth, 300), generator=torch.Generator().manual_seed(seed)).mul_(3)
    return logits.log_softmax(-1).topk(width).values


def lists(log_probs: torch.Tensor) -> list:
    """Impossible prefixes score a finite number, so that there are some of different lengths among them."""
    return log_probs.clamp(min=-1e30).tolist()


class TestPrefixes:
    @settings(max_examples=100)
    @given(lattices(), st.integers(1, 100))
    def test_best_of_all(self, log_probs, budget):
        expected = [all_prefixes(row, budget) for row in lists(log_probs)]
        assert drafted_paths(log_probs, budget) == expected

    @settings(max_examples=60)
    @given(lattices(), st.integers(1, 40), st.data())
    def test_limits(self, log_probs, budget, data):
        rows, depth = log_probs.shape[:2]
        limits = data.draw(st.lists(st.integers(0, depth + 1), min_size=rows, max_size=rows))
        expected = [all_prefixes(row[:limit], budget) for row, limit in zip(lists(log_probs), limits)]
        tree = best_prefixes(numbered(log_probs), budget, limits)
        assert rank_paths(tree) == expected
        # Of the padding too.
        assert (tree.parents < torch.arange(tree.size)).all()

    @every_pair(rows=[1, 4], budget=[1, 8, 40, 90], depth=[1, 7, 15])
    def test_large_budgets(self, rows, depth, budget):
        log_probs = random_lattice(rows, depth, budget, seed=depth)
        assert drafted_paths(log_probs, budget) == [heap_prefixes(row, budget) for row in lists(log_probs)]

    def test_a_certain_draft_is_a_chain_first(self):
        log_probs = torch.tensor([[[-0.01, -5.0]] * 4])
        assert drafted_paths(log_probs, 4) == [[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]]
        assert drafted_paths(log_probs, 5)[0][4] == (1,)

    def test_ties_go_by_ranks(self):
        log_probs = torch.zeros(1, 3, 2)
        expected = [(0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 1), (0, 1, 0), (0, 1, 1), (1,), (1, 0)]
        assert drafted_paths(log_probs, 9) == [expected]

    def test_the_order_of_sums_on_every_device(self):
        # In float32 every sum were -17, and (0, 0) would come second by its ranks.
        log_probs = torch.tensor([[[-17.0, -17.0], [-1e-9, -2e-9]]])
        assert drafted_paths(log_probs, 4) == [[(0,), (1,), (0, 0), (1, 0)]]

    @pytest.mark.parametrize("bad", [math.nan, -math.inf])
    def test_what_cannot_be_comes_last(self, bad):
        log_probs = torch.tensor([[[-0.1, -3.0], [bad, bad], [-0.1, -3.0]]])
        paths = drafted_paths(log_probs, 14)[0]
        assert paths[:2] == [(0,), (1,)]
        assert len(set(paths)) == len(paths) == 14

    def test_more_room_than_prefixes(self):
        log_probs = random_lattice(2, 2, 3)
        tree = best_prefixes(numbered(log_probs), 500, [2, 1])
        assert [len(row) for row in tree.token_lists()] == [12, 3]
        assert tree.num_nodes.tolist() == [12, 3]
        assert tree.size == 12

    def test_candidates_beyond_the_budget_do_not_matter(self):
        log_probs = random_lattice(1, 4, 60)
        assert drafted_paths(log_probs, 5) == drafted_paths(log_probs[..., :5], 5)

    def test_rows_equal_single_rows(self):
        log_probs = random_lattice(5, 6, 20)
        limits = [6, 2, 0, 5, 1]
        together = drafted_paths(log_probs, 20, limits)
        for row, limit in enumerate(limits):
            assert drafted_paths(log_probs[row : row + 1], 20, [limit]) == together[row : row + 1]

    @pytest.mark.parametrize(("budget", "limits"), [(0, None), (4, [0, 0])])
    def test_nothing_to_draft(self, budget, limits):
        tree = best_prefixes(numbered(torch.zeros(2, 3, 4)), budget, limits)
        assert tree.token_lists() == [[], []]

    def test_topology_follows(self):
        log_probs = random_lattice(3, 5, 16)
        tree = best_prefixes(numbered(log_probs), 16, [5, 3, 1])
        depths = tree.topology.depths.expand(3, -1)
        for row, parents in enumerate(tree.parent_lists()):
            assert depths[row, 1 : len(parents) + 1].tolist() == node_depths(parents)
        assert tree.max_depths()[2] == 1

    @settings(max_examples=30)
    @given(lattices(), st.integers(1, 30), st.none() | st.integers(1, 5))
    def test_log_probabilities_of_the_prefixes(self, log_probs, budget, siblings):
        tree = best_prefixes(numbered(log_probs), budget, siblings=siblings)
        if tree.is_chain:
            return
        for scores, paths, found in zip(lists(log_probs), rank_paths(tree), tree.path_log_probs.tolist()):
            expected = [sum(scores[level][rank] for level, rank in enumerate(path)) for path in paths]
            np.testing.assert_allclose(found[: len(paths)], expected, rtol=1e-6)
            assert found[len(paths) :] == [-math.inf] * (len(found) - len(paths))


@st.composite
def lattices_with_tables(draw):
    """Few positions whose candidates depend on the one before, of tokens that are not those of their ranks."""
    rows, depth, width = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    scores = torch.randn((rows, depth, width, width), generator=generator).log_softmax(-1)
    best = scores.sort(-1, descending=True)
    return Lattice(best.indices + 10 * torch.arange(depth)[:, None, None], best.values, best.indices)


def paths_through(lattice: Lattice, row: int) -> list[tuple[float, tuple[int, ...], tuple[int, ...]]]:
    """All prefixes of a row: log-probability, ranks, tokens."""
    tokens, log_probs, tables = (part[row].tolist() for part in lattice)
    found, last = [], [(0.0, (), (), 0)]
    for level in range(len(tokens)):
        last = [
            (
                total + log_probs[level][table][rank],
                (*ranks, rank),
                (*path, tokens[level][table][rank]),
                tables[level][table][rank],
            )
            for total, ranks, path, table in last
            for rank in range(len(tokens[level][table]))
        ]
        found += [prefix[:3] for prefix in last]
    return found


def token_paths(tree: DraftTree) -> list[list[tuple[int, ...]]]:
    rows = []
    for tokens, parents in zip(tree.token_lists(), tree.parent_lists()):
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        rows.append(paths)
    return rows


class TestTables:
    @settings(max_examples=60)
    @given(lattices_with_tables(), st.integers(1, 100), st.data())
    def test_best_of_all(self, lattice, budget, data):
        limits = [data.draw(st.integers(0, 5)) for _ in lattice.tokens]
        found = token_paths(best_prefixes(lattice, budget, limits))
        for row, limit in enumerate(limits):
            prefixes = [prefix for prefix in paths_through(lattice, row) if len(prefix[1]) <= limit]
            best = sorted(prefixes, key=lambda prefix: (-prefix[0], prefix[1]))[:budget]
            assert found[row] == [path for _, _, path in best]


def accumulated(lattice: Lattice, row: int, width: int, budget: int, limit: int) -> list[tuple[int, ...]]:
    """JetSpec's "accum_logp": the best node leaves the heap, and its children are nodes and enter."""
    totals = {path: (total, ranks) for total, ranks, path in paths_through(lattice, row) if max(ranks) < width}
    nodes: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = [(0.0, (), ())]
    while heap and len(nodes) < budget:
        _, _, path = heapq.heappop(heap)
        if len(path) == limit:
            continue
        children = [child for child in totals if len(child) == len(path) + 1 and child[:-1] == path]
        for child in sorted(children, key=lambda child: totals[child][1])[: budget - len(nodes)]:
            nodes.append(child)
            heapq.heappush(heap, (-totals[child][0], totals[child][1], child))
    return nodes


class TestSiblings:
    @settings(max_examples=60)
    @given(lattices_with_tables(), st.integers(1, 60), st.integers(1, 5), st.data())
    def test_all_children_at_once(self, lattice, budget, siblings, data):
        limits = [data.draw(st.integers(0, 4)) for _ in lattice.tokens]
        tree = best_prefixes(lattice, budget, limits, siblings)
        for row, (limit, paths) in enumerate(zip(limits, token_paths(tree))):
            depth = lattice.tokens.shape[1]
            assert paths == accumulated(lattice, row, siblings, budget, min(limit, depth))
        # Of the padding too.
        assert (tree.parents < torch.arange(tree.size)).all()

    @pytest.mark.parametrize(("width", "size"), [(4, 15), (7, 30)])
    def test_recorded_trees_of_jetspec(self, width, size):
        """Theirs count the anchor."""
        tree = best_prefixes(best_candidates(JETSPEC["r0.draft_logits"], width), size - 1, siblings=width)
        recorded = {part: JETSPEC[f"tree_w{width}_n{size}.{part}"][1:] for part in ("token_ids", "parents", "depths")}
        assert tree.token_lists() == [recorded["token_ids"].tolist()]
        assert tree.parent_lists() == [(recorded["parents"] - 1).tolist()]
        assert node_depths(tree.parent_lists()[0]) == recorded["depths"].tolist()
        expected = JETSPEC[f"tree_w{width}_n{size}.cum_logprob"][None, 1:]
        torch.testing.assert_close(tree.path_log_probs, expected, atol=1e-5, rtol=1e-5)


class TestRecordedTrees:
    @pytest.mark.parametrize("budget", [7, 16])
    def test_tree_of_a_trained_draft(self, budget):
        tree = best_prefixes(best_candidates(RECORDED["r0.draft_logits"], budget), budget)
        assert tree.token_lists() == [RECORDED[f"ddtree{budget}.node_token_ids"].tolist()]
        parents = tree.parent_lists()[0]
        assert parents == (RECORDED[f"ddtree{budget}.parents"][1:] - 1).tolist()
        assert node_depths(parents) == RECORDED[f"ddtree{budget}.node_depths"].tolist()


class TestCandidates:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_log_probabilities(self, dtype):
        logits = (torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
        tokens, log_probs = (part[:, :, 0] for part in best_candidates(logits, 5)[:2])
        expected = logits.double().log_softmax(-1)
        assert log_probs.dtype == torch.float32
        np.testing.assert_allclose(log_probs, expected.gather(2, tokens), atol=1e-6)
        np.testing.assert_allclose(log_probs, expected.sort(-1, descending=True).values[..., :5], atol=1e-6)

    def test_large_logits(self):
        logits = torch.tensor([[[1000.0, 999.0, -1000.0]]])
        log_probs = best_candidates(logits, 3).log_probs
        expected = logits.double().log_softmax(-1)
        np.testing.assert_allclose(log_probs[0, 0, 0], expected[0, 0], rtol=1e-6)

    def test_few_tokens_and_other_ids(self):
        found = best_candidates(torch.tensor([[[0.0, 2.0, 1.0]]]), 10, ids=torch.tensor([7, 8, 9]))
        assert found.tokens.tolist() == [[[[8, 9, 7]]]]
        assert found.log_probs.shape == (1, 1, 1, 3)

    def test_logits_that_are_no_distribution_draft_last(self):
        logits = torch.zeros(1, 2, 4)
        logits[0, 1, 2] = math.nan
        tree = best_prefixes(best_candidates(logits, 4), 6)
        assert node_depths(tree.parent_lists()[0])[:4] == [1, 1, 1, 1]


@pytest.mark.parametrize("siblings", [None, 5])
def test_nothing_waits_for_the_device(siblings):
    # Reading a value of a tensor that has none is an error.
    logits = torch.empty(2, 5, 100, device="meta", dtype=torch.bfloat16)
    tree = best_prefixes(best_candidates(logits, 12), 12, [5, 1], siblings)
    assert tree.tokens.shape == tree.parents.shape == (2, 12)
