"""Draft trees from lists, and what follows from their parents."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.drafts import DraftTree, TokenTree, TreeTopology


@st.composite
def parent_lists(draw, max_size=40):
    return [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, max_size)))]


def ancestors_of(parents: list[int]) -> list[list[bool]]:
    """Node by node, the anchor first: its parent's ancestors and itself."""
    size = len(parents) + 1
    reach = [[node == 0 for node in range(size)]]
    for node, parent in enumerate(parents, start=1):
        reach.append([other == node or seen for other, seen in enumerate(reach[parent + 1])])
    return reach


@settings(max_examples=100)
@given(parent_lists())
def test_topology_of_one_tree(parents):
    topology = TreeTopology.from_parents(torch.tensor(parents, dtype=torch.long))
    expected = ancestors_of(parents)
    assert topology.parents.tolist() == [0] + [parent + 1 for parent in parents]
    assert topology.ancestors.tolist() == expected
    assert topology.depths.tolist() == [sum(row) - 1 for row in expected]
    assert topology.max_depth >= topology.depths.max()


@settings(max_examples=50)
@given(st.integers(0, 12), st.integers(1, 5), st.data())
def test_topology_of_rows(size, batch_size, data):
    rows = [[data.draw(st.integers(-1, node - 1)) for node in range(size)] for _ in range(batch_size)]
    topology = TreeTopology.from_parents(torch.tensor(rows, dtype=torch.long).view(batch_size, size))
    assert topology.ancestors.tolist() == [ancestors_of(row) for row in rows]
    assert topology.depths.tolist() == [[sum(reach) - 1 for reach in ancestors_of(row)] for row in rows]


def test_topology_of_a_deep_tree_is_exact():
    size = 500
    topology = TreeTopology.from_parents(torch.arange(-1, size - 1))
    assert torch.equal(topology.depths, torch.arange(size + 1))
    assert torch.equal(topology.ancestors, torch.ones(size + 1, size + 1, dtype=torch.bool).tril())


@settings(max_examples=100)
@given(st.lists(parent_lists(max_size=8), min_size=1, max_size=4))
def test_lists_of_trees(parents):
    tokens = [list(range(10, 10 + len(row))) for row in parents]
    draft = DraftTree.from_lists(tokens, parents=parents)
    assert draft.size == max(map(len, parents))
    assert draft.num_nodes.tolist() == list(map(len, parents))
    assert draft.token_lists() == tokens
    assert draft.parent_lists() == parents
    assert draft.is_chain == all(row == list(range(-1, len(row) - 1)) for row in parents)
    depths = draft.topology.depths.expand(len(parents), -1).tolist()
    ancestors = draft.topology.ancestors.expand(len(parents), -1, -1).tolist()
    for row, row_depths, row_ancestors in zip(parents, depths, ancestors):
        expected, size = ancestors_of(row), len(row) + 1
        assert [reach[:size] for reach in row_ancestors[:size]] == expected
        assert row_depths[:size] == [sum(reach) - 1 for reach in expected]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_rows_of_one_shape_share_a_topology(batch_size):
    parents = [-1, -1, 0, 1]
    draft = DraftTree.from_lists([[1, 2, 3, 4]] * batch_size, parents=[parents] * batch_size)
    other = DraftTree.from_lists([[5, 6, 7, 8]], parents=[parents])
    assert draft.topology is other.topology
    assert draft.topology.max_depth == 2


@settings(max_examples=100)
@given(st.lists(parent_lists(max_size=8), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_what_the_host_does_not_know(parents, knows_counts, with_tokens):
    """Counts are learnt from the tables that are asked for, and then nothing is left to be read."""
    tokens = [list(range(10, 10 + len(row))) for row in parents]
    given = DraftTree.from_lists(tokens, parents=parents)
    counts = given.counts() if knows_counts else given.num_nodes
    draft = DraftTree(given.tokens, given.parents, counts, is_chain=given.is_chain)
    tables = draft.unknown_tables(tokens=with_tokens)
    assert ("num_nodes" in tables) == (not knows_counts)
    assert ("parents" in tables) == (not draft.is_chain)
    assert ("tokens" in tables) == with_tokens
    draft.learn({name: table.tolist() for name, table in tables.items()})
    assert draft.unknown_tables(tokens=with_tokens) == {}
    assert draft.counts() == list(map(len, parents))
    assert draft.parent_lists() == parents
    assert draft.max_depths() == given.max_depths()
    assert draft.token_lists() == tokens


def test_drafts_that_the_host_knows():
    assert DraftTree.from_lists([[1, 2], [3]]).unknown_tables(tokens=True) == {}
    assert DraftTree.chain(torch.ones(2, 3, dtype=torch.long)).unknown_tables() == {}
    tree = TokenTree.from_paths([(0,), (1,), (0, 0)])
    assert DraftTree.of_shape(tree, torch.ones(2, 3, dtype=torch.long), [2, 1]).unknown_tables() == {}


@pytest.mark.parametrize("counts", [[3, 3], [1, 3], [0, 0]])
def test_counts_as_a_list(counts):
    draft = DraftTree.chain(torch.ones(2, 3, dtype=torch.long), counts)
    assert draft.num_nodes.tolist() == draft.counts() == counts
    assert draft.max_depths() == counts


def test_topology_of_parents_that_were_read_before():
    """The first row may end before the others, the nodes of the topology do not."""
    parents = torch.tensor([-1, -1, 0, 1])
    draft = DraftTree(torch.ones(2, 4, dtype=torch.long), parents, [2, 4])
    assert draft.parent_lists() == [[-1, -1], [-1, -1, 0, 1]]
    assert torch.equal(draft.topology.ancestors, TreeTopology.from_parents(parents).ancestors)


def test_without_probs():
    draft = DraftTree.chain(torch.ones(2, 3, dtype=torch.long), [1, 3], torch.rand(2, 3, 5))
    topology = draft.topology
    light = draft.without_probs()
    assert light.probs is None
    assert draft.probs is not None
    assert light.counts() == [1, 3]
    assert light.topology is topology


def log_probs_of(parents: list[int], draw) -> list[float]:
    """Log-probabilities of the paths: no child is likelier than its parent."""
    found: list[float] = []
    for parent in parents:
        found.append((found[parent] if parent >= 0 else 0.0) - draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])))
    return found


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(1, 3), st.integers(1, 12), st.data())
def test_a_smaller_tree_has_the_likeliest_nodes(size, batch_size, count, data):
    rows = [[data.draw(st.integers(-1, node - 1)) for node in range(size)] for _ in range(batch_size)]
    log_probs = [log_probs_of(row, data.draw) for row in rows]
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


@pytest.mark.parametrize("max_depths", [[3, 3], [3, 1], [2, 0]])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_smaller_static_tree_is_static(max_depths, count):
    tree = TokenTree.of_size(9, 3)
    tokens = torch.arange(2 * len(tree)).view(2, -1)
    cut = DraftTree.of_shape(tree, tokens, max_depths).likeliest(count)
    assert cut.size <= count
    assert cut.shape is not None
    for row, depth in enumerate(max_depths):
        first = row * len(tree)
        paths = [tree.paths[token - first] for token in cut.token_lists()[row]]
        assert all(len(path) <= depth for path in paths)
        parents = [paths[parent] if parent >= 0 else () for parent in cut.parent_lists()[row]]
        assert parents == [path[:-1] for path in paths]
    ranked = DraftTree.of_shape(tree, tokens).probs_by_rank()
    assert ranked.tolist() == sorted(ranked.tolist(), reverse=True)
    assert ranked[0] == pytest.approx(0.6)


def test_what_says_nothing_of_its_nodes_stays_whole():
    chain = DraftTree.chain(torch.arange(6).view(1, 6))
    assert chain.likeliest(2) is chain
    assert chain.probs_by_rank() is None
    tree = DraftTree.from_lists([[5, 6, 7]], parents=[[-1, -1, 0]])
    assert tree.likeliest(2) is tree
    assert tree.probs_by_rank() is None
