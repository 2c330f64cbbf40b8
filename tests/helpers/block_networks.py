"""DFlash networks of random weights, of every kind of head and attention."""

from __future__ import annotations

import torch

from hf_specdec.candidate_generators.dflash.heads.domino import DominoConfig
from hf_specdec.candidate_generators.dflash.heads.lilicorr import LiLiCorrConfig
from hf_specdec.candidate_generators.dflash.heads.markov import MarkovConfig
from hf_specdec.candidate_generators.dflash.heads.selector import SelectorConfig
from hf_specdec.candidate_generators.dflash.heads.xpress import XPressConfig
from hf_specdec.candidate_generators.dflash.network import BlockView, DFlashConfig, DFlashNetwork
from tests.helpers.models import tiny_llama


def draft(hidden_size, vocab_size, known=None, **settings):
    """A draft of random weights; `known` lists the target's tokens that it knows."""
    config = DFlashConfig(
        **{
            "hidden_size": hidden_size,
            "target_hidden_size": hidden_size,
            "vocab_size": vocab_size,
            "draft_vocab_size": vocab_size if known is None else len(known),
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 2 * hidden_size,
            "block_size": 7,
            "mask_token_id": 0,
            "target_layer_ids": (0, 1),
            "num_target_layers": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "own_head": known is not None,
            "has_token_ids": known is not None,
            **settings,
        }
    )
    network = DFlashNetwork(config).eval()
    if known is not None:
        network.token_ids = torch.tensor(known)
    return network


SELECTOR = {"conv_kernel_size": 3, "conv_group_size": 8, "head": SelectorConfig(4, 5)}
LATTICE = LiLiCorrConfig(
    hidden_size=16, candidate_topk=5, num_layers=2, num_heads=2, mlp_size=24, factor_dim=6, logit_scale=4.0
)
REFINER = XPressConfig(rank=6, mlp_hidden=10, num_passes=3)
_NEXT = {"predicts_next": True, "block_size": 6}
_DSPARK = {**_NEXT, "head": MarkovConfig(4)}
NETWORKS = {
    "full": {},
    "window_and_full": {"views": (BlockView(4, True), BlockView())},
    "window": {"views": (BlockView(4), BlockView(4))},
    "causal": {"views": (BlockView(None, True), BlockView(None, True))},
    "reduced_vocabulary": {"known": list(range(1, 40, 3))},
    "biases": {"attention_bias": True, "target_layer_ids": (2, -1, 0), "num_hidden_layers": 1},
    "selector": SELECTOR,
    "selector_window_and_scales": {
        **SELECTOR,
        "conv_kernel_size": 2,
        "views": (BlockView(4), BlockView()),
        "embedding_scale": 0.5,
        "logit_scale": 1.5,
        "logit_softcap": 6.0,
    },
    "next_token": _NEXT,
    "corrections": _DSPARK,
    "corrections_reduced": {**_DSPARK, "known": list(range(0, 40, 2))},
    "corrections_gated": {**_NEXT, "head": MarkovConfig(4, "gated")},
    "corrections_rnn": {**_NEXT, "head": MarkovConfig(4, "rnn")},
    "confident": {**_NEXT, "head": MarkovConfig(4, "vanilla", True, True)},
    "confident_rnn": {**_NEXT, "head": MarkovConfig(4, "rnn", True, True)},
    "confident_alone": {**_NEXT, "head": MarkovConfig(has_confidence=True)},
    "lilicorr": {"head": LATTICE},
    "lilicorr_convolutions": {"head": LATTICE, "conv_kernel_size": 2, "conv_group_size": 8},
    "domino": {"head": DominoConfig(12, 10, pure_draft_prefix_len=1)},
    "domino_next_token": {"head": DominoConfig(12, 10), "predicts_next": True, "known": list(range(0, 40, 2))},
    "xpress": {"head": REFINER},
    "xpress_reduced": {"head": REFINER, "known": list(range(1, 40, 2))},
}


@torch.no_grad()
def random_network(seed=0, **settings):
    torch.manual_seed(seed)
    network = draft(32, 40, num_embeddings=41, mask_token_id=40, num_target_layers=3, **settings)
    if network.lm_head is None:
        network.attach(tiny_llama(vocab_size=40).requires_grad_(False))
    begins_without_effect = isinstance(network.config.head, (SelectorConfig, DominoConfig, XPressConfig))
    for name, weight in network.named_parameters():
        # Clear choices, and norms and biases that are no constants.
        if "_conv." in name or ("block_head." in name and begins_without_effect):
            weight.normal_(0.0, 0.3 if "_conv." in name else 1.0)
        else:
            weight.mul_(2.0) if weight.dim() == 2 else weight.add_(0.2 * torch.randn_like(weight))
    return network.requires_grad_(False)
