"""Multi-token prediction (MTP): further decoder layers of the target that predict tokens after the next one.

DeepSeek-V3 (arXiv:2412.19437, section 2.2) trains them with the model, and its checkpoints hold them; other families
have followed. Entry t of layer j is made of the embedding e of token t + 1 + j and a state of token t: the target's,
or what the layer before has handed on. With W the projection, E and H norms:

    u = W [E(e) ; H(state)],    z = DecoderLayer(u),    y = norm(z),    logits = lm_head of the target (y)

and y is handed on in the state's place: to the next layer, or to the same one for the next token. Where families
differ from this is in [`MtpLayout`]. The decoder layers are those of the target's own class; those of the Llama family
run as [`DecoderLayer`].

Shapes: R rows, T entries, S slots of the draft's cache, h hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from ...checkpoints.checkpoint import Checkpoint, head_placement, save_checkpoint, tensor_shapes
from ...checkpoints.header import TargetNeeds, TargetSizes
from ...checkpoints.loading import check_given, filled, loads_checkpoint
from ...checkpoints.quantised import quantise_layers
from ...errors import SpecConfigError, UnsupportedModelError
from ...layers.draft_network import DraftModule, TargetParts
from ...layers.experts import MixtureOfExperts
from ...layers.known import is_llama_layer
from ...layers.llama import DecoderLayer, KeyValueCache, RMSNorm, project, with_query_groups
from ...layers.rope import RotaryAngles
from ...target.attention import NAME, TreeMask, VerificationForward, running
from ...target.masks import FULL, Span
from ...target_facts import (
    cache_name_among,
    decoder_layers,
    forward_arguments,
    hidden_size,
    numbers_of,
    vocabulary_size,
)
from .formats import MTP_LAYOUT, SUPPORTED_MODEL_TYPES, WIDTH_KEY, MtpConfig, MtpReader, stored_tensors


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig


# Families whose MTP layers look no further back than the window of the target's other layers.
_SLIDING = ("mellum",)

# Of each list in a target's config that describes its layers: what describes the MTP layers, and what they are else.
_LAYER_LISTS = {
    "layer_types": ("mtp_layer_types", "full_attention"),
    "mlp_layer_types": ("mtp_mlp_layer_types", "sparse"),
}


class MtpNetwork(DraftModule):
    """The MTP layers of a target.

    Embedding, lm_head and rotary embedding are the target's: they are read where it has them, and are no part of the
    state dict. Its weights are not initialised for use; see `load_mtp` and `new_mtp`.

    Args:
        config (`MtpConfig`): What it consists of.
        target_model (`PreTrainedModel`): The target.

    Attributes:
        needs (`TargetNeeds`): What a target must share with the one that they were made for.
        target_hidden_states (`tuple`): The key of the target's state that `fuse` takes, see [`captured_states`].
        span (`Span`): How far back the layers look.
        head_size (`int`): Size of an attention head, 0 where it does not matter.
        token_ids (`None`): Draft and target have one vocabulary.

    Raises:
        UnsupportedModelError: Targets of this model type are not supported.
    """

    spec_method = "mtp"
    token_ids = None

    def __init__(self, config: MtpConfig, target_model: nn.Module):
        check_family(target_model)
        super().__init__()
        self.config = config
        sizes = hidden_size(target_model), vocabulary_size(target_model)
        self.needs: TargetNeeds = TargetNeeds(None, *sizes, model_type=_model_type(target_model))
        num_target_layers = len(decoder_layers(target_model))
        self.target_hidden_states: tuple[int | str, ...] = (
            num_target_layers if config.layout.before_norm else "last",
        )
        parts = _layer_config(target_model, config)
        self.span: Span = _span(parts)
        size, count = parts.hidden_size, config.num_projections
        projections = [nn.Linear(2 * size, size, bias=config.has_bias) for _ in range(count)]
        layers = [_decoder_layer(target_model, parts, config, index) for index in range(config.num_layers)]
        self._is_llama = all(map(is_llama_layer, layers))
        # In layers of the target's own class the attention function sees to it.
        self.head_size: int = layers[0].self_attn.head_dim if self._is_llama else 0
        norm = RMSNorm if self._is_llama else type(target_model.get_decoder().norm)

        def norms(count: int) -> nn.ModuleList:
            return nn.ModuleList(norm(size, eps=parts.rms_norm_eps) for _ in range(count))

        self.enorm: nn.ModuleList = norms(count)
        self.hnorm: nn.ModuleList = norms(count)
        self.eh_proj: nn.ModuleList = nn.ModuleList(projections)
        if self._is_llama:
            layers = [DecoderLayer.of(layer, index, MixtureOfExperts.of) for index, layer in enumerate(layers)]
        self.layers: nn.ModuleList = nn.ModuleList(layers)
        self.norm: nn.ModuleList = norms(0 if config.layout.before_norm else count)
        self._layer_types = getattr(parts, "layer_types", None)
        self.attach(target_model)

    @property
    def _weight(self) -> torch.Tensor:
        return self._part("enorm", 0).weight

    def attach(self, target_model: nn.Module) -> MtpNetwork:
        """Reads embedding, lm_head, rotary embedding and final norm from `target_model`."""
        self._target = _SharedParts(target_model)
        if self._is_llama:
            self._angles = RotaryAngles(self.rotary_emb)
        return self

    @property
    def shared_modules(self) -> tuple[nn.Module, ...]:
        """Modules of the target that the layers go through."""
        target = self._target
        return target.embedding, target.head, target.norm, target.rotary

    def fuse(self, states: dict[int | str, torch.Tensor]) -> torch.Tensor:
        """Input `hidden` of `forward` for entries with states of the target.

        Args:
            states (`dict`): A tensor of shape `(R, T, h)` for the key in `target_hidden_states`.

        Returns:
            `torch.Tensor` of shape `(R, T, h)`, in the dtype and on the device of the layers.
        """
        return states[self.target_hidden_states[0]].to(self._weight)

    def embed(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Embeddings `(R, T, h)` of the tokens `(R, T)`."""
        return self._target.embed(tokens).to(self._weight)

    def forward(
        self,
        tokens: torch.LongTensor,
        hidden: torch.Tensor,
        positions: torch.LongTensor,
        mask: torch.Tensor | None,
        cache: KeyValueCache | None = None,
        layer: int = 0,
        bound: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads entries with one of the layers.

        Args:
            tokens (`torch.LongTensor` of shape `(R, T)`): The token of each entry; for layer j of a chain, the one
                j + 1 after the token of its state.
            hidden (`torch.Tensor` of shape `(R, T, h)`): Its state: from `fuse`, or what an earlier call handed on.
            positions (`torch.LongTensor` of shape `(R, T)` or `(1, T)`): Position ids: those of the states' tokens,
                the same for all layers.
            mask (`torch.Tensor` of shape `(R | 1, 1, T, S)`, *optional*): Additive, in the layers' dtype, or boolean.
                `None`: causal, or where T is 1 everything.
            cache (`KeyValueCache`, *optional*): Where keys and values are put; the plan of a `SlotCache` is set.
                `None`: nowhere, the entries see each other alone.
            layer (`int`): Which layer reads them.
            bound (`int`, *optional*): Above all positions; with it, angles may be looked up.

        Returns:
            Two tensors of shape `(R, T, h)`: what is handed on as `hidden`, and what `logits` reads.
        """
        part = layer % self.config.num_projections
        halves = [self._part("enorm", part)(self.embed(tokens)), self._part("hnorm", part)(hidden)]
        if self.config.layout.hidden_first:
            halves.reverse()
        projected = project(self._part("eh_proj", part), torch.cat(halves, dim=-1))
        if self._is_llama:
            stream = self._read_as_llama(layer, projected, positions, mask, cache, bound)
        else:
            stream = self._read_as_family(layer, projected, positions, mask, cache)
        if self.config.layout.before_norm:
            return stream, self.final_norm(stream)
        output = self._part("norm", part)(stream)
        return output, output

    def _part(self, name: str, index: int) -> nn.Module:
        """An entry of one of the lists, from where modules keep them: lookups of `nn.ModuleList` take longer."""
        return self._modules[name]._modules[str(index)]

    def _read_as_llama(
        self,
        layer: int,
        projected: torch.Tensor,
        positions: torch.LongTensor,
        mask: torch.Tensor | None,
        cache: KeyValueCache | None,
        bound: int | None,
    ) -> torch.Tensor:
        """The stream `(R, T, h)` after a layer of the Llama family."""
        own = self._part("layers", layer)
        angles = self._angles(positions, projected, bound)
        return own(projected, angles, with_query_groups(mask, own.self_attn.groups), cache)

    def _read_as_family(
        self,
        layer: int,
        projected: torch.Tensor,
        positions: torch.LongTensor,
        mask: torch.Tensor | None,
        cache: KeyValueCache | None,
    ) -> torch.Tensor:
        """The stream `(R, T, h)` after a layer of the target's own class."""
        positions = positions.to(projected.device).expand(len(projected), -1)
        forward = VerificationForward()
        if isinstance(mask, TreeMask):
            mask, forward = mask.in_a_forward(cache.plan.columns, projected.dtype)
        with running(forward):
            own = self._part("layers", layer)
            names = *forward_arguments(type(own)), *forward_arguments(type(own.self_attn))
            stream = own(
                projected,
                attention_mask=mask,
                position_ids=positions,
                **{cache_name_among(names): cache},
                position_embeddings=self._target.angles(projected, positions, self._layer_type(layer)),
            )
        return stream[0] if isinstance(stream, tuple) else stream

    @property
    def rotary_emb(self) -> nn.Module:
        """The target's rotary embedding."""
        return self._target.rotary

    def final_norm(self, stream: torch.Tensor) -> torch.Tensor:
        """The target's final norm of the stream `(R, T, h)`, for layouts that predict in front of it."""
        norm = self._target.norm
        return norm(stream.to(norm.weight.device)).to(stream)

    def _layer_type(self, layer: int) -> str | None:
        return self._layer_types[layer] if self._layer_types else None

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Logits `(..., V)`, from the second tensor of `forward`, `(..., h)`."""
        return self._target.logits(output).to(output)

    def target_ids(self, draft_ids: torch.LongTensor) -> torch.LongTensor:
        """The ids themselves: draft and target have one vocabulary."""
        return draft_ids

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits themselves: draft and target have one vocabulary."""
        return logits

    def save(self, folder: str | Path) -> None:
        """Writes `config.json` and `model.safetensors` with tensors of the names `mtp.*`; makes the folder.

        Raises:
            CheckpointFormatError: The layers are of a family with another computation around them.
        """
        tensors = stored_tensors(self.config, self.state_dict())
        config = {
            "model_type": "mtp",
            "num_nextn_predict_layers": self.config.num_layers,
            "target_model_type": self.needs.model_type,
            "hidden_size": self.needs.hidden_size,
            "vocab_size": self.needs.vocab_size,
        }
        if self.config.intermediate_size:
            config[WIDTH_KEY] = self.config.intermediate_size
        save_checkpoint(folder, config, tensors)


def _decoder_layer(target_model: nn.Module, parts: Any, config: MtpConfig, index: int) -> nn.Module:
    """A layer of the target's own class, with random weights."""
    if config.layout.is_half_layer:
        return HalfLayer(target_model, parts, index)
    return type(decoder_layers(target_model)[-1])(parts, index)


class HalfLayer(nn.Module):
    """One attention and one dense MLP of a target whose decoder layers have two of each (LongCat-Flash).

    Args:
        target_model (`PreTrainedModel`): The target.
        config (`PreTrainedConfig`): Of its layers.
        index (`int`): Which layer of the cache it is.
    """

    def __init__(self, target_model: nn.Module, config: Any, index: int):
        super().__init__()
        whole = decoder_layers(target_model)[-1]
        norm = type(target_model.get_decoder().norm)
        self.self_attn: Any = type(whole.self_attn[0])(config, index)
        self.mlp: Any = type(whole.mlps[0])(config)
        self.input_layernorm: Any = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm: Any = norm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, stream: torch.Tensor, **attention: Any) -> torch.Tensor:
        """The stream `(R, T, h)` after the layer; `attention` is what decoder layers of transformers take."""
        stream = stream + self.self_attn(hidden_states=self.input_layernorm(stream), **attention)[0]
        return stream + self.mlp(self.post_attention_layernorm(stream))


class _SharedParts(TargetParts):
    """Parts of the target, its rotary embedding and its final norm among them."""

    finders: ClassVar = TargetParts.finders | {
        "norm": lambda target: target.get_decoder().norm,
        "rotary": lambda target: target.get_decoder().rotary_emb,
    }

    def __init__(self, target_model: nn.Module):
        super().__init__(target_model)
        self._names_types = "layer_type" in inspect.signature(self.rotary.forward).parameters
        # In multimodal targets a token has three positions; of text they are the same.
        self._has_sections = hasattr(self.rotary, "mrope_section")

    def angles(self, like: torch.Tensor, positions: torch.LongTensor, layer_type: str | None):
        positions = positions.expand(3, -1, -1) if self._has_sections else positions
        return self.rotary(like, positions, **({"layer_type": layer_type} if self._names_types else {}))


def check_family(target_model: nn.Module) -> None:
    """Refuses targets whose decoder layers are not known to work as MTP layers.

    Raises:
        UnsupportedModelError: It is of another model type.
    """
    found = _model_type(target_model)
    if found not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModelError(
            f"spec_method='mtp' does not know the layers of {type(target_model).__name__} (model_type '{found}'). It "
            f"supports {', '.join(SUPPORTED_MODEL_TYPES)}. Use another method, such as 'ngram', which works with all."
        )


def _model_type(target_model: nn.Module) -> str:
    return target_model.config.get_text_config(decoder=True).model_type


def _layer_config(target_model: nn.Module, mtp: MtpConfig) -> Any:
    """The target's config, with what it says of single layers said of the MTP layers."""
    config = copy.deepcopy(target_model.config.get_text_config(decoder=True))
    for name, (own, default) in _LAYER_LISTS.items():
        if getattr(config, name, None):
            default = "sliding_attention" if name == "layer_types" and config.model_type in _SLIDING else default
            given = getattr(config, own, None) or [default]
            setattr(config, name, [given[j % len(given)] for j in range(mtp.num_layers)])
    if hasattr(config, "first_k_dense_replace"):
        # MTP layers have experts in every family that has them in most layers.
        config.first_k_dense_replace = 0
    if mtp.intermediate_size:
        config.intermediate_size = mtp.intermediate_size
    config._attn_implementation = NAME
    return config


def _span(config: Any) -> Span:
    kinds = set(getattr(config, "layer_types", None) or ("sliding_attention",))
    window = getattr(config, "sliding_window", None)
    return Span("sliding", window) if kinds == {"sliding_attention"} and window else FULL


def new_mtp(target_model: nn.Module, num_layers: int = 1, intermediate_size: int | None = None) -> MtpNetwork:
    """MTP layers to be trained, in the `mtp` layout: copies of the target's last layer after a random projection.

    Args:
        target_model (`PreTrainedModel`): The target, not quantised. Its random state decides nothing; torch's does.
        num_layers (`int`): K.
        intermediate_size (`int`, *optional*): Width of dense MLPs, which then are the first part of the target's.

    Returns:
        [`MtpNetwork`] in the target's dtype and on its device, its parameters requiring gradients.

    Raises:
        UnsupportedModelError: Targets of this model type are not supported, or none of its layers can be copied.
    """
    check_family(target_model)
    network = MtpNetwork(MtpConfig(MTP_LAYOUT, num_layers, intermediate_size=intermediate_size), target_model)
    wanted = tensor_shapes(network.layers[0])
    fitting = (layer for layer in reversed(decoder_layers(target_model)) if _can_be_cut(tensor_shapes(layer), wanted))
    source = next(fitting, None)
    if source is None:
        raise UnsupportedModelError(
            f"None of the decoder layers of {type(target_model).__name__} has the parts of an MTP layer: attention to "
            "the text, experts if the family has them, no quantised weights. Load a target that has one, as it is."
        )
    for layer in network.layers:
        whole = {name: numbers_of(tensor) for name, tensor in source.state_dict().items()}
        parts = {name: tensor[tuple(map(slice, wanted[name]))] for name, tensor in whole.items() if tensor is not None}
        layer.load_state_dict(parts)
    network.norm[0].load_state_dict(target_model.get_decoder().norm.state_dict())
    return network.to(next(source.parameters()).device, target_model.dtype)


@loads_checkpoint
def load_mtp(config: SpeculativeConfig, target_model: nn.Module) -> MtpNetwork:
    """Loads MTP layers from the target's own checkpoint, or from `config.model` where that is named.

    Args:
        config (`SpeculativeConfig`): `model`, `revision`, `subfolder`, `dtype`, `device`.
        target_model (`PreTrainedModel`): The target.

    Raises:
        UnsupportedModelError: Targets of this model type are not supported.
        SpecConfigError: The target was not loaded from a checkpoint and none was named, or the layers do not fit the
            quantisation.
        CheckpointFormatError: The checkpoint has no MTP layers, is incomplete, or was made for another target.
    """
    check_family(target_model)
    placement = head_placement(config, target_model, can_be_quantised=True)
    checkpoint = Checkpoint(placed(config, target_model), MtpReader.weight_files)
    in_float32 = getattr(target_model, "_keep_in_fp32_modules_strict", None) or ()
    reader = MtpReader(checkpoint.header, len(decoder_layers(target_model)), in_float32)
    found = reader.configured(None if config.model is None else TargetSizes.of(target_model))
    network = filled(partial(MtpNetwork, found, target_model), reader, checkpoint, placement)
    if config.quantization is not None:
        quantise_layers((network.eh_proj, network.layers), config.quantization)
    return network


def placed(config: SpeculativeConfig, target_model: nn.Module) -> SpeculativeConfig:
    """The settings with the checkpoint that has the MTP layers: unless another is named that of the target itself.

    Raises:
        SpecConfigError: The target was not loaded from a checkpoint.
    """
    if config.model is not None:
        return config
    source = target_model.config
    name = getattr(source, "_name_or_path", None)
    if not name:
        raise SpecConfigError(
            f"This {type(target_model).__name__} was not loaded from a checkpoint, so there is none to read its "
            "MTP layers from. Pass the folder or repo id of one as `spec_model`."
        )
    revision = config.revision or getattr(source, "_commit_hash", None)
    return config.replace(model=str(name), revision=revision)


def fitting_network(network: nn.Module, config: SpeculativeConfig, target_model: nn.Module) -> MtpNetwork:
    """MTP layers that were not loaded here, such as those in training, checked against the target and attached to it.

    Raises:
        SpecConfigError: These are no MTP layers, or those of another target.
    """
    check_given(network, MtpNetwork, config, target_model, most_gap=0)
    made_for, found = network.needs.model_type, _model_type(target_model)
    if made_for != found:
        raise SpecConfigError(
            f"The MTP layers were made for a target of the model_type '{made_for}', and this one is of '{found}'. "
            "Pass fitting ones."
        )
    return network.attach(target_model)


def _can_be_cut(shapes: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> bool:
    """Tells whether tensors of these shapes have those wanted as their first parts."""
    if shapes.keys() != wanted.keys():
        return False
    pairs = [(shape, wanted[name]) for name, shape in shapes.items()]
    return all(len(shape) == len(size) and all(map(int.__ge__, shape, size)) for shape, size in pairs)
