"""Drawn drafts keep the target's distribution: kinds of heads and masks beside those of the table of methods."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec import load_speculator
from hf_specdec.candidate_generators.dflash.heads.markov import MarkovConfig
from hf_specdec.candidate_generators.draft_model.network import TargetStates
from hf_specdec.control.controller import SpeculationController
from hf_specdec.control.sizes import ChainLength
from hf_specdec.drafts import DraftTree
from tests.helpers.block_networks import draft
from tests.helpers.by_hand import speculator_for
from tests.helpers.chi_square import chi_square_pvalue
from tests.helpers.distribution import P_VALUE, SETTINGS, V, exact_distribution, sampled_counts, small_model
from tests.helpers.draft_layers import parallel_head
from tests.helpers.levels import in_full


# A draft that knows some of the tokens, each of whose tokens depends on those before it.
DSPARK = {"known": [0, 1, 2, 4], "predicts_next": True}
BLOCKS = {
    "corrections_rnn": {**DSPARK, "head": MarkovConfig(3, "rnn")},
    "confident": {**DSPARK, "head": MarkovConfig(3, "vanilla", True, True)},
}


@torch.no_grad()
def block_of(name):
    """A block draft for the target whose distribution is enumerated, with a head that has a strong say."""
    target = small_model()
    torch.manual_seed(2)
    settings = {"num_target_layers": 1, "target_layer_ids": (-1, 0), **BLOCKS[name]}
    network = draft(target.config.hidden_size, V, mask_token_id=3, block_size=4, **settings)
    network.lm_head.weight.mul_(4.0)
    if name == "confident":
        network.block_head.confidence_head["proj"].weight.normal_(0.0, 1.5)
    return network.attach(target).requires_grad_(False)


def small_pard(**settings):
    """A draft model of random weights with a mask."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=V + 1, **sizes, pard_token=V, bos_token_id=None, eos_token_id=None)
    network = LlamaForCausalLM(config).eval().requires_grad_(False)
    settings = {"num_speculative_tokens": 3, "draft_vocabulary": "same", **settings}
    drafter = load_speculator(small_model(), "draft_model", draft_model=network, **settings)
    assert drafter.resources.mask_token == V
    return drafter


def small_pard2(**settings):
    """The same with states of the target."""
    drafter = small_pard(**settings)
    torch.manual_seed(8)
    weight, embedding = torch.randn(16, 2 * 16) / 4, drafter.resources.model.get_input_embeddings()
    drafter.resources.states = TargetStates((0, "last"), weight, torch.randn(16), 0.5, embedding)
    return drafter


def check(name, sampling="top_k", **settings):
    """Compares how often texts are drawn with their exact probabilities; the call's statistics."""
    settings["draft_sample_method"] = "probabilistic"
    if name.startswith("pard"):
        speculator = {"pard": small_pard, "pard2": small_pard2}[name](**settings)
    elif name == "peagle":
        network = parallel_head(V, small_model().config.hidden_size).attach(small_model())
        speculator = speculator_for(network, **settings)
    else:
        speculator = speculator_for(block_of(name), **settings)
    counts, stats = sampled_counts(SETTINGS[sampling], speculator)
    assert chi_square_pvalue(counts, exact_distribution(SETTINGS[sampling])) > P_VALUE
    return stats


@pytest.mark.parametrize(
    ("name", "sampling", "rule"),
    [
        ("corrections_rnn", "top_k", "block"),
        ("peagle", "repetition_penalty", "standard"),
        *in_full(
            ("pard2", "temperature", "standard"),
            ("corrections_rnn", "temperature", "standard"),
            ("peagle", "temperature", "block"),
            ("pard", "repetition_penalty", "standard"),
            ("pard", "temperature", "block"),
        ),
    ],
)
def test_drawn_drafts(name, sampling, rule):
    assert check(name, sampling, rejection_sample_method=rule).num_accepted_tokens > 300


@pytest.mark.parametrize("rule", in_full("block", "standard"))
def test_drawn_drafts_cut_by_threshold(rule):
    whole = check("confident", rejection_sample_method=rule)
    cut = check("confident", rejection_sample_method=rule, draft_confidence_threshold=0.5)
    assert cut.num_accepted_tokens > 100
    assert cut.num_draft_tokens < 0.8 * whole.num_draft_tokens


@pytest.mark.parametrize("rule", ["standard", *in_full("block")])
def test_drawn_drafts_cut_by_price(rule, monkeypatch):
    """Of drafts that some rows of a batch do not have."""
    widths, shortened = [], DraftTree.shortened
    monkeypatch.setattr(ChainLength, "_plan", lambda sizes, *given: setattr(sizes, "price", 0.3))
    monkeypatch.setattr(
        DraftTree, "shortened", lambda draft, counts: widths.append(counts[0]) or shortened(draft, counts)
    )
    monkeypatch.setattr(SpeculationController, "limits", lambda self, rows, *more: [self.most] * len(rows))
    check("confident", rejection_sample_method=rule, num_speculative_tokens="auto")
    assert any(width < 4 for width in widths)
