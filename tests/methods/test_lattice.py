"""The most probable prefixes of a block, on host and device: against all that there are, and recorded trees."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.drafting.draw import DepthLimits
from hf_specdec.drafting.growth import DynamicTree
from hf_specdec.drafting.prefixes import Lattice, best_candidates, best_prefixes
from hf_specdec.drafts import DraftTree, node_depths
from tests.helpers.by_hand import CPU, paths_of
from tests.helpers.levels import full, in_full
from tests.helpers.published import published


def drafted(lattice: Lattice, budget: int, limits=None, siblings=None) -> DraftTree:
    """The draft that a heap on the host finds, and operations of fixed shapes on a device."""
    rows, most = lattice.tokens.shape[:2]
    limits = [min(limit, most) for limit in limits or [most] * rows]
    if not any(limits):
        return DraftTree.empty(rows, CPU)
    plan, trees = DynamicTree.of(most, 1, budget + 1), []
    for deepest in (None, max(limits)):
        nodes = best_prefixes(lattice, budget, DepthLimits(torch.tensor(limits), deepest=deepest), siblings)
        trees.append(nodes.draft(plan, limits, CPU))
    assert paths_of(trees[0]) == paths_of(trees[1])
    return trees[1]


def numbered(log_probs: torch.Tensor) -> Lattice:
    """Candidates whose tokens say where they stand: 100 * position + rank."""
    rows, depth, width = log_probs.shape
    tokens = 100 * torch.arange(depth)[:, None] + torch.arange(width)
    return Lattice.independent(tokens.expand(rows, depth, width), log_probs)


def rank_paths(tree: DraftTree) -> list[list[tuple[int, ...]]]:
    """Every row's nodes as their ranks from the anchor on, of drafts of `numbered`."""
    return [[tuple(token % 100 for token in path) for path in row] for row in paths_of(tree)]


@st.composite
def independent(draw):
    """Candidates of few rows, among them ties within and across positions, and sums that are rounded."""
    rows, depth, width = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    scores = st.one_of(
        st.sampled_from([0.0, -0.5, -1.0, -2.0]),
        st.sampled_from([-1e-12, -3e-20, -17.0]),
        st.floats(-20, 0, width=32),
        st.just(-math.inf),
    )
    values = draw(st.lists(scores, min_size=rows * depth * width, max_size=rows * depth * width))
    values = torch.tensor(values, dtype=torch.float32).view(rows, depth, width)
    return numbered(values.sort(-1, descending=True).values)


@st.composite
def with_tables(draw):
    """Few positions whose candidates depend on the one before, of tokens that are not those of their ranks."""
    rows, depth, width = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    scores = torch.randn((rows, depth, width, width), generator=generator).log_softmax(-1)
    best = scores.sort(-1, descending=True)
    return Lattice(best.indices + 10 * torch.arange(depth)[:, None, None], best.values, best.indices)


def paths_through(lattice: Lattice, row: int) -> list[tuple[float, tuple[int, ...], tuple[int, ...]]]:
    """All prefixes of a row: log-probability, ranks, tokens. Of impossible ones there are some of all lengths."""
    tokens, tables = lattice.tokens[row].tolist(), lattice.tables[row].tolist()
    log_probs = lattice.log_probs[row].clamp(min=-1e30).tolist()
    found, last = [], [(0.0, (), (), 0)]
    for level in range(len(tokens)):
        last = [
            # Left to right: sums of floats depend on the order.
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


class TestBestPrefixes:
    @given(st.one_of(independent(), with_tables()), st.integers(1, 100), st.data())
    def test_best_of_all(self, lattice, budget, data):
        limits = [data.draw(st.integers(0, 5)) for _ in lattice.tokens]
        tree = drafted(lattice, budget, limits)
        for row, (limit, paths) in enumerate(zip(limits, paths_of(tree))):
            prefixes = [prefix for prefix in paths_through(lattice, row) if len(prefix[1]) <= limit]
            best = sorted(prefixes, key=lambda prefix: (-prefix[0], prefix[1]))[:budget]
            assert paths == [path for _, _, path in best]
            if not tree.is_chain:
                found = tree.path_log_probs[row].tolist()
                np.testing.assert_allclose(found[: len(best)], [total for total, _, _ in best], rtol=1e-6)
                assert found[len(best) :] == [-math.inf] * (len(found) - len(best))
        # Of the padding too.
        assert (tree.parents < torch.arange(tree.size)).all()

    @full
    def test_the_order_of_sums_on_every_device(self):
        # In float32 every sum were -17, and (0, 0) would come second by its ranks.
        log_probs = torch.tensor([[[-17.0, -17.0], [-1e-9, -2e-9]]])
        assert rank_paths(drafted(numbered(log_probs), 4)) == [[(0,), (1,), (0, 0), (1, 0)]]

    def test_what_cannot_be_comes_last(self):
        for bad in (math.nan, -math.inf):
            log_probs = torch.tensor([[[-0.1, -3.0], [bad, bad], [-0.1, -3.0]]])
            (paths,) = rank_paths(drafted(numbered(log_probs), 14))
            assert paths[:2] == [(0,), (1,)]
            assert len(set(paths)) == len(paths) == 14
        logits = torch.zeros(1, 2, 4)
        logits[0, 1, 2] = math.nan
        (parents,) = drafted(best_candidates(logits, 4), 6).parent_lists()
        assert node_depths(parents)[:4] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("case", "name", "budget", "siblings"),
    [
        # Nodes that get all their children at once; theirs count the anchor.
        ("jetspec_b8", "tree_w4_n15", 14, 4),
        *in_full(("trained_b8", "ddtree16", 16, None), ("jetspec_b8", "tree_w7_n30", 29, 7)),
    ],
)
def test_recorded_trees(case, name, budget, siblings):
    expected = published(f"dflash/{case}").expected
    recorded = {key.removeprefix(f"{name}."): value for key, value in expected.items()}
    tree = drafted(best_candidates(expected["r0.draft_logits"], siblings or budget), budget, siblings=siblings)
    (parents,) = tree.parent_lists()
    tokens = recorded["node_token_ids"] if siblings is None else recorded["token_ids"][1:]
    depths = recorded["node_depths"] if siblings is None else recorded["depths"][1:]
    assert tree.token_lists() == [tokens.tolist()]
    assert parents == (recorded["parents"][1:] - 1).tolist()
    assert node_depths(parents) == depths.tolist()
    if siblings is not None:
        torch.testing.assert_close(tree.path_log_probs[0], recorded["cum_logprob"][1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_full(torch.float32, torch.float16)])
def test_candidates(dtype):
    logits = (torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)) * 4 + 1000).to(dtype)
    tokens, log_probs = (part[:, :, 0] for part in best_candidates(logits, 5)[:2])
    expected = logits.double().log_softmax(-1)
    assert log_probs.dtype == torch.float32
    np.testing.assert_allclose(log_probs, expected.gather(2, tokens), atol=1e-6)
    np.testing.assert_allclose(log_probs, expected.sort(-1, descending=True).values[..., :5], atol=1e-6)
    found = best_candidates(torch.tensor([[[0.0, 2.0, 1.0]]]), 10, ids=torch.tensor([7, 8, 9]))
    assert found.tokens.tolist() == [[[[8, 9, 7]]]]
