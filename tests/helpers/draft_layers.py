"""EAGLE heads, P-EAGLE heads and MTP layers of random weights."""

from __future__ import annotations

import torch

from hf_specdec.candidate_generators.eagle.formats import EagleConfig
from hf_specdec.candidate_generators.eagle.network import EagleNetwork
from hf_specdec.candidate_generators.mtp.network import new_mtp
from tests.helpers.models import tiny_llama


STATIC = [(0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 2, 1), (0, 2, 1, 0)]


def head(method, hidden_size, vocab_size, aux_layer_ids=(), known=None, num_hidden_layers=1, **settings):
    """An EAGLE head; `known` lists the target's tokens that it knows."""
    layers = [f"layers.{index}" for index in range(num_hidden_layers)]
    norms = [f"{layer}.post_attention_layernorm" for layer in layers]
    if method == "eagle3":
        norms += ["layers.0.hidden_norm", *(f"{layer}.input_layernorm" for layer in layers), "norm"]
    config = EagleConfig(
        method=method,
        hidden_size=hidden_size,
        target_hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size if known is None else len(known),
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=2 * hidden_size,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        aux_layer_ids=aux_layer_ids,
        norms=tuple(norms),
        own_head=method == "eagle3",
        has_token_ids=known is not None,
        **settings,
    )
    network = EagleNetwork(config).eval()
    if known is not None:
        network.token_ids = torch.tensor(known)
    return network


NETWORKS = {
    "eagle1": {"method": "eagle"},
    "eagle3": {"method": "eagle3", "aux_layer_ids": (0, 2, 3), "known": list(range(1, 40, 3))},
    "window": {"method": "eagle3", "aux_layer_ids": (1,), "sliding_window": 3},
    "mixed": {
        "method": "eagle3",
        "aux_layer_ids": (1,),
        "sliding_window": 3,
        "full_layers": (1,),
        "num_hidden_layers": 3,
    },
}


@torch.no_grad()
def random_network(seed=0, **settings):
    torch.manual_seed(seed)
    network = head(hidden_size=32, vocab_size=40, own_embedding=True, **settings)
    if network.lm_head is None:
        network.attach(tiny_llama(vocab_size=40).requires_grad_(False))
    for weight in network.parameters():
        if weight.dim() == 2:
            # Clear choices.
            weight.mul_(2.0)
    return network.requires_grad_(False)


@torch.no_grad()
def parallel_head(vocab_size, hidden_size, mask=3, **settings):
    """A P-EAGLE head, with distinct states of text and masks."""
    torch.manual_seed(1)
    settings = {"own_embedding": True, "num_hidden_layers": 2, "num_parallel_tokens": 4, **settings}
    network = head("eagle3", hidden_size, vocab_size, (0, 1), mask_token_id=mask, **settings)
    for weight in network.parameters():
        weight.mul_(2.0) if weight.dim() == 2 else weight.add_(0.3 * torch.randn_like(weight))
    return network.requires_grad_(False)


def random_mtp(num_layers=3, seed=0):
    """MTP layers of random weights for a tiny target."""
    target = tiny_llama(seed).requires_grad_(False)
    network = new_mtp(target, num_layers)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return network.requires_grad_(False)
