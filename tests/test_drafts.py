"""Draft trees from lists, and what follows from their parents."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.drafts import DraftTree, TreeTopology


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


@settings(max_examples=100, deadline=None)
@given(parent_lists())
def test_topology_of_one_tree(parents):
    topology = TreeTopology.from_parents(torch.tensor(parents, dtype=torch.long))
    expected = ancestors_of(parents)
    assert topology.parents.tolist() == [0] + [parent + 1 for parent in parents]
    assert topology.ancestors.tolist() == expected
    assert topology.depths.tolist() == [sum(row) - 1 for row in expected]
    assert topology.max_depth >= topology.depths.max()


@settings(max_examples=50, deadline=None)
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


@settings(max_examples=100, deadline=None)
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
