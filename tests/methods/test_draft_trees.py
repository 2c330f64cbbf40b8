"""Draft trees: the spellings of a static one, what follows from its paths or parents, and trees cut to their room."""

from __future__ import annotations

import json
import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.drafts import PUBLISHED_TREES, DraftTree, TokenTree, TreeTopology, parse_token_tree
from hf_specdec.errors import SpecConfigError
from tests.helpers.levels import full
from tests.helpers.paths import FIXTURES


CPU = torch.device("cpu")
CHOICES = json.loads((FIXTURES / "medusa" / "tree_buffers" / "choices.json").read_text())


@st.composite
def parent_lists(draw, max_size=12, min_size=0):
    """Parents of random trees, -1 for the anchor."""
    return [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(min_size, max_size)))]


@st.composite
def token_trees(draw) -> TokenTree:
    """Trees whose ranks may have gaps."""
    paths = {()}
    for _ in range(draw(st.integers(1, 12))):
        paths.add((*draw(st.sampled_from(sorted(paths))), draw(st.integers(0, draw(st.sampled_from([1, 9]))))))
    return TokenTree.from_paths(paths - {()})


def ancestors_of(parents: list[int]) -> list[list[bool]]:
    """Node by node, the anchor first: its parent's ancestors and itself."""
    size = len(parents) + 1
    reach = [[node == 0 for node in range(size)]]
    for node, parent in enumerate(parents, start=1):
        reach.append([other == node or seen for other, seen in enumerate(reach[parent + 1])])
    return reach


@given(st.lists(parent_lists(max_size=8), min_size=1, max_size=4), st.booleans())
def test_trees_from_lists(parents, knows_counts):
    """What the host does not know is learnt from the tables that are asked for."""
    tokens = [list(range(10, 10 + len(row))) for row in parents]
    given = DraftTree.from_lists(tokens, parents=parents)
    assert given.unknown_tables() == {}
    counts = given.counts() if knows_counts else given.num_nodes
    draft = DraftTree(given.tokens, given.parents, counts, is_chain=given.is_chain)
    tables = draft.unknown_tables()
    assert ("num_nodes" in tables) == (not knows_counts)
    assert ("parents" in tables) == (not draft.is_chain)
    assert "tokens" in tables
    draft.learn({name: table.tolist() for name, table in tables.items()})
    assert draft.unknown_tables() == {}
    for tree in (given, draft):
        assert tree.size == max(map(len, parents))
        assert tree.counts() == tree.num_nodes.tolist() == list(map(len, parents))
        assert tree.token_lists() == tokens
        assert tree.parent_lists() == parents
        assert tree.is_chain == all(row == list(range(-1, len(row) - 1)) for row in parents)
        depths = tree.topology.depths.expand(len(parents), -1).tolist()
        ancestors = tree.topology.ancestors.expand(len(parents), -1, -1).tolist()
        for row, row_depths, row_ancestors in zip(parents, depths, ancestors):
            expected, size = ancestors_of(row), len(row) + 1
            assert [reach[:size] for reach in row_ancestors[:size]] == expected
            assert row_depths[:size] == [sum(reach) - 1 for reach in expected]


@full
def test_topologies_are_exact_and_shared():
    # Of deep trees, and under other default data types.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        topology = TreeTopology.from_parents(torch.arange(-1, 499))
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(topology.depths, torch.arange(501))
    assert torch.equal(topology.ancestors, torch.ones(501, 501, dtype=torch.bool).tril())
    parents = [-1, -1, 0, 1]
    draft, other = (DraftTree.from_lists([[1, 2, 3, 4]] * rows, parents=[parents] * rows) for rows in (1, 3))
    assert draft.topology is other.topology
    # The first row may end before the others, the nodes of the topology do not.
    draft = DraftTree(torch.ones(2, 4, dtype=torch.long), torch.tensor(parents), [2, 4])
    assert draft.parent_lists() == [[-1, -1], parents]
    assert torch.equal(draft.topology.ancestors, other.topology.ancestors)
    draft = DraftTree.chain(torch.ones(2, 3, dtype=torch.long), [1, 3], torch.rand(2, 3, 5))
    assert draft.num_nodes.tolist() == draft.max_depths() == [1, 3]
    light = draft.without_probs()
    assert (light.probs, light.counts(), light.topology) == (None, [1, 3], draft.topology)


@given(st.integers(1, 12), st.integers(1, 3), st.integers(1, 12), st.data())
def test_a_cut_tree_has_the_likeliest_nodes(size, batch_size, count, data):
    rows = [[data.draw(st.integers(-1, node - 1)) for node in range(size)] for _ in range(batch_size)]
    log_probs = [[] for _ in rows]
    for row, found in zip(rows, log_probs):
        for parent in row:
            # No child is likelier than its parent.
            found.append((found[parent] if parent >= 0 else 0.0) - data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])))
    tokens = torch.arange(batch_size * size).view(batch_size, size)
    counts = [data.draw(st.integers(0, size)) for _ in rows]
    for row, valid in zip(log_probs, counts):
        row[valid:] = [-torch.inf] * (size - valid)
    whole = DraftTree(tokens, torch.tensor(rows), counts, path_log_probs=torch.tensor(log_probs))
    cut = whole.likeliest(count)
    assert cut.size == min(count, size)
    for row in range(batch_size):
        valid, own = cut.counts()[row], whole.token_lists()[row]
        assert valid == min(counts[row], count)
        order = sorted(range(counts[row]), key=lambda node: (-log_probs[row][node], node))
        kept = sorted(order[:valid])
        assert cut.token_lists()[row] == [own[node] for node in kept]
        # The same parents, by their tokens.
        anchored = [-1, *own]
        expected = [anchored[rows[row][node] + 1] for node in kept]
        mine = [-1, *cut.token_lists()[row]]
        assert [mine[parent + 1] for parent in cut.parent_lists()[row]] == expected


def test_spellings_of_one_tree():
    for value in (
        [(0,), (1,), (2,), (0, 0), (0, 1)],
        [[0, 1], [2], [0, 0], [1], [0]],
        ((0,), (0, 0), (0, 1), (1,), (2,), (2,)),
        "[(0,), (0, 0), (0, 1), (1,), (2,)]",
        " [[0], [1], [2], [0, 0], [0, 1]]\n",
        [list(path) for path in map(np.array, ([0], [1], [2], [0, 0], [0, 1]))],
    ):
        paths = parse_token_tree(value)
        assert paths == ((0,), (1,), (2,), (0, 0), (0, 1))
        assert all(type(rank) is int for path in paths for rank in path)
    assert parse_token_tree("[(0,)]") == ((0,),)
    assert len(parse_token_tree([[rank] for rank in range(1024)])) == 1024


def test_published_trees():
    for name in PUBLISHED_TREES:
        tree = TokenTree.published(name)
        for spelling in (name, tree.paths, str(tree.paths), json.dumps(tree.paths)):
            assert parse_token_tree(spelling) == tree.paths
        assert name == "eagle_1" or TokenTree.from_paths(CHOICES[name]) == tree


@full
def test_wrong_spellings():
    for value, words in (
        ([], "list of paths.*got"),
        ("mc_sim", "mc_sim_7b_63.*got 'mc_sim'"),
        ("__import__('os')", "list of paths"),
        ([[0], [True]], "got .*True"),
        ([[0], [1, 0]], "Add the parent"),
        ([0, 0, 1], r"list of paths.*got \[0, 0, 1\]"),
        ({"num_steps": 3, "topk": 4, "num_draft_tokens": 16}, "list of paths.*got .*num_steps"),
        ([[0], [1024]], "rank 1024. Ranks are from 0 to 1023"),
        ([[0] * depth for depth in range(1, 1026)], "1025 nodes.*at most 1024"),
    ):
        with pytest.raises(SpecConfigError, match=words):
            parse_token_tree(value)


@given(tree=token_trees())
def test_geometry_follows_from_the_paths(tree):
    topology, prefixes = tree.topology(CPU), [(), *tree.paths]
    assert topology.depths.tolist() == [len(path) for path in prefixes]
    assert topology.parents.tolist() == [prefixes.index(path[:-1]) for path in prefixes]
    assert topology.ancestors.tolist() == [[path[: len(a)] == a for a in prefixes] for path in prefixes]
    assert tree.parents == tuple(parent - 1 for parent in topology.parents.tolist()[1:])
    assert tree.depths == tuple(map(len, tree.paths))
    assert tree.ranks == tuple(path[-1] for path in tree.paths)
    assert tree.max_depth == topology.max_depth == max(tree.depths)
    for depth, width in enumerate(tree.widths, start=1):
        assert width == 1 + max(path[-1] for path in tree.paths if len(path) == depth)
    assert tree.is_chain == topology.is_chain == (tree.parents == tuple(range(-1, len(tree) - 1)))
    # Equal trees share what follows from them.
    assert TokenTree.from_paths(tree.paths).topology(CPU) is topology


@given(tree=token_trees(), data=st.data())
def test_trees_cut_to_the_depths_of_rows(tree, data):
    depths = data.draw(st.lists(st.integers(0, tree.max_depth + 2), min_size=1, max_size=4))
    tokens = torch.arange(len(depths) * len(tree)).view(len(depths), -1)
    draft = DraftTree.of_shape(tree, tokens, depths)
    for row, depth in enumerate(depths):
        kept = [node for node in range(len(tree)) if tree.depths[node] <= depth]
        assert draft.token_lists()[row] == tokens[row, kept].tolist()
        assert draft.parent_lists()[row] == [tree.parents[node] for node in kept]
        assert tree.up_to(depth).paths == tuple(path for path in tree.paths if len(path) <= depth)
    # No column that no row needs.
    assert draft.size == max(draft.num_nodes.tolist())
    shape = TokenTree.chain(draft.size) if draft.is_chain else draft.shape
    assert tuple(draft.parents.tolist()) == shape.parents == tree.parents[: draft.size]
    same = DraftTree(draft.tokens, draft.parents, draft.num_nodes)
    for name in ("parents", "depths", "ancestors"):
        assert torch.equal(getattr(draft.topology, name), getattr(same.topology, name))
    assert draft.unknown_tables() == {}


# How often each rank is right at each depth; higher ranks less often.
rates = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3).map(lambda rates: sorted(rates, reverse=True))


@given(accuracies=st.lists(rates, min_size=1, max_size=3), num_nodes=st.integers(0, 45))
def test_the_most_likely_nodes(accuracies, num_nodes):
    def probs_of(paths):
        rated = [math.prod(ranks[rank] for ranks, rank in zip(accuracies, path)) for path in paths]
        return sorted(rated, reverse=True)

    ranks = [range(len(ranks)) for ranks in accuracies]
    paths = [path for depth in range(1, len(ranks) + 1) for path in product(*ranks[:depth])]
    tree = TokenTree.from_accuracies(accuracies, num_nodes)
    # By their probabilities, because equally likely nodes may stand for each other.
    assert probs_of(tree.paths) == probs_of(paths)[:num_nodes]
    assert {path[:-1] for path in tree.paths} <= {(), *tree.paths}
    limited = TokenTree.from_accuracies(accuracies, num_nodes, max_children=2)
    assert limited == TokenTree.from_accuracies([ranks[:2] for ranks in accuracies], num_nodes)
