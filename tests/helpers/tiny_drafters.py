"""Drafters of every kind with small networks of random weights, made for a target on the device where it is."""

from __future__ import annotations

import torch

from hf_specdec import Speculator, load_speculator
from hf_specdec.candidate_generators.dflash.heads.domino import DominoConfig
from hf_specdec.candidate_generators.dflash.heads.markov import MarkovConfig
from hf_specdec.candidate_generators.draft_model.network import TargetStates
from hf_specdec.candidate_generators.medusa.network import MedusaHeads
from hf_specdec.candidate_generators.mlp_speculator.network import MLPSpeculator, MLPSpeculatorConfig
from tests.helpers import block_networks, draft_layers
from tests.helpers.by_hand import speculator_for
from tests.helpers.distribution import no_drafts
from tests.helpers.models import VOCAB_SIZE, tiny_llama
from tests.helpers.other_device import DEVICE, move


def beside(model, network):
    """The network or tensor, on the device of the model."""
    return move(network) if model.device == DEVICE else network.to(model.device)


def attached(model, network, settings) -> Speculator:
    return speculator_for(beside(model, network).attach(model), **settings)


def method(model, name, **settings):
    return load_speculator(model, name, **settings)


def draft_model(model, seed=1, mask_token=None, reads_states=False, **settings):
    network = tiny_llama(seed)
    network.config.pard_token = mask_token
    speculator = load_speculator(model, draft_model=beside(model, network), draft_vocabulary="same", **settings)
    if reads_states:
        embedding, width = network.get_input_embeddings(), model.config.hidden_size
        weight = torch.randn(embedding.embedding_dim, 2 * width, generator=torch.Generator().manual_seed(0)) / 8
        speculator.resources.states = TargetStates((0, "last"), beside(model, weight), None, 0.5, embedding)
    return speculator


def medusa(model, method="medusa", **settings):
    torch.manual_seed(0)
    heads = MedusaHeads(model.config.hidden_size, VOCAB_SIZE, 3)
    for weight in (*heads.weights, *heads.lm_heads):
        weight.data.normal_(0, 0.5)
    return load_speculator(model, method, draft_model=beside(model, heads.eval()), **settings)


def mlp_speculator(model, **settings):
    torch.manual_seed(0)
    sizes = {"n_predict": 3, "top_k_tokens_per_head": (4, 3, 2), "inner_dim": 24, "tie_weights": True}
    config = MLPSpeculatorConfig(emb_dim=model.config.hidden_size, vocab_size=VOCAB_SIZE, **sizes)
    network = MLPSpeculator(config).eval()
    return load_speculator(model, "mlp_speculator", draft_model=beside(model, network), **settings)


def eagle3(model, method="eagle3", **settings):
    torch.manual_seed(0)
    network = draft_layers.head("eagle3", model.config.hidden_size, VOCAB_SIZE, aux_layer_ids=(0, 1))
    if method != "eagle3":
        return load_speculator(model, method, draft_model=beside(model, network), **settings)
    return attached(model, network, settings)


def peagle(model, **settings):
    return attached(model, draft_layers.parallel_head(VOCAB_SIZE, model.config.hidden_size), settings)


def mtp(model, **settings):
    return attached(model, draft_layers.random_mtp(3).eval(), {"mtp_mode": "chain", **settings})


def dflash(model, network=None, **settings):
    torch.manual_seed(0)
    sizes = {"mask_token_id": 3, "block_size": 4, "num_target_layers": 2, "target_layer_ids": (0, 1)}
    network = block_networks.draft(model.config.hidden_size, VOCAB_SIZE, **{**sizes, **(network or {})})
    return attached(model, network, settings)


K2, K3, FIXED = ({"num_speculative_tokens": length} for length in (2, 3, "fixed"))
TREE = {"speculative_token_tree": [(0,), (1,), (0, 0), (1, 0)]}
DYNAMIC = {"draft_tree_depth": 3, "draft_tree_top_k": 2, "num_draft_nodes": 6, **FIXED}
MASKS = {"mask_token": 3, **K3}
STATES = {**MASKS, "reads_states": True}
CORRECTIONS = {"predicts_next": True, "head": MarkovConfig(3)}
CONFIDENT = {"predicts_next": True, "head": MarkovConfig(3, "vanilla", True, True)}
PROBABILISTIC = {"draft_sample_method": "probabilistic"}

# Functions of a model and settings, and the settings.
GREEDY_DRAFTERS = {
    "ngram": (method, {"name": "ngram", **K3}),
    "ngram, chains": (method, {"name": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, **K3}),
    "recycling": (method, {"name": "recycling", **K3}),
    "draft model": (draft_model, K3),
    "draft model, masks": (draft_model, MASKS),
    "draft model, states": (draft_model, STATES),
    "adaptive": (draft_model, {"num_speculative_tokens": "auto"}),
    "medusa": (medusa, FIXED),
    "medusa, measured": (medusa, {"medusa_tree": "measured", **FIXED}),
    "mlp_speculator": (mlp_speculator, K2),
    "mlp_speculator, fixed": (mlp_speculator, FIXED),
    "mlp_speculator, candidates": (mlp_speculator, {"mlp_speculator_num_candidates": 4, **FIXED}),
    "mlp_speculator, static tree": (mlp_speculator, TREE),
    "eagle3": (eagle3, K3),
    "eagle3, static tree": (eagle3, TREE),
    "eagle3, dynamic tree": (eagle3, DYNAMIC),
    "mtp, layers": (mtp, FIXED),
    "mtp, two layers": (mtp, K2),
    "dflash": (dflash, FIXED),
    "dflash, tree": (dflash, {"num_draft_nodes": 6, **FIXED}),
    "dflash, denoising": (dflash, {"dflash_num_denoising_steps": 2, **FIXED}),
    "dflash, corrections": (dflash, {"network": CORRECTIONS, **FIXED}),
    "dflash, domino": (dflash, {"network": {"head": DominoConfig(8, 4)}, **FIXED}),
}
DRAWN_DRAFTERS = {
    "draft model, drawn": (draft_model, K3),
    "draft model, masks, drawn": (draft_model, MASKS),
    "draft model, states, drawn": (draft_model, STATES),
    "eagle3, drawn": (eagle3, {**K3, **PROBABILISTIC}),
    "peagle, drawn": (peagle, {**K3, **PROBABILISTIC}),
    "mtp, drawn": (mtp, {**FIXED, **PROBABILISTIC}),
    "mlp_speculator, drawn": (mlp_speculator, {**K3, **PROBABILISTIC}),
    "dflash, drawn": (dflash, {**FIXED, **PROBABILISTIC}),
    "dflash, confident, drawn": (dflash, {"network": CONFIDENT, **FIXED, **PROBABILISTIC}),
    "dflash, selector, drawn": (dflash, {"network": block_networks.SELECTOR, **FIXED, **PROBABILISTIC}),
}
# Retrieved drafts are as deep as the others, so that these are launched ahead until nearly the end.
_SHORT = {"num_speculative_tokens": 3, "retrieval_num_speculative_tokens": 3}
COMBINED_DRAFTERS = {
    "ngram+draft model": (draft_model, {"method": "ngram+draft_model", **_SHORT}),
    "ngram+medusa": (medusa, {"method": "ngram+medusa", **_SHORT}),
    "suffix+medusa": (medusa, {"method": "suffix+medusa", **_SHORT}),
    "ngram+eagle3": (eagle3, {"method": "ngram+eagle3", **_SHORT}),
    "ngram+early_exit": (method, {"name": "ngram+early_exit", "early_exit_layer": 1, **_SHORT}),
}
# In graphs of the target, which take the memory of its verifications. Not all drafts of `sparse_kv` are accepted.
SELF_DRAFTERS = {
    "early_exit": (method, {"name": "early_exit", "early_exit_layer": 1, **K3}),
    "sparse_kv": (method, {"name": "sparse_kv", "sparse_kv_window": [1, 2], **K3}),
}
_OTHERS = {
    "no drafts": (lambda model, **settings: no_drafts(**settings), {}),
    "grammar+ngram": (method, {"name": "grammar+ngram", **K3}),
    "the target itself": (draft_model, {"seed": 0, **K3}),
}
_ALL = {**GREEDY_DRAFTERS, **DRAWN_DRAFTERS, **SELF_DRAFTERS, **COMBINED_DRAFTERS, **_OTHERS}


def tiny_drafter(model, name: str, **more) -> Speculator:
    """The drafter of this name for a model, with further settings."""
    make, settings = _ALL[name]
    return make(model, **{**settings, **more})
