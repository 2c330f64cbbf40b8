"""DFlash: what its settings mean for its blocks, trees and denoising steps."""

from hf_specdec.protocol import Session
from tests.helpers.block_networks import NETWORKS, random_network
from tests.helpers.by_hand import CPU, generator_for


def test_number_of_denoising_steps(warnings):
    network, several = random_network(), random_network(num_denoising_steps=3)

    def steps(network, **options):
        return generator_for(network, **options).num_steps

    assert (steps(network), steps(several)) == (1, 3)
    assert steps(several, dflash_num_denoising_steps=1) == 1
    assert steps(several, num_draft_nodes=4) == 1
    assert warnings == []
    # More than it was trained for.
    assert steps(several, dflash_num_denoising_steps=13) == 13
    assert steps(network, dflash_num_denoising_steps=14) == steps(network, dflash_num_denoising_steps=14) == 14
    assert ["trained for 3" in line for line in warnings] == [True, False]
    for name in ("next_token", "corrections", "domino", "lilicorr", "xpress"):
        network = random_network(**NETWORKS[name], num_denoising_steps=3)
        assert steps(network) == steps(network, dflash_num_denoising_steps=1) == 1


def test_trees_by_default():
    """Of drafts that were made for trees, where nothing is said and a verification is not wide already."""
    cases = (
        ("full", {}, 1, 0),
        ("causal", {}, 1, 20),
        ("causal", {}, 2, 0),
        ("causal", {"dflash_num_denoising_steps": 2}, 1, 0),
        ("selector", {}, 1, 20),
        ("selector", {"num_draft_nodes": 7}, 3, 7),
    )
    for name, settings, num_rows, budget in cases:
        session = Session(num_rows, 100, CPU)
        generator = generator_for(random_network(**NETWORKS[name]), session=session, **settings)
        assert (generator.tree_budget, session.notes) == (budget, []), (name, settings)
    for name in ("corrections", "domino", "xpress"):
        # Tokens of these depend on each other.
        session = Session(1, 100, CPU)
        generator = generator_for(random_network(**NETWORKS[name]), session=session, num_draft_nodes=4)
        assert (generator.tree_budget, len(session.notes)) == (0, 1)
    chains_only = Session(1, 100, CPU, supports_trees=False)
    generator = generator_for(random_network(**NETWORKS["causal"]), session=chains_only)
    assert (generator.tree_budget, chains_only.notes) == (0, [])
