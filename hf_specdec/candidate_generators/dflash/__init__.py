"""Drafts of DFlash and its kin: a whole block in one pass."""

from dataclasses import dataclass

from ...method import Method
from ...settings.checks import Options, setting
from ...training.options import shared_option


@dataclass(frozen=True)
class DFlashTraining(Options):
    """Options of training a DFlash draft."""

    block_size: int = setting(16, "Tokens of a block, the last committed one included.", least=2)
    num_layers: int = setting(5, "Decoder layers.", least=1)
    intermediate_size: int = shared_option("intermediate_size", 0)
    target_layer_ids: tuple[int, ...] | None = setting(
        None,
        "Target layers whose outputs the draft reads, separated by commas. Default: as many as the draft has layers, "
        "spread over the depth.",
    )
    causal: bool = setting(
        False,
        "A place of the block sees none of the later ones, which suits trees (JetSpec).",
        flags=("--causal/--bidirectional",),
    )
    mask_token_id: int | None = shared_option("mask_token_id", None)
    # Neighbouring blocks teach much the same.
    num_anchors: int = setting(128, "Blocks of a row that are drawn for a step; 0 for all.", least=0)
    head_decay: float = shared_option("head_decay", 0.87)
    kl_weight: float = shared_option("kl_weight", 0.0)
    reveal_share: float = setting(
        0.0, "Share of the blocks with a part of their tokens revealed, for several denoising steps.", least=0, most=1
    )
    num_denoising_steps: int | None = setting(
        None, "Forwards for a block that the draft asks for. Default: 1, or 3 with --reveal-share.", least=1
    )


@dataclass(frozen=True)
class DFlash2Training(DFlashTraining):
    """Options of training a DFlash 2 draft."""

    conv_kernel_size: int = setting(2, "Taps of the convolutions along the block.", least=1)
    conv_group_size: int = setting(
        16, "Channels of the convolutions that share what is added to their taps by position.", least=1
    )
    selector_rank: int = setting(256, "Rank of the scores of candidates after the token before.", least=1)
    selector_top_k: int = setting(16, "Candidates of a position.", least=1, most=256)
    selector_weight: float = setting(1.0, "Weight of the loss of these scores beside that of the tokens.", least=0)


@dataclass(frozen=True)
class DominoTraining(DFlashTraining):
    """Options of training a Domino draft."""

    gru_hidden_dim: int = setting(256, "Size of the state that reads the block's tokens.", least=1)
    emb_dim: int = setting(256, "Rank of the corrections by that state.", least=1)
    pure_draft_prefix_len: int = setting(1, "First tokens of a block that are not corrected.", least=0)


@dataclass(frozen=True)
class LiLiCorrTraining(DFlashTraining):
    """Options of training a LiLiCorr draft; what belongs to the lattice is named as in its configs."""

    lilicorr_candidate_topk: int = setting(8, "Candidates of a position.", least=1, most=256)
    lilicorr_hidden_size: int = setting(512, "Size of the states of candidates.", least=1)
    lilicorr_num_layers: int = setting(2, "Layers in which the candidates of a block see each other.", least=1)
    lilicorr_num_heads: int = setting(8, "Attention heads of these layers.", least=1)
    lilicorr_factor_dim: int = setting(128, "Size of the vectors whose products are the scores.", least=1)
    lilicorr_logit_scale: float = setting(10.0, "Factor of the scores, which are cosines.", least=0, inclusive=False)
    lattice_weight: float = setting(0.25, "Weight of the cross-entropy of the scores.", least=0)
    rejection_weight: float = setting(
        0.25, "Weight of the logits by which the target prefers the right token to what is chosen.", least=0
    )


METHODS = (
    Method(
        name="dflash",
        aliases=("dflash2",),
        noun="DFlash draft",
        drafts_from="hidden states of several layers: a whole block in one forward",
        generator="generator:DFlashCandidateGenerator",
        formats="formats",
        weights="a draft",
        preference=20,
        recipe="recipe:DFlashRecipe",
        training=DFlashTraining,
        further_recipes={
            "dflash2": ("DFlash 2 draft", "heads.selector:DFlash2Recipe", DFlash2Training),
            "domino": ("Domino draft", "heads.domino:DominoRecipe", DominoTraining),
            "lilicorr": ("LiLiCorr draft", "heads.lilicorr:LiLiCorrRecipe", LiLiCorrTraining),
        },
        vllm="dflash",
        sglang="DFLASH",
        healthy_first_rate=0.4,
        demo="dflash",
    ),
)
