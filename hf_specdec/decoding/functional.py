"""A lean forward for dense models of the Llama family, on a GPU for the small ones.

A forward of a few tokens through a small model is mostly module calls and small operations, not arithmetic. The layers
of [`~layers.llama`] share the model's own weights and take half of the time or less, and the results are bit for bit
those of the model's own forward over slots. Whatever is not exactly such a model (other classes, quantised layers,
adapters, hooks, replaced forwards, another attention implementation) goes through its own forward.

Shapes: R rows, T nodes, H hidden size, Q query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ..drafts import TreeTopology
from ..kernels.tree_attention import DTYPES, MAX_HEAD_SIZE
from ..layers.llama import DecoderLayer, RMSNorm, is_published, is_untouched, modules_of, project
from ..layers.rope import RotaryAngles, has_static_frequencies
from .attention import TREE_KERNEL, TreeMask, attention_switch
from .cache import SlotCache
from .masks import FULL, node_masks
from .target import SlotModel, SlotOutput


# Classes whose layers are: RMS norm, rotary attention, RMS norm, gated MLP, each added to the stream.
_FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

# Above this, on a GPU, the arithmetic weighs more than the calls, and the model's own forward may have better kernels.
_MAX_HIDDEN_SIZE_ON_GPU = 1024


def slot_model(
    model: nn.Module,
    cache: SlotCache,
    states: tuple[int | str, ...] = (),
    forward_kwargs: dict[str, Any] | None = None,
) -> SlotModel:
    """The fastest way to drive `model` over slots; the arguments are those of [`SlotModel`].

    Raises:
        UnsupportedModelError: The model's attention cannot take masks of a draft.
    """
    if not forward_kwargs and is_plain_llama(model):
        return FunctionalSlotModel(model, cache, states)
    attention_switch(model)  # before anything is read
    return SlotModel(model, cache, states, forward_kwargs)


def is_plain_llama(model: PreTrainedModel) -> bool:
    """Tells whether `FunctionalSlotModel` computes exactly what the model's own forward does."""
    config = model.config
    if type(model).__name__ not in _FAMILY or not is_published(type(model)):
        return False
    if config.hidden_size > _MAX_HIDDEN_SIZE_ON_GPU and model.device.type != "cpu":
        return False
    if not has_static_frequencies(getattr(config, "rope_parameters", None)):
        return False
    if config._attn_implementation != "sdpa":
        return False
    return all(not module.training and is_untouched(module) for module in modules_of(model))


class FunctionalSlotModel(SlotModel):
    """Drives a model for which `is_plain_llama` holds. Its prompt goes through the model's own forward."""

    def __init__(self, model: torch.nn.Module, cache: SlotCache, states: tuple[int | str, ...] = ()):
        super().__init__(model, cache, states)
        decoder = model.get_decoder()
        self._embedding = decoder.embed_tokens.weight
        self._head = model.get_output_embeddings()
        self._norm = RMSNorm.sharing(decoder.norm)
        self._layers = [DecoderLayer.of(layer, index) for index, layer in enumerate(decoder.layers)]
        attention = self._layers[0].self_attn
        self._groups = attention.groups
        self._fits_kernel = self._head.weight.dtype in DTYPES and attention.head_dim <= MAX_HEAD_SIZE
        self._has_full_span = all(span == FULL for span in self.profile.spans)
        types = self.profile.layer_types
        kinds = getattr(model.config, "layer_types", None) or [""] * len(self._layers)
        self._span_of_layer = [types.index(kind) if types else 0 for kind in kinds]
        self._angles = RotaryAngles(decoder.rotary_emb)

    def forward(self, tokens: torch.LongTensor, topology: TreeTopology, logits_from: int = 0) -> SlotOutput:
        replayed = None if self.graphs is None else self._replay(tokens, topology, logits_from)
        if replayed is not None:
            return replayed
        rows, tree = self._place(tokens, topology)
        is_uniform, nodes, columns = rows.is_uniform, tokens.shape[1], self.cache.plan.columns
        spans = self.profile.spans
        self.attention_layers: Counter[str] = Counter({} if tree is None else {TREE_KERNEL: len(self._layers)})
        if tree is not None:
            masks = [TreeMask(tree, span) for span in spans]
        elif nodes == 1 and is_uniform and self._has_full_span:
            # One new token in rows of equal length sees every slot.
            masks = [None] * len(spans)
        else:
            # The query heads of a group become further positions of their key/value head.
            repeats = self._groups if nodes > 1 else 1
            masks = node_masks(topology, rows, columns, spans, self._head.weight.dtype, repeats)
        first = self.cache.lengths[0] + self.offsets[0]
        is_inside = self.max_position is None or first + nodes <= self.max_position + 1
        if topology.is_chain and is_inside and is_uniform and len(set(self.offsets)) == 1:
            positions = slice(first, first + nodes)
        else:
            positions = self.positions(topology, rows)
        stream = F.embedding(tokens, self._embedding)
        angles = self._angles(positions, stream, columns + max(self.offsets))
        states = {}
        for index, layer in enumerate(self._layers):
            if index in self.states:
                states[index] = stream
            stream = layer(stream, angles, masks[self._span_of_layer[index]], self.cache)
        if len(self._layers) in self.states:
            states[len(self._layers)] = stream
        if "last" in self.states:
            states["last"] = last = self._norm(stream)
            return SlotOutput(project(self._head, last[:, logits_from:]), states)
        return SlotOutput(project(self._head, self._norm(stream[:, logits_from:])), states)
