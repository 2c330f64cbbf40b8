"""Decoder layers of the Llama family: RMS norm, rotary attention, RMS norm, gated MLP, each added to the stream.

There may be norms of what is added as well, or those alone, and experts in the place of the MLP. On a GPU what lies
between two products runs as one kernel: sums with norms, heads on their way to attention, activated gates.

Draft networks are made of them, in drafting and in training, and small targets run through them. The names of their
parts are those of checkpoints. A forward of a few tokens through a small layer is mostly module calls, not arithmetic,
so a module of this file that has no hooks is called like a function, and reads its parts from where `nn.Module` keeps
them.

Shapes: R rows, T tokens, X width of what attention reads, H hidden size, Q query heads, K key/value heads, G = Q / K,
D head size, S slots of a cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from ..kernels import _triton, products, projections
from ..kernels._triton import fuses
from ..kernels.gates import GELU_TANH, SILU, gated
from ..kernels.heads import Angles, KeyValueCache, place_heads
from ..kernels.norms import Norm, Scale, add_norm
from ..kernels.projections import Unnormed
from .protocols import SlotMask
from .structure import AttentionForm, LayerForm, form_of


Module = TypeVar("Module", bound="DirectModule")


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


def project(linear: nn.Module, hidden: torch.Tensor | Unnormed) -> torch.Tensor:
    """Applies a linear layer, a quantised, wrapped or hooked one by its own call."""
    if not is_plain(linear):
        return linear(as_normed(hidden))
    parameters = linear._parameters
    if may_fuse(hidden) and projections.takes(hidden, alone := [(parameters["weight"], parameters["bias"])]):
        return projections.products(hidden, alone)[0]
    hidden = as_normed(hidden)
    # Spares small models a call for each of their layers.
    if not products.ways_of_shapes:
        return F.linear(hidden, parameters["weight"], parameters["bias"])
    return products.product(hidden, parameters["weight"], parameters["bias"])


def project_together(linears: Sequence[nn.Module], hidden: torch.Tensor | Unnormed) -> Sequence[torch.Tensor]:
    """Applies linear layers to the same states."""
    on_gpu = may_fuse(hidden)
    parameters = _plain_parameters(linears) if on_gpu or products.ways_of_shapes else None
    if parameters is None or (on_gpu and not projections.takes(hidden, parameters)):
        hidden = as_normed(hidden)
        return [project(linear, hidden) for linear in linears]
    return (projections if on_gpu else products).products(hidden, parameters)


def _plain_parameters(linears: Sequence[nn.Module]) -> list[projections.Linear] | None:
    """Weights and biases of linear layers, `None` where one of them is not plain."""
    if not all(map(is_plain, linears)):
        return None
    return [(linear._parameters["weight"], linear._parameters["bias"]) for linear in linears]


def is_plain(linear: nn.Module) -> bool:
    """Tells whether a linear layer is not hooked, wrapped or packed."""
    return type(linear) is nn.Linear and not is_hooked(linear) and "weight" in linear._parameters


def as_normed(hidden: torch.Tensor | Unnormed) -> torch.Tensor:
    """For whoever is no linear layer."""
    return hidden.normed() if isinstance(hidden, Unnormed) else hidden


HEAD_NORMS = ("q_norm", "k_norm")


class Pending(NamedTuple):
    """What nobody has added to the stream yet.

    Attributes:
        read (`torch.Tensor` of shape `(R, T, X)`): What the linear layer reads; without one, what is added.
        linear (`nn.Module`, *optional*): Makes of it what is added.
        norm (`nn.Module`, *optional*): The norm that this goes through before.
    """

    read: torch.Tensor
    linear: nn.Module | None
    norm: nn.Module | None


class DecoderLayer(DirectModule):
    """
    Args:
        self_attn (`RotaryAttention`): Attention.
        mlp (`nn.Module`): MLP, or experts.
        input_layernorm, post_attention_layernorm (`nn.Module`): Norms of what they read; `nn.Identity` for none.

    Attributes:
        form (`LayerForm`): Names of its norms.
    """

    form: LayerForm = LayerForm("input_layernorm", None, "post_attention_layernorm", None)

    def __init__(
        self,
        self_attn: RotaryAttention,
        mlp: nn.Module,
        input_layernorm: nn.Module,
        post_attention_layernorm: nn.Module,
    ):
        super().__init__()
        self.self_attn: RotaryAttention = self_attn
        self.mlp = mlp
        self.input_layernorm = input_layernorm
        self.post_attention_layernorm = post_attention_layernorm

    @classmethod
    def of(
        cls, layer: nn.Module, layer_idx: int, experts_of: Callable[[nn.Module], nn.Module] = lambda block: block
    ) -> DecoderLayer:
        """The layer with the parameters of one of transformers', for which `is_known_layer` holds.

        Args:
            layer (`nn.Module`): The layer; its linear modules are taken as they are, and so are experts.
            layer_idx (`int`): Which layer of the cache it is.
            experts_of (`Callable`): Takes a block of experts, and returns what runs in its place.
        """
        form = form_of(layer, "layer")
        assert form is not None, "a layer that nobody knows"
        names = [name for name in form[:4] if name is not None]
        parts: dict[str, nn.Module] = {name: RMSNorm.of(layer._modules[name]) for name in names}
        if form.factor is not None:
            parts["scale"] = Scaled(getattr(layer, form.factor))
            form = form._replace(after_attention="scale", after_mlp="scale")
        parts["self_attn"] = RotaryAttention.of(layer.self_attn, layer_idx)
        is_dense = form_of(layer.mlp, "mlp") is not None
        parts["mlp"] = GatedMLP.sharing(layer.mlp) if is_dense else experts_of(layer.mlp)
        return cls.sharing(layer, _modules=parts, form=form)

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
        return added_and_normed(*self.advance(stream, None, angles, mask, cache, attended), None)[0]

    def advance(
        self,
        stream: torch.Tensor,
        pending: Pending | None,
        angles: Angles,
        mask: torch.Tensor | SlotMask | None,
        cache: KeyValueCache | None,
        attended: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Pending]:
        """The stream, and what the layer leaves to be added to it, together with the norm that comes next.

        Args:
            pending (`Pending`, *optional*): What the layer before has left.
            stream, angles, mask, cache, attended: As for `forward`.
        """
        parts, form = self._modules, self.form
        if attended is None:
            before = parts[form.before_attention] if form.before_attention else None
            stream, attended = added_and_normed(stream, pending, before, may_wait=True)
        elif pending is not None:
            stream = added_and_normed(stream, pending, None)[0]
        attention, mlp = parts["self_attn"], parts["mlp"]
        if type(attention) is RotaryAttention and not is_hooked(attention):
            output, linear = attention.mixed(attended, angles, mask, cache), attention._modules["o_proj"]
        else:
            output, linear = attention(as_normed(attended), angles, mask, cache), None
        after = parts[form.after_attention] if form.after_attention else None
        before = parts[form.before_mlp] if form.before_mlp else None
        stream, read = added_and_normed(stream, Pending(output, linear, after), before, may_wait=True)
        after = parts[form.after_mlp] if form.after_mlp else None
        if type(mlp) is GatedMLP and not is_hooked(mlp):
            return stream, Pending(mlp.inner(read), mlp._modules["down_proj"], after)
        return stream, Pending(mlp(as_normed(read)), None, after)


def added_and_normed(
    stream: torch.Tensor, pending: Pending | None, norm: nn.Module | None, may_wait: bool = False
) -> tuple[torch.Tensor, torch.Tensor | Any]:
    """The sum of the stream and what is pending, and the normed sum, as one kernel where the norms are plain.

    Args:
        stream (`torch.Tensor` of shape `(R, T, H)`): The stream.
        pending (`Pending`, *optional*): What is pending.
        norm (`nn.Module`, *optional*): Norm of the sum.
        may_wait (`bool`): Linear layers read the normed sum, and may norm it themselves: it may be an [`Unnormed`].
    """
    if pending is None:
        return stream, stream if norm is None else norm(stream)
    read, linear, update_norm = pending
    is_far = may_fuse(stream)
    if is_far and linear is not None and update_norm is None:
        joined = _added_by_product(stream, read, linear, norm)
        if joined is not None:
            return joined if may_wait else (joined[0], as_normed(joined[1]))
    update = read if linear is None else project(linear, read)
    if is_far:
        given, known = (update_norm, norm), (_plain_norm(update_norm), _plain_norm(norm))
        is_plain = all(one is None or other is not None for one, other in zip(given, known))
        if is_plain and fuses(stream, update, *(None if one is None else one.weight for one in known)):
            return add_norm(stream, update, *known)
    stream = stream + (update if update_norm is None else update_norm(update))
    return stream, stream if norm is None else norm(stream)


def _added_by_product(
    stream: torch.Tensor, read: torch.Tensor, linear: nn.Module, norm: nn.Module | None
) -> tuple[torch.Tensor, torch.Tensor | Unnormed] | None:
    """The same by the kernel of the product that is added; `None` where it does not take it."""
    known, parameters = _plain_norm(norm), _plain_parameters([linear])
    can_norm = (norm is None or projections.goes_along(known)) and fuses(read, stream, known and known.weight)
    if parameters is None or not can_norm or not projections.takes(read, parameters):
        return None
    total, squares = projections.added_product(read, parameters[0], stream)
    return total, total if known is None else Unnormed(total, squares, known)


def may_fuse(tensor: torch.Tensor | Unnormed) -> bool:
    """Spares small models on a CPU the question of [`fuses`], which decides."""
    return not tensor.is_cpu or _triton.CHOICE == "triton"


def _plain_norm(module: nn.Module | None) -> Any:
    """The numbers of an [`RMSNorm`] or [`Scaled`] that nothing hooks into; `None` for other modules."""
    return module.norm if type(module) in (RMSNorm, Scaled) and not is_hooked(module) else None


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

    Attributes:
        form (`AttentionForm`): How its products and norms are made up.
        is_interleaved (`bool`): Neighbours of a head turn together, and not its halves.
        turns (`bool`): Heads turn at all.
        softcap (`float`): Bound of the scores, 0 for none.
    """

    form: AttentionForm = AttentionForm()
    is_interleaved: bool = False
    turns: bool = True
    softcap: float = 0.0

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
        norms = {name: RMSNorm.of(attention._modules[name]) for name in HEAD_NORMS if name in attention._modules}
        form: Any = form_of(attention, "attention")
        known = {"form": form, "is_interleaved": form_of(attention, "rotation")}
        known |= {"turns": form.turns is None or bool(getattr(attention, form.turns))}
        known |= {"softcap": (form.softcap and getattr(attention, form.softcap)) or 0.0}
        known |= {"groups": attention.num_key_value_groups, "layer_idx": layer_idx, "is_causal": True}
        return cls.sharing(attention, _modules={**attention._modules, **norms}, **known)

    def forward(
        self,
        hidden: torch.Tensor,
        angles: Angles,
        mask: torch.Tensor | SlotMask | None,
        cache: KeyValueCache | None,
    ) -> torch.Tensor:
        """The output `(R, T, H)`; the arguments are those of `mixed`."""
        return project(self._modules["o_proj"], self.mixed(hidden, angles, mask, cache))

    def mixed(
        self,
        hidden: torch.Tensor | Unnormed,
        angles: Angles,
        mask: torch.Tensor | SlotMask | None,
        cache: KeyValueCache | None,
    ) -> torch.Tensor:
        """The values that tokens see, weighed and added, in front of the last linear layer.

        Args:
            hidden (`torch.Tensor` or `Unnormed` of shape `(R, T, X)`): What queries, keys and values are made of.
            angles (`tuple`): Cosine and signed sine, each of a shape that broadcasts to `(R, T, 1, D)`.
            mask (`torch.Tensor` or `SlotMask`, *optional*): From [`with_query_groups`], `(R | 1, 1, G * T | 1, S)`.
                `None`: everything is seen, or, if `is_causal`, what comes before.
            cache (`KeyValueCache`, *optional*): Where keys and values go. `None`: the tokens see each other alone.

        Returns:
            `torch.Tensor` of shape `(R, T, Q * D)`.
        """
        rows, tokens = hidden.shape[0], hidden.shape[1]
        # Without numbers that turn, all of a head stay.
        angles = angles if self.turns else (angles[0][..., :0], angles[1][..., :0])
        query, keys, values = self._placed(hidden, angles, cache)
        if mask is not None and not isinstance(mask, torch.Tensor):
            output = mask.attend(query, keys, values, self.scaling, self.softcap)
        elif mask is None and self.is_causal and tokens > 1:
            output = F.scaled_dot_product_attention(
                query, keys, values, is_causal=True, scale=self.scaling, enable_gqa=self.groups > 1
            ).transpose(1, 2)
        else:
            # The query heads of a group become further positions of their key/value head, which is read once for all.
            query = query.reshape(rows, keys.shape[1], self.groups * tokens, self.head_dim)
            if self.softcap:
                output = capped_attention(query, keys, values, mask, self.scaling, self.softcap)
            else:
                output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self.scaling)
            output = output.reshape(rows, -1, tokens, self.head_dim).transpose(1, 2)
        return output.reshape(rows, tokens, -1)

    def _placed(self, hidden: torch.Tensor | Unnormed, angles: Angles, cache: KeyValueCache | None):
        """Queries `(R, Q, T, D)` of `(R, T, X)`, and the keys and values `(R, K, S, D)` that they see."""
        parts, rows, tokens = self._modules, hidden.shape[0], hidden.shape[1]
        if self.form.is_packed:
            joined = project(parts["qkv_proj"], hidden)
            width = joined.shape[-1] // (self.groups + 2)
            projected = joined.split((self.groups * width, width, width), dim=-1)
        else:
            projected = project_together((parts["q_proj"], parts["k_proj"], parts["v_proj"]), hidden)
        if self.form.norms_whole:
            projected = parts["q_norm"](projected[0]), parts["k_norm"](projected[1]), projected[2]
        query, key, value = (part.view(rows, tokens, -1, self.head_dim) for part in projected)
        has_norms = "q_norm" in parts and not self.form.norms_whole
        if cache is not None and may_fuse(hidden) and cache.writes_slots:
            norms = (_plain_norm(parts["q_norm"]), _plain_norm(parts["k_norm"])) if has_norms else None
            weights = [None if norm is None else norm.weight for norm in norms or ()]
            if (norms is None or None not in norms) and fuses(query, key, value, *weights):
                return place_heads((query, key, value), angles, norms, cache, self.layer_idx, self.is_interleaved)
        if has_norms:
            query, key = parts["q_norm"](query), parts["k_norm"](key)
        query, keys = turned(query, key, angles, self.is_interleaved)
        values = value.transpose(1, 2)
        return query, *((keys, values) if cache is None else cache.update(keys, values, self.layer_idx))

    def keys(self, hidden: torch.Tensor) -> torch.Tensor:
        """Keys `(R, T, K, D)` of `(R, T, X)` before they are turned."""
        parts = self._modules
        keys = project(parts["k_proj"], hidden).view(*hidden.shape[:2], -1, self.head_dim)
        return parts["k_norm"](keys) if "k_norm" in parts else keys

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """Values `(R, K, T, D)` of `(R, T, X)`."""
        values = project(self._modules["v_proj"], hidden)
        return values.view(*hidden.shape[:2], -1, self.head_dim).transpose(1, 2)


def capped_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Attention whose scores have a bound, which torch's own has not; the shapes are those of that."""
    scores = (query @ keys.transpose(-1, -2) * scale / softcap).tanh() * softcap
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values


def turned(
    query: torch.Tensor, key: torch.Tensor, angles: Angles, is_interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `(R, Q, T, D)` and keys `(R, K, T, D)` from those of tokens `(R, T, heads, D)`, turned by `angles`."""
    # One rotation of both takes less time than two.
    both = rotate(torch.cat((query, key), dim=2), *angles, is_interleaved).to(query.dtype).transpose(1, 2)
    return both.split_with_sizes((query.shape[2], key.shape[2]), dim=1)


def rotate(
    heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, is_interleaved: bool = False
) -> torch.Tensor:
    """Heads `(R, T, heads, D)`, turned by signed angles that broadcast to `(R, T, 1, A)`, see [`~layers.rope`]."""
    size = cosine.shape[-1]
    if not size:
        return heads
    if size < heads.shape[-1]:
        turning, left = heads.tensor_split((size,), dim=-1)
        return torch.cat((rotate(turning, cosine, sine, is_interleaved), left), dim=-1)
    partners = heads.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if is_interleaved else heads.roll(size // 2, -1)
    return heads * cosine + partners * sine


def with_query_groups(mask: torch.Tensor | SlotMask | None, groups: int) -> torch.Tensor | SlotMask | None:
    """A mask `(R | 1, 1, T, S)` for query heads that are further positions of their key/value head."""
    if not isinstance(mask, torch.Tensor) or mask.shape[2] == 1 or groups == 1:
        return mask
    return mask.expand(-1, groups, -1, -1).reshape(len(mask), 1, -1, mask.shape[3])


class GatedMLP(DirectModule):
    """
    Args:
        gate_proj, up_proj, down_proj (`nn.Module`): Linear layers from H to the inner width, twice, and back.
        act_fn (`nn.Module`): The activation of the gate.

    transformers' layers may have one product `gate_up_proj` for both, and then the activation as `activation_fn`.
    """

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module, act_fn: nn.Module):
        super().__init__()
        self.gate_proj = gate_proj
        self.up_proj = up_proj
        self.down_proj = down_proj
        self.act_fn = act_fn

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return project(self._modules["down_proj"], self.inner(hidden))

    def inner(self, hidden: torch.Tensor | Unnormed) -> torch.Tensor:
        """The active gate times its other half, `(..., I)`, in front of the last linear layer."""
        parts = self._modules
        is_packed = "gate_up_proj" in parts
        activation = parts["activation_fn" if is_packed else "act_fn"]
        kind = activation_kind(activation) if may_fuse(hidden) else None
        if is_packed:
            gate, up = project(parts["gate_up_proj"], hidden).chunk(2, dim=-1)
        else:
            halves = parts["gate_proj"], parts["up_proj"]
            parameters = None if kind is None else _plain_parameters(halves)
            if parameters is not None and projections.takes(hidden, parameters):
                return projections.gated_product(hidden, *parameters, kind)
            gate, up = project_together(halves, hidden)
        return gated(gate, up, kind) if kind is not None and fuses(gate, up) else activation(gate) * up


_ACTIVATIONS = {
    type(ACT2FN[name]): kind for name, kind in (("silu", SILU), ("swish", SILU), ("gelu_pytorch_tanh", GELU_TANH))
}


def activation_kind(activation: nn.Module) -> str | None:
    """The name of an activation that kernels know, and nothing hooks into; `None` for others."""
    return None if is_hooked(activation) else _ACTIVATIONS.get(type(activation))


class RMSNorm(DirectModule):
    """Root mean square norm over the last dimension, in float32, multiplied with the weights after the rounding.

    Args:
        size (`int`): Of the last dimension.
        eps (`float`): Added to the mean square.
        weight (`nn.Parameter`, *optional*): The weights `(size,)`; by default ones.

    Attributes:
        offset, rounds_last, is_centered: Of [`Norm`].
    """

    offset: float = 0.0
    rounds_last: bool = False
    is_centered: bool = False

    def __init__(self, size: int, eps: float, weight: nn.Parameter | None = None):
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.ones(size)) if weight is None else weight
        self.variance_epsilon = eps

    @classmethod
    def of(cls, norm: nn.Module) -> RMSNorm:
        """The norm with the weights of one of transformers', whose form is known."""
        form: Any = form_of(norm, "norm")
        eps = form.eps if isinstance(form.eps, float) else getattr(norm, form.eps)
        known = {"offset": form.offset, "rounds_last": form.rounds_last, "is_centered": form.is_centered}
        return cls.sharing(norm, variance_epsilon=eps, **known)

    @property
    def norm(self) -> Norm:
        """Its numbers."""
        weight = self._parameters.get("weight")
        return Norm(weight, self.variance_epsilon, self.offset, self.rounds_last, self.is_centered)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        if may_fuse(hidden) and fuses(hidden, norm.weight):
            return add_norm(hidden, None, None, norm)[1]
        return normed(hidden, norm)


def normed(hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
    """The normed `hidden` `(..., H)`, in torch."""
    weight, eps, offset, rounds_last, is_centered = norm
    if is_centered:
        return F.layer_norm(hidden.float(), hidden.shape[-1:], None, None, eps).to(hidden.dtype)
    assert weight is not None, "only layer norms have no weights"
    if rounds_last:
        wide = weight.float() + offset if offset else weight.float()
        return (torch.rms_norm(hidden.float(), weight.shape, None, eps) * wide).to(hidden.dtype)
    if hidden.dtype == torch.float32:
        return torch.rms_norm(hidden, weight.shape, weight, eps)
    return weight * torch.rms_norm(hidden, weight.shape, None, eps)


class Scaled(DirectModule):
    """Multiplies with a number, in the place of a norm of what is added to the stream."""

    def __init__(self, factor: float):
        super().__init__()
        self.norm: Scale = Scale(factor)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.norm.factor
