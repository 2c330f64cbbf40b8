"""DFlash: what its settings mean for its blocks, trees and denoising steps, and which of them are refused."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdec import SpeculativeConfig
from hf_specdec.protocol import Session
from tests.helpers.block_networks import NETWORKS, SELECTOR, draft, random_network  # noqa: F401
from tests.helpers.by_hand import CPU, generator_for, speculator_for  # noqa: F401
from tests.helpers.levels import full, in_full


class Operators(TorchDispatchMode):
    """Names of the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def test_logits_of_a_part_of_a_block_copy_no_weights():
    """The positions that predict are no matrix of their own; a batched product would copy the lm_head."""
    for network in (random_network(), random_network(known=list(range(1, 40, 3)))):
        output = torch.randn(1, 7, network.config.hidden_size)
        with Operators() as seen:
            logits = network.logits(network.predicting(output)[:, :3])
        assert logits.shape == (1, 3, network.config.draft_vocab_size)
        assert "aten::mm" in seen.names
        assert "aten::bmm" not in seen.names
        torch.testing.assert_close(logits, network.logits(output)[:, 1:4])


def test_number_of_denoising_steps(warnings):
    network, several = random_network(), random_network(num_denoising_steps=3)

    def steps(network, **options):
        return generator_for(network, **options).num_steps

    assert (steps(network), steps(several)) == (1, 3)
    assert steps(several, dflash_num_denoising_steps=1) == 1
    assert steps(several, num_draft_nodes=4) == 1
    assert steps(several, dflash_num_denoising_steps=2) == 2
    assert warnings == []
    # More than it was trained for.
    assert steps(several, dflash_num_denoising_steps=13) == 13
    assert steps(network, dflash_num_denoising_steps=14) == steps(network, dflash_num_denoising_steps=14) == 14
    assert ["=13" in line and "trained for 3" in line for line in warnings] == [True, False]
    assert "=14" in warnings[1]
    assert "accepted less often" in warnings[1]


@pytest.mark.parametrize("name", ["next_token", *in_full("corrections", "domino", "lilicorr", "xpress")])
def test_heads_without_denoising_steps(name):
    network = random_network(**NETWORKS[name], num_denoising_steps=3)
    assert generator_for(network).num_steps == generator_for(network, dflash_num_denoising_steps=1).num_steps == 1


@pytest.mark.parametrize(
    ("name", "settings", "note"),
    [
        ("corrections", {"num_draft_nodes": 4}, "chains instead of trees: the draft's tokens depend on each other"),
        (
            "xpress",
            {"draft_sample_method": "probabilistic"},
            "draft tokens are chosen, not drawn: XPress's passes have",
        ),
        *in_full(*((name, {"num_draft_nodes": 4}, "chains instead of trees") for name in ("domino", "xpress"))),
    ],
)
def test_what_a_head_cannot_do_is_noted(name, settings, note):
    session = Session(1, 100, CPU, sampler=SimpleNamespace(is_greedy=False))
    generator_for(random_network(**NETWORKS[name]), session=session, **settings)
    assert [line.startswith(note) for line in session.notes] == [True]


def test_trees_by_default():
    """Of drafts that were made for trees, where nothing is said and a verification is not wide already."""
    cases = (
        ("full", {}, 1, 0),
        ("window", {}, 1, 0),
        ("causal", {}, 1, 20),
        ("causal", {}, 2, 0),
        ("causal", {"num_draft_nodes": 0}, 1, 0),
        ("causal", {"num_speculative_tokens": 4}, 1, 0),
        ("causal", {"dflash_num_denoising_steps": 2}, 1, 0),
        ("selector", {}, 1, 20),
        ("selector", {"num_draft_nodes": 7}, 3, 7),
        ("next_token", {}, 1, 0),
    )
    for name, settings, num_rows, budget in cases:
        session = Session(num_rows, 100, CPU)
        generator = generator_for(random_network(**NETWORKS[name]), session=session, **settings)
        assert (generator.tree_budget, session.notes) == (budget, []), (name, settings)
    chains_only = Session(1, 100, CPU, supports_trees=False)
    generator = generator_for(random_network(**NETWORKS["causal"]), session=chains_only)
    assert (generator.tree_budget, chains_only.notes) == (0, [])


@full
def test_length_for_other_engines():
    for settings, length in (({}, 15), ({"dflash_block_size": 8}, 7), ({"num_speculative_tokens": 3}, 3)):
        assert SpeculativeConfig("dflash", "folder", **settings).to_vllm()["num_speculative_tokens"] == length
