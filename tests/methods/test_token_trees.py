"""Static draft trees: every spelling of one, the published ones, and what follows from the paths."""

from __future__ import annotations

import json
import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.drafts import PUBLISHED_TREES, DraftTree, TokenTree, TreeTopology, parse_token_tree
from hf_specdec.errors import SpecConfigError
from tests.helpers.paths import FIXTURES


CPU = torch.device("cpu")
CHOICES = json.loads((FIXTURES / "medusa" / "tree_buffers" / "choices.json").read_text())

# Nodes of depth 1, 2, 3, 4.
MEDUSA_TREES = {
    "mc_sim_7b_63": [10, 28, 23, 2],
    "vicuna_7b_stage2": [10, 23, 23, 7],
    "vicuna_13b_stage2": [10, 19, 25, 9],
    "vicuna_33b_stage2": [10, 24, 24, 5],
    "zephyr_stage2": [10, 27, 23, 3],
    "vicuna_7b_stage1": [10, 32, 20, 1],
}


@st.composite
def parent_lists(draw, max_nodes: int = 12) -> list[int]:
    """Parents of random trees, 0 for the anchor."""
    size = draw(st.integers(1, max_nodes))
    return [draw(st.integers(0, index)) for index in range(size)]


@st.composite
def trees(draw, max_nodes: int = 12) -> TokenTree:
    return TokenTree.from_parents(draw(parent_lists(max_nodes)))


@st.composite
def sparse_trees(draw) -> TokenTree:
    """Trees whose ranks have gaps."""
    paths = {()}
    for _ in range(draw(st.integers(1, 12))):
        paths.add((*draw(st.sampled_from(sorted(paths))), draw(st.integers(0, 9))))
    return TokenTree.from_paths(paths - {()})


class TestSpellings:
    TREE = ((0,), (1,), (2,), (0, 0), (0, 1))

    @pytest.mark.parametrize(
        "value",
        [
            [(0,), (1,), (2,), (0, 0), (0, 1)],
            [[0, 1], [2], [0, 0], [1], [0]],
            ((0,), (0, 0), (0, 1), (1,), (2,), (2,)),
            "[(0,), (0, 0), (0, 1), (1,), (2,)]",
            " [[0], [1], [2], [0, 0], [0, 1]]\n",
            [0, 0, 0, 1, 1],
            (0, 0, 0, 1, 1),
            "[0, 0, 0, 1, 1]",
            # Depth first.
            [0, 1, 1, 0, 0],
            list(np.array([0, 0, 0, 1, 1])),
            [list(path) for path in map(np.array, ([0], [1], [2], [0, 0], [0, 1]))],
        ],
        ids=str,
    )
    def test_of_one_tree(self, value):
        paths = parse_token_tree(value)
        assert paths == self.TREE
        assert all(type(rank) is int for path in paths for rank in path)

    def test_one_node(self):
        assert parse_token_tree("[(0,)]") == parse_token_tree("[0]") == parse_token_tree("[(0)]") == ((0,),)

    @pytest.mark.parametrize("name", PUBLISHED_TREES)
    def test_published_name(self, name):
        assert parse_token_tree(name) == TokenTree.published(name).paths

    @pytest.mark.parametrize(
        "keys",
        [
            ("num_steps", "topk", "num_draft_tokens"),
            ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"),
        ],
    )
    @pytest.mark.parametrize("spell", [dict, str, json.dumps])
    def test_sglang(self, keys, spell):
        tree = TokenTree(parse_token_tree(spell(dict(zip(keys, (3, 4, 16))))))
        assert len(tree) == 15  # the 16th is the anchor
        assert tree.max_depth <= 3
        assert max(tree.ranks) < 4
        assert tree == TokenTree.from_sglang(3, 4, 16)

    def test_sglang_with_more_candidates_than_nodes(self):
        assert TokenTree.from_sglang(1, 10**12, 5).paths == ((0,), (1,), (2,), (3,))

    def test_sglang_with_one_candidate_is_a_chain(self):
        paths = parse_token_tree({"num_steps": 5, "topk": 1, "num_draft_tokens": 6})
        assert paths == TokenTree.chain(5).paths == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0))

    @pytest.mark.parametrize(("steps", "topk"), [(1, 1), (1, 4), (2, 3), (4, 2), (1, 100), (2, 30)])
    def test_sglang_limits_are_reached(self, steps, topk):
        most = steps if topk == 1 else topk + (steps - 1) * topk**2
        for tokens in {steps + 1, most + 1}:
            tree = TokenTree.from_sglang(steps, topk, tokens)
            assert len(tree) == tokens - 1
            assert tree.max_depth <= steps
            assert max(tree.ranks) < topk

    def test_paths_are_a_spelling_themselves(self):
        for paths in map(parse_token_tree, PUBLISHED_TREES):
            assert (
                parse_token_tree(paths) == parse_token_tree(str(paths)) == parse_token_tree(json.dumps(paths)) == paths
            )

    @settings(max_examples=100)
    @given(parents=parent_lists())
    def test_paths_and_parents(self, parents):
        """Paths give parents, and the parents give the same paths."""
        tree = TokenTree.from_parents(parents)
        again = TokenTree.from_parents([parent + 1 for parent in tree.parents])
        assert again == tree
        assert len(tree) == len(parents)
        assert hash(again) == hash(tree)
        # The number of children of each depth's nodes is that of the given parents.
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        assert sorted(tree.depths) == sorted(depths[1:])


class TestErrors:
    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ([], ["list of paths", "got []"]),
            ((), ["list of paths"]),
            ("", ["got ''"]),
            ("(0", ["list of paths", "'(0'"]),
            ("mc_sim", ["mc_sim_7b_63", "got 'mc_sim'"]),
            ("__import__('os')", ["list of paths"]),
            (5, ["got 5"]),
            ("5", ["got '5'"]),
            ([[]], ["got [[]]"]),
            ([0, (0, 0)], ["got [0, (0, 0)]"]),
            ([True, False], ["got [True, False]"]),
            ([[0], [True]], ["got [[0], [True]]"]),
            ([[0], [-1]], ["got [[0], [-1]]"]),
            ([0, -1], ["got [0, -1]"]),
            ([0.0, 1.0], ["got [0.0, 1.0]"]),
            (["0"], ["got ['0']"]),
            ([[0], [1, 0]], ["(1, 0)", "parent (1,)", "Add the parent"]),
            ([[0, 0, 0], [0]], ["(0, 0, 0)", "parent (0, 0)"]),
            ([0, 2], ["has 2 for node 2", "earlier node"]),
            ([1, 1], ["has 1 for node 1"]),
            ({}, ["num_steps, topk, num_draft_tokens", "got {}"]),
            ({"num_steps": 3, "topk": 4}, ["num_draft_tokens", "got {'num_steps': 3, 'topk': 4}"]),
            ({"num_steps": 3, "topk": 4, "num_draft_tokens": "16"}, ["integers", "'16'"]),
            ({"num_steps": 3, "topk": 4, "num_draft_tokens": 16, "size": 2}, ["'size': 2"]),
            ({"num_steps": 0, "topk": 4, "num_draft_tokens": 1}, ["num_steps=0"]),
            ({"num_steps": 3, "topk": 0, "num_draft_tokens": 4}, ["topk=0"]),
            ({"num_steps": 3, "topk": 1, "num_draft_tokens": 16}, ["3 steps of 1", "4 to 4 tokens"]),
            ({"num_steps": 3, "topk": 2, "num_draft_tokens": 12}, ["num_draft_tokens=12", "4 to 11 tokens"]),
            ({"num_steps": 3, "topk": 2, "num_draft_tokens": 3}, ["num_draft_tokens=3", "4 to 11 tokens"]),
            ([[rank] for rank in range(1000)] + [[0, rank] for rank in range(25)], ["1025 nodes", "at most 1024"]),
            # So large that they must not be built first.
            (list(range(200_000)), ["200000 nodes", "at most 1024"]),
            ({"num_steps": 10**9, "topk": 1, "num_draft_tokens": 10**9 + 1}, ["1000000000 nodes"]),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_message(self, value, words):
        with pytest.raises(SpecConfigError) as caught:
            parse_token_tree(value)
        assert [word for word in words if word not in str(caught.value)] == []

    def test_largest(self):
        assert len(parse_token_tree([[rank] for rank in range(1024)])) == 1024


class TestPublished:
    def test_names(self):
        assert set(PUBLISHED_TREES) == {*MEDUSA_TREES, "eagle_1"}

    @pytest.mark.parametrize("name", MEDUSA_TREES)
    def test_medusa(self, name):
        tree = TokenTree.published(name)
        assert len(tree) == 63
        assert [tree.depths.count(depth) for depth in (1, 2, 3, 4)] == MEDUSA_TREES[name]
        assert max(tree.ranks) < 10
        assert TokenTree.from_paths(CHOICES[name]) == tree

    def test_eagle_1(self):
        tree = TokenTree.published("eagle_1")
        by_depth = [
            "0 1 2 3",
            "00 01 02 10 11 20 21 30",
            "000 001 002 010 011 020 021 100",
            "0000 0001 0002",
            "00000 00001",
        ]
        assert tree.paths == tuple(tuple(map(int, path)) for path in " ".join(by_depth).split())
        assert len(tree) == 25


class TestGeometry:
    @settings(max_examples=100)
    @given(tree=trees() | sparse_trees())
    def test_follows_from_the_paths(self, tree):
        for node, path in enumerate(tree.paths):
            parent = tree.parents[node]
            assert path[:-1] == (() if parent == -1 else tree.paths[parent])
            assert parent < node
            assert (tree.depths[node], tree.ranks[node]) == (len(path), path[-1])
        assert tree.max_depth == max(tree.depths)
        for depth, width in enumerate(tree.widths, start=1):
            assert width == 1 + max(path[-1] for path in tree.paths if len(path) == depth)
        assert tree.is_chain == all(parent == node - 1 for node, parent in enumerate(tree.parents))

    @settings(max_examples=100)
    @given(tree=trees() | sparse_trees())
    def test_topology(self, tree):
        topology = tree.topology(CPU)
        prefixes = [(), *tree.paths]
        assert topology.depths.tolist() == [len(path) for path in prefixes]
        assert topology.parents.tolist() == [prefixes.index(path[:-1]) for path in prefixes]
        assert topology.ancestors.tolist() == [[path[: len(a)] == a for a in prefixes] for path in prefixes]
        assert topology.max_depth == tree.max_depth
        assert topology.is_chain == tree.is_chain
        assert tree.topology(CPU) is topology

    def test_topology_under_another_default_dtype(self):
        parents = torch.tensor([[-1, 0, 0], [-1, -1, 1]])
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert TreeTopology.from_parents(parents).depths.tolist() == [[0, 1, 2, 2], [0, 1, 1, 2]]
        finally:
            torch.set_default_dtype(before)

    def test_without_nodes(self):
        tree = TokenTree(())
        assert (len(tree), tree.max_depth, tree.widths, tree.is_chain) == (0, 0, (), True)
        draft = DraftTree.of_shape(tree, torch.zeros((2, 0), dtype=torch.long))
        assert (draft.size, draft.num_nodes.tolist(), draft.topology.depths.tolist()) == (0, [0, 0], [0])

    def test_equal_trees_share_what_follows_from_them(self):
        first, second = (TokenTree.from_paths(CHOICES["small"]) for _ in range(2))
        assert first is not second
        assert first.topology(CPU) is second.topology(CPU)
        assert first.up_to(2) is second.up_to(2)
        assert TokenTree.chain(4) is TokenTree.chain(4)


class TestDraft:
    @settings(max_examples=100)
    @given(tree=trees() | sparse_trees(), data=st.data())
    def test_cut_to_the_rows_depths(self, tree, data):
        depths = data.draw(st.lists(st.integers(0, tree.max_depth + 2), min_size=1, max_size=4))
        tokens = torch.arange(len(depths) * len(tree)).view(len(depths), -1)
        draft = DraftTree.of_shape(tree, tokens, depths)
        for row, depth in enumerate(depths):
            kept = [node for node in range(len(tree)) if tree.depths[node] <= depth]
            assert draft.token_lists()[row] == tokens[row, kept].tolist()
            assert draft.parent_lists()[row] == [tree.parents[node] for node in kept]
        # No column that no row needs.
        assert draft.size == max(draft.num_nodes.tolist())
        assert tuple(draft.parents.tolist()) == draft.shape.parents == tree.parents[: draft.size]
        same = DraftTree(draft.tokens, draft.parents, draft.num_nodes)
        for name in ("parents", "depths", "ancestors"):
            assert torch.equal(getattr(draft.topology, name), getattr(same.topology, name))

    @settings(max_examples=50)
    @given(tree=trees() | sparse_trees(), depth=st.integers(-1, 13))
    def test_up_to(self, tree, depth):
        cut = tree.up_to(depth)
        assert cut.paths == tuple(path for path in tree.paths if len(path) <= depth)
        assert len(cut) == tree.num_nodes_to(depth)

    def test_whole(self):
        tree = TokenTree.published("mc_sim_7b_63")
        tokens = torch.arange(126).view(2, 63)
        for depths in (None, [4, 4], [4, 9]):
            draft = DraftTree.of_shape(tree, tokens, depths)
            assert torch.equal(draft.tokens, tokens)
            assert draft.shape is tree
            assert draft.num_nodes.tolist() == [63, 63]
            assert draft.topology is tree.topology(CPU)

    def test_chain(self):
        draft = DraftTree.of_shape(TokenTree.chain(4), torch.arange(8).view(2, 4), [3, 1])
        assert draft.is_chain
        assert draft.token_lists() == [[0, 1, 2], [4]]
        assert draft.topology.is_chain


@st.composite
def accuracy_tables(draw) -> list[list[float]]:
    """Draws how often each rank is right at each depth; higher ranks less often."""
    rate = st.floats(0.01, 1.0)
    return [sorted(draw(st.lists(rate, min_size=1, max_size=3)), reverse=True) for _ in range(draw(st.integers(1, 3)))]


def path_prob(path, accuracies) -> float:
    return math.prod(ranks[rank] for ranks, rank in zip(accuracies, path))


def all_paths(accuracies):
    return [
        path
        for depth in range(1, len(accuracies) + 1)
        for path in product(*(range(len(ranks)) for ranks in accuracies[:depth]))
    ]


class TestFromAccuracies:
    @settings(max_examples=200)
    @given(accuracies=accuracy_tables(), num_nodes=st.integers(0, 45))
    def test_has_the_most_likely_nodes(self, accuracies, num_nodes):
        tree = TokenTree.from_accuracies(accuracies, num_nodes)
        best = sorted((path_prob(path, accuracies) for path in all_paths(accuracies)), reverse=True)[:num_nodes]
        # By their probabilities, because equally likely nodes may stand for each other.
        assert sorted((path_prob(path, accuracies) for path in tree.paths), reverse=True) == best
        assert {path[:-1] for path in tree.paths} <= {(), *tree.paths}

    def test_equals_the_best_nodes_where_no_two_are_alike(self):
        accuracies = [[0.61, 0.23, 0.07], [0.43, 0.17, 0.11], [0.31, 0.13, 0.05]]
        ranked = sorted(all_paths(accuracies), key=lambda path: -path_prob(path, accuracies))
        for num_nodes in range(1, len(ranked) + 1):
            assert set(TokenTree.from_accuracies(accuracies, num_nodes).paths) == set(ranked[:num_nodes])

    def test_max_children(self):
        accuracies = [[0.5, 0.3, 0.2, 0.1]] * 3
        limited = TokenTree.from_accuracies(accuracies, 1000, max_children=2)
        assert limited == TokenTree.from_accuracies([[0.5, 0.3]] * 3, 1000)
        assert len(limited) == 2 + 4 + 8

    def test_heads_that_know_nothing(self):
        assert len(TokenTree.from_accuracies([[0.5, 0.1], [0.0, 0.0]], 6)) == 6
        assert TokenTree.from_accuracies([[0.5], []], 6).paths == ((0,),)
        assert TokenTree.from_accuracies([], 6).paths == ()
        assert TokenTree.from_accuracies([[]], 6).paths == ()

    @pytest.mark.parametrize(("num_nodes", "max_depth"), [(1, 1), (8, 3), (25, 5), (63, 4), (63, 16)])
    def test_of_size(self, num_nodes, max_depth):
        tree = TokenTree.of_size(num_nodes, max_depth)
        assert len(tree) == num_nodes
        assert tree.max_depth <= max_depth
        assert max(tree.ranks) < 10
        assert (0,) in tree.paths
