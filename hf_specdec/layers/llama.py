"""Decoder layers of the Llama family: RMS norm, rotary attention, RMS norm, gated MLP, each added to the stream.

Draft networks are made of them, in drafting and in training, and small targets run through them. The names of their
parts are those of checkpoints. A forward of a few tokens through a small layer is mostly module calls, not arithmetic,
so a module of this file that has no hooks is called like a function, and reads its parts from where `nn.Module` keeps
them.

Shapes: R rows, T tokens, X width of what attention reads, H hidden size, Q query heads, K key/value heads, G = Q / K,
D head size, S slots of a cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.activations import ACT2FN

from ..kernels import products


# transformers' layers that compute this.
_FAMILY = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")

Angles = tuple[torch.Tensor, torch.Tensor]
Module = TypeVar("Module", bound="DirectModule")


class LayerSizes(Protocol):
    """Sizes of layers, as configs name them."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden_act(self) -> str: ...
    @property
    def rms_norm_eps(self) -> float: ...


class KeyValueCache(Protocol):
    """Storage of keys and values, such as a [`SlotCache`]."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `(R, K, S, D)` that a layer sees once the new ones `(R, K, T, D)` are stored."""


class SlotMask(Protocol):
    """Attention that needs no mask tensor, such as a [`TreeMask`]."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, /) -> torch.Tensor: ...


# Ends of the names under which `nn.Module` keeps hooks.
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


class DirectModule(nn.Module):
    """Module that is called like a function while nothing hooks into its calls."""

    # Torch has each of them as optional; a subclass knows which it has.
    _modules: dict[str, Any]
    _parameters: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(_additions(self)):
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)

    @classmethod
    def sharing(cls: type[Module], module: nn.Module, **changed: Any) -> Module:
        """A module of this class with the attributes of another, its parameters and parts among them, but no hooks.

        Args:
            module (`nn.Module`): The other module.
            changed (`Any`): Attributes to have in the place of some of these.
        """
        made = cls.__new__(cls)
        hooks = {name: OrderedDict() for name in module.__dict__ if name.endswith(_HOOKS)}
        made.__dict__.update(module.__dict__, **hooks, **changed)
        return made


# All that a call of a module runs beside, or in the place of, its `forward`.
_additions = attrgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_compiled_call_impl"
)


def is_hooked(module: nn.Module) -> bool:
    """Tells whether a call of the module is more, or another, than the forward of its class."""
    forward = module.__dict__.get("forward")
    return any(_additions(module)) or not (forward is None or type(forward) is products.OwnForward)


def is_untouched(module: nn.Module) -> bool:
    """Tells whether calling the module runs the forward that its class was published with, on plain weights."""
    if is_hooked(module) or not (is_published(type(module)) and is_published(type(module).forward)):
        return False
    if "weight" in module._buffers:
        return False  # packed
    weight = module._parameters.get("weight")
    if is_traceable_wrapper_subclass(weight) or (weight is None and getattr(module, "weight", None) is not None):
        return False  # in parts on several processes, or packed
    return weight is None or weight.dim() != 2 or type(module) in (nn.Linear, nn.Embedding)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The model and all modules in it, in less time than `modules()`, and shared ones more than once."""
    found = [model]
    for module in found:
        found += [part for part in module._modules.values() if part is not None]
    return found


@lru_cache(maxsize=256)
def is_published(definition: Any) -> bool:
    """Tells whether a class or function is torch's, transformers', or of this package."""
    return definition.__module__.partition(".")[0] in ("torch", "transformers", "hf_specdec")


def is_llama_layer(layer: nn.Module) -> bool:
    """Tells whether [`DecoderLayer`] computes what this decoder layer of transformers does."""
    if type(layer).__name__ not in _FAMILY or layer.self_attn.attention_dropout:
        return False
    return all(map(is_untouched, layer.modules()))


def project(linear: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Applies a linear layer, a quantised, wrapped or hooked one by its own call."""
    if not _is_plain(linear):
        return linear(hidden)
    parameters = linear._parameters
    # Spares small models a call for each of their layers.
    if not products.ways_of_shapes:
        return F.linear(hidden, parameters["weight"], parameters["bias"])
    return products.product(hidden, parameters["weight"], parameters["bias"])


def project_together(linears: Sequence[nn.Module], hidden: torch.Tensor) -> Sequence[torch.Tensor]:
    """Applies linear layers to the same states."""
    if not products.ways_of_shapes or not all(map(_is_plain, linears)):
        return [project(linear, hidden) for linear in linears]
    return products.products(hidden, [(part._parameters["weight"], part._parameters["bias"]) for part in linears])


def _is_plain(linear: nn.Module) -> bool:
    """Tells whether a linear layer is not hooked, wrapped or packed."""
    return type(linear) is nn.Linear and not is_hooked(linear) and "weight" in linear._parameters


class DecoderLayer(DirectModule):
    """
    Args:
        self_attn (`RotaryAttention`): Attention.
        mlp (`GatedMLP`): MLP.
        input_layernorm, post_attention_layernorm (`nn.Module`): Norms of what they read; `nn.Identity` for none.
    """

    def __init__(
        self,
        self_attn: RotaryAttention,
        mlp: GatedMLP,
        input_layernorm: nn.Module,
        post_attention_layernorm: nn.Module,
    ):
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = input_layernorm
        self.post_attention_layernorm = post_attention_layernorm

    @classmethod
    def of(cls, layer: nn.Module, layer_idx: int) -> DecoderLayer:
        """The layer with the parameters of one of transformers', for which `is_llama_layer` holds.

        Args:
            layer (`nn.Module`): The layer; its linear modules are taken as they are.
            layer_idx (`int`): Which layer of the cache it is.
        """
        parts = {
            "self_attn": RotaryAttention.of(layer.self_attn, layer_idx),
            "mlp": GatedMLP.sharing(layer.mlp),
            "input_layernorm": RMSNorm.sharing(layer.input_layernorm),
            "post_attention_layernorm": RMSNorm.sharing(layer.post_attention_layernorm),
        }
        return cls.sharing(layer, _modules=parts)

    def forward(
        self,
        stream: torch.Tensor,
        angles: Angles,
        mask: torch.Tensor | SlotMask | None,
        cache: KeyValueCache | None,
        attended: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The stream `(R, T, H)` after the layer.

        Args:
            stream (`torch.Tensor` of shape `(R, T, H)`): The stream before it.
            angles, mask, cache: As for [`RotaryAttention`].
            attended (`torch.Tensor` of shape `(R, T, X)`, *optional*): What attention reads, by default the normed
                stream.
        """
        parts = self._modules
        attended = parts["input_layernorm"](stream) if attended is None else attended
        stream = stream + parts["self_attn"](attended, angles, mask, cache)
        return stream + parts["mlp"](parts["post_attention_layernorm"](stream))


class RotaryAttention(DirectModule):
    """
    Args:
        q_proj, k_proj, v_proj, o_proj (`nn.Module`): Linear layers from X to Q * D, K * D and K * D, and back to H.
        head_dim (`int`): D.
        groups (`int`): G.
        layer_idx (`int`): Which layer of the cache it is.
        head_norms (`tuple[nn.Module, nn.Module]`, *optional*): Norms of each head of the queries and of the keys.
        scaling (`float`, *optional*): Factor of the scores, by default `D ** -0.5`.
        is_causal (`bool`): Without a mask, several tokens see each other in their order only.
    """

    def __init__(
        self,
        q_proj: nn.Module,
        k_proj: nn.Module,
        v_proj: nn.Module,
        o_proj: nn.Module,
        *,
        head_dim: int,
        groups: int,
        layer_idx: int,
        head_norms: tuple[nn.Module, nn.Module] | None = None,
        scaling: float | None = None,
        is_causal: bool = True,
    ):
        super().__init__()
        self.head_dim = head_dim
        self.groups = groups
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.scaling: float = head_dim**-0.5 if scaling is None else scaling
        self.q_proj = q_proj
        self.k_proj = k_proj
        self.v_proj = v_proj
        self.o_proj = o_proj
        if head_norms is not None:
            self.q_norm: nn.Module
            self.k_norm: nn.Module
            self.q_norm, self.k_norm = head_norms

    @classmethod
    def of(cls, attention: nn.Module, layer_idx: int) -> RotaryAttention:
        """The attention of one of transformers' layers, see [`DecoderLayer.of`]."""
        norms = {name: RMSNorm.sharing(part) for name, part in attention._modules.items() if name.endswith("_norm")}
        groups = attention.num_key_value_groups
        parts = {**attention._modules, **norms}
        return cls.sharing(attention, _modules=parts, groups=groups, layer_idx=layer_idx, is_causal=True)

    @classmethod
    def new(
        cls,
        config: LayerSizes,
        layer_idx: int,
        biases: Container[str] = (),
        has_head_norms: bool = False,
        width: int | None = None,
        is_causal: bool = True,
    ) -> RotaryAttention:
        """Attention with random weights.

        Args:
            config (`LayerSizes`): Has the sizes.
            layer_idx (`int`): Which layer of the cache it is.
            biases (`Container[str]`): Names of the linear layers that have a bias.
            has_head_norms (`bool`): Queries and keys are normed.
            width (`int`, *optional*): X, by default H.
            is_causal (`bool`): See the class.
        """
        size, head_dim = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        shapes = {name: (width or size, keys) for name in ("k_proj", "v_proj")}
        shapes |= {"q_proj": (width or size, queries), "o_proj": (queries, size)}
        norms = (RMSNorm(head_dim, config.rms_norm_eps), RMSNorm(head_dim, config.rms_norm_eps))
        return cls(
            **{name: nn.Linear(*shape, bias=name in biases) for name, shape in shapes.items()},
            head_dim=head_dim,
            groups=config.num_attention_heads // config.num_key_value_heads,
            layer_idx=layer_idx,
            head_norms=norms if has_head_norms else None,
            is_causal=is_causal,
        )

    def forward(
        self,
        hidden: torch.Tensor,
        angles: Angles,
        mask: torch.Tensor | SlotMask | None,
        cache: KeyValueCache | None,
    ) -> torch.Tensor:
        """
        Args:
            hidden (`torch.Tensor` of shape `(R, T, X)`): What queries, keys and values are made of.
            angles (`tuple`): Cosine and signed sine, each of a shape that broadcasts to `(R, T, 1, D)`.
            mask (`torch.Tensor` or `SlotMask`, *optional*): From [`with_query_groups`], `(R | 1, 1, G * T | 1, S)`.
                `None`: everything is seen, or, if `is_causal`, what comes before.
            cache (`KeyValueCache`, *optional*): Where keys and values go. `None`: the tokens see each other alone.

        Returns:
            `torch.Tensor` of shape `(R, T, H)`.
        """
        parts, rows, tokens = self._modules, hidden.shape[0], hidden.shape[1]
        projected = project_together((parts["q_proj"], parts["k_proj"], parts["v_proj"]), hidden)
        query, key, values = (part.view(rows, tokens, -1, self.head_dim) for part in projected)
        if "q_norm" in parts:
            query, key = parts["q_norm"](query), parts["k_norm"](key)
        values = values.transpose(1, 2)
        # One rotation of both takes less time than two.
        turned = rotate(torch.cat((query, key), dim=2), *angles).transpose(1, 2)
        query, keys = turned.split_with_sizes((query.shape[2], key.shape[2]), dim=1)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        if mask is not None and not isinstance(mask, torch.Tensor):
            output = mask.attend(query, keys, values, self.scaling)
        elif mask is None and self.is_causal and tokens > 1:
            output = F.scaled_dot_product_attention(
                query, keys, values, is_causal=True, scale=self.scaling, enable_gqa=self.groups > 1
            ).transpose(1, 2)
        else:
            # The query heads of a group become further positions of their key/value head, which is read once for all.
            query = query.reshape(rows, keys.shape[1], self.groups * tokens, self.head_dim)
            output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self.scaling)
            output = output.reshape(rows, -1, tokens, self.head_dim).transpose(1, 2)
        return project(parts["o_proj"], output.reshape(rows, tokens, -1))

    def keys(self, hidden: torch.Tensor) -> torch.Tensor:
        """Keys `(R, T, K, D)` of `(R, T, X)` before they are turned."""
        parts = self._modules
        keys = project(parts["k_proj"], hidden).view(*hidden.shape[:2], -1, self.head_dim)
        return parts["k_norm"](keys) if "k_norm" in parts else keys

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """Values `(R, K, T, D)` of `(R, T, X)`."""
        values = project(self._modules["v_proj"], hidden)
        return values.view(*hidden.shape[:2], -1, self.head_dim).transpose(1, 2)


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Heads `(R, T, heads, D)`, turned by signed angles that broadcast to `(R, T, 1, D)`, see [`~layers.rope`]."""
    return heads * cosine + heads.roll(heads.shape[-1] // 2, -1) * sine


def with_query_groups(mask: torch.Tensor | None, groups: int) -> torch.Tensor | None:
    """A mask `(R | 1, 1, T, S)` for query heads that are further positions of their key/value head."""
    if mask is None or mask.shape[2] == 1 or groups == 1:
        return mask
    return mask.expand(-1, groups, -1, -1).reshape(len(mask), 1, -1, mask.shape[3])


class GatedMLP(DirectModule):
    """
    Args:
        gate_proj, up_proj, down_proj (`nn.Module`): Linear layers from H to the inner width, twice, and back.
        act_fn (`nn.Module`): The activation of the gate.
    """

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module, act_fn: nn.Module):
        super().__init__()
        self.gate_proj = gate_proj
        self.up_proj = up_proj
        self.down_proj = down_proj
        self.act_fn = act_fn

    @classmethod
    def new(cls, config: LayerSizes, biases: Container[str] = ()) -> GatedMLP:
        """An MLP with random weights; `biases` names the linear layers that have a bias."""
        outer, inner = config.hidden_size, config.intermediate_size
        shapes = {"gate_proj": (outer, inner), "up_proj": (outer, inner), "down_proj": (inner, outer)}
        linears = {name: nn.Linear(*shape, bias=name in biases) for name, shape in shapes.items()}
        return cls(**linears, act_fn=ACT2FN[config.hidden_act])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self._modules
        gate, up = project_together((parts["gate_proj"], parts["up_proj"]), hidden)
        return project(parts["down_proj"], parts["act_fn"](gate) * up)


class RMSNorm(DirectModule):
    """Root mean square norm over the last dimension, in float32, multiplied with the weights after the rounding.

    Args:
        size (`int`): Of the last dimension.
        eps (`float`): Added to the mean square.
        weight (`nn.Parameter`, *optional*): The weights `(size,)`; by default ones.
    """

    def __init__(self, size: int, eps: float, weight: nn.Parameter | None = None):
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.ones(size)) if weight is None else weight
        self.variance_epsilon = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self._parameters["weight"]
        if hidden.dtype == torch.float32:
            return torch.rms_norm(hidden, weight.shape, weight, self.variance_epsilon)
        return weight * torch.rms_norm(hidden, weight.shape, None, self.variance_epsilon)
