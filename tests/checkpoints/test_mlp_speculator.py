"""The MLP speculator's network: the published equations and layout, and vocabularies of other padding."""

import json
import shutil
from itertools import product

import pytest
import torch

from hf_specdec import SpecConfigError, load_speculator
from hf_specdec.candidate_generators.mlp_speculator.network import MLPSpeculator, MLPSpeculatorConfig
from tests.helpers import heads
from tests.helpers.heads import HEADS, expected_of, loaded_target, published, same_network, settings_of, tensors_of
from tests.helpers.levels import in_full
from tests.helpers.models import TINY, VOCAB_SIZE, prompts, tiny_llama


SIZES = {"emb_dim": TINY["hidden_size"], "inner_dim": 16, "vocab_size": VOCAB_SIZE, "n_predict": 3}
SIZES["top_k_tokens_per_head"] = (3, 2, 2)


def saved(folder, seed=0, **changes):
    """A speculator of random weights, and its folder."""
    torch.manual_seed(seed)
    speculator = MLPSpeculator(MLPSpeculatorConfig(**{**SIZES, **changes}))
    with torch.no_grad():
        for name, parameter in speculator.named_parameters():
            if name.startswith("ln."):
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    speculator.save(folder)
    return speculator.requires_grad_(False)


def test_recorded_logits(tmp_path):
    for name in [name for name in HEADS if name.startswith("mlp_speculator/")]:
        network, expected, folder = published(name), expected_of(name), tmp_path / name
        # Along the drafted chain.
        tokens = torch.cat([expected["ind"], expected["greedy_chain"][:, :-1]], dim=1)
        logits = network(expected["state"][:, 0], tokens)
        torch.testing.assert_close(logits, expected["chain_logits"], atol=1e-4, rtol=0)
        state_weight, embedding_weight = expected["state_weight_emb_weight"].tolist()
        assert network.config.token_weight == embedding_weight / state_weight
        # Saved, it is the published file.
        network.save(folder)
        ours, theirs = tensors_of(folder), tensors_of(HEADS[name])
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        config = settings_of(name)
        config.pop("transformers_version")
        assert json.loads((folder / "config.json").read_text()) == config
        if "/tied" in name:
            # The pickled one has all names.
            (folder / "model.safetensors").unlink()
            shutil.copy(HEADS[name] / "pytorch_model.bin", folder)
            same_network(heads.load("mlp_speculator", folder, loaded_target(HEADS[name])), network)


def test_teacher_forcing_is_the_stages_one_by_one(tmp_path):
    hidden, tokens = torch.randn(2, 4, SIZES["emb_dim"]), torch.randint(VOCAB_SIZE, (2, 4, 3))
    for tied, scaled in product((True, False), repeat=2):
        speculator = saved(tmp_path, tie_weights=tied, scale_input=scaled)
        logits = speculator(hidden, tokens)
        assert logits.shape == (3, 2, 4, VOCAB_SIZE)
        for place in ((0, 1), (1, 3)):
            state = speculator.start(hidden[place])
            for index in range(3):
                state, one = speculator.stage(index)(state, tokens[place][index])
                torch.testing.assert_close(one, logits[(index, *place)], atol=1e-5, rtol=1e-5)
        assert torch.equal(speculator(hidden, tokens[..., :2]), logits[:2])
    # The norm is taken in float32: the squares of these states overflow in half precision.
    started = saved(tmp_path, scale_input=True).half().start(torch.full((1, SIZES["emb_dim"]), 300.0).half())
    assert started.dtype == torch.float16
    torch.testing.assert_close(started.float(), torch.full_like(started, 0.5**0.5).float(), atol=1e-3, rtol=0)


# Vocabularies of other padding: the weights stay as they are, and drafts fit the target


SMALLER, LARGER = VOCAB_SIZE - 2, VOCAB_SIZE + 2


@pytest.mark.parametrize(
    ("vocab_size", "shape"),
    [
        (SMALLER, {}),
        *in_full((LARGER, {"num_draft_nodes": 6}), (SMALLER, {"speculative_token_tree": [(0,), (61,), (0, 1)]})),
        *in_full((LARGER, {"top_k_tokens_per_head": [VOCAB_SIZE, 2, 2], "mlp_speculator_num_candidates": 3})),
    ],
    ids=str,
)
def test_greedy_with_another_vocabulary_matches_generate(model, tmp_path, vocab_size, shape):
    saved(tmp_path, vocab_size=vocab_size)
    inputs = prompts(3)
    # Also the ids that a smaller speculator lacks are read, and drafted where processors choose them.
    inputs["input_ids"][:, -1] = torch.tensor([VOCAB_SIZE - 1, VOCAB_SIZE - 2, 5])
    loaded = load_speculator(model, {"method": "mlp_speculator", "model": str(tmp_path), **shape})
    assert loaded.resources.num_tokens == min(vocab_size, VOCAB_SIZE)
    last = VOCAB_SIZE - 1
    for arguments in ({}, {"forced_eos_token_id": last}, {"sequence_bias": {(last,): float("inf")}}):
        arguments = {**inputs, "max_new_tokens": 10, "do_sample": False, **arguments}
        assert torch.equal(model.generate(**arguments, assistant=loaded), model.generate(**arguments))
    passed = load_speculator(model, "mlp_speculator", draft_model=loaded.resources)
    assert passed.resources is loaded.resources


def test_vocabularies_that_do_not_fit(model, tmp_path):
    large = MLPSpeculator(MLPSpeculatorConfig(**{**SIZES, "vocab_size": 68}))
    with pytest.raises(SpecConfigError, match="vocabulary of 68 tokens, and LlamaForCausalLM has 64"):
        load_speculator(model, "mlp_speculator", draft_model=large)
    # More candidates than the target has tokens are not asked for, though the speculator has them.
    saved(tmp_path)
    target, ids = tiny_llama(vocab_size=62), {"input_ids": torch.tensor([[3, 4, 5]]), "max_new_tokens": 8}
    options = {"model": str(tmp_path), "top_k_tokens_per_head": [64, 2, 2]}
    assert torch.equal(target.generate(**ids, speculative=options), target.generate(**ids))
    options = {"model": str(tmp_path), "speculative_token_tree": [(0,), (62,)]}
    with pytest.raises(SpecConfigError, match="the rank 62, and the draft knows 62 tokens"):
        target.generate(**ids, speculative=options)
