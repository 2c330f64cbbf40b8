"""Drafters of every kind with small networks of random weights, made for a target on the device where it is.

Each function takes the settings of a kind. What it returns takes the plain text and its inputs, which scripted drafts
need, and returns what makes the drafter for a model.
"""

from __future__ import annotations

import torch

from hf_specdec import load_speculator
from hf_specdec.candidate_generators.draft_model.target_states import TargetStates
from hf_specdec.candidate_generators.medusa.network import MedusaHeads
from hf_specdec.candidate_generators.mlp_speculator.network import MLPSpeculator, MLPSpeculatorConfig
from tests.helpers.models import VOCAB_SIZE, scripted_for, tiny_llama
from tests.helpers.other_device import DEVICE, move
from tests.methods import test_dflash, test_eagle, test_mtp, test_peagle


def beside(model, network):
    """The network, on the device of the model."""
    return move(network) if model.device == DEVICE else network.to(model.device)


def scripted(**script):
    return lambda plain, inputs: lambda model: scripted_for(plain.cpu(), inputs, **script)


# Drafts that are not all accepted.
SPARSE = {"sparse_kv_window": 2, "sparse_kv_sinks": 1}


def draft_model(mask_token=None, reads_states=False, **settings):
    def make(model):
        network = tiny_llama(seed=1)
        network.config.pard_token = mask_token
        speculator = load_speculator(model, draft_model=beside(model, network), same_tokenizer=True, **settings)
        if reads_states:
            embedding, width = network.get_input_embeddings(), model.config.hidden_size
            weight = torch.randn(embedding.embedding_dim, 2 * width, generator=torch.Generator().manual_seed(0)) / 8
            weight = move(weight) if model.device == DEVICE else weight.to(model.device)
            speculator.resources.states = TargetStates((0, "last"), weight, None, 0.5, embedding)
        return speculator

    return lambda plain, inputs: make


def medusa(**settings):
    def make(model):
        torch.manual_seed(0)
        heads = MedusaHeads(model.config.hidden_size, VOCAB_SIZE, 3)
        for weight in (*heads.weights, *heads.lm_heads):
            weight.data.normal_(0, 0.5)
        return load_speculator(model, "medusa", draft_model=beside(model, heads.eval()), **settings)

    return lambda plain, inputs: make


def mlp_speculator(**settings):
    def make(model):
        torch.manual_seed(0)
        sizes = {"n_predict": 3, "top_k_tokens_per_head": (4, 3, 2), "inner_dim": 24, "tie_weights": True}
        config = MLPSpeculatorConfig(emb_dim=model.config.hidden_size, vocab_size=VOCAB_SIZE, **sizes)
        network = MLPSpeculator(config).eval()
        return load_speculator(model, "mlp_speculator", draft_model=beside(model, network), **settings)

    return lambda plain, inputs: make


def eagle3(**settings):
    def make(model):
        torch.manual_seed(0)
        network = test_eagle.head("eagle3", model.config.hidden_size, VOCAB_SIZE, aux_layer_ids=(0, 1))
        return test_eagle.speculator_for(beside(model, network).attach(model), **settings)

    return lambda plain, inputs: make


def peagle(**settings):
    def make(model):
        network = test_peagle.random_head(VOCAB_SIZE, model.config.hidden_size)
        return test_peagle.speculator_for(beside(model, network).attach(model), **settings)

    return lambda plain, inputs: make


def mtp(**settings):
    def make(model):
        network = test_mtp.random_mtp(3).eval()
        return test_mtp.speculator_for(beside(model, network).attach(model), mtp_mode="chain", **settings)

    return lambda plain, inputs: make


def dflash(predicts_next=False, markov_rank=0, domino=None, network=None, **settings):
    kind = {"predicts_next": predicts_next, "markov_rank": markov_rank, "domino": domino, **(network or {})}

    def make(model):
        torch.manual_seed(0)
        sizes = {"mask_token_id": 3, "block_size": 4, "num_target_layers": 2, "target_layer_ids": (0, 1), **kind}
        network = test_dflash.draft(model.config.hidden_size, VOCAB_SIZE, **sizes)
        return test_dflash.speculator_for(beside(model, network).attach(model), **settings)

    return lambda plain, inputs: make


def method(name, **settings):
    return lambda plain, inputs: lambda model: load_speculator(model, name, **settings)
