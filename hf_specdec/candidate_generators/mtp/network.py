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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from ...checkpoints.header import TargetNeeds
from ...checkpoints.loading import save_checkpoint, tensor_shapes
from ...checkpoints.reader import CheckpointReader
from ...errors import SpecConfigError, UnsupportedModelError
from ...kernels.heads import KeyValueCache
from ...layers.draft_network import DraftModule, TargetParts
from ...layers.experts import MixtureOfExperts
from ...layers.known import is_llama_layer
from ...layers.llama import DecoderLayer, RMSNorm, RotaryAngles, with_query_groups
from ...layers.plan import Way, bind_linears, bind_norm, norm_of, planned
from ...settings import SpeculativeConfig
from ...target.attention import NAME, name_masks
from ...target.forward import SlotForward, told
from ...target.masks import FULL, Span, TreeMask
from ...target_facts import (
    cache_name_among,
    decoder_layers,
    forward_arguments,
    hidden_size,
    numbers_of,
    vocabulary_size,
)
from ...transfers import RowNumbers, last_of_each
from .formats import MTP_LAYOUT, SUPPORTED_MODEL_TYPES, WIDTH_KEY, MtpConfig, MtpReader, stored_tensors


# Families whose MTP layers look no further back than the window of the target's other layers.
_SLIDING = ("mellum",)

# Of each list in a target's config that describes its layers: what describes the MTP layers, and what they are else.
_LAYER_LISTS = {
    "layer_types": ("mtp_layer_types", "full_attention"),
    "mlp_layer_types": ("mtp_mlp_layer_types", "sparse"),
}


class MtpPart(NamedTuple):
    """Bound functions around a layer."""

    project: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    norm_embedded: Callable[[torch.Tensor], torch.Tensor]
    norm_hidden: Callable[[torch.Tensor], torch.Tensor]
    norm: Callable[[torch.Tensor], torch.Tensor] | None = None  # after the layer, if it is not the target's


class MtpPlan(NamedTuple):
    """Bound functions of MTP layers."""

    embed: Callable[[torch.LongTensor], torch.Tensor]
    parts: list[MtpPart]
    head: Callable[[torch.Tensor], torch.Tensor]


class MtpNetwork(DraftModule):
    """The MTP layers of a target, of random weights; embedding, lm_head and rotary embedding are the target's."""

    spec_method = "mtp"
    reader_class: ClassVar[type[MtpReader]] = MtpReader
    most_gap: ClassVar[float] = 0
    token_ids: None = None

    def __init__(self, config: MtpConfig, target_model: nn.Module):
        check_family(target_model)
        super().__init__()
        self.embed_tokens: None = None
        self.lm_head: None = None
        self.config = config
        sizes = hidden_size(target_model), vocabulary_size(target_model)
        self.needs: TargetNeeds = TargetNeeds(None, *sizes, model_type=_model_type(target_model))
        num_target_layers = len(decoder_layers(target_model))
        # Key of the state that `fuse` takes, see [`captured_states`].
        state = num_target_layers if config.layout.before_norm else "last"
        self.target_hidden_states: tuple[int | str, ...] = (state,)
        parts = _layer_config(target_model, config)
        kinds = set(getattr(parts, "layer_types", None) or ("sliding_attention",))
        window = getattr(parts, "sliding_window", None)
        slides = kinds == {"sliding_attention"} and window
        self.spans: tuple[Span, ...] = (Span("sliding", window) if slides else FULL,)
        size, count = parts.hidden_size, config.num_projections
        projections = [nn.Linear(2 * size, size, bias=config.has_bias) for _ in range(count)]
        # Layers of the target's own class, with random weights.
        layer_class = type(decoder_layers(target_model)[-1])
        if config.layout.is_half_layer:
            layer_class = partial(HalfLayer, target_model)
        layers = [layer_class(parts, index) for index in range(config.num_layers)]
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

    @classmethod
    def of_record(cls, record: MtpConfig, target_model: nn.Module) -> MtpNetwork:
        return cls(record, target_model)

    def fitted(
        self, config: SpeculativeConfig, target_model: nn.Module, reader: CheckpointReader | None = None
    ) -> MtpNetwork:
        made_for, model_type = self.needs.model_type, _model_type(target_model)
        if made_for != model_type:
            raise SpecConfigError(
                f"The MTP layers were made for a target of the model_type '{made_for}', and this one is of "
                f"'{model_type}'. Pass fitting ones."
            )
        return self.attach(target_model)

    def attach(self, target_model: nn.Module) -> MtpNetwork:
        """Reads embedding, lm_head, rotary embedding and final norm from `target_model`."""
        self._target = _SharedParts(target_model)
        if self._is_llama:
            self._angles = RotaryAngles(self.rotary_emb)
        return self

    @property
    def shared_modules(self) -> tuple[nn.Module, ...]:
        """Modules of the target that the layers go through."""
        return (*super().shared_modules, self._target.norm, self._target.rotary)

    def fuse(self, states: dict[int | str, torch.Tensor]) -> torch.Tensor:
        """Input `hidden` of `forward`, `(R, T, h)`, for entries with states `(R, T, h)` of the target."""
        return states[self.target_hidden_states[0]].to(self._weight)

    def forward(
        self,
        tokens: torch.LongTensor,  # (R, T); for layer j of a chain, those j + 1 after the tokens of the states
        hidden: torch.Tensor,  # (R, T, h), from `fuse`, or what an earlier call handed on
        positions: torch.LongTensor,  # (R | 1, T), those of the states' tokens, the same for all layers
        # (R | 1, 1, T, S), additive in the layers' dtype or boolean. `None`: causal, or where T is 1 everything.
        mask: torch.Tensor | None,
        cache: KeyValueCache | None = None,  # keys and values are put there; `None`: the entries see each other alone
        layer: int = 0,  # that reads them
        bound: int | None = None,  # above all positions; with it, angles may be looked up
        counts: RowNumbers | None = None,  # (R,): of these entries only the last one predicts
        predicts: bool = False,  # returns the logits, in the place of what they are made of
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is handed on as `hidden`, and what `logits` reads, `(R, T, h)` each; with counts `(R, h)`."""
        plan = planned(self, hidden, cache)
        part = plan.parts[layer % self.config.num_projections]
        halves = [part.norm_embedded(plan.embed(tokens)), part.norm_hidden(hidden)]
        if self.config.layout.hidden_first:
            halves.reverse()
        (projected,) = part.project(torch.cat(halves, dim=-1))
        if self._is_llama:
            decoder_layer = self._part("layers", layer)
            angles = self._angles(positions, projected, bound)
            stream = decoder_layer(projected, angles, with_query_groups(mask, decoder_layer.self_attn.groups), cache)
        else:
            stream = self._read_as_family(layer, projected, positions, mask, cache)
        if counts is not None:
            stream = last_of_each(stream, counts)
            plan = planned(self, stream, cache)
        if part.norm is None:
            # What is handed on is in front of the target's final norm.
            norm = self._target.norm
            output = norm(stream.to(norm.weight.device)).to(stream)
        else:
            stream = output = part.norm(stream)
        return stream, plan.head(output) if predicts else output

    def plan(self, way: Way, dtype: torch.dtype) -> MtpPlan:
        """What it computes with around its layers."""
        norms = ("enorm", "hnorm", "norm") if len(self.norm) else ("enorm", "hnorm")
        parts = []
        for index in range(self.config.num_projections):
            bound = [bind_norm(norm_of(self._part(name, index)), way, dtype) for name in norms]
            project, _ = bind_linears(way, dtype, [self._part("eh_proj", index)])
            parts.append(MtpPart(project, *bound))
        return MtpPlan(self.bind_embedding(), parts, self.bind_head(way, dtype))

    def _part(self, name: str, index: int) -> nn.Module:
        """An entry of one of the lists, from where modules keep them: lookups of `nn.ModuleList` take longer."""
        return self._modules[name]._modules[str(index)]

    def _read_as_family(self, layer: int, projected: torch.Tensor, positions: Any, mask: Any, cache: Any) -> Any:
        """The stream `(R, T, h)` after a layer of the target's own class."""
        positions = positions.to(projected.device).expand(len(projected), -1)
        forward = SlotForward(projected)
        if isinstance(mask, TreeMask):
            content, columns = mask, cache.plan.columns
            mask = content.additive(columns, projected.dtype)
            forward = SlotForward(projected, columns=columns, tree=content.tree)
            name_masks(forward, [mask], (content.span,))
        layer_type = self._layer_types[layer] if self._layer_types else None
        with told(forward):
            decoder_layer = self._part("layers", layer)
            names = *forward_arguments(type(decoder_layer)), *forward_arguments(type(decoder_layer.self_attn))
            stream = decoder_layer(
                projected,
                attention_mask=mask,
                position_ids=positions,
                **{cache_name_among(names): cache},
                position_embeddings=self._target.angles(projected, positions, layer_type),
            )
        return stream[0] if isinstance(stream, tuple) else stream

    @property
    def rotary_emb(self) -> nn.Module:
        """The target's rotary embedding."""
        return self._target.rotary

    def logits(self, output: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        """Logits `(..., V)`, from the second tensor of `forward`, `(..., h)`."""
        return planned(self, output, cache).head(output)

    def save(self, folder: str | Path) -> None:
        """Writes `config.json` and `model.safetensors` with tensors of the names `mtp.*`; makes the folder."""
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


class HalfLayer(nn.Module):
    """One attention and one dense MLP of a target whose decoder layers have two of each (LongCat-Flash)."""

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
    """Refuses targets whose decoder layers are not known to work as MTP layers."""
    model_type = _model_type(target_model)
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModelError(
            f"spec_method='mtp' does not know the layers of {type(target_model).__name__} (model_type "
            f"'{model_type}'). It supports {', '.join(SUPPORTED_MODEL_TYPES)}. Use another method, such as 'ngram', "
            "which works with all."
        )


def _model_type(target_model: nn.Module) -> str:
    return target_model.config.get_text_config(decoder=True).model_type


def _layer_config(target_model: nn.Module, mtp: MtpConfig) -> Any:
    """The target's config, with what it says of single layers said of the MTP layers."""
    config = copy.deepcopy(target_model.config.get_text_config(decoder=True))
    for name, (mtp_name, default) in _LAYER_LISTS.items():
        if getattr(config, name, None):
            default = "sliding_attention" if name == "layer_types" and config.model_type in _SLIDING else default
            kinds = getattr(config, mtp_name, None) or [default]
            setattr(config, name, [kinds[j % len(kinds)] for j in range(mtp.num_layers)])
    if hasattr(config, "first_k_dense_replace"):
        # MTP layers have experts in every family that has them in most layers.
        config.first_k_dense_replace = 0
    if mtp.intermediate_size:
        config.intermediate_size = mtp.intermediate_size
    config._attn_implementation = NAME
    return config


def new_mtp(target_model: nn.Module, num_layers: int = 1, intermediate_size: int | None = None) -> MtpNetwork:
    """MTP layers to be trained: copies of the target's last layer, or its first parts, after a random projection."""
    check_family(target_model)
    network = MtpNetwork(MtpConfig(MTP_LAYOUT, num_layers, intermediate_size=intermediate_size), target_model)
    wanted = tensor_shapes(network.layers[0])

    def can_be_cut(layer: nn.Module) -> bool:
        """Tells whether its tensors have those wanted as their first parts."""
        shapes = tensor_shapes(layer)
        if shapes.keys() != wanted.keys():
            return False
        pairs = [(shape, wanted[name]) for name, shape in shapes.items()]
        return all(len(shape) == len(size) and all(map(int.__ge__, shape, size)) for shape, size in pairs)

    source = next(filter(can_be_cut, reversed(decoder_layers(target_model))), None)
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
