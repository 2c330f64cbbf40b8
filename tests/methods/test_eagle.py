"""EAGLE: which trees and chains its settings and defaults mean, and which layers its heads read."""

import torch

from hf_specdec import load_speculator
from hf_specdec.drafting.growth import DynamicTree
from hf_specdec.drafts import TokenTree
from hf_specdec.protocol import Session
from tests.helpers.by_hand import CPU, drafts_of, feed, generator_for, random_rows
from tests.helpers.draft_layers import NETWORKS, random_network
from tests.helpers.published import published


def test_equal_probabilities_keep_parents():
    """A head that is sure gives the child the probability of its parent."""
    network = random_network(**NETWORKS["eagle3"])
    network.lm_head.weight.mul_(1e4)
    generator = generator_for(network, 3, draft_tree_depth=4, draft_tree_top_k=2, num_draft_nodes=3)
    texts, states = random_rows(network, (9, 6, 12), seed=1)
    feed(generator, texts, states, (5, 1, 4))
    assert [list(map(len, paths)) for paths in drafts_of(generator, texts)] == [[1, 2, 3]] * 3


def test_layers_that_are_read():
    target, folder, _ = published("eagle/eagle3_llama")
    other = load_speculator(target, "eagle3", model=folder, aux_layer_ids=[1, 3, 6])
    assert other.resources.target_hidden_states == (1, 3, 6)
    assert other.candidate_generator(Session(1, 100, CPU)).target_hidden_states == (1, 3, 6)
    assert load_speculator(target, "eagle3", model=folder).resources.target_hidden_states == (2, 4, 5)


def test_shapes_by_default():
    """A tree for few rows, the published one where nodes cost little; otherwise a chain."""
    network = random_network(**NETWORKS["eagle1"])

    def default(device, batch_size=1, settings=None, **changes):
        session = Session(batch_size, 100, torch.device(device), **changes)
        return generator_for(network, session=session, **(settings or {})).plan, len(session.notes)

    assert default("cuda") == default("cuda", 4) == (DynamicTree.of(7, 10, 60), 0)
    assert default("cuda", 5) == default("cpu") == default("cpu", 2) == (TokenTree.chain(4), 0)
    assert default("cuda", 5, {"draft_tree_depth": 6}) == (DynamicTree.of(5, 10, 60), 0)
    assert default("cpu", settings={"num_draft_nodes": 19}) == (DynamicTree.of(4, 4, 20), 0)
    assert default("cuda", settings={"num_speculative_tokens": 6}) == (TokenTree.chain(6), 0)
    assert default("cuda", supports_trees=False) == (TokenTree.chain(4), 1)


def test_threshold_by_default():
    """Doubtful drafts end where waiting is cheap, and no shape was asked for."""
    for device, settings, threshold in (
        ("cpu", {}, 0.2),
        ("cuda", {}, 0.0),
        ("cpu", {"num_speculative_tokens": 4}, 0.0),
        ("cpu", {"draft_confidence_threshold": 0.4, "draft_tree_depth": 3}, 0.4),
    ):
        session = Session(1, 100, torch.device(device))
        assert generator_for(random_network(**NETWORKS["eagle1"]), session=session, **settings).threshold == threshold
