"""Records of block drafters of the DFlash family: what a checkpoint of any format is brought to.

Shapes: h and th hidden sizes of draft and target, A captured states, V vocabulary of the target, U that of the draft,
L layers of the draft, N decoder layers of the target, B tokens of a block.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...checkpoints.draft_reader import DraftConfig
from ...checkpoints.header import TargetNeeds


@dataclass(frozen=True)
class BlockView:
    """View of a layer: how much of the text before it, and of itself, the positions of a block see.

    Args:
        window (`int`, *optional*): How many positions it looks back, its own included; without `causal` as many
            forward. `None`: no limit.
        causal (`bool`): It does not look forward inside of the block.
    """

    window: int | None = None
    causal: bool = False

    @property
    def sees_all(self) -> bool:
        return self.window is None and not self.causal

    def hidden(self, distance: torch.LongTensor) -> torch.BoolTensor:
        """Marks keys out of sight, by the distance from key to query in positions."""
        if self.window is None:
            return distance < 0 if self.causal else torch.zeros_like(distance, dtype=torch.bool)
        far = distance >= self.window
        return far | (distance < 0 if self.causal else distance <= -self.window)


@dataclass(frozen=True)
class DominoConfig:
    """Sizes of Domino's corrections (arXiv:2605.29707), named as in its configs.

    Args:
        gru_hidden_dim (`int`): Size of the state that reads the block's tokens.
        emb_dim (`int`): Rank of the corrections.
        pure_draft_prefix_len (`int`): First drafts of a block that are not corrected.
    """

    gru_hidden_dim: int
    emb_dim: int
    pure_draft_prefix_len: int = 0


@dataclass(frozen=True)
class LiLiCorrConfig:
    """Sizes of LiLiCorr's lattice (arXiv:2608.20530), named as in its configs without their `lilicorr_`.

    Args:
        hidden_size (`int`): Of the states of candidates.
        candidate_topk (`int`): Candidates of a position.
        num_layers, num_heads, mlp_size (`int`): Of the layers over them.
        factor_dim (`int`): Size of the vectors whose products are the scores.
        vector_eps (`float`): Least norm that such a vector is divided by.
        logit_scale (`float`): Factor of the scores.
    """

    hidden_size: int
    candidate_topk: int
    num_layers: int
    num_heads: int
    mlp_size: int
    factor_dim: int
    vector_eps: float = 1e-6
    logit_scale: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """Its entries in a config."""
        sizes = asdict(self) | {"mlp_ratio": self.mlp_size / self.hidden_size, "enabled": True}
        return {f"lilicorr_{name}": value for name, value in sizes.items() if name != "mlp_size"}


@dataclass(frozen=True)
class XPressConfig:
    """Sizes of XPress's refinement (arXiv:2608.02438), named as in its configs without their `xpress_`.

    Args:
        rank (`int`): Size of its states.
        mlp_hidden (`int`): Size inside of its MLP.
        num_passes (`int`): Times that the tokens of a block are predicted anew.
    """

    rank: int
    mlp_hidden: int
    num_passes: int = 6


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(DraftConfig):
    """Record of a block drafter; see also [`DraftConfig`].

    Args:
        block_size (`int`): B, the anchor included.
        mask_token_id (`int`): The token of the positions that are to be filled.
        target_layer_ids (`tuple[int, ...]` of length A): The decoder layers of the target whose outputs are read, in
            this order; -1 is the output of its embedding.
        num_target_layers (`int`): N.
        views (`tuple[BlockView, ...]` of length L): What each layer sees; empty: all see everything.
        predicts_next (`bool`): A position of the block predicts the token after it, so that the anchor's predicts
            the first one (DSpark, and Domino's with `shift_label`). Otherwise every position predicts its own token,
            and the anchor none.
        markov_rank (`int`): Rank of the table of corrections by the token before (DSpark); 0: there is none.
        markov_head_type (`str`): "vanilla", or "gated" or "rnn" for corrections that also depend on the position's
            output, and on the tokens further back.
        has_confidence (`bool`): A head foresees how many drafts will be kept (DSpark).
        confidence_with_markov (`bool`): It reads the row of that table, too.
        domino (`DominoConfig`, *optional*): Sizes of Domino's corrections; `None`: there are none.
        conv_kernel_size, conv_group_size (`int`): Taps of the convolutions along the block, and channels that share
            the part of a tap that depends on the position (DFlash 2); 0: there are none.
        selector_rank, selector_top_k (`int`): Rank of the candidate selector, and candidates of a position (DFlash 2);
            0: there is none. A draft with a selector has convolutions.
        lilicorr (`LiLiCorrConfig`, *optional*): Sizes of LiLiCorr's lattice, which scores candidates in the place of a
            selector; `None`: there is none.
        xpress (`XPressConfig`, *optional*): Sizes of XPress's refinement; `None`: there is none.
        embedding_scale, logit_scale, logit_softcap (`float`): Factors of the embeddings and of the logits, and the cap
            of these, 0 for none; with a selector they stand for all that the target does there.
        num_denoising_steps (`int`): Forwards for a block that the draft was trained for.
        attention_bias (`bool`): The projections of the attention have biases.
        num_embeddings (`int`, *optional*): Rows of the draft's own embedding; `None`: it shares the target's.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    views: tuple[BlockView, ...] = ()
    predicts_next: bool = False
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    has_confidence: bool = False
    confidence_with_markov: bool = False
    domino: DominoConfig | None = None
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    lilicorr: LiLiCorrConfig | None = None
    xpress: XPressConfig | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    num_denoising_steps: int = 1
    attention_bias: bool = False
    max_position_embeddings: int = 32768
    num_embeddings: int | None = None

    def num_drafts(self, block_size: int) -> int:
        """Tokens that a block of this many yields."""
        # The last output of Domino's blocks goes unused.
        return block_size if self.predicts_next and self.domino is None else block_size - 1

    @property
    def needs_whole_block(self) -> bool:
        """A block is always drafted in its trained size: what is chosen depends on all of its positions."""
        return self.xpress is not None

    @property
    def takes_one_step(self) -> bool:
        """Several denoising steps are not possible."""
        has_parts = self.has_confidence or self.lilicorr is not None or self.xpress is not None
        return self.predicts_next or self.is_sequential or has_parts

    @property
    def has_edges(self) -> bool:
        """Drafts are walks through scores of candidates after each other."""
        return self.selector_rank > 0 or self.lilicorr is not None

    @property
    def is_sequential(self) -> bool:
        """The logits of a position depend on the tokens before it."""
        return self.markov_rank > 0 or self.domino is not None

    @property
    def needs(self) -> TargetNeeds:
        """The target that it was made for."""
        return TargetNeeds(None, self.target_hidden_size, self.vocab_size, self.num_target_layers)

    @property
    def suits_trees(self) -> bool:
        """Made for trees: with a selector, or as JetSpec's with causal blocks whose layers have no window."""
        return self.selector_rank > 0 or (bool(self.views) and set(self.views) == {BlockView(causal=True)})

    def view(self, layer: int) -> BlockView:
        return self.views[layer] if self.views else BlockView()

    def to_dict(self) -> dict[str, Any]:
        """The content of `config.json`: z-lab's layout, DeepSpec's where a position predicts the next token."""
        windows = {view.window for view in self.views} - {None}
        sliding = [self.view(layer).window is not None for layer in range(self.num_hidden_layers)]
        config = {
            "model_type": "qwen3",
            **super().to_dict(),
            **{name: getattr(self, name) for name in _STORED_AS_THEY_ARE},
            "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
            "sliding_window": next(iter(windows), None),
            "use_sliding_window": bool(windows),
            "tie_word_embeddings": False,
        }
        own = {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)}
        if self.num_denoising_steps > 1:
            own["num_denoising_steps"] = self.num_denoising_steps
        # By itself a layer is causal if and only if it slides.
        if any(self.view(layer).causal != slides for layer, slides in enumerate(sliding)):
            config["is_causal"] = self.view(0).causal
        if self.domino is not None:
            own |= {"projector_type": "domino", "shift_label": self.predicts_next, **asdict(self.domino)}
            return {"architectures": ["DominoDraftModel"], **config, "dflash_config": own}
        if self.predicts_next:
            own |= {name: getattr(self, name) for name in ("markov_rank", "markov_head_type")}
            if self.has_confidence:
                own |= {
                    "enable_confidence_head": True,
                    "confidence_head_with_markov": self.confidence_with_markov,
                }
            return {"architectures": ["Qwen3DSparkModel"], **config, **own}
        if self.xpress is not None:
            own |= {f"xpress_{name}": value for name, value in asdict(self.xpress).items()}
            return {"architectures": ["Qwen3XPressModel"], **config, "dflash_config": own}
        if self.lilicorr is not None:
            own |= {"projector_type": "lilicorr", **self.lilicorr.to_dict()}
            if self.conv_kernel_size:
                own |= {name: getattr(self, name) for name in OF_DFLASH2[:2]}
            return {"architectures": ["LiLiCorrDraftModel"], **config, "dflash_config": own}
        if self.selector_rank:
            own |= {name: getattr(self, name) for name in OF_DFLASH2}
            scales = {key: (getattr(self, name), usual) for key, (name, usual) in SCALES.items()}
            own |= {key: value for key, (value, usual) in scales.items() if value != usual}
        name = "DFlash2DraftModel" if self.selector_rank else "DFlashDraftModel"
        return {"architectures": [name], **config, "dflash_config": own}


OF_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")

# Keys of DFlash 2, and the fields and usual values that they stand for.
SCALES = {
    "input_embedding_scale": ("embedding_scale", 1),
    "output_multiplier": ("logit_scale", 1),
    "final_logit_softcapping": ("logit_softcap", 0),
}

_STORED_AS_THEY_ARE = ("attention_bias", "draft_vocab_size", "block_size", "num_target_layers")


def default_layer_ids(num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """The layers that a z-lab draft of `num_layers` layers reads where its config names none."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + index * (num_target_layers - 4) / (num_layers - 1)) for index in range(num_layers))
