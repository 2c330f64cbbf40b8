"""The heads that come with the demo target."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_specdec import demo, record
from hf_specdec.candidate_generators.eagle.network import load_eagle
from hf_specdec.candidate_generators.medusa.network import load_medusa
from hf_specdec.candidate_generators.mlp_speculator.network import load_mlp_speculator
from hf_specdec.settings import SpeculativeConfig
from tests.helpers.methods import CHECKPOINTS


PATHS = {method: path for method, path in CHECKPOINTS.items() if method != "draft_model"}


@pytest.fixture(scope="module")
def target():
    return demo.load_target()


@pytest.mark.parametrize("method", PATHS)
def test_the_files_are_small_and_in_bfloat16(method):
    files = list(Path(PATHS[method]).iterdir())
    assert sum(file.stat().st_size for file in files) <= 1_500_000
    (weights,) = (file for file in files if file.suffix == ".safetensors")
    assert {tensor.dtype for tensor in load_file(weights).values()} == {torch.bfloat16}


def test_the_medusa_heads_share_the_lm_head_and_know_their_accuracies(target):
    heads = load_medusa(SpeculativeConfig(method="medusa", model=demo.drafter_path("medusa")), target)
    assert heads.lm_heads is None
    assert heads.num_heads == 4
    assert [len(ranks) for ranks in heads.accuracies] == [10] * 4
    for ranks in heads.accuracies:
        assert ranks[0] > 0.08
        assert sum(ranks) < 1
        assert ranks[0] > 1.5 * ranks[1]


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_the_eagle_heads_share_embedding_and_lm_head(method, target):
    head = load_eagle(SpeculativeConfig(method=method, model=PATHS[method]), target)
    assert head.embed_tokens is None
    assert head.lm_head is None
    assert head.token_ids is None
    assert len(head.layers) == 1


def test_the_stages_of_the_speculator_share_their_weights(target):
    config = SpeculativeConfig(method="mlp_speculator", model=demo.drafter_path("mlp_speculator"))
    speculator = load_mlp_speculator(config, target)
    assert speculator.config.n_predict == 4
    assert len(speculator.emb) == len(speculator.head) == 1


@pytest.mark.parametrize("method", PATHS)
def test_drafts_are_accepted(method, target):
    prompt = next(prompt for prompt in demo.prompts() if prompt.name == "function")
    inputs = demo.load_tokenizer()(prompt.text, return_tensors="pt")
    arguments = {"do_sample": False, "max_new_tokens": 96}
    with record() as recorded:
        target.generate(**inputs, **arguments, spec_method=method, spec_model=PATHS[method])
    assert recorded.calls[0].stats.mean_acceptance_length > 1.2


def padded(prompts):
    tokenizer = demo.load_tokenizer()
    return tokenizer([prompt.text for prompt in prompts], return_tensors="pt", padding=True, padding_side="left")


def test_a_tree_of_medusas_candidates_beats_their_chain(target):
    """Tokens a cycle: the tree has all nodes of the chain, and more."""
    inputs = padded(demo.prompts())
    inputs.pop("token_type_ids", None)
    chain = {"num_speculative_tokens": 4}
    tree = {"speculative_token_tree": "mc_sim_7b_63"}
    lengths = []
    for shape in (chain, {}, tree):
        settings = {"method": "medusa", "model": demo.drafter_path("medusa"), **shape}
        output = target.generate(
            **inputs, do_sample=False, max_new_tokens=32, speculative=settings, return_dict_in_generate=True
        )
        lengths.append(output.speculative.mean_acceptance_length)
    of_chain, of_default, of_tree = lengths
    assert of_chain < of_tree
    assert of_default > 1.2


def test_a_tree_of_eagle3_beats_its_chain_clearly(target):
    inputs = padded(demo.prompts())
    inputs.pop("token_type_ids", None)
    lengths = []
    for shape in (
        {"num_speculative_tokens": 4},
        {"draft_tree_depth": 4, "draft_tree_top_k": 8, "num_draft_nodes": 39},
    ):
        settings = {"method": "eagle3", "model": demo.drafter_path("eagle3"), **shape}
        output = target.generate(
            **inputs, do_sample=False, max_new_tokens=32, speculative=settings, return_dict_in_generate=True
        )
        lengths.append(output.speculative.mean_acceptance_length)
    # Both are four tokens deep.
    assert lengths[1] > 1.1 * lengths[0]
