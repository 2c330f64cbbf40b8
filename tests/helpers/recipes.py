"""The recipes that these tests train, in several variants, and networks to tell wrong inputs from right ones."""

import torch

from hf_specdec.candidate_generators.dflash.generator import DraftText
from hf_specdec.candidate_generators.dflash.heads.domino import DominoRecipe
from hf_specdec.candidate_generators.dflash.heads.lilicorr import LiLiCorrRecipe
from hf_specdec.candidate_generators.dflash.heads.selector import DFlash2Recipe
from hf_specdec.candidate_generators.dflash.recipe import DFlashRecipe
from hf_specdec.candidate_generators.draft_model.recipe import DraftModelRecipe
from hf_specdec.candidate_generators.eagle.recipe import Eagle1Recipe, Eagle3Recipe, PEagleRecipe
from hf_specdec.candidate_generators.medusa.recipe import MedusaRecipe
from hf_specdec.candidate_generators.mlp_speculator.recipe import MLPSpeculatorRecipe
from hf_specdec.candidate_generators.mtp.recipe import MtpRecipe
from hf_specdec.drafting.state import Entries
from hf_specdec.training.arguments import DraftTrainingArguments
from hf_specdec.training.reading import TargetReader
from tests.helpers.architectures import tiny_model
from tests.helpers.models import VOCAB_SIZE, tiny_llama, tiny_mistral


SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
BLOCKS = {"block_size": 5, "num_layers": 2, "target_layer_ids": (0, 1)}
SELECTOR = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 12}
LATTICE = {
    **{"lilicorr_candidate_topk": 32, "lilicorr_hidden_size": 16, "lilicorr_num_layers": 1, "lilicorr_num_heads": 2},
    "lilicorr_factor_dim": 12,
}
DOMINO = {"gru_hidden_dim": 12, "emb_dim": 10, "pure_draft_prefix_len": 1}
RECIPES = {
    "medusa": MedusaRecipe(num_heads=3),
    "medusa with own lm_heads": MedusaRecipe(num_heads=2, num_layers=2, share_lm_head=False, kl_weight=0.5),
    "mlp_speculator": MLPSpeculatorRecipe(inner_dim=16),
    "mlp_speculator, untied": MLPSpeculatorRecipe(n_predict=2, tie_weights=False, scale_input=False, kl_weight=1.0),
    "draft_model": DraftModelRecipe(from_scratch=SIZES, kl_weight=0.0),
    "draft_model, distilled": DraftModelRecipe(from_scratch=SIZES),
    "eagle": Eagle1Recipe(token_weight=1.0),
    "eagle, two layers and steps": Eagle1Recipe(ttt_steps=2, num_layers=2, intermediate_size=24, kl_weight=0.5),
    "eagle3": Eagle3Recipe(ttt_steps=4),
    "eagle3, few tokens": Eagle3Recipe(ttt_steps=3, draft_vocab_size=48, aux_layer_ids=(0, 2), kl_weight=0.5),
    "eagle3, narrow": Eagle3Recipe(ttt_steps=3, hidden_size=24, num_layers=2, intermediate_size=40),
    "eagle3, parallel": PEagleRecipe(ttt_steps=4, num_layers=2, mask_token_id=9),
    "eagle3, parallel, shared": PEagleRecipe(ttt_steps=3, num_layers=1, own_embedding=False, draft_vocab_size=48),
    "dflash": DFlashRecipe(**BLOCKS, num_anchors=16),
    "dflash, all anchors, distilled": DFlashRecipe(**BLOCKS, num_anchors=0, kl_weight=0.7, head_decay=0.7),
    "dflash, one layer": DFlashRecipe(block_size=4, num_layers=1, intermediate_size=24, mask_token_id=9),
    "dflash, revealed": DFlashRecipe(**BLOCKS, num_anchors=6, reveal_share=0.6, num_denoising_steps=2),
    "dflash, causal": DFlashRecipe(**BLOCKS, num_anchors=12, causal=True),
    "dflash, selector": DFlash2Recipe(**BLOCKS, **SELECTOR, num_anchors=12),
    "dflash, selector, revealed": DFlash2Recipe(**BLOCKS, **SELECTOR, num_anchors=6, reveal_share=0.6, kl_weight=0.4),
    "dflash, domino": DominoRecipe(**BLOCKS, **DOMINO, num_anchors=12, kl_weight=0.3),
    "dflash, lilicorr": LiLiCorrRecipe(**BLOCKS, **LATTICE, num_anchors=12),
    "dflash, lilicorr, distilled": LiLiCorrRecipe(
        **BLOCKS, **LATTICE, num_anchors=0, kl_weight=0.5, lattice_weight=1.0
    ),
    "mtp": MtpRecipe(),
    "mtp, narrow": MtpRecipe(ttt_steps=2, intermediate_size=24, kl_weight=0.5),
}
# Targets whose MTP layers are of several kinds: a short window; latent attention and experts; gated attention beside
# recurrent layers.
MTP_TARGETS = {
    "llama": tiny_llama,
    "mistral, window of 4": lambda: tiny_mistral(sliding_window=4),
    "deepseek_v3": lambda: tiny_model("deepseek_v3", first_k_dense_replace=1),
    "qwen3_5_text": lambda: tiny_model("qwen3_5_text"),
}


def training_arguments(folder, **changed):
    """Arguments of a training in float32 on the CPU."""
    return DraftTrainingArguments(str(folder), use_cpu=True, **{"bf16": False, "disable_tqdm": True} | changed)


def enlarged(network):
    """Gives a network random weights large enough to tell wrong inputs from right ones."""
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1 and "embed_tokens" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return network


def built(recipe, target):
    torch.manual_seed(0)
    return enlarged(recipe.build(target))


def read(recipe, network, target, length=20, uncounted=0):
    """The reading of two random rows; of the first one some tokens do not count."""
    tokens = torch.randint(1, VOCAB_SIZE, (2, length), generator=torch.Generator().manual_seed(5))
    counted = torch.ones_like(tokens, dtype=torch.bool)
    counted[0, :uncounted] = False
    return TargetReader(target, recipe.states_for(network)).read(tokens, counted)


def drafted_block(network, reading, row, place, masked):
    """The network's output for a block after `place`, `(S, h)`, by the cached forward of drafting."""
    text = DraftText(network, starts=[0], leads=[0], capacity=64)
    states = {key: reading.states[key][row, None, : place + 1] for key in network.target_hidden_states}
    text.extend(Entries(reading.tokens[row, None, 1 : place + 2], states, [place + 1]))
    text.begin_block(network.config.block_size)
    block = torch.tensor([[int(reading.tokens[row, place + 1]), *masked]])
    return text.read_block(block)[0]
