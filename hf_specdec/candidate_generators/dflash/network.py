"""DFlash: a small transformer that fills a whole block of masked positions in one forward (arXiv:2602.06036).

The block is the last committed token, the anchor, and masks. Its positions attend to each other in both directions,
and in every layer to the text before them, of which the draft knows the target's hidden states alone:

    c = norm(W [s_1 ; ... ; s_A])                    s_a: outputs of A decoder layers of the target
    keys and values of the text in layer l:          W_k c, W_v c, the keys normed and rotated
    keys and values of the block in layer l:         the same of norm(x_l), x_0 the embedding of the block
    logits = lm_head(norm(x_L))                      of the mask in question; the anchor's are of no use

What depends on the text alone is computed once for every token. In DSpark (arXiv:2607.05147) a position predicts the
token after it, the anchor's the first one. There, and in Domino, the tokens before a position correct its logits, see
[`~candidate_generators.dflash.corrections`].

DFlash 2 wraps attention and MLP of every layer in convolutions along the block, and chooses tokens with a selector,
see [`~candidate_generators.dflash.selector`]; LiLiCorr has a lattice in its place, and XPress refines the tokens in
several passes. With u what is normed before attention or MLP, and s counting positions back inside of the block:

    kernels = W u                                     of each position, for both sides and every group g of channels
    conv_i(x)[t, c] = sum_s (base_i[s, c] + kernels[t, i, s, g(c)]) x[t - s, c]
    stream + conv_1(attention(conv_0(u)))             keys and values of the text pass through none

Shapes: R rows, T positions of a block (or of several), S slots of the cache, C tokens of the text, h and th hidden
sizes of draft and target, A captured states, D head size, V vocabulary of the target, U that of the draft; B positions
of one block, K of them predicting, G groups of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ...checkpoints.checkpoint import Checkpoint, head_placement, save_checkpoint
from ...checkpoints.draft_reader import stored_vocabulary
from ...checkpoints.header import TargetSizes
from ...checkpoints.loading import check_given, loads_checkpoint
from ...drafting.positions import MaskedWalk
from ...errors import SpecConfigError
from ...layers.draft_network import (
    DraftNetwork,
    TargetParts,
    is_copy,
    loaded_network,
    new_attention,
    new_mlp,
    on_device_of,
)
from ...layers.llama import (
    DecoderLayer,
    DirectModule,
    KeyValueCache,
    RMSNorm,
    project,
    rotate,
    with_query_groups,
)
from ...layers.mask_token import mask_token_in, tokenizer_of
from ...target_facts import num_embeddings
from .config import BlockView, DFlashConfig
from .corrections import Block, ConfidenceHead, CorrectionHead, DominoHead, LeftToRight, MarkovHead
from .denoising import Denoising
from .formats import DFlashReader
from .lilicorr import LiLiCorrHead
from .selector import CandidateSelector, Edges, walk_on
from .xpress import XPressHead


if TYPE_CHECKING:
    from ...checkpoints.draft_reader import DraftConfig
    from ...settings import SpeculativeConfig


class DFlashNetwork(DraftNetwork):
    """A block drafter.

    The state dict has the names of the published files. What a draft shares with the target, embedding and lm_head,
    is read where the target has it and is not part of the state dict.

    Args:
        config (`DFlashConfig`): What the draft consists of.

    Attributes:
        target_hidden_states (`tuple`): Keys of the target's states that `fuse` takes: i is what enters its decoder
            layer i, "last" what leaves its final norm, see [`captured_states`].
        views (`tuple[BlockView, ...]`): What its layers see; `forward` takes a mask for each.
        token_ids (`torch.LongTensor` of shape `(U,)`): The target's id of each draft id; `None` where they are equal.
    """

    spec_method = "dflash"
    states_keys: ClassVar[tuple[str, ...]] = ("target_layer_ids", "aux_hidden_state_layer_ids")

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        # DFlash 2 was trained on transformers' states, of which the last one is normed.
        normed = config.num_target_layers if config.selector_rank else None
        self._state_keys = tuple("last" if layer + 1 == normed else layer + 1 for layer in config.target_layer_ids)
        self.target_hidden_states: tuple[int | str, ...] = tuple(dict.fromkeys(self._state_keys))
        self._layer_views = tuple(map(config.view, range(config.num_hidden_layers)))
        self.views: tuple[BlockView, ...] = tuple(dict.fromkeys(self._layer_views))
        size = config.hidden_size
        own_rows = config.num_embeddings
        self.embed_tokens = None if own_rows is None else nn.Embedding(own_rows, size)
        self.fc: nn.Linear = nn.Linear(len(self._state_keys) * config.target_hidden_size, size, bias=False)
        self.hidden_norm: RMSNorm = RMSNorm(size, config.rms_norm_eps)
        self.layers: nn.ModuleList = nn.ModuleList(
            DFlashLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm: RMSNorm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False) if config.own_head else None
        self.markov_head: MarkovHead | None = MarkovHead(config) if config.markov_rank else None
        self.logit_head: DominoHead | None = None if config.domino is None else DominoHead(config, config.domino)
        self.confidence_head: ConfidenceHead | None = ConfidenceHead(config) if config.has_confidence else None
        self.candidate_selector: CandidateSelector | None = CandidateSelector(config) if config.selector_rank else None
        self.xpress_head: XPressHead | None = None if config.xpress is None else XPressHead(config, config.xpress)
        self.lilicorr: LiLiCorrHead | None = None if config.lilicorr is None else LiLiCorrHead(config, config.lilicorr)
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size) if config.has_token_ids else None)
        self._target: _ScaledParts | None = None

    @property
    def num_embeddings(self) -> int:
        """Number of tokens that have an embedding; those past the vocabulary may serve as masks."""
        return num_embeddings(self._target.embedding if self.embed_tokens is None else self.embed_tokens)

    def attach(self, target_model: nn.Module) -> DFlashNetwork:
        """Reads embedding and lm_head from `target_model` where the draft has none of its own.

        What is only a copy of the target's is given up.
        """
        # DFlash 2 has scales of its own.
        self._target = target = _ScaledParts(target_model, is_scaled=self.candidate_selector is None)
        if self.embed_tokens is not None and target.has_plain_embedding:
            if is_copy(self.embed_tokens.weight, target.embedding.weight):
                self.embed_tokens = None
                self.config = replace(self.config, num_embeddings=None)
        if self.lm_head is not None and self.token_ids is None and target.has_plain_head:
            if is_copy(self.lm_head.weight, target.head.weight):
                self.lm_head = None
                self.config: DraftConfig = replace(self.config, own_head=False)
        return self

    # The text

    def fuse(self, states: Mapping[Any, torch.Tensor]) -> torch.Tensor:
        """Fuses the target's states of tokens of the text into what all layers see of them.

        Args:
            states (`Mapping`): For each of `target_hidden_states` a tensor of shape `(R, C, th)`.

        Returns:
            `torch.Tensor` of shape `(R, C, h)`, in the dtype and on the device of the draft.
        """
        like = self._weight
        joined = torch.cat([states[key].to(like) for key in self._state_keys], dim=-1)
        return self.hidden_norm(project(self.fc, joined))

    def context(
        self, fused: torch.Tensor, positions: torch.LongTensor, bound: int | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of tokens of the text, for every layer, each of shape `(R, kv heads, C, D)`.

        Args:
            fused (`torch.Tensor` of shape `(R, C, h)`): From `fuse`.
            positions (`torch.LongTensor` of shape `(R, C)` or `(1, C)`): Position ids of the tokens.
            bound (`int`, *optional*): All position ids lie below; with it, angles are looked up.
        """
        attentions = [layer.self_attn for layer in self._modules["layers"]]
        keys = [attention.keys(fused) for attention in attentions]
        # The angles are those of all layers.
        angles = self.angles(positions, fused, bound)
        turned = rotate(torch.cat(keys, dim=2), *angles).split(keys[0].shape[2], dim=2)
        return [(key.transpose(1, 2), attention.values(fused)) for attention, key in zip(attentions, turned)]

    # The block

    def embed(self, tokens: torch.LongTensor) -> torch.Tensor:
        rows = super().embed(tokens)
        return rows if self.config.embedding_scale == 1 else rows * self.config.embedding_scale

    def forward(
        self,
        tokens: torch.LongTensor,
        positions: torch.LongTensor,
        masks: Mapping[BlockView, torch.Tensor | None],
        cache: KeyValueCache,
        bound: int | None = None,
        block_size: int | None = None,
    ) -> torch.Tensor:
        """Reads blocks.

        Args:
            tokens (`torch.LongTensor` of shape `(R, T)`): Anchors and masks, in the target's ids; tokens that are
                known already in the place of masks.
            positions (`torch.LongTensor` of shape `(R, T)` or `(1, T)`): Their position ids.
            masks (`Mapping`): For each of `views` the mask of its layers of shape `(R | 1, 1, T, S)`, additive, in
                the draft's dtype. `None`: every position sees everything.
            cache (`KeyValueCache`): Has the keys and values of the text, from `context`, and is given those of the
                block: a `SlotCache` or [`GivenContext`].
            bound (`int`, *optional*): As in `context`.
            block_size (`int`, *optional*): B, where rows have several blocks. By default T.

        Returns:
            `torch.Tensor` of shape `(R, T, h)`: what `logits` reads.
        """
        stream = self.embed(tokens)
        angles = self.angles(positions, stream, bound)
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        masks = {view: with_query_groups(mask, groups) for view, mask in masks.items()}
        for layer, view in zip(self._modules["layers"], self._layer_views):
            stream = layer(stream, angles, masks[view], cache, block_size=block_size or tokens.shape[1])
        return self._modules["norm"](stream)

    def predicting(self, output: torch.Tensor) -> torch.Tensor:
        """Part of `forward`'s output for one block, `(R, T, h)`, the positions that predict tokens, in their order."""
        count = self.config.num_drafts(output.shape[1])
        return output[:, :count] if self.config.predicts_next else output[:, 1:]

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Logits `(..., U)` over the draft's vocabulary, from `forward`'s output `(..., h)`.

        Where there are corrections, [`left_to_right`] adds them.
        """
        # As a matrix: the product of a part of a block with its strides would copy the weights.
        rows = output.flatten(0, -2)
        logits = self._target.logits(rows).to(rows) if self.lm_head is None else self.lm_head(rows)
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        if cap := self.config.logit_softcap:
            logits = cap * torch.tanh(logits / cap)
        return logits.unflatten(0, output.shape[:-1])

    @property
    def correction_head(self) -> CorrectionHead | None:
        """The head that corrects logits by the tokens before, if there is one."""
        return self.markov_head or self.logit_head

    def left_to_right(self, block: Block) -> LeftToRight:
        """Begins to read a block's logits position by position, with the corrections by the tokens before."""
        return LeftToRight(block, self.correction_head, self.embed)

    def edges(
        self,
        logits: torch.Tensor,
        output: torch.Tensor,
        anchors: torch.LongTensor,
        context: torch.Tensor | None,
        ranked: torch.Tensor | None = None,
    ) -> Edges:
        """Scores of the candidates of a block after each other, where the draft has any.

        Args:
            logits (`torch.Tensor` of shape `(R, K, V)`): Of the first positions that predict.
            output (`torch.Tensor` of shape `(R, K, h)`): `forward`'s output there.
            anchors (`torch.LongTensor` of shape `(R,)`): First tokens of the blocks.
            context (`torch.Tensor` of shape `(R, h)`, *optional*): What `fuse` makes of the last token before them;
                LiLiCorr alone reads it.
            ranked (`torch.Tensor` of shape `(R, K, V)`, *optional*): What LiLiCorr's candidates are chosen by, if not
                the logits.
        """
        if self.lilicorr is not None:
            return self.lilicorr(logits, output, context, self.embed, ranked)
        assert self.candidate_selector is not None, "a draft without scores of candidates"
        return self.candidate_selector(logits, output, anchors)

    def confidence_logits(self, output: torch.Tensor, before: torch.LongTensor) -> torch.FloatTensor:
        """Estimated log-odds `(R, K)` that each draft token is accepted once those before it are.

        That of a token does not depend on the token itself, only on those before it.

        Args:
            output (`torch.Tensor` of shape `(R, K, h)`): `forward`'s output at the positions that predict them.
            before (`torch.LongTensor` of shape `(R, K)`): The tokens before each, the anchor's first.
        """
        assert self.confidence_head is not None, "a draft without a confidence head"
        rows = self.markov_head.markov_w1(before) if self.config.confidence_with_markov else None
        return self.confidence_head(output, rows).float()

    def denoise(
        self,
        state: Denoising,
        output: torch.Tensor,
        anchors: torch.LongTensor,
        keep: int,
        walk: MaskedWalk | None = None,
    ) -> None:
        """One denoising step.

        Args:
            state (`Denoising`): The blocks.
            output (`torch.Tensor` of shape `(R, K, h)`): `forward`'s output at the positions that predict.
            anchors (`torch.LongTensor` of shape `(R,)`): First tokens of the blocks.
            keep (`int`): As for [`Denoising.update`].
            walk (`MaskedWalk`, *optional*): Says what grammars allow.
        """
        logits = self.logits(output)
        if walk is not None:
            logits = walk.ranked(logits, state.known, state.tokens)
        if self.candidate_selector is None:
            state.update(logits, keep, self.token_ids)
        else:
            walk_on(state, self.candidate_selector, logits, output, anchors, keep)

    def save(self, folder: str | Path) -> None:
        """Writes `config.json` and `model.safetensors` in the layout of the first publishers; makes the folder."""
        tensors = {name.removeprefix("logit_head."): tensor for name, tensor in self.state_dict().items()}
        save_checkpoint(folder, self.config.to_dict(), stored_vocabulary(tensors, self.config.vocab_size))


class DFlashLayer(DecoderLayer):
    """A decoder layer of the Qwen3 kind, maybe with convolutions; without a mask, all of text and block is seen."""

    def __init__(self, config: DFlashConfig, index: int):
        biases = ("q_proj", "k_proj", "v_proj", "o_proj") if config.attention_bias else ()
        super().__init__(
            new_attention(config, index, biases, has_head_norms=True, is_causal=False),
            new_mlp(config),
            RMSNorm(config.hidden_size, config.rms_norm_eps),
            RMSNorm(config.hidden_size, config.rms_norm_eps),
        )
        if config.conv_kernel_size:
            self.attention_conv: BlockConvolution = BlockConvolution(config)
            self.mlp_conv: BlockConvolution = BlockConvolution(config)

    def forward(
        self,
        stream: torch.Tensor,
        angles: Any,
        mask: Any,
        cache: Any,
        attended: Any = None,
        *,
        block_size: int | None = None,
    ) -> torch.Tensor:
        parts = self._modules
        if "attention_conv" not in parts:
            return super().forward(stream, angles, mask, cache, attended)
        attention, mlp = parts["self_attn"], parts["mlp"]
        normed = parts["input_layernorm"](stream)
        stream = stream + parts["attention_conv"](
            normed, lambda convolved: attention(convolved, angles, mask, cache), block_size
        )
        normed = parts["post_attention_layernorm"](stream)
        return stream + parts["mlp_conv"](normed, mlp, block_size)


class BlockConvolution(DirectModule):
    """Convolution along each block before and after an operation, with kernels that depend on what is read.

    A channel has its own taps, and shares what is added to them by position with its group. Before the anchor there
    is nothing. A new one changes nothing.
    """

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
        """
        Args:
            normed (`torch.Tensor` of shape `(R, T, h)`): What the operation would read without convolution.
            operation (`Callable`): From `(R, T, h)` to `(R, T, h)`.
            block_size (`int`, *optional*): B, by default T.

        Returns:
            `torch.Tensor` of shape `(R, T, h)`.
        """
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


class GivenContext:
    """Keys and values of a text, from `DFlashNetwork.context`, in the place of a cache: gradients pass through it."""

    writes_slots = False

    def __init__(self, layers: list[tuple[torch.Tensor, torch.Tensor]]):
        self.layers = layers

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the layer, then those of the block; nothing is kept."""
        known_keys, known_values = self.layers[layer_idx]
        return torch.cat((known_keys, keys), dim=2), torch.cat((known_values, values), dim=2)


class _ScaledParts(TargetParts):
    """Embedding and lm_head with the scaling that targets apply after them, if drafts are trained with it."""

    def __init__(self, target_model: nn.Module, is_scaled: bool):
        super().__init__(target_model)
        self._is_scaled, self._softcap, self._scale = is_scaled, None, 1
        if not is_scaled:
            return
        config = target_model.config.get_text_config(decoder=True)
        self._softcap = getattr(config, "final_logit_softcapping", None)
        factors = (getattr(config, name, None) for name in ("logit_scale", "output_multiplier"))
        self._scale = next(filter(None, factors), 1 / (getattr(config, "logits_scaling", None) or 1))

    @property
    def has_plain_embedding(self) -> bool:
        return type(self.embedding) is nn.Embedding

    @property
    def has_plain_head(self) -> bool:
        return type(self.head) is nn.Linear and self.head.bias is None and not self._softcap and self._scale == 1

    def embed(self, tokens):
        """Embeds tokens as the target does, with its scaling. A norm after the table belongs to the target alone."""
        if not self._is_scaled or hasattr(self.embedding, "embed_norm"):
            return super().embed(tokens)
        return self.embedding(on_device_of(self.embedding, tokens))

    def logits(self, output):
        """The target's logits of an output: their scaling and cap count in probabilities."""
        logits = super().logits(output)
        if self._scale != 1:
            logits = logits * self._scale
        return self._softcap * torch.tanh(logits / self._softcap) if self._softcap else logits


@loads_checkpoint
def load_dflash(config: SpeculativeConfig, target_model: nn.Module) -> DFlashNetwork:
    """Loads `config.model`, in any of its formats, in the target's dtype and on its device unless the settings differ.

    Args:
        config (`SpeculativeConfig`): `model`, `revision`, `subfolder`, `dtype`, `device`, the option
            `dflash_mask_token_id`.
        target_model (`PreTrainedModel`): The target.

    Raises:
        SpecConfigError: No checkpoint was named, or its layers do not fit the quantisation.
        CheckpointFormatError: The checkpoint is incomplete, no draft that this package knows, or was made for another
            target.
    """
    placement = head_placement(config, target_model, can_be_quantised=True)
    mask_token_id = getattr(config.options, "dflash_mask_token_id", None)

    def find_mask_token(spelling: str | None) -> int | None:
        return mask_token_in(tokenizer_of(target_model), spelling)

    checkpoint = Checkpoint(config)
    reader = DFlashReader(checkpoint.header)
    found = reader.configured(checkpoint, TargetSizes.of(target_model), mask_token_id, find_mask_token)
    make = partial(DFlashNetwork, found)
    network = loaded_network(make, reader, checkpoint, target_model, placement, config.quantization)
    check_mask_token(found.mask_token_id, network, f"'{config.model}'")
    return network


def fitting_network(network: nn.Module, config: SpeculativeConfig, target_model: nn.Module) -> DFlashNetwork:
    """A draft that was not loaded here, such as one in training, checked against the target and attached to it.

    Raises:
        SpecConfigError: It is no DFlash draft, or of another size than the target.
    """
    # The tables of a draft are as long as the vocabulary.
    check_given(network, DFlashNetwork, config, target_model, most_gap=0)
    network.attach(target_model)
    check_mask_token(network.config.mask_token_id, network)
    return network


def check_mask_token(token: int, network: DFlashNetwork, name: str = "the draft") -> None:
    """Raises a [`SpecConfigError`] where a mask token has no embedding."""
    if not 0 <= token < network.num_embeddings:
        raise SpecConfigError(
            f"The mask token of {name} is {token}, and the embedding has the tokens 0 to "
            f"{network.num_embeddings - 1}. Name another with `dflash_mask_token_id`, or, if the target's embedding "
            "was resized, pass a target that has the row."
        )
