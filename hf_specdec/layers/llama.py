"""Decoder layers of the Llama family: RMS norm, rotary attention, RMS norm, gated MLP, each added to the stream.

There may be norms of what is added as well, or those alone, and experts in the place of the MLP. On a GPU what lies
between two products runs as one kernel: sums with norms, heads on their way to attention, activated gates.

The two halves of a head are the coordinates that turn (Su et al. 2021, arXiv:2104.09864): `(x, y)` becomes
`(x cos - y sin, y cos + x sin)`. Sines are kept with the sign that they have there.

Draft networks are made of them, in drafting and in training, and small targets run through them. The names of their
parts are those of checkpoints. A forward of a few tokens through a small layer is mostly module calls, not arithmetic:
what the layer computes with is bound once for a call, see [`~layers.plan`].

Shapes: R rows, T tokens, X width of what attention reads, H hidden size, Q query heads, K key/value heads, G = Q / K,
D head size, A numbers of a head that turn, S slots of a cache, I inner width of an MLP.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from ..checkpoints.draft_reader import DraftConfig
from ..kernels import gates, heads, norms, projections
from ..kernels.gates import GELU_TANH, SILU
from ..kernels.heads import Angles, KeyValueCache
from ..kernels.norms import Norm, Scale
from ..kernels.projections import Unnormed
from .plan import (
    LayerPlan,
    Normed,
    PartPlan,
    Read,
    Way,
    bind_linear,
    bind_linears,
    bind_norm,
    fused_matrices,
    is_hooked,
    is_known,
    norm_of,
    planned,
    project,
    reading,
    way_of,
)
from .structure import AttentionForm, LayerForm, form_of


Module = TypeVar("Module", bound=nn.Module)

HEAD_NORMS = ("q_norm", "k_norm")


class SlotMask(Protocol):
    """Attention that needs no mask tensor, such as a [`TreeMask`]."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, softcap: float, /
    ) -> torch.Tensor: ...


Mask = torch.Tensor | SlotMask | None

# Of queries and keys.
PairOfNorms = tuple[Callable[[torch.Tensor], torch.Tensor], ...]

# Ends of the names under which `nn.Module` keeps hooks.
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


def sharing(kind: type[Module], module: nn.Module, **changed: Any) -> Module:
    """A module of a class with the attributes of another, its parameters and parts too, but for some and for hooks."""
    made = kind.__new__(kind)
    hooks = {name: OrderedDict() for name in module.__dict__ if name.endswith(_HOOKS)}
    made.__dict__.update(module.__dict__, **hooks, **changed)
    return made


class DecoderLayer(nn.Module):
    """Attention and an MLP, or experts, with norms of what they read; `nn.Identity` for none."""

    form: LayerForm = LayerForm("input_layernorm", None, "post_attention_layernorm", None)  # names of its norms
    scale: Scale | None = None  # of what it adds to the stream, in the place of norms

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
        """The layer with the parts of one of transformers', for which `is_known_layer` holds."""
        form = form_of(layer, "layer")
        assert form is not None, "a layer that nobody knows"
        names = [name for name in form[:4] if name is not None]
        parts: dict[str, nn.Module] = {name: RMSNorm.of(layer._modules[name]) for name in names}
        scale = None if form.factor is None else Scale(getattr(layer, form.factor))
        parts["self_attn"] = RotaryAttention.of(layer.self_attn, layer_idx)
        is_dense = form_of(layer.mlp, "mlp") is not None
        parts["mlp"] = sharing(GatedMLP, layer.mlp) if is_dense else experts_of(layer.mlp)
        return sharing(cls, layer, _modules=parts, form=form, scale=scale)

    def plan(self, way: Way, dtype: torch.dtype, following: Normed | None = None) -> LayerPlan:
        """What the layer computes with, and the norm of what reads the stream after it."""
        parts, form = self._modules, self.form
        before_attention, after_attention, before_mlp, after_mlp = (
            norm_of(parts[name] if name else None) for name in form[:4]
        )
        if self.scale is not None:
            after_attention = after_mlp = self.scale
        # Modules of other classes, and hooked ones, are called.
        attention, mlp = (
            part.plan(way, dtype) if "plan" in vars(type(part)) and not is_hooked(part) else PartPlan(part)
            for part in (parts["self_attn"], parts["mlp"])
        )
        return LayerPlan(
            reading(before_attention, attention.norms, dtype),
            {name: bind_norm(norm_of(parts.get(name)), way, dtype) for name in (*parts, None)},
            attention.run,
            bind_sum(way, dtype, attention.last, after_attention, reading(before_mlp, mlp.norms, dtype)),
            mlp.run,
            bind_sum(way, dtype, mlp.last, after_mlp, following or Normed()),
        )

    def forward(self, stream: torch.Tensor, angles: Angles, mask: Mask, cache: KeyValueCache | None) -> torch.Tensor:
        """The stream `(R, T, H)` after the layer; the arguments are those of `advance`."""
        plan = planned(self, stream, cache)
        return self.advance(plan, stream, plan.norms[self.form.before_attention](stream), angles, mask, cache)[0]

    def advance(
        self,
        plan: LayerPlan,
        stream: torch.Tensor,
        read: Read,
        angles: Angles,
        mask: Mask,
        cache: KeyValueCache | None,
        first: int = 0,
    ) -> tuple[torch.Tensor, Read]:
        """The stream `(R, T, H)` from token `first` on after the layer, and what is read next; `read` is normed."""
        # Queries, keys and values, rotation, cache, attention.
        mixed = plan.attend(read, angles, mask, cache)
        if first:
            stream, mixed = stream[:, first:], mixed[:, first:]
        # Output, residual, norm.
        stream, read = plan.add_attention(stream, mixed)
        # MLP, residual, and the norm of what comes next.
        return plan.add_mlp(stream, plan.activate(read))


def bind_sum(
    way: Way, dtype: torch.dtype, last: nn.Module | None, update_norm: Any, normed: Normed
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, Read]]:
    """What adds to the stream `(R, T, H)` the linear layer of `(R, T, X)`, normed or not, and norms the sum."""
    matrices = None if last is None or update_norm is not None else fused_matrices(way, dtype, [last])
    if matrices is not None:
        bound_norm = bind_norm(normed.norm, way, dtype)

        def add_in_product(stream: torch.Tensor, read: torch.Tensor) -> tuple[torch.Tensor, Read]:
            stream, squares = projections.added_product_triton(read, matrices[0], stream)
            return stream, Unnormed(stream, squares, normed.norm) if normed.is_left else bound_norm(stream)

        return add_in_product
    linear = None if last is None else bind_linear(last)
    has_kernel = way is not Way.TORCH and is_known(update_norm, dtype) and is_known(normed.norm, dtype)
    bound_update_norm, norm = (
        each if each is None or has_kernel else bind_norm(each, way, dtype) for each in (update_norm, normed.norm)
    )

    def add(stream: torch.Tensor, read: torch.Tensor) -> tuple[torch.Tensor, Read]:
        update = read if linear is None else linear(read)
        # A module that is called may return any dtype.
        if has_kernel and update.dtype == stream.dtype:
            return norms.add_norm_triton(stream, update, update_norm, normed.norm)
        stream = stream + (update if bound_update_norm is None else bound_update_norm(update))
        return stream, stream if norm is None else norm(stream)

    return add


class RotaryAttention(nn.Module):
    """Attention of heads that turn, maybe with norms of each head of queries and keys.

    It reads `(R, T, X)`. Angles, cosine and signed sine, broadcast to `(R, T, 1, D)`. A mask is one of
    [`with_query_groups`], `(R | 1, 1, G * T | 1, S)`; without one everything is seen, or, if `is_causal`, what comes
    before. Without a cache the tokens see each other alone.
    """

    form: AttentionForm = AttentionForm()  # how its products and norms are made up
    is_interleaved: bool = False  # neighbours of a head turn together, and not its halves
    turns: bool = True  # heads turn at all
    softcap: float = 0.0  # bound of the scores, 0 for none

    def __init__(
        self,
        config: DraftConfig,
        layer_idx: int,
        biases: Container[str] = (),  # names of the linear layers that have one
        has_head_norms: bool = False,
        width: int | None = None,  # X, by default H
        is_causal: bool = True,
    ):
        super().__init__()
        size, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.groups: int = config.num_attention_heads // config.num_key_value_heads
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.scaling: float = head_dim**-0.5
        queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        shapes = {name: (width or size, keys) for name in ("k_proj", "v_proj")}
        shapes |= {"q_proj": (width or size, queries), "o_proj": (queries, size)}
        linears = {name: nn.Linear(*shape, bias=name in biases) for name, shape in shapes.items()}
        self.q_proj: nn.Module = linears["q_proj"]
        self.k_proj: nn.Module = linears["k_proj"]
        self.v_proj: nn.Module = linears["v_proj"]
        self.o_proj: nn.Module = linears["o_proj"]
        if has_head_norms:
            self.q_norm: nn.Module = RMSNorm(head_dim, config.rms_norm_eps)
            self.k_norm: nn.Module = RMSNorm(head_dim, config.rms_norm_eps)

    @classmethod
    def of(cls, attention: nn.Module, layer_idx: int) -> RotaryAttention:
        """The attention of one of transformers' layers, see [`DecoderLayer.of`]."""
        norms = {name: RMSNorm.of(attention._modules[name]) for name in HEAD_NORMS if name in attention._modules}
        form: Any = form_of(attention, "attention")
        attributes = {"form": form, "is_interleaved": form_of(attention, "rotation")}
        attributes |= {"turns": form.turns is None or bool(getattr(attention, form.turns))}
        attributes |= {"softcap": (form.softcap and getattr(attention, form.softcap)) or 0.0}
        attributes |= {"groups": attention.num_key_value_groups, "layer_idx": layer_idx, "is_causal": True}
        return sharing(cls, attention, _modules={**attention._modules, **norms}, **attributes)

    def plan(self, way: Way, dtype: torch.dtype) -> PartPlan:
        parts, form = self._modules, self.form
        names = ("qkv_proj",) if form.is_packed else ("q_proj", "k_proj", "v_proj")
        project, takes_unnormed = bind_linears(way, dtype, [parts[name] for name in names])
        numbers = [norm_of(parts[name]) for name in HEAD_NORMS if name in parts]
        bound = tuple(bind_norm(norm, way, dtype) for norm in numbers) or None
        whole_norms, head_norms = (bound, None) if form.norms_whole else (None, bound)
        has_kernel = way is not Way.TORCH and (head_norms is None or all(is_known(norm, dtype) for norm in numbers))
        place = partial(
            place_heads,
            norms=tuple(numbers) if has_kernel and head_norms else head_norms,
            layer_idx=self.layer_idx,
            is_interleaved=self.is_interleaved,
            has_kernel=has_kernel,
        )
        mixed = partial(self.mixed, project=project, whole_norms=whole_norms, place=place)
        return PartPlan(mixed, parts["o_proj"], takes_unnormed)

    def forward(self, hidden: torch.Tensor, angles: Angles, mask: Mask, cache: KeyValueCache | None) -> torch.Tensor:
        """The output `(R, T, H)`."""
        plan = planned(self, hidden, cache)
        return bind_linear(plan.last)(plan.run(hidden, angles, mask, cache))

    def mixed(
        self,
        read: Read,
        angles: Angles,
        mask: Mask,
        cache: KeyValueCache | None,
        *,
        project: Callable[[Read], Any],  # to queries, keys and values, apart or packed
        whole_norms: PairOfNorms | None,  # of all heads together
        place: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]],  # each head, and in the cache
    ) -> torch.Tensor:
        """The values `(R, T, Q * D)` that tokens see, weighed and added, in front of the last linear layer."""
        rows, tokens, _ = read.shape
        # Without numbers that turn, all of a head stay.
        angles = angles if self.turns else (angles[0][..., :0], angles[1][..., :0])
        projected = project(read)
        if self.form.is_packed:
            width = projected[0].shape[-1] // (self.groups + 2)
            projected = projected[0].split((self.groups * width, width, width), dim=-1)
        if whole_norms is not None:
            projected = whole_norms[0](projected[0]), whole_norms[1](projected[1]), projected[2]
        projected = [part.view(rows, tokens, -1, self.head_dim) for part in projected]
        query, keys, values = place(projected, angles, cache=cache)
        if mask is not None and not isinstance(mask, torch.Tensor):
            output = mask.attend(query, keys, values, self.scaling, self.softcap)
        elif mask is None and self.is_causal and tokens > 1:
            output = F.scaled_dot_product_attention(
                query, keys, values, is_causal=True, scale=self.scaling, enable_gqa=self.groups > 1
            ).transpose(1, 2)
        else:
            # The query heads of a group become further positions of their key/value head, which is read once for all.
            query = query.reshape(rows, keys.shape[1], self.groups * tokens, self.head_dim)
            if self.softcap:  # torch's own attention has none
                scores = (query @ keys.transpose(-1, -2) * self.scaling / self.softcap).tanh() * self.softcap
                scores = scores if mask is None else scores + mask
                output = scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
            else:
                output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self.scaling)
            output = output.reshape(rows, -1, tokens, self.head_dim).transpose(1, 2)
        return output.reshape(rows, tokens, -1)

    def keys(self, hidden: torch.Tensor) -> torch.Tensor:
        """Keys `(R, T, K, D)` of `(R, T, X)` before they are turned."""
        parts: dict[str, Any] = self._modules
        keys = project(parts["k_proj"], hidden).view(*hidden.shape[:2], -1, self.head_dim)
        return parts["k_norm"](keys) if "k_norm" in parts else keys

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """Values `(R, K, T, D)` of `(R, T, X)`."""
        values = project(self._modules["v_proj"], hidden)
        return values.view(*hidden.shape[:2], -1, self.head_dim).transpose(1, 2)


def place_heads(
    projected: Sequence[torch.Tensor],
    angles: Angles,
    norms: PairOfNorms | None,
    cache: KeyValueCache | None,
    layer_idx: int,
    is_interleaved: bool,
    has_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As [`place_heads_triton`], which takes the heads of rows that have slots of their own."""
    plan = None if cache is None else cache.plan
    if has_kernel and plan is not None and plan.firsts is not None and plan.layers:
        if len({part.dtype for part in projected}) == 1:
            return heads.place_heads_triton(projected, angles, norms, cache, layer_idx, is_interleaved)
    query, key, value = projected
    if norms is not None:
        query, key = norms[0](query), norms[1](key)
    # One rotation of both takes less time than two.
    both = rotate(torch.cat((query, key), dim=2), *angles, is_interleaved).to(query.dtype).transpose(1, 2)
    query, keys = both.split_with_sizes((query.shape[2], key.shape[2]), dim=1)
    values = value.transpose(1, 2)
    if cache is None:
        return query, keys, values
    if plan is None or plan.offset is None or not plan.layers:
        return query, *cache.update(keys, values, layer_idx)
    # The slots of rows of equal length are one slice.
    slots, new, seen = plan.layers[layer_idx], slice(plan.offset, plan.columns), slice(plan.columns)
    rows = len(keys)
    slots.keys[:rows, :, new], slots.values[:rows, :, new] = keys, values
    return query, slots.keys[:rows, :, seen], slots.values[:rows, :, seen]


def rotate(
    heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, is_interleaved: bool = False
) -> torch.Tensor:
    """Heads `(R, T, heads, D)`, turned by signed angles that broadcast to `(R, T, 1, A)`."""
    size = cosine.shape[-1]
    if not size:
        return heads
    if size < heads.shape[-1]:
        turning, left = heads.tensor_split((size,), dim=-1)
        return torch.cat((rotate(turning, cosine, sine, is_interleaved), left), dim=-1)
    partners = heads.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if is_interleaved else heads.roll(size // 2, -1)
    return heads * cosine + partners * sine


# Kinds whose frequencies do not depend on the length of the text, and the bound of tables, which outlive calls.
_STATIC_KINDS = ("default", "linear", "llama3", "yarn")
_LONGEST_TABLE = 1 << 13


def has_static_frequencies(parameters: Mapping[str, Any] | None) -> bool:
    """Tells whether an embedding with these `rope_parameters` has the same frequencies at every length."""
    return (parameters or {}).get("rope_type", "default") in _STATIC_KINDS


class RotaryAngles:
    """Angles of positions, by transformers' rotary embedding, and a type of layer where each has its own angles."""

    def __init__(self, embedding: nn.Module, layer_type: str | None = None, is_interleaved: bool = False):
        self.embedding: nn.Module = embedding
        self._is_interleaved = is_interleaved
        self._type, self._prefix = ((), "") if layer_type is None else ((layer_type,), f"{layer_type}_")
        parameters = embedding.config.rope_parameters
        self._is_static = has_static_frequencies(parameters if layer_type is None else parameters[layer_type])
        # Whether angles have the dtype of what turns, and not float32; `None` where others than kernels know it.
        self._rounds = form_of(embedding, "rotary") if self._is_static and not is_hooked(embedding) else None
        self.tables: dict[tuple[torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self, positions: torch.LongTensor | slice, like: torch.Tensor, bound: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine of position ids `(R | 1, T)` or a slice, which broadcast to `(R, T, 1, A)`.

        The bound is above the size of all positions; those of padding may be negative, and get the angles of others.
        Without one nothing is looked up: a graph must not read a table that a later call replaces.
        """
        if isinstance(positions, torch.Tensor):
            positions = positions.to(like.device)
        if bound is None or bound > _LONGEST_TABLE or not self._is_static:
            if isinstance(positions, slice):
                positions = torch.arange(positions.start, positions.stop, device=like.device)[None]
            return self._angles(like, positions)
        # A network may be moved or cast between calls.
        place = (like.dtype, like.device)
        # Another thread may put a shorter table in this one's place.
        table = self.tables.get(place)
        if table is None or bound > len(table[0]):
            every = torch.arange(2 * bound, device=like.device)
            table = self.tables[place] = tuple(values[0] for values in self._angles(like, every[None]))
        return table[0][positions], table[1][positions]

    def _angles(self, like: torch.Tensor, positions: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._rounds is None or way_of(like) is Way.TORCH:
            return heads.signed_angles(*self.embedding(like, positions, *self._type), self._is_interleaved)
        frequencies = getattr(self.embedding, f"{self._prefix}inv_freq").to(like.device)
        factor = getattr(self.embedding, f"{self._prefix}attention_scaling")
        dtype = like.dtype if self._rounds else torch.float32
        return heads.rotary_angles_triton(positions, frequencies, factor, dtype, self._is_interleaved)


def with_query_groups(mask: Mask, groups: int) -> Mask:
    """A mask `(R | 1, 1, T, S)` for query heads that are further positions of their key/value head."""
    if not isinstance(mask, torch.Tensor) or mask.shape[2] == 1 or groups == 1:
        return mask
    return mask.expand(-1, groups, -1, -1).reshape(len(mask), 1, -1, mask.shape[3])


class GatedMLP(nn.Module):
    """An MLP whose activated gate is multiplied with its other half.

    transformers' layers may have one product `gate_up_proj` for both, and then the activation as `activation_fn`.
    """

    def __init__(self, size: int, inner: int, activation: str = "silu", biases: Container[str] = ()):
        super().__init__()
        self.gate_proj: nn.Module = nn.Linear(size, inner, bias="gate_proj" in biases)
        self.up_proj: nn.Module = nn.Linear(size, inner, bias="up_proj" in biases)
        self.down_proj: nn.Module = nn.Linear(inner, size, bias="down_proj" in biases)
        self.act_fn: nn.Module = ACT2FN[activation]

    def plan(self, way: Way, dtype: torch.dtype) -> PartPlan:
        parts: dict[str, Any] = self._modules
        is_packed = "gate_up_proj" in parts
        activation, last = parts["activation_fn" if is_packed else "act_fn"], parts["down_proj"]
        kind = None if way is Way.TORCH else activation_kind(activation)
        names = ("gate_up_proj",) if is_packed else ("gate_proj", "up_proj")
        linears = [parts[name] for name in names]
        matrices = None if is_packed or kind is None else fused_matrices(way, dtype, linears)
        if matrices is not None:
            gate, up = matrices
            return PartPlan(partial(projections.gated_product_triton, gate=gate, up=up, kind=kind), last, True)
        run, takes_unnormed = bind_linears(way, dtype, linears)

        def activate(read: Read) -> torch.Tensor:
            """The active gate times its other half, `(..., I)`, in front of the last linear layer."""
            gate, up = run(read)[0].chunk(2, dim=-1) if is_packed else run(read)
            if kind is None or gate.dtype != up.dtype:
                return activation(gate) * up
            return gates.gated_triton(gate, up, kind)

        return PartPlan(activate, last, takes_unnormed)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        plan = self.plan(way_of(hidden), hidden.dtype)
        return bind_linear(plan.last)(plan.run(hidden))


_ACTIVATIONS = {
    type(ACT2FN[name]): kind for name, kind in (("silu", SILU), ("swish", SILU), ("gelu_pytorch_tanh", GELU_TANH))
}


def activation_kind(activation: nn.Module) -> str | None:
    """The name of an activation that kernels know, and nothing hooks into; `None` for others."""
    return None if is_hooked(activation) else _ACTIVATIONS.get(type(activation))


class RMSNorm(nn.Module):
    """Root mean square norm in float32, multiplied with weights `(size,)` after the rounding, see [`Norm`]."""

    offset: float = 0.0
    rounds_last: bool = False
    is_centered: bool = False

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    @classmethod
    def of(cls, norm: nn.Module) -> RMSNorm:
        """The norm with the weights of one of transformers', whose form is known."""
        attributes = form_of(norm, "norm")._asdict()
        eps = attributes.pop("eps")
        return sharing(cls, norm, variance_epsilon=eps if isinstance(eps, float) else getattr(norm, eps), **attributes)

    @property
    def norm(self) -> Norm:
        weight = self._parameters.get("weight")
        return Norm(weight, self.variance_epsilon, self.offset, self.rounds_last, self.is_centered)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return bind_norm(self.norm, way_of(hidden), hidden.dtype)(hidden)
