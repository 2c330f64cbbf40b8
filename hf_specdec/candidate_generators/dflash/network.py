"""DFlash: a small transformer that fills a whole block of masked positions in one forward (arXiv:2602.06036).

The block is the last committed token, the anchor, and masks. Its positions attend to each other in both directions,
and in every layer to the text before them, of which the draft knows the target's hidden states alone:

    c = norm(W [s_1 ; ... ; s_A])                    s_a: outputs of A decoder layers of the target
    keys and values of the text in layer l:          W_k c, W_v c, the keys normed and rotated
    keys and values of the block in layer l:         the same of norm(x_l), x_0 the embedding of the block
    logits = lm_head(norm(x_L))                      of the mask in question; the anchor's are of no use

What depends on the text alone is computed once for every token. In some drafts a position predicts the token after it,
the anchor's the first one. How tokens are chosen by the logits is the business of a head, see
[`~candidate_generators.dflash.heads`].

Some drafts wrap attention and MLP of every layer in convolutions along the block. With u what is normed before
attention or MLP, and s counting positions back inside of the block:

    kernels = W u                                     of each position, for both sides and every group g of channels
    conv_i(x)[t, c] = sum_s (base_i[s, c] + kernels[t, i, s, g(c)]) x[t - s, c]
    stream + conv_1(attention(conv_0(u)))             keys and values of the text pass through none

Shapes: R rows, T positions of a block (or of several), S slots of the cache, C tokens of the text, h and th hidden
sizes of draft and target, A captured states, D head size, V vocabulary of the target, U that of the draft, L layers of
the draft, N decoder layers of the target; B positions of one block, K of them predicting, G groups of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...checkpoints.draft_reader import DraftConfig, stored_vocabulary
from ...checkpoints.header import TargetNeeds
from ...checkpoints.loading import save_checkpoint
from ...checkpoints.reader import CheckpointReader
from ...errors import SpecConfigError
from ...kernels.heads import KeyValueCache
from ...layers.draft_network import DraftNetwork, TargetParts, embedding_device, is_copy
from ...layers.llama import DecoderLayer, GatedMLP, RMSNorm, RotaryAttention, rotate, with_query_groups
from ...layers.plan import project, way_of
from ...settings import SpeculativeConfig
from ...target_facts import num_embeddings
from .heads import Block, BlockHead, HeadConfig, Memory


@dataclass(frozen=True)
class BlockView:
    """View of a layer: how much of the text before it, and of itself, the positions of a block see."""

    window: int | None = None  # how many positions it looks back, its own included; if not causal, as many forward
    causal: bool = False  # it does not look forward inside of the block

    @property
    def sees_all(self) -> bool:
        return self.window is None and not self.causal

    def hidden(self, distance: torch.LongTensor) -> torch.BoolTensor:
        """Marks keys out of sight, by the distance from key to query in positions."""
        if self.window is None:
            return distance < 0 if self.causal else torch.zeros_like(distance, dtype=torch.bool)
        far = distance >= self.window
        return far | (distance < 0 if self.causal else distance <= -self.window)


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(DraftConfig):
    """Record of a block drafter; see also [`DraftConfig`]."""

    block_size: int  # B, the anchor included
    mask_token_id: int
    # The A decoder layers of the target whose outputs are read, in this order; -1 is the output of its embedding.
    target_layer_ids: tuple[int, ...]
    num_target_layers: int  # N
    views: tuple[BlockView, ...] = ()  # of each layer; empty: all see everything
    predicts_next: bool = False  # a position predicts the token after it, the anchor's the first one; else its own
    head: HeadConfig = field(default_factory=HeadConfig)  # what follows the parallel prediction
    conv_kernel_size: int = 0  # taps of the convolutions; 0: there are none
    conv_group_size: int = 0  # channels that share the part of a tap that depends on the position
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # 0: there is none
    num_denoising_steps: int = 1  # forwards for a block that the draft was trained for
    attention_bias: bool = False
    max_position_embeddings: int = 32768
    num_embeddings: int | None = None  # rows of the draft's own embedding; `None`: it shares the target's

    def num_drafts(self, block_size: int) -> int:
        """Tokens that a block of this many yields."""
        return block_size if self.predicts_next and self.head.uses_last_output else block_size - 1

    @property
    def takes_steps(self) -> bool:
        """Several denoising steps are possible."""
        return self.head.takes_steps and not self.predicts_next

    @property
    def suits_trees(self) -> bool:
        """Made for trees: by its head, or as JetSpec's with causal blocks whose layers have no window."""
        return self.head.suits_trees or set(self.views) == {BlockView(causal=True)}

    @property
    def needs(self) -> TargetNeeds:
        """The target that it was made for."""
        return TargetNeeds(None, self.target_hidden_size, self.vocab_size, self.num_target_layers)

    def view(self, layer: int) -> BlockView:
        return self.views[layer] if self.views else BlockView()

    def to_dict(self) -> dict[str, Any]:
        """The content of `config.json`, in z-lab's layout or that of the head."""
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
        # By itself a layer is causal if and only if it slides.
        if any(self.view(layer).causal != slides for layer, slides in enumerate(sliding)):
            config["is_causal"] = self.view(0).causal
        inner = {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)}
        values = {key: (getattr(self, name), getattr(DFlashConfig, name)) for key, name in _RARE.items()}
        inner |= {key: value for key, (value, usual) in values.items() if value != usual}
        return self.head.placed(self, config, inner)


# Keys of configs that are left out where they have the usual value, and the fields that they stand for.
SCALES = {
    "input_embedding_scale": "embedding_scale",
    "output_multiplier": "logit_scale",
    "final_logit_softcapping": "logit_softcap",
}
_RARE = SCALES | {name: name for name in ("conv_kernel_size", "conv_group_size", "num_denoising_steps")}

_STORED_AS_THEY_ARE = ("attention_bias", "draft_vocab_size", "block_size", "num_target_layers")


def default_layer_ids(num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """The layers that a z-lab draft of `num_layers` layers reads where its config names none."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + index * (num_target_layers - 4) / (num_layers - 1)) for index in range(num_layers))


class DFlashNetwork(DraftNetwork):
    """A block drafter; embedding and lm_head that it shares are read where the target has them."""

    spec_method = "dflash"
    config: DFlashConfig

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        normed = config.num_target_layers if config.head.reads_normed_states else None
        # Of the states that `fuse` takes, see [`captured_states`].
        self._state_keys = tuple("last" if layer + 1 == normed else layer + 1 for layer in config.target_layer_ids)
        self.target_hidden_states: tuple[int | str, ...] = tuple(dict.fromkeys(self._state_keys))
        self._layer_views = tuple(map(config.view, range(config.num_hidden_layers)))
        self.views: tuple[BlockView, ...] = tuple(dict.fromkeys(self._layer_views))
        size, own_rows = config.hidden_size, config.num_embeddings
        self.embed_tokens: nn.Embedding | None = None if own_rows is None else nn.Embedding(own_rows, size)
        self.fc: nn.Linear = nn.Linear(len(self._state_keys) * config.target_hidden_size, size, bias=False)
        self.hidden_norm: RMSNorm = RMSNorm(size, config.rms_norm_eps)
        self.layers: nn.ModuleList = nn.ModuleList(
            DFlashLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm: RMSNorm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head: nn.Linear | None = (
            nn.Linear(size, config.draft_vocab_size, bias=False) if config.own_head else None
        )
        self.block_head: BlockHead = config.head.head_class(config, config.head)
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size) if config.has_token_ids else None)
        self._target: TargetParts | None = None
        self._scale, self._softcap = config.logit_scale, config.logit_softcap

    def fitted(
        self, config: SpeculativeConfig, target_model: nn.Module, reader: CheckpointReader | None = None
    ) -> DFlashNetwork:
        super().fitted(config, target_model, reader)
        check_mask_token(self.config.mask_token_id, self, "the draft" if reader is None else f"'{reader.name}'")
        return self

    @property
    def num_embeddings(self) -> int:
        """Number of tokens that have an embedding; those past the vocabulary may serve as masks."""
        return num_embeddings(self._target.embedding if self.embed_tokens is None else self.embed_tokens)

    def attach(self, target_model: nn.Module) -> DFlashNetwork:
        """Reads from the target what the draft has none of its own of; mere copies of the target's are given up."""
        self._target = target = TargetParts(target_model)
        own, embedding = self.embed_tokens, target.embedding
        if own is not None and type(embedding) is nn.Embedding and is_copy(own.weight, embedding.weight):
            self.embed_tokens, self.config = None, replace(self.config, num_embeddings=None)
        scale, softcap = (1, 0) if self.config.head.has_own_scales else _scales_of(target_model)
        own, head = self.lm_head if self.token_ids is None else None, target.head
        is_plain = type(head) is nn.Linear and head.bias is None and (scale, softcap) == (1, 0)
        if own is not None and is_plain and is_copy(own.weight, head.weight):
            self.lm_head, self.config = None, replace(self.config, own_head=False)
        if self.lm_head is None and not self.config.head.has_own_scales:
            # They count in probabilities.
            self._scale, self._softcap = scale, softcap
        return self

    # The text

    def fuse(self, states: Mapping[Any, torch.Tensor]) -> torch.Tensor:
        """What all layers see of the text, `(R, C, h)`, from states `(R, C, th)` of each of `target_hidden_states`."""
        like = self._weight
        joined = torch.cat([states[key].to(like) for key in self._state_keys], dim=-1)
        return self.hidden_norm(project(self.fc, joined))

    def context(
        self, fused: torch.Tensor, positions: torch.LongTensor, bound: int | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of the text for every layer, `(R, kv heads, C, D)` each, from what `fuse` makes."""
        layers: Any = self._modules["layers"]
        attentions = [layer.self_attn for layer in layers]
        keys = [attention.keys(fused) for attention in attentions]
        # The angles are those of all layers.
        angles = self.angles(positions, fused, bound)
        turned = rotate(torch.cat(keys, dim=2), *angles).split(keys[0].shape[2], dim=2)
        return [(key.transpose(1, 2), attention.values(fused)) for attention, key in zip(attentions, turned)]

    # The block

    def bind_embedding(self) -> Callable[[torch.LongTensor], torch.Tensor]:
        is_shared, scale, like = self.embed_tokens is None, self.config.embedding_scale, self._weight
        # A norm after the table belongs to the target alone.
        if is_shared and not (self.config.head.has_own_scales or hasattr(self._target.embedding, "embed_norm")):
            # As the target embeds, with its scaling.
            embedding = self._target.embedding
            device = embedding_device(embedding)
            return lambda tokens: embedding(tokens.to(device)).to(like)
        embed = super().bind_embedding()
        return embed if scale == 1 else lambda tokens: embed(tokens) * scale

    def forward(
        self,
        tokens: torch.LongTensor,  # (R, T), anchors and masks, or tokens that are known already in their place
        positions: torch.LongTensor,  # (R | 1, T)
        # Of each of `views`, (R | 1, 1, T, S), additive in the draft's dtype or boolean; `None`: everything is seen.
        masks: Mapping[BlockView, torch.Tensor | None],
        cache: KeyValueCache,  # has the keys and values of the text, from `context`, and is given those of the block
        bound: int | None = None,  # above all positions; with it, angles are looked up
        block_size: int | None = None,  # B, where rows have several blocks; by default T
    ) -> torch.Tensor:
        """Reads blocks: what `logits` reads, `(R, T, h)`."""
        stream = self.embed(tokens)
        angles = self.angles(positions, stream, bound)
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        masks = {view: with_query_groups(mask, groups) for view, mask in masks.items()}
        for layer, view in zip(self._modules["layers"], self._layer_views):
            stream = layer(stream, angles, masks[view], cache, block_size=block_size or tokens.shape[1])
        norm: Any = self._modules["norm"]
        return norm(stream)

    def predicting(self, output: torch.Tensor) -> torch.Tensor:
        """Part of `forward`'s output for one block, `(R, T, h)`, the positions that predict tokens, in their order."""
        count = self.config.num_drafts(output.shape[1])
        return output[:, :count] if self.config.predicts_next else output[:, 1:]

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Logits `(..., U)` over the draft's vocabulary, from `forward`'s output `(..., h)`."""
        # As a matrix: the product of a part of a block with its strides would copy the weights.
        rows = output.flatten(0, -2)
        logits = self.bind_head(way_of(rows), rows.dtype)(rows)
        if self._scale != 1:
            logits = logits * self._scale
        if self._softcap:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits.unflatten(0, output.shape[:-1])

    def block(self, whole: torch.Tensor, anchors: torch.LongTensor, memory: Memory, count: int | None = None) -> Block:
        """The first `count` predictions of blocks, by default all, from `forward`'s output `(R, T, h)`."""
        output = self.predicting(whole)[:, :count]
        return Block(self, anchors, output, self.logits(output), whole, memory)

    def save(self, folder: str | Path) -> None:
        """Writes `config.json` and `model.safetensors` in the layout of the first publishers; makes the folder."""
        tensors = {self.config.head.name_in_file(name): tensor for name, tensor in self.state_dict().items()}
        save_checkpoint(folder, self.config.to_dict(), stored_vocabulary(tensors, self.config.vocab_size))


class DFlashLayer(DecoderLayer):
    """A decoder layer of the Qwen3 kind, maybe with convolutions; without a mask, all of text and block is seen."""

    def __init__(self, config: DFlashConfig, index: int):
        biases = ("q_proj", "k_proj", "v_proj", "o_proj") if config.attention_bias else ()
        super().__init__(
            RotaryAttention(config, index, biases, has_head_norms=True, is_causal=False),
            GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act),
            RMSNorm(config.hidden_size, config.rms_norm_eps),
            RMSNorm(config.hidden_size, config.rms_norm_eps),
        )
        if config.conv_kernel_size:
            self.attention_conv: BlockConvolution = BlockConvolution(config)
            self.mlp_conv: BlockConvolution = BlockConvolution(config)

    def forward(
        self, stream: torch.Tensor, angles: Any, mask: Any, cache: Any, *, block_size: int | None = None
    ) -> torch.Tensor:
        parts: dict[str, Any] = self._modules
        if "attention_conv" not in parts:
            return super().forward(stream, angles, mask, cache)
        attention = partial(parts["self_attn"], angles=angles, mask=mask, cache=cache)
        normed = parts["input_layernorm"](stream)
        stream = stream + parts["attention_conv"](normed, attention, block_size)
        normed = parts["post_attention_layernorm"](stream)
        return stream + parts["mlp_conv"](normed, parts["mlp"], block_size)


class BlockConvolution(nn.Module):
    """Convolution along each block before and after an operation, by what is read; a new one changes nothing."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        size, taps = config.hidden_size, config.conv_kernel_size
        self.group_size: int = config.conv_group_size
        self.base_kernel: nn.Parameter = nn.Parameter(F.pad(torch.ones(2, 1, size), (0, 0, 0, taps - 1)))
        self.kernel_projection: nn.Linear = nn.Linear(size, 2 * taps * (size // self.group_size), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(
        self, normed: torch.Tensor, operation: Callable[[torch.Tensor], torch.Tensor], block_size: int | None = None
    ) -> torch.Tensor:
        """The operation from `(R, T, h)` to the same shape, on what it would read without convolution."""
        base = self._parameters["base_kernel"].unflatten(2, (-1, self.group_size))
        kernels = project(self._modules["kernel_projection"], normed)
        # (R, T, 2, taps, G, channels of a group)
        kernels = kernels.view(*normed.shape[:2], *base.shape[:3], 1) + base
        before, after = kernels.unbind(2)
        return self._convolved(operation(self._convolved(normed, before, block_size)), after, block_size)

    def _convolved(self, hidden: torch.Tensor, kernels: torch.Tensor, block_size: int | None) -> torch.Tensor:
        size = block_size or hidden.shape[1]
        # (R, blocks, B, G, channels of a group)
        blocks = hidden.view(len(hidden), -1, size, *kernels.shape[3:])
        kernels = kernels.unflatten(1, (-1, size))
        total = kernels[..., 0, :, :] * blocks
        for tap in range(1, min(kernels.shape[3], size)):
            earlier = F.pad(blocks[:, :, :-tap], (0, 0, 0, 0, tap, 0))
            total = total + kernels[..., tap, :, :] * earlier
        return total.view_as(hidden)


def _scales_of(target_model: nn.Module) -> tuple[float, float]:
    """Scale of a target's logits after its lm_head, and what caps them, 0 for nothing."""
    config = target_model.config.get_text_config(decoder=True)
    factors = (getattr(config, name, None) for name in ("logit_scale", "output_multiplier"))
    scale = next(filter(None, factors), 1 / (getattr(config, "logits_scaling", None) or 1))
    return scale, getattr(config, "final_logit_softcapping", None) or 0


def check_mask_token(token: int, network: DFlashNetwork, name: str = "the draft") -> None:
    """Raises a [`SpecConfigError`] where a mask token has no embedding."""
    if not 0 <= token < network.num_embeddings:
        raise SpecConfigError(
            f"The mask token of {name} is {token}, and the embedding has the tokens 0 to "
            f"{network.num_embeddings - 1}. Name another with `dflash_mask_token_id`, or, if the target's embedding "
            "was resized, pass a target that has the row."
        )
