"""A lean forward for models of the Llama family, eagerly and as a graph.

A forward of a few tokens through a small model is mostly module calls and small operations, not arithmetic, and on a
GPU even large models wait for many small kernels. The layers of [`~layers.llama`] share the model's own weights. On a
CPU they take half of the time or less, and the results are bit for bit those of the model's own forward over slots; on
a GPU they launch a third of the kernels. A model is known by the code of its forwards, not by its name, see
[`~layers.structure`]. Whatever is not exactly such a model (other code, quantised layers, adapters, hooks, replaced
forwards, another attention implementation, autocast) goes through its own forward.

Shapes: R rows, T nodes, H hidden size, Q query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ..drafts import TreeTopology, chain_topology
from ..kernels.products import fast_products
from ..layers.experts import MixtureOfExperts
from ..layers.known import has_known_layers, is_untouched, modules_of
from ..layers.llama import DecoderLayer, GatedMLP, RMSNorm, RotaryAngles
from ..layers.plan import LayerPlan, Read, Way, bind_linears, first_outputs, norm_of, plan_layers, planned, reading
from ..layers.structure import form_of
from ..modules import has_hooks_of_all, kept_for
from .attention import DTYPES, MAX_HEAD_SIZE, TREE_KERNEL, attention_switch, takes_trees
from .cache import SlotCache
from .facts import model_profile
from .forward import SlotForward, SlotOutput
from .masks import FULL, TreeMask, node_masks
from .model import SlotModel
from .uncompiled import Uncompiled


def slot_model(
    model: nn.Module,
    cache: SlotCache,
    states: tuple[int | str, ...] = (),
    forward_kwargs: dict[str, Any] | None = None,
) -> SlotModel:
    """The fastest way to drive `model` over slots; the arguments are those of [`SlotModel`]."""
    with ExitStack() as if_it_fails:
        uncompiled = Uncompiled(model)
        if_it_fails.callback(uncompiled.close)
        # What earlier calls have found, unless the model has changed since.
        cache.plans = kept_for(model)
        if not forward_kwargs and cache.plans[has_lean_forward]:
            slots: SlotModel = LeanModel(model, cache, states)
        else:
            attention_switch(model)  # before anything is read
            slots = SlotModel(model, cache, states, forward_kwargs)
        if_it_fails.pop_all()
    if uncompiled.has_modules:
        slots.parts.append(uncompiled)
    return slots


def has_lean_forward(model: PreTrainedModel) -> bool:
    """Tells whether `LeanModel` computes exactly what the model's own forward does."""
    if has_hooks_of_all() or not has_known_layers(model):
        return False
    decoder: Any = model.get_decoder()
    attention, weight = decoder.layers[0].self_attn, decoder.embed_tokens.weight
    kind, implementation = weight.device.type, model.config._attn_implementation
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        # It would cast elsewhere than in the model's own operations.
        return False
    if implementation == "eager":
        # The same but for rounding.
        is_known = takes_trees(weight, weight.dtype, attention.head_dim)
    else:
        # That of torch has no soft caps.
        is_known = implementation == "sdpa" and form_of(attention, "attention").softcap is None
    if not is_known:
        return False
    # Modules that run through their own calls: experts, and embeddings that scale.
    called = {id(layer.mlp) for layer in decoder.layers if form_of(layer.mlp, "mlp") is None}
    if type(decoder.embed_tokens) is not nn.Embedding:
        called.add(id(decoder.embed_tokens))
    return all(not module.training and is_untouched(module) for module in modules_of(model, called))


@dataclass(frozen=True)
class EnteredNodes:
    """Nodes after the committed slots, a chain, that a model's first layers have read already."""

    num_layers: int
    tokens: torch.LongTensor  # (R, N), the anchor first
    states: torch.Tensor  # (R, N, H), after these layers

    def fits(self, tokens: torch.LongTensor, topology: TreeTopology) -> bool:
        """Tells if a forward reads them: a chain `(R, T)` that begins alike."""
        count = min(tokens.shape[1], self.tokens.shape[1])
        return topology.is_chain and torch.equal(tokens[:, :count], self.tokens[:, :count])


class LayerStack:
    """A model from its embedding to its lm_head, with its own parameters: what `LeanModel` runs in every call."""

    def __init__(self, model: PreTrainedModel):
        self._decoder: Any = model.get_decoder()
        self.head: nn.Module = model.get_output_embeddings()
        self.embedding: nn.Module = self._decoder.embed_tokens
        self.layers: list[DecoderLayer] = [
            DecoderLayer.of(layer, index, MixtureOfExperts.of) for index, layer in enumerate(self._decoder.layers)
        ]
        self.norm: RMSNorm = RMSNorm.of(self._decoder.norm)
        attention = self.layers[0].self_attn
        self.groups: int = attention.groups
        # That of the head may be packed.
        self.fits_kernel: bool = self.embedding.weight.dtype in DTYPES and attention.head_dim <= MAX_HEAD_SIZE
        types = model_profile(model).layer_types
        kinds = getattr(model.config, "layer_types", None) or [""] * len(self.layers)
        self.span_of_layer: list[int] = [types.index(kind) if types else 0 for kind in kinds]
        decoder_form, model_form = form_of(self._decoder, "decoder"), form_of(model, "model")
        self.kinds: list[str | None] = kinds if decoder_form.has_angles_by_type else [None] * len(self.layers)
        rotary, is_interleaved = self._decoder.rotary_emb, attention.is_interleaved
        self.angles: dict[Any, RotaryAngles] = {
            kind: RotaryAngles(rotary, kind, is_interleaved) for kind in set(self.kinds)
        }
        self.factor: Any = decoder_form.factor and getattr(self._decoder, decoder_form.factor)
        self.softcap: Any = model_form.softcap and getattr(model.config, model_form.softcap)
        self.divisor: Any = model_form.divisor and getattr(model.config, model_form.divisor)
        self.has_experts: bool = not all(isinstance(layer.mlp, GatedMLP) for layer in self.layers)

    def modules(self) -> Iterator[nn.Module]:
        """The modules of the model that it goes through; it does not hold the model itself."""
        yield from self._decoder.modules()
        yield from self.head.modules()

    def plan(
        self, way: Way, dtype: torch.dtype, num_layers: int, leaves_norm: bool, num_logits: int | None
    ) -> tuple[list[LayerPlan], Callable[[Read], Sequence[torch.Tensor]]]:
        """Plans of the first layers, and the lm_head, which may norm what it reads if nobody else does."""
        head = self.head if num_logits is None else first_outputs(self.head, num_logits)
        project, takes_unnormed = bind_linears(way, dtype, [head])
        following = reading(norm_of(self.norm), leaves_norm and takes_unnormed, dtype)
        return plan_layers(self.layers[:num_layers], following, way, dtype), project


class LeanModel(SlotModel):
    """Drives a model for which `has_lean_forward` holds. Its prompt goes through the model's own forward."""

    entered: EnteredNodes | None = None  # nodes that the next forward need not read from the first layer on

    def __init__(self, model: torch.nn.Module, cache: SlotCache, states: tuple[int | str, ...] = ()):
        super().__init__(model, cache, states)
        self._stack: LayerStack = cache.plans[LayerStack]
        for angles in self._stack.angles.values():
            angles.tables.clear()  # frequencies that were written through `.data` leave no trace
        self._layers, self._fits_kernel = self._stack.layers, self._stack.fits_kernel
        self._reads_prompts_by_kernel = self._fits_kernel and self._has_kernel
        self._has_full_span = all(span == FULL for span in self.profile.spans)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def keep_layers(self, count: int | None) -> None:
        """Lets the first layers run alone, in front of norm and head; `None`: all."""
        self._layers = self._layers[:count]

    def run(self, nodes: SlotForward, logits_from: int) -> SlotOutput:
        stack, tokens, first_layer = self._stack, nodes.tokens, 0
        entered, self.entered = self.entered, None
        if entered is not None and entered.fits(tokens, nodes.topology):
            tokens, first_layer = self._entering(entered, tokens), entered.num_layers
        rows, spans, num_nodes = nodes.rows, self.profile.spans, tokens.shape[1]
        self.attention_layers = Counter({} if nodes.tree is None else {TREE_KERNEL: len(self._layers)})
        masks: list[Any]
        if nodes.tree is not None:
            masks = [TreeMask(nodes.tree, span) for span in spans]
        elif num_nodes == 1 and rows.is_uniform and self._has_full_span:
            # One new token in rows of equal length sees every slot.
            masks = [None] * len(spans)
        else:
            # The query heads of a group become further positions of their key/value head.
            repeats = stack.groups if num_nodes > 1 else 1
            masks = node_masks(nodes.topology, rows, nodes.columns, spans, self._mask_dtype, repeats)
        positions = None
        if nodes.topology.is_chain and rows.is_uniform and len(set(rows.leads)) == 1:
            first = rows.lengths[0] + rows.leads[0]
            if rows.max_position is None or first + num_nodes <= rows.max_position + 1:
                positions = slice(first, first + num_nodes)
        if positions is None:
            positions = nodes.positions
        bound = nodes.columns + max(rows.leads) if rows.are_known else None
        if tokens.is_floating_point():
            stream = tokens
        elif type(stack.embedding) is nn.Embedding:
            stream = F.embedding(tokens, stack.embedding.weight)
        else:
            stream = stack.embedding(tokens)
        stream = stream if stack.factor is None or first_layer else stream * stack.factor
        last = len(self._layers)
        # States are of all nodes; where none are asked for, the last layer goes on with the nodes that have logits.
        wants_all = not {last, "last"}.isdisjoint(self.states) or logits_from >= num_nodes
        first = 0 if wants_all else logits_from
        plans, project = planned(stack, stream, self.cache, last, not wants_all, self.num_logits)
        every_angle = {kind: angles(positions, stream, bound) for kind, angles in stack.angles.items()}
        states: dict[int | str, torch.Tensor] = {}
        read: Any = plans[first_layer].norms[self._layers[first_layer].form.before_attention](stream)
        with fast_products(self.model) if stack.has_experts else nullcontext():
            for index, layer in enumerate(self._layers[first_layer:], first_layer):
                if index in self.states:
                    states[index] = stream
                mask, angles = masks[stack.span_of_layer[index]], every_angle[stack.kinds[index]]
                after = first if index == last - 1 else 0
                stream, read = layer.advance(plans[index], stream, read, angles, mask, self.cache, after)
        if last in self.states:
            states[last] = stream
        if logits_from >= num_nodes:  # the states alone are wanted
            return SlotOutput(stream[:, logits_from:], states)
        if "last" in self.states:
            states["last"] = read
        logits = project(read[:, logits_from:] if wants_all else read)[0]
        logits = logits if stack.divisor is None else logits / stack.divisor
        logits = logits if stack.softcap is None else torch.tanh(logits / stack.softcap) * stack.softcap
        return SlotOutput(logits, states)

    def _entering(self, entered: EnteredNodes, tokens: torch.LongTensor) -> torch.Tensor:
        """States `(R, T, H)` of a chain that enter the layers after those that have read its first nodes."""
        first = entered.states[:, : tokens.shape[1]]
        rest = tokens[:, first.shape[1] :]
        if not rest.shape[1]:
            return first
        lengths, layers, states = self.cache.lengths, self._layers, self.states
        try:
            # What has been read lies in the slots, as if it were committed.
            self.cache.lengths = [length + first.shape[1] for length in lengths]
            self._layers, self.states = layers[: entered.num_layers], (entered.num_layers,)
            topology = chain_topology(rest.shape[1] - 1, rest.device)
            output = self.forward(rest, topology, logits_from=rest.shape[1])
            return torch.cat((first, output.hidden_states[entered.num_layers]), dim=1)
        finally:
            self.cache.lengths, self._layers, self.states = lengths, layers, states
            self.cache.plan_write(tokens.shape[1])
