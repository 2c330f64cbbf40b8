"""P-EAGLE: what its checkpoints say, in all their spellings, and what its settings mean."""

import pytest
import torch

from hf_specdec import CheckpointFormatError, SpecConfigError, load_speculator
from hf_specdec.hub.detect import detect_checkpoint
from hf_specdec.protocol import Session
from tests.helpers.by_hand import CPU, drafts_of, feed, generator_for, random_rows
from tests.helpers.draft_layers import parallel_head
from tests.helpers.heads import both, copy_of, put, renamed, same_network, without
from tests.helpers.levels import full, in_full
from tests.helpers.paths import FIXTURES
from tests.helpers.published import published


NAME = "eagle/eagle3_peagle"
FOLDER = FIXTURES / NAME


def target():
    return published(NAME).target


def test_improbable_drafts_end_and_trees_become_chains():
    network = parallel_head(40, 32)
    for settings in ({"num_draft_nodes": 9}, {"speculative_token_tree": "[(0,), (1,), (0, 0)]"}):
        session = Session(1, 100, CPU)
        assert generator_for(network, session=session, **settings).plan.is_chain
        assert session.notes == ["chains instead of trees: the head drafts all tokens at once"]
    texts, states = random_rows(network, (9, 6), seed=1)
    lengths = []
    for threshold in (0.0, 0.1, 0.9):
        generator = generator_for(network, 2, num_speculative_tokens=4, draft_confidence_threshold=threshold)
        feed(generator, texts, states, (4, 4))
        lengths.append(sum(map(len, drafts_of(generator, texts))))
    assert lengths[0] == 8 >= lengths[1] >= lengths[2] >= 2
    assert lengths[0] > lengths[2]


AWS = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "speculators_model_type": None,
    "speculators_config": None,
    "mask_token_id": None,
    "ptd_token_id": 151,
}


@pytest.mark.parametrize(
    ("config", "change", "name", "length"),
    [
        # Heads of AWS.
        (AWS, both(renamed(layers__0__="midlayer."), put("mask_hidden", lambda x: x.flatten())), "peagle", 7),
        *in_full(
            ({}, None, "peagle-speculators", 5),
            # A stranger's word about how long drafts are, and so about memory, has a limit.
            ({"speculators_config.proposal_methods": [{"speculative_tokens": 10**6}]}, None, "peagle-speculators", 7),
        ),
    ],
)
def test_spellings(tmp_path, config, change, name, length):
    folder = copy_of(FOLDER, tmp_path / "head", config, change)
    found = detect_checkpoint(folder)
    assert (found.method, found.format, found.num_draft_tokens, found.problems) == ("eagle3", name, length, ())
    network = load_speculator(target(), model=str(folder), aux_layer_ids=(1, 3, 5)).resources
    assert (network.config.mask_token_id, network.config.num_parallel_tokens) == (151, length)
    expected = load_speculator(target(), model=str(FOLDER)).resources
    assert torch.equal(network.mask_state(), expected.mask_state())


@full
@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({}, without("mask_hidden"), "lacks 1 tensors of a P-EAGLE head: mask_hidden"),
        ({"mask_token_id": None}, None, "does not say which token its masks are"),
        ({}, put("mask_hidden", torch.zeros(95)), r"mask_hidden of the shape \[95\]"),
        ({"mask_token_id": 160}, None, "mask token 160.* 160 tokens"),
    ],
)
def test_what_is_refused(tmp_path, config, change, message):
    folder = copy_of(FOLDER, tmp_path / "head", config, change)
    with pytest.raises(CheckpointFormatError, match=message):
        load_speculator(target(), method="eagle3", model=str(folder))


@full
def test_saved_and_loaded(tmp_path):
    with pytest.raises(SpecConfigError, match="`parallel_drafting`=False.*all tokens at once"):
        load_speculator(target(), model=str(FOLDER), parallel_drafting=False)
    network = load_speculator(target(), model=str(FOLDER)).resources
    network.save(tmp_path)
    same_network(load_speculator(target(), model=str(tmp_path)).resources, network)
