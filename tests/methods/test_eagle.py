"""EAGLE: which trees and chains its settings and defaults mean, which nodes it reads, and what is refused."""

import pytest
import torch

from hf_specdec import SpecConfigError, load_speculator
from hf_specdec.drafting import growth
from hf_specdec.drafting.entries import DraftEntries
from hf_specdec.drafting.growth import DynamicTree
from hf_specdec.drafts import TokenTree
from hf_specdec.protocol import Session
from tests.helpers.by_hand import CPU, GREEDY, drafts_of, feed, generator_for, random_rows, speculator_for  # noqa: F401
from tests.helpers.draft_layers import NETWORKS, STATIC, head, random_network  # noqa: F401
from tests.helpers.levels import in_full
from tests.helpers.models import prompts
from tests.helpers.published import published


LENGTHS, PROMPTS = (9, 6, 12), (5, 1, 4)


def drafted(network, seed, **shape):
    generator = generator_for(network, 3, **shape)
    texts, states = random_rows(network, LENGTHS, seed=seed)
    feed(generator, texts, states, PROMPTS)
    return drafts_of(generator, texts)


def test_equal_probabilities_keep_parents():
    """A head that is sure gives the child the probability of its parent."""
    network = random_network(**NETWORKS["eagle3"])
    network.lm_head.weight.mul_(1e4)
    found = drafted(network, 1, draft_tree_depth=4, draft_tree_top_k=2, num_draft_nodes=3)
    assert [list(map(len, paths)) for paths in found] == [[1, 2, 3]] * 3


def test_nodes_whose_children_cannot_be_drafted_are_not_read(monkeypatch):
    network = random_network(**NETWORKS["eagle1"])
    read_nodes, read = DraftEntries.read_nodes, []

    def counting(entries, tokens, *arguments):
        read.append(tokens.shape[1])
        return read_nodes(entries, tokens, *arguments)

    def outcomes():
        found = []
        for num_nodes in (2, 3, 6, 11):
            read.clear()
            drafts = drafted(network, 2, draft_tree_depth=5, draft_tree_top_k=4, num_draft_nodes=num_nodes)
            found.append((drafts, sum(read)))
        return found

    monkeypatch.setattr(DraftEntries, "read_nodes", counting)
    found = outcomes()
    monkeypatch.setattr(growth, "num_expandable", lambda plan, levels, log_probs: log_probs.shape[1])
    expected = outcomes()
    assert [drafts for drafts, _ in found] == [drafts for drafts, _ in expected]
    assert all(few < many for (_, few), (_, many) in zip(found, expected))


def test_layers_that_are_read():
    target, folder, _ = published("eagle/eagle3_llama")
    other = load_speculator(target, "eagle3", model=folder, aux_layer_ids=[1, 3, 6])
    assert other.resources.target_hidden_states == (1, 3, 6)
    assert other.candidate_generator(Session(1, 100, CPU)).target_hidden_states == (1, 3, 6)
    assert load_speculator(target, "eagle3", model=folder).resources.target_hidden_states == (2, 4, 5)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    in_full(("eagle1_llama", "eagle", "eagle3"), ("eagle3_speculators", "eagle3", "eagle")),
)
def test_the_other_method(name, right, wrong):
    target, folder, _ = published(f"eagle/{name}")
    with pytest.raises(SpecConfigError, match=f"'{right}'"):
        target.generate(**prompts(1), **GREEDY, speculative={"model": folder, "method": wrong})


def test_shapes_by_default():
    """A tree for few rows, the published one where nodes cost little; otherwise a chain."""
    network = random_network(**NETWORKS["eagle1"])

    def default(device, batch_size=1, settings=None, **changes):
        session = Session(batch_size, 100, torch.device(device), **changes)
        return generator_for(network, session=session, **(settings or {})).plan, session.notes

    assert default("cuda") == (DynamicTree(7, 10, 60), [])
    assert default("cuda", 4)[0] == DynamicTree(7, 10, 60)
    assert default("cuda", 5) == (TokenTree.chain(4), [])
    assert default("cuda", 5, {"draft_tree_depth": 6}) == (DynamicTree(5, 10, 60), [])
    assert default("cpu")[0] == default("cpu", 2)[0] == TokenTree.chain(4)
    assert default("cpu", settings={"num_draft_nodes": 19})[0] == DynamicTree(4, 4, 20)
    assert default("cuda", settings={"num_speculative_tokens": 6}) == (TokenTree.chain(6), [])
    assert default("cuda", settings={"draft_tree_top_k": 1, "draft_tree_depth": 4}) == (TokenTree.chain(4), [])
    few = {"draft_tree_top_k": 1, "draft_tree_depth": 4, "num_draft_nodes": 2}
    assert default("cuda", settings=few) == (TokenTree.chain(2), [])
    plan, notes = default("cuda", supports_trees=False)
    assert plan == TokenTree.chain(4)
    assert len(notes) == 1
    assert default("cuda", settings={"draft_tree_depth": 7}, supports_trees=False)[0] == TokenTree.chain(7)


def test_threshold_by_default():
    """Doubtful drafts end where waiting is cheap, and no shape was asked for."""
    for device, settings, threshold in (
        ("cpu", {}, 0.2),
        ("cuda", {}, 0.0),
        ("cpu", {"num_speculative_tokens": 4}, 0.0),
        ("cpu", {"draft_tree_top_k": 4}, 0.0),
        ("cpu", {"draft_min_path_prob": 0.0}, 0.0),
        ("cuda", {"draft_min_path_prob": 0.4}, 0.4),
        ("cpu", {"draft_min_path_prob": 0.4, "draft_tree_depth": 3}, 0.4),
    ):
        session = Session(1, 100, torch.device(device))
        generator = generator_for(random_network(**NETWORKS["eagle1"]), session=session, **settings)
        assert generator.threshold == threshold, (device, settings)


def test_sizes_of_dynamic_trees():
    for tree, max_depth, size, reads in (
        (DynamicTree(7, 10, 60), 8, 59, 70),
        (DynamicTree(4, 4, 12), 5, 11, 16),
        (DynamicTree(0, 5, 60), 1, 5, 0),
        (DynamicTree(2, 2, 60), 3, 10, 4),
        (DynamicTree(9, 4, 3), 2, 2, 4),
    ):
        assert (tree.max_depth, len(tree), tree.num_reads) == (max_depth, size, reads)
