"""A lean forward for small dense models of the Llama family.

A forward of a few tokens through a small model is mostly module calls and small operations, not arithmetic. The same
operations written as plain functions over the model's own weights take half of the time or less. The weights are read
where they are, so nothing is copied, and the results are bit for bit those of the model's own
forward over slots. Whatever is not exactly such a model (other classes, quantised layers, adapters, hooks, replaced
forwards, another attention implementation) goes through its own forward.

Shapes: R rows, T nodes, H hidden size, Q query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..drafts import TreeTopology
from ..kernels.cache import WritePlan
from ..kernels.tree_attention import DTYPES, MAX_HEAD_SIZE
from .attention import TREE_KERNEL, TreeMask
from .cache import SlotCache, SlotLayer
from .masks import FULL, RowState, node_masks
from .target import SlotModel, SlotOutput


# Classes whose layers are: RMS norm, rotary attention, RMS norm, gated MLP, each added to the stream.
_FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

# Rotary embeddings whose frequencies do not depend on the length of the sequence.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")

# Above this the arithmetic weighs more than the calls, and the model's own forward may have better kernels.
_MAX_HIDDEN_SIZE = 1024


def slot_model(
    model: nn.Module, cache: SlotCache, states: tuple = (), forward_kwargs: dict | None = None
) -> SlotModel:
    """The fastest way to drive `model` over slots; the arguments are those of [`SlotModel`]."""
    if forward_kwargs or not is_plain_llama(model):
        return SlotModel(model, cache, states, forward_kwargs)
    return FunctionalSlotModel(model, cache, states)


def is_plain_llama(model: nn.Module) -> bool:
    """Whether `FunctionalSlotModel` computes exactly what the model's own forward does."""
    config = model.config
    if type(model).__name__ not in _FAMILY or not _is_published(type(model)):
        return False
    if config.hidden_size > _MAX_HIDDEN_SIZE or not _has_static_rope(getattr(config, "rope_parameters", None)):
        return False
    if config._attn_implementation != "sdpa":
        return False
    return all(is_untouched(module) for module in model.modules())


def is_untouched(module: nn.Module) -> bool:
    """Whether calling the module runs the forward that its class was published with, on plain weights."""
    if module.training or module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl:
        return False
    if "forward" in vars(module) or not (_is_published(type(module)) and _is_published(type(module).forward)):
        return False
    if "weight" in module._buffers:
        return False  # packed
    weight = module._parameters.get("weight")
    if is_traceable_wrapper_subclass(weight) or (weight is None and getattr(module, "weight", None) is not None):
        return False  # in parts on several processes, or packed
    return weight is None or weight.dim() != 2 or type(module) in (nn.Linear, nn.Embedding)


def _is_published(definition) -> bool:
    return definition.__module__.partition(".")[0] in ("torch", "transformers", "hf_specdec")


def _has_static_rope(parameters: Mapping | None) -> bool:
    """Whether the frequencies of these `rope_parameters` do not depend on the length of the text."""
    return (parameters or {}).get("rope_type", "default") in _STATIC_ROPE


class FunctionalSlotModel(SlotModel):
    """Drives a model for which `is_plain_llama` holds. Its prompt goes through the model's own forward."""

    def __init__(self, model, cache: SlotCache, states: tuple = ()):
        super().__init__(model, cache, states)
        decoder = model.get_decoder()
        self._embedding = decoder.embed_tokens.weight
        self._head = model.get_output_embeddings().weight
        self._norm = LeanNorm(decoder.norm)
        self._layers = [LeanLayer(layer) for layer in decoder.layers]
        self._has_full_span = all(span == FULL for span in self.profile.spans)
        types = self.profile.layer_types
        self._span_of_layer = [types.index(kind) if types else 0 for kind in self._layer_kinds(model.config)]
        self._rotary = RotaryTable(decoder.rotary_emb)

    def _layer_kinds(self, config) -> list[str]:
        return getattr(config, "layer_types", None) or [""] * len(self._layers)

    def forward(self, tokens: torch.LongTensor, topology: TreeTopology, logits_from: int = 0) -> SlotOutput:
        replayed = self._replay(tokens, topology, logits_from)
        if replayed is not None:
            return replayed
        plan, rows = self._plan_write(tokens)
        masks = self._masks_of_spans(topology, tokens, rows)
        stream = F.embedding(tokens, self._embedding)
        rotary = self._rotary_at(topology, stream, rows)
        states = {}
        for index, (layer, slots) in enumerate(zip(self._layers, self.cache.layers)):
            if index in self.states:
                states[index] = stream
            stream = layer(stream, rotary, slots, plan, masks[self._span_of_layer[index]])
        if len(self._layers) in self.states:
            states[len(self._layers)] = stream
        if "last" in self.states:
            states["last"] = last = self._norm(stream)
            return SlotOutput(F.linear(last[:, logits_from:], self._head), states)
        return SlotOutput(F.linear(self._norm(stream[:, logits_from:]), self._head), states)

    def _masks_of_spans(self, topology: TreeTopology, tokens: torch.LongTensor, rows: RowState) -> list:
        """What each layer's attention is given as mask, by span."""
        tree, spans, nodes = self._tree(topology, tokens, rows), self.profile.spans, tokens.shape[1]
        fits = self._head.dtype in DTYPES and self._layers[0].attention.head_size <= MAX_HEAD_SIZE
        has_kernel = tree is not None and fits
        self.attention_layers = Counter({TREE_KERNEL: len(self._layers)} if has_kernel else {})
        if has_kernel:
            return [TreeMask(tree, span) for span in spans]
        # One new token in rows of equal length sees every slot.
        if nodes == 1 and self._has_full_span and rows.is_uniform:
            return [None] * len(spans)
        # The query heads of a group become further positions of their key/value head.
        repeats = self._layers[0].attention.groups if nodes > 1 else 1
        return node_masks(topology, rows, self.cache.plan.columns, spans, self._head.dtype, repeats)

    def _rotary_at(
        self, topology: TreeTopology, like: torch.Tensor, rows: RowState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine `(R | 1, T, 1, D / 2)` of each node's position."""
        cosine, sine = self._rotary.up_to(self.cache.plan.columns + max(self.offsets), like)
        first, nodes = self.cache.lengths[0] + self.offsets[0], topology.depths.shape[-1]
        inside = self.max_position is None or first + nodes <= self.max_position + 1
        if topology.is_chain and inside and rows.is_uniform and len(set(self.offsets)) == 1:
            return cosine[first : first + nodes], sine[first : first + nodes]
        positions = self.positions(topology, rows)
        return cosine[positions], sine[positions]


class RotaryTable:
    """Angles of a rotary embedding with static frequencies, for all positions of a text that grows.

    Args:
        embedding (`nn.Module`): transformers' rotary embedding.
    """

    def __init__(self, embedding: nn.Module):
        self.embedding = embedding
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None

    def up_to(self, count: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of at least the first `count` positions, each `(positions, 1, D / 2)`.

        Args:
            like (`torch.Tensor`): Says in which dtype and where.
        """
        if self._angles is None or count > len(self._angles[0]):
            every = torch.arange(2 * count, device=like.device)
            self._angles = half_angles(*(angles[0] for angles in self.embedding(like, every[None])))
        return self._angles


def rotary_table(embedding: nn.Module, parameters: Mapping) -> RotaryTable | None:
    """The table of a rotary embedding with these `rope_parameters`; `None` where angles change with the text."""
    return RotaryTable(embedding) if _has_static_rope(parameters) else None


class RotaryAngles:
    """Angles of the entries of a draft, from a table unless the frequencies change with the text.

    Args:
        embedding (`nn.Module`): transformers' rotary embedding.
        parameters (`Mapping`): Its `rope_parameters`.
        lead (`int`): How far a position may be ahead of its slot.
    """

    def __init__(self, embedding: nn.Module, parameters: Mapping, lead: int):
        self.embedding, self.lead = embedding, lead
        self._table = rotary_table(embedding, parameters)

    def __call__(self, positions: torch.LongTensor, like: torch.Tensor, columns: int):
        """Cosine and sine of each entry, `(R | 1, T, 1, D / 2)`, in the first `columns` slots."""
        if self._table is None:
            return half_angles(*self.embedding(like, positions))
        cosine, sine = self._table.up_to(columns + self.lead, like)
        return cosine[positions], sine[positions]


def half_angles(cosine: torch.Tensor, sine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' angles `(..., T, D)` as `(..., T, 1, D / 2)`: both halves of a head turn by the same ones."""
    half = cosine.shape[-1] // 2
    return cosine[..., None, :half].contiguous(), sine[..., None, :half].contiguous()


class LeanLayer:
    """One decoder layer of this family as a function of the stream; the weights are those of the model's modules.

    Args:
        layer (`nn.Module`): The decoder layer. A norm may be an `nn.Identity`.
        attention (`type`, *optional*): The kind of `LeanAttention`; that itself by default.
    """

    def __init__(self, layer: nn.Module, attention: type[LeanAttention] | None = None):
        self.attention, self.mlp = (attention or LeanAttention)(layer.self_attn), LeanMLP(layer.mlp)
        self.attention_norm = lean_norm(layer.input_layernorm)
        self.mlp_norm = lean_norm(layer.post_attention_layernorm)

    def __call__(self, stream, rotary, slots, plan, mask):
        """The stream `(R, T, H)` behind the layer; for the other arguments see [`LeanAttention`]."""
        return self.finish(stream, self.attention_norm(stream), rotary, slots, plan, mask)

    def finish(self, stream, attended, *where):
        """The stream behind the layer, given what its attention reads."""
        stream = stream + self.attention(attended, *where)
        return stream + self.mlp(self.mlp_norm(stream))


class LeanAttention:
    """Rotary attention over slots, of transformers' Llama, Mistral, Qwen2 or Qwen3 attention module.

    Args:
        attention (`nn.Module`): The module.

    Attributes:
        groups (`int`): Query heads of a key/value head, which become further positions of it.
    """

    def __init__(self, attention: nn.Module):
        self.query, self.key, self.value, self.output = (
            _linear(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        )
        has_head_norms = hasattr(attention, "q_norm")
        self.head_norms = (LeanNorm(attention.q_norm), LeanNorm(attention.k_norm)) if has_head_norms else None
        self.head_size = attention.head_dim
        self.groups = attention.num_key_value_groups
        self.scale = attention.scaling

    def __call__(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        slots: SlotLayer,
        plan: WritePlan,
        mask: torch.Tensor | TreeMask | None,
    ) -> torch.Tensor:
        """
        Args:
            hidden (`torch.Tensor` of shape `(R, T, X)`): What queries, keys and values are made of.
            rotary (`tuple`): Cosine and sine, each of a shape that broadcasts to `(R, T, 1, D / 2)`.
            slots (`SlotLayer`), plan (`WritePlan`): Where keys and values go.
            mask (`torch.Tensor` or `TreeMask`, *optional*): Additive, `(R | 1, 1, groups * T, S)`, or
                `(R | 1, 1, 1, S)`.

        Returns:
            `torch.Tensor` of shape `(R, T, H)`.
        """
        rows, nodes, _ = hidden.shape
        query, key, value = (
            F.linear(hidden, *weights).view(rows, nodes, -1, self.head_size)
            for weights in (self.query, self.key, self.value)
        )
        if self.head_norms is not None:
            query, key = self.head_norms[0](query), self.head_norms[1](key)
        turned = _turn(torch.cat((query, key), dim=2), *rotary)
        query, key = turned.split((query.shape[2], key.shape[2]), dim=2)
        keys, values = slots.update(key.transpose(1, 2), value.transpose(1, 2), plan)
        if isinstance(mask, TreeMask):
            output = mask.attend(query.transpose(1, 2), keys, values, self.scale)
            return F.linear(output.reshape(rows, nodes, -1), *self.output)
        query = query.transpose(1, 2).reshape(rows, keys.shape[1], self.groups * nodes, self.head_size)
        output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self.scale)
        output = output.reshape(rows, -1, nodes, self.head_size).transpose(1, 2).reshape(rows, nodes, -1)
        return F.linear(output, *self.output)


def with_query_groups(mask: torch.Tensor | None, groups: int) -> torch.Tensor | None:
    """A mask `(R | 1, 1, T, S)` for query heads that are further positions of their key/value head."""
    if mask is None or mask.shape[2] == 1 or groups == 1:
        return mask
    return mask.expand(-1, groups, -1, -1).reshape(len(mask), 1, -1, mask.shape[3])


class LeanMLP:
    """Gated MLP."""

    def __init__(self, mlp: nn.Module):
        self.gate, self.up, self.down = (_linear(getattr(mlp, name)) for name in ("gate_proj", "up_proj", "down_proj"))
        self.activation = mlp.act_fn

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.activation(F.linear(hidden, *self.gate)) * F.linear(hidden, *self.up)
        return F.linear(hidden, *self.down)


class LeanNorm:
    """Root mean square norm over the last dimension, rounded where the models round."""

    def __init__(self, norm: nn.Module):
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.dtype == torch.float32:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)
        return self.weight * F.rms_norm(hidden, self.weight.shape, None, self.epsilon)


def lean_norm(norm: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return norm if isinstance(norm, nn.Identity) else LeanNorm(norm)


def _linear(module: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    return module.weight, module.bias


def _turn(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `(R, T, heads, D)`: the two halves of a head are the two coordinates that turn."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
