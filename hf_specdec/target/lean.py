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
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ..drafts import TreeTopology, chain_topology
from ..kernels._triton import use_triton
from ..kernels.products import fast_products
from ..kernels.tree_attention import DTYPES, MAX_HEAD_SIZE
from ..layers.experts import MixtureOfExperts
from ..layers.known import is_known_layer, is_published, is_untouched, modules_of
from ..layers.llama import DecoderLayer, GatedMLP, RMSNorm, added_and_normed, project
from ..layers.rope import RotaryAngles, has_static_frequencies
from ..layers.structure import form_of
from .attention import TREE_KERNEL, TreeMask, VerificationForward, attention_switch, takes_trees
from .cache import SlotCache
from .masks import FULL, node_masks
from .model import SlotModel, SlotOutput
from .uncompiled import Uncompiled


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
    with ExitStack() as if_it_fails:
        uncompiled = Uncompiled(model)
        if_it_fails.callback(uncompiled.close)
        if not forward_kwargs and has_lean_forward(model):
            made = FunctionalSlotModel(model, cache, states)
        else:
            attention_switch(model)  # before anything is read
            made = SlotModel(model, cache, states, forward_kwargs)
        if_it_fails.pop_all()
    made.uncompiled = uncompiled
    return made


def has_lean_forward(model: PreTrainedModel) -> bool:
    """Tells whether `FunctionalSlotModel` computes exactly what the model's own forward does."""
    if not has_known_layers(model):
        return False
    decoder, implementation = model.get_decoder(), model.config._attn_implementation
    attention, weight = decoder.layers[0].self_attn, decoder.embed_tokens.weight
    kind = weight.device.type
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
    called = {id(module) for module in _called_as_they_are(decoder)}
    return all(not module.training and is_untouched(module) for module in modules_of(model, called))


def has_known_layers(model: PreTrainedModel) -> bool:
    """Tells whether `FunctionalSlotModel` can run the model, as far as nobody has hooked or changed its modules."""
    config = model.config
    if not is_published(type(model)) or form_of(model, "model") is None:
        return False
    decoder = model.get_decoder()
    form = form_of(decoder, "decoder")
    is_known = form is not None and form_of(decoder.norm, "norm") is not None and hasattr(decoder, "rotary_emb")
    if not is_known or getattr(config, "use_bidirectional_attention", False):
        return False
    parameters = _rope_parameters(config)
    if form.has_angles_by_type == ("" in parameters) or not all(map(has_static_frequencies, parameters.values())):
        return False
    return all(map(is_known_layer, decoder.layers))


def _rope_parameters(config) -> dict:
    """The settings of the rotary embeddings, by type of layer where each has its own."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return parameters if all(isinstance(part, dict) for part in parameters.values()) else {"": parameters}


def _called_as_they_are(decoder: Any) -> Iterator[nn.Module]:
    """Modules that run through their own calls: embeddings that scale, and experts."""
    if type(decoder.embed_tokens) is not nn.Embedding:
        yield decoder.embed_tokens
    for layer in decoder.layers:
        if form_of(layer.mlp, "mlp") is None:
            yield layer.mlp


@dataclass(frozen=True)
class ReadAhead:
    """Nodes that a model's first layers have read already, after the committed slots.

    Attributes:
        num_layers (`int`): Those layers.
        tokens (`torch.LongTensor` of shape `(R, N)`): The nodes, the anchor first.
        states (`torch.Tensor` of shape `(R, N, H)`): Their states after these layers.
    """

    num_layers: int
    tokens: torch.LongTensor
    states: torch.Tensor

    def fits(self, tokens: torch.LongTensor, topology: TreeTopology) -> bool:
        """Tells if a forward reads them: a chain `(R, T)` that begins alike."""
        count = min(tokens.shape[1], self.tokens.shape[1])
        return topology.is_chain and torch.equal(tokens[:, :count], self.tokens[:, :count])


class FunctionalSlotModel(SlotModel):
    """Drives a model for which `has_lean_forward` holds. Its prompt goes through the model's own forward.

    Attributes:
        ahead (`ReadAhead`, *optional*): Nodes that the next forward need not read from the first layer on.
    """

    ahead: ReadAhead | None = None

    def __init__(self, model: torch.nn.Module, cache: SlotCache, states: tuple[int | str, ...] = ()):
        super().__init__(model, cache, states)
        decoder = model.get_decoder()
        self._embedding = decoder.embed_tokens
        self._head = model.get_output_embeddings()
        self._norm = RMSNorm.of(decoder.norm)
        self._layers = [
            DecoderLayer.of(layer, index, MixtureOfExperts.of) for index, layer in enumerate(decoder.layers)
        ]
        attention = self._layers[0].self_attn
        self._groups = attention.groups
        # That of the head may be packed.
        weight = self._embedding.weight
        self._fits_kernel = weight.dtype in DTYPES and attention.head_dim <= MAX_HEAD_SIZE
        if self._fits_kernel and use_triton(weight):
            self.reading_prompts: Any = self._reading_prompts
        self._has_full_span = all(span == FULL for span in self.profile.spans)
        types = self.profile.layer_types
        kinds = getattr(model.config, "layer_types", None) or [""] * len(self._layers)
        self._span_of_layer = [types.index(kind) if types else 0 for kind in kinds]
        decoder_form, model_form = form_of(decoder, "decoder"), form_of(model, "model")
        self._kinds = kinds if decoder_form.has_angles_by_type else [None] * len(self._layers)
        self._angles = {
            kind: RotaryAngles(decoder.rotary_emb, kind, attention.is_interleaved) for kind in set(self._kinds)
        }
        self._factor: Any = decoder_form.factor and getattr(decoder, decoder_form.factor)
        self._softcap: Any = model_form.softcap and getattr(model.config, model_form.softcap)
        self._divisor: Any = model_form.divisor and getattr(model.config, model_form.divisor)
        self._has_experts = not all(isinstance(layer.mlp, GatedMLP) for layer in self._layers)

    def _reading_prompts(self) -> AbstractContextManager[None]:
        """Lets the kernel read prompts that would need a mask, such as padded ones, without any."""
        return self._attention(VerificationForward(reads_prompts=True))

    @property
    def num_layers(self) -> int:
        """Layers that run."""
        return len(self._layers)

    def keep_layers(self, count: int | None) -> None:
        """Lets the first layers run alone, in front of norm and head; `None`: all."""
        self._layers = self._layers[:count]

    def forward(self, tokens: torch.LongTensor, topology: TreeTopology, logits_from: int = 0) -> SlotOutput:
        if self.graphs is not None and (replayed := self._replay_nodes(tokens, topology, logits_from)) is not None:
            return replayed
        (ahead, self.ahead), first_layer = (self.ahead, None), 0
        if ahead is not None and ahead.fits(tokens, topology):
            tokens, first_layer = self._entering(ahead, tokens), ahead.num_layers
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
            masks = node_masks(topology, rows, columns, spans, self._mask_dtype, repeats)
        positions = None
        if topology.is_chain and is_uniform and len(set(self.leads)) == 1:
            first = self.cache.lengths[0] + self.leads[0]
            if self.max_position is None or first + nodes <= self.max_position + 1:
                positions = slice(first, first + nodes)
        if positions is None:
            positions = self.positions(topology, rows)
        bound = columns + max(self.leads) if self.cache.columns is None else None
        return self._run(tokens, positions, masks, bound, logits_from, first_layer)

    def _entering(self, ahead: ReadAhead, tokens: torch.LongTensor) -> torch.Tensor:
        """States `(R, T, H)` of a chain that enter the layers after those that have read its first nodes."""
        known = ahead.states[:, : tokens.shape[1]]
        rest = tokens[:, known.shape[1] :]
        if not rest.shape[1]:
            return known
        lengths, layers, states = self.cache.lengths, self._layers, self.states
        try:
            # What has been read lies in the slots, as if it were committed.
            self.cache.lengths = [length + known.shape[1] for length in lengths]
            self._layers, self.states = layers[: ahead.num_layers], (ahead.num_layers,)
            output = self.forward(rest, chain_topology(rest.shape[1] - 1, rest.device), logits_from=rest.shape[1])
            return torch.cat((known, output.hidden_states[ahead.num_layers]), dim=1)
        finally:
            self.cache.lengths, self._layers, self.states = lengths, layers, states

    def _run(
        self,
        tokens: torch.LongTensor,
        positions: torch.LongTensor | slice,
        masks: list,
        bound: int | None = None,
        logits_from: int = 0,
        first_layer: int = 0,
    ) -> SlotOutput:
        """Reads tokens `(R, T)` or embeddings `(R, T, H)` into the slots of the plan, seen as each span's mask says.

        Args:
            positions, bound: As for [`RotaryAngles`].
            logits_from (`int`): The first node whose logits are wanted.
            first_layer (`int`): The first layer that runs. If it is a later one, the states that enter it are read.
        """
        is_plain, pending = type(self._embedding) is nn.Embedding, None
        if tokens.is_floating_point():
            stream = tokens
        else:
            stream = F.embedding(tokens, self._embedding.weight) if is_plain else self._embedding(tokens)
        stream = stream if self._factor is None or first_layer else stream * self._factor
        every_angle = {kind: angles(positions, stream, bound) for kind, angles in self._angles.items()}
        states = {}
        with fast_products(self.model) if self._has_experts else nullcontext():
            for index, layer in enumerate(self._layers[first_layer:], first_layer):
                if index in self.states:
                    states[index] = stream = added_and_normed(stream, pending, None)[0]
                    pending = None
                mask, angles = masks[self._span_of_layer[index]], every_angle[self._kinds[index]]
                stream, pending = layer.advance(stream, pending, angles, mask, self.cache)
        if len(self._layers) in self.states:
            states[len(self._layers)] = stream = added_and_normed(stream, pending, None)[0]
            pending = None
        if logits_from >= stream.shape[1]:
            # The states alone are wanted.
            return SlotOutput(stream[:, logits_from:], states)
        if "last" not in self.states:
            # Sums and norms of nodes without logits are spared.
            stream = stream[:, logits_from:]
            pending = None if pending is None else pending._replace(read=pending.read[:, logits_from:])
        if "last" in self.states:
            states["last"] = added_and_normed(stream, pending, self._norm)[1]
            normed = states["last"][:, logits_from:]
        else:
            normed = added_and_normed(stream, pending, self._norm, may_wait=True)[1]
        logits = project(self._head, normed)
        logits = logits if self._divisor is None else logits / self._divisor
        return SlotOutput(
            logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap, states
        )
