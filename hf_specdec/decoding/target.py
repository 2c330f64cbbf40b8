"""A causal language model as the loop sees it: it reads tokens into slots and returns logits for every node.

The target and a draft model are both driven through `SlotModel`. The model runs through its own forward with a
`SlotCache`, explicit positions and ready-made masks; nothing of it is copied, replaced or left changed.

Shapes: R active rows, T nodes (anchor included), P prompt length, H hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from ..drafts import TreeTopology
from ..errors import UnsupportedModelError
from ..kernels._triton import use_triton
from ..kernels.cache import WritePlan
from ..kernels.tree_attention import MAX_NODES, SlotTree
from ..target_facts import decoder_layers, layers_owner
from ..transfers import select_rows, upload
from .attention import TREE_KERNEL, TreeMask, VerificationForward, attention_switch, describe_layers
from .cache import SlotCache
from .masks import FULL, RowState, Span, node_masks, node_positions, slot_tree
from .recurrent import RecurrentLayers, RecurrentState, mixers


if TYPE_CHECKING:
    from .graphs import CallGraphs, NodeInputs


@dataclass(frozen=True)
class ModelProfile:
    """What the loop must know of a model, read from its class and config once.

    Attributes:
        spans (`tuple[Span, ...]`): The distinct spans of its layers; one mask each.
        layer_types (`tuple[str, ...]`, *optional*): Types of the layers that attend, in the order of `spans`, by which
            the model asks for the masks; `None` if it takes a single mask.
        counts_slots (`bool`): Tells positions from the slots of its cache, whatever positions it is given. That is
            right for chains in rows of equal length only.
        takes_flat_mask (`bool`): Builds its position bias from a 2-D mask, and has no use for a ready 4-D one.
        takes_position_ids (`bool`): Its forward has the argument `position_ids`.
        takes_logits_to_keep (`bool`): Its forward has the argument `logits_to_keep`.
        is_recurrent (`bool`): Some of its layers have a recurrent state, which cannot branch.
    """

    spans: tuple[Span, ...]
    layer_types: tuple[str, ...] | None
    counts_slots: bool
    takes_flat_mask: bool
    takes_position_ids: bool
    takes_logits_to_keep: bool
    is_recurrent: bool = False

    @property
    def takes_trees(self) -> bool:
        """Whether branches can be verified, and not chains only."""
        return not (self.counts_slots or self.is_recurrent)


# Models with `position_ids` that count slots all the same; those without always do.
_COUNT_SLOTS = {
    "gpt_neo": "its local layers cut their window by slot",
    "inkling2_text": "its position bias counts slots",
    "inkling_text": "its position bias counts slots",
}

# Models that no cache of keys and values is enough for.
_UNSUPPORTED = {
    "blt": "groups bytes into patches by what one forward reads, so its logits depend on how the text is cut",
    "cpmant": "reads the whole text again in every forward and places a learned prompt in front of it",
    "glm5_next_text": "pools keys by their places in the whole buffers of its cache, by a mask of two dimensions",
    "git": "keeps image slots in front of the padding, which its mask does not cover",
    "qwen4_exp_text": "remembers the last tokens for its n-grams beside its recurrent state",
    "prophetnet": "continues from its cache by one token at a time",
}

_SPAN_OF_LAYER_TYPE = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    # They choose among what the mask lets them see; the keys they choose by are kept like all others.
    "indexed_attention": "full",
    "deepseek_sparse_attention": "full",
    # Attention beside a recurrent state.
    "hybrid": "full",
    "hybrid_sliding": "sliding",
}

# What some models call the mask of such layers; others call it by the type of the layers.
_MASK_OF_LAYER_TYPE = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}

# Layers that attend to nothing: those with a recurrent state alone, and those that work on each token by itself.
_WITHOUT_ATTENTION = ("linear_attention", "conv", "mlp", "moe")

_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}

# Arguments with a value for each token, of which new tokens get the last one in plain generation.
REPEATED_INPUTS = ("token_type_ids",)

_profiles: WeakKeyDictionary[torch.nn.Module, ModelProfile] = WeakKeyDictionary()


def model_profile(model: torch.nn.Module, role: str = "target model") -> ModelProfile:
    """The model's profile.

    Raises:
        UnsupportedModelError: The loop cannot drive the model: what it is and what is missing.
    """
    if model not in _profiles:
        _profiles[model] = _read_profile(model, role)
    return _profiles[model]


def _read_profile(model, role) -> ModelProfile:
    name = type(model).__name__
    config = model.config
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder model; as {role} only decoder-only models can be used. Leave the "
            "speculative arguments out to use plain generate()."
        )
    text_config = config.get_text_config(decoder=True)
    if text_config.model_type in _UNSUPPORTED:
        raise UnsupportedModelError(
            f"{name} {_UNSUPPORTED[text_config.model_type]}; it cannot be used as {role}. Leave the speculative "
            "arguments out to use plain generate()."
        )
    layer_types = getattr(text_config, "layer_types", None)
    is_recurrent = bool(mixers(model))
    known = set(_SPAN_OF_LAYER_TYPE) | set(_WITHOUT_ATTENTION)
    others = sorted(set(layer_types or ()) - (known if is_recurrent else known - _RECURRENT))
    if others or (getattr(model, "_is_stateful", False) and not is_recurrent):
        what = f"layers of type {', '.join(others)}" if others else "a recurrent state"
        raise UnsupportedModelError(
            f"{name} has {what} that cannot be cut back to the accepted tokens; as {role} only models can be used "
            "that keep keys and values of every token, or a recurrent state where transformers' caches keep it. Leave "
            "the speculative arguments out to use plain generate()."
        )
    parameters = inspect.signature(model.forward).parameters
    if "past_key_values" not in parameters:
        raise UnsupportedModelError(
            f"{name} keeps no key/value cache (its forward has no `past_key_values`), which speculation needs of the "
            f"{role}. Leave the speculative arguments out to use plain generate()."
        )
    spans, keys = _read_spans(text_config, layer_types, is_recurrent)
    takes_flat_mask = text_config.model_type == "bloom" or bool(getattr(text_config, "alibi", False))
    return ModelProfile(
        spans=spans,
        layer_types=keys,
        counts_slots="position_ids" not in parameters or takes_flat_mask or text_config.model_type in _COUNT_SLOTS,
        takes_flat_mask=takes_flat_mask,
        takes_position_ids="position_ids" in parameters,
        takes_logits_to_keep="logits_to_keep" in parameters,
        is_recurrent=is_recurrent,
    )


def _read_spans(config, layer_types, is_recurrent):
    window = getattr(config, "sliding_window", None)
    if not layer_types:
        return (Span("sliding", window) if window else FULL,), None
    sizes = {"sliding": window, "chunked": getattr(config, "attention_chunk_size", None), "full": 0}
    keys = tuple(sorted(set(layer_types) - set(_WITHOUT_ATTENTION)))
    kinds = [_SPAN_OF_LAYER_TYPE[key] for key in keys]
    spans = tuple(Span(kind, sizes[kind]) if sizes[kind] else FULL for kind in kinds)
    if is_recurrent and len(set(spans)) <= 1:
        # One mask is understood to be for the attention; not all of these models call it by the types of their layers.
        return spans[:1] or (FULL,), None
    return spans, keys


def is_text_only(model: torch.nn.Module) -> bool:
    """Whether a model reads nothing but text."""
    # Where the language model has no config of its own, there may still be other parts beside it.
    is_whole = model.config.get_text_config(decoder=True) is model.config
    return is_whole and model.input_modalities in ("text", ["text"], ("text",))


def check_reach(model: torch.nn.Module, prompt_lengths: list[int], max_new_tokens: int) -> None:
    """Refuses texts during which the rotary embedding would change its frequencies.

    It changes them for a whole forward, by the last position in it. A forward over several draft tokens would not
    give the earlier ones what they get in plain generation.

    Args:
        model (`PreTrainedModel`): The target.
        prompt_lengths (`list[int]`): Positions of each row before generation, padding not counted.
        max_new_tokens (`int`): Positions that generation may add.

    Raises:
        UnsupportedModelError: A row may get past the position where the frequencies change.
    """
    config = model.config.get_text_config(decoder=True)
    # The last token is not read.
    longest = max(prompt_lengths) + max_new_tokens - 1
    for parameters in _rope_parameters(config):
        kind, limit = parameters.get("rope_type"), config.max_position_embeddings
        if kind == "longrope":
            limit = parameters["original_max_position_embeddings"]
        changes = kind == "dynamic" or (kind == "longrope" and min(prompt_lengths) <= limit)
        if changes and longest > limit:
            raise UnsupportedModelError(
                f"The rotary embedding of {type(model).__name__} (rope_type='{kind}') changes at position {limit}, "
                f"and this call may reach {longest}: prompts of {min(prompt_lengths)} to {max(prompt_lengths)} tokens "
                f"and {max_new_tokens} new ones. Set `max_new_tokens` so that it stays below, or leave the "
                "speculative arguments out to use plain generate()."
            )


def _rope_parameters(config) -> list[dict]:
    """The rotary parameters, one for each layer type where they differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]


@dataclass
class SlotOutput:
    """Result of a forward over slots: `logits` `(R, T, V)` and the states asked for, each `(R, T, H)`."""

    logits: torch.Tensor
    hidden_states: dict = field(default_factory=dict)
    all_hidden_states: tuple | None = None


class SlotModel:
    """Drives one model over one `SlotCache` during one call.

    Args:
        model (`PreTrainedModel`): Any decoder-only model with a key/value cache.
        cache (`SlotCache`): Its keys and values.
        states (`tuple`): Hidden states to return, see [`captured_states`].
        forward_kwargs (`dict`): Further arguments for every forward.

    Attributes:
        max_position (`int`, *optional*): Last position id that a valid node of the call may have. Padding nodes lie
            behind it in rows that are nearly full, and a table of positions may end there.
        row_inputs (`dict[str, torch.Tensor]`): Further arguments of the forwards over slots, each with one value for
            every row, `(R, 1)`, that goes for all its nodes.
        attention_layers (`Counter`): What computed the attention of the last forward's layers, where kernels run.
        graphs (`CallGraphs`, *optional*): Run in the place of forwards whose shapes repeat.
    """

    def __init__(self, model, cache: SlotCache, states: tuple = (), forward_kwargs: dict | None = None):
        self.model = model
        self.cache = cache
        self.profile = model_profile(model)
        self.starts: list[int] = []
        self.offsets: list[int] = []
        self.hidden: torch.BoolTensor | None = None
        self.counter: PositionCounter | None = None
        self.max_position: int | None = None
        self.attention_layers: Counter = Counter()
        self.graphs: CallGraphs | None = None
        self.recurrent: RecurrentLayers | None = None
        if self.profile.is_recurrent:
            cache.last_recurrent_layer = max(module.layer_idx for module in mixers(model))
        self.states = states
        self._taps = StateTaps(model, states)
        self.forward_kwargs = forward_kwargs or {}
        self.row_inputs: dict[str, torch.Tensor] = {}
        self._attention = attention_switch(model)
        self._needs_no_masks = False
        # That of the hidden states; a model's first parameter may belong to a vision tower of another type.
        embedding = model.get_input_embeddings().weight
        self._mask_dtype = embedding.dtype if embedding.is_floating_point() else model.dtype

    @property
    def rows(self) -> RowState:
        return RowState(self.cache.lengths, self.starts, self.offsets, self.hidden)

    def use_graphs(self, graphs: CallGraphs | None) -> None:
        """From now on forwards whose shapes repeat run as graphs. To be called in front of the prefill."""
        self.graphs = graphs
        self.cache.store = None if graphs is None else graphs.store

    def close(self) -> None:
        """Ends the call."""
        if self.graphs is not None:
            self.graphs.close()

    def check_prefilled(self) -> None:
        """
        Raises:
            UnsupportedModelError: The prompt has left nothing in the cache.
        """
        if self.cache.get_seq_length() == 0:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has put no keys and values of the prompt into the cache it was given, "
                "which speculation needs. Leave the speculative arguments out to use plain generate()."
            )

    def start_slots(
        self,
        starts: list[int],
        offsets: list[int] | None = None,
        hidden: torch.BoolTensor | None = None,
        counter: PositionCounter | None = None,
    ) -> None:
        """Ends the prefill.

        Args:
            starts (`list[int]`): Each row's first slot that is not padding.
            offsets (`list[int]`, *optional*): Each row's position id at that slot, 0 if not given.
            hidden (`torch.BoolTensor`, *optional*): Of [`RowState`].
            counter (`PositionCounter`, *optional*): Says the positions, in the place of starts and offsets.

        Raises:
            UnsupportedModelError: The prompt has left nothing in the cache.
        """
        self.check_prefilled()
        self.starts = list(starts)
        self.offsets = list(offsets) if offsets else [0] * len(starts)
        self.hidden, self.counter = hidden, counter
        if self.graphs is not None and hidden is not None:
            self.graphs.switch_off("tokens inside of the prompts are masked")
        elif self.graphs is not None and counter is not None:
            self.graphs.switch_off("its positions depend on the tokens")
        self.cache.start_slots(len(starts))
        if self.profile.is_recurrent:
            self.recurrent = RecurrentLayers(self.model, self.cache, len(starts))

    def prefill(self, input_ids: torch.LongTensor, starts: list[int]) -> None:
        """Reads left-padded prompts of shape `(R, P)` into empty slots; their logits are not kept."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        inputs = {"input_ids": input_ids, "past_key_values": self.cache, "use_cache": True, "return_dict": True}
        if any(starts):
            first = upload(starts, input_ids.device)[:, None]
            inputs["attention_mask"] = (positions >= first).long()
            positions = (positions - first).clamp_(min=0)
        if self.profile.takes_position_ids:
            inputs["position_ids"] = positions.expand(input_ids.shape)
        if self.profile.takes_logits_to_keep:
            inputs["logits_to_keep"] = 1
        self.model(**inputs)
        self.start_slots(starts)

    def captured(self, joined: bool = False):
        """Collects the asked-for hidden states of the model's forwards inside: see [`captured_states`]."""
        return self._taps.captured(joined)

    def forward(self, tokens: torch.LongTensor, topology: TreeTopology, logits_from: int = 0) -> SlotOutput:
        """Reads nodes behind each row's committed slots.

        Args:
            tokens (`torch.LongTensor` of shape `(R, T)`): Anchor and draft tokens.
            topology (`TreeTopology`): Who sees whom among them.
            logits_from (`int`): The first node whose logits are wanted.

        Returns:
            [`SlotOutput`] with the logits of these nodes, and the states of all.

        Raises:
            UnsupportedModelError: A tree for a model that can verify chains only.
        """
        if not (self.profile.takes_trees or topology.is_chain):
            why = (
                "has a recurrent state" if self.profile.is_recurrent else "tells positions from the order of its cache"
            )
            raise UnsupportedModelError(
                f"{type(self.model).__name__} {why}, so it can verify chains, and got a draft tree. Draft without "
                "branches."
            )
        replayed = self._replay(tokens, topology, logits_from)
        if replayed is not None:
            return replayed
        plan, rows = self._plan_write(tokens)
        forward = VerificationForward(self._tree(topology, tokens, rows), plan.columns)
        positions = self._positions_of(tokens, topology, rows) if self.profile.takes_position_ids else None
        masks = self._masks(topology, forward, rows)
        output = self._read(tokens, positions, masks, forward, tokens.shape[1] - logits_from)
        self.attention_layers = forward.layers
        return output

    def _plan_write(self, tokens: torch.LongTensor) -> tuple[WritePlan, RowState]:
        """Where the next forward writes, and where the rows stand in front of it."""
        plan, rows = self.cache.plan_write(tokens.shape[1]), self.rows
        # Nodes go behind the committed slots: one copy to the device serves both.
        rows.device_lengths = plan.device_starts
        return plan, rows

    def _replay(self, tokens: torch.LongTensor, topology: TreeTopology, logits_from: int) -> SlotOutput | None:
        """The forward as a graph; `None` where it has to run without one."""
        output = None if self.graphs is None else self.graphs.forward(self, tokens, topology)
        if output is None:
            return None
        return SlotOutput(output.logits[:, logits_from:], output.hidden_states)

    def read_static(self, nodes: NodeInputs, columns: int) -> tuple[SlotOutput, Counter]:
        """The same forward from tensors that stay where they are, for a capture; nothing else changes with the text.

        Args:
            nodes (`NodeInputs`): The nodes, and where the rows stand.
            columns (`int`): Slots to read, those in use among them. The cache has room for them.

        Returns:
            `tuple`: The output, and what computed the attention, as `attention_layers`.
        """
        num_nodes = nodes.tokens.shape[1]
        self.cache.plan = WritePlan.on_device(columns, nodes.lengths, num_nodes)
        forward = VerificationForward(nodes.tree if use_triton(nodes.tokens) else None, columns)
        make = TreeMask.stand_in if self._needs_no_masks else TreeMask.additive
        masks = [make(TreeMask(nodes.tree, span), columns, self._mask_dtype) for span in self.profile.spans]
        output = self._read(nodes.tokens, nodes.positions, self._named(masks, forward), forward, num_nodes)
        # A forward runs at least once before it is captured, and then shows whether anything looks at the masks.
        num_layers = sum(layer.is_initialized for layer in self.cache.layers)
        self._needs_no_masks = set(forward.layers) == {TREE_KERNEL} and forward.layers.total() >= num_layers
        return output, forward.layers

    def _read(self, tokens, positions, masks, forward: VerificationForward, num_logits: int) -> SlotOutput:
        inputs = {"input_ids": tokens, "past_key_values": self.cache, "use_cache": True, "return_dict": True}
        inputs["attention_mask"] = masks
        if num_logits < tokens.shape[1] and self.profile.takes_logits_to_keep:
            inputs["logits_to_keep"] = num_logits
        if self.profile.takes_position_ids:
            inputs["position_ids"] = positions
        inputs |= {name: values.expand(-1, tokens.shape[1]) for name, values in self.row_inputs.items()}
        with self.captured() as states, self._attention(forward), self._states_kept(tokens.shape[1]):
            output = self.model(**inputs, **self.forward_kwargs)
        return SlotOutput(output.logits[:, -num_logits:], states, output.get("hidden_states"))

    def _tree(self, topology: TreeTopology, tokens: torch.LongTensor, rows: RowState) -> SlotTree | None:
        """The nodes for the tree attention kernel, where it runs."""
        if tokens.shape[1] > MAX_NODES or rows.hidden is not None or not use_triton(tokens):
            return None
        return slot_tree(topology, rows)

    @property
    def attention(self) -> str:
        """What computed the attention of the last forward."""
        return describe_layers(self.attention_layers)

    def _states_kept(self, nodes: int):
        return nullcontext() if self.recurrent is None else self.recurrent.reading(nodes)

    def commit(self, counts: list[int], path: torch.LongTensor | None = None) -> None:
        """Keeps what was accepted of the last forward; the arguments are those of [`SlotCache.commit`]."""
        self.cache.commit(counts, path)
        if self.recurrent is not None:
            self.recurrent.commit(counts)

    def row_states(self, row: int) -> tuple[list[tuple[torch.Tensor, ...]], dict[int, RecurrentState]]:
        """Copies of what an active row has in the cache: its slots, and its recurrent states by layer."""
        recurrent = {} if self.recurrent is None else self.recurrent.row_states(row)
        return self.cache.row_states(row), recurrent

    def positions(self, topology: TreeTopology, rows: RowState) -> torch.LongTensor:
        """Position ids of the nodes, `(R, T)`."""
        positions = node_positions(topology, rows)
        return positions if self.max_position is None else positions.clamp(max=self.max_position)

    def _positions_of(self, tokens, topology: TreeTopology, rows: RowState) -> torch.LongTensor:
        if self.counter is None:
            return self.positions(topology, rows)
        return self.counter(tokens, rows.lengths_on(tokens.device)[:, None] + topology.depths)

    def _masks(self, topology: TreeTopology, forward: VerificationForward, rows: RowState):
        columns = forward.columns
        if self.profile.takes_flat_mask:
            slots = torch.arange(columns, device=topology.depths.device)
            lengths = rows.lengths_on(slots.device)[:, None]
            return rows.visible(slots, lengths + topology.depths.shape[-1]).long()
        masks = node_masks(topology, rows, columns, self.profile.spans, self._mask_dtype)
        # Some models insist on a mask for every row; one that all rows share is only seen so often, not copied.
        return self._named([mask.expand(len(rows.lengths), -1, -1, -1) for mask in masks], forward)

    def _named(self, masks: list[torch.Tensor], forward: VerificationForward):
        """The masks of all spans as the model expects them."""
        if forward.tree is not None:
            forward.name_masks(masks, self.profile.spans)
        if self.profile.layer_types is None:
            return masks[0]
        masks = {
            name: mask
            for layer_type, mask in zip(self.profile.layer_types, masks)
            for name in (layer_type, _MASK_OF_LAYER_TYPE.get(layer_type, layer_type))
        }
        return {**masks, **dict.fromkeys(_WITHOUT_ATTENTION)} if self.profile.is_recurrent else masks

    def keep_rows(self, keep: list[int]) -> None:
        self.cache.keep_rows(keep)
        if self.recurrent is not None:
            self.recurrent.keep_rows(keep)
        self.starts = [self.starts[row] for row in keep]
        self.offsets = [self.offsets[row] for row in keep]
        self.row_inputs = {name: select_rows(values, keep) for name, values in self.row_inputs.items()}
        if self.hidden is not None:
            self.hidden = self.hidden[keep]


class PositionCounter:
    """Positions of tokens that a model's embedding counts by itself, from the number of its padding token on.

    Args:
        embedding (`nn.Module`): With transformers' `create_position_ids_from_input_ids`.
    """

    def __init__(self, embedding: torch.nn.Module):
        self.embedding = embedding

    @classmethod
    def of(cls, model: torch.nn.Module) -> PositionCounter | None:
        """That of a model; `None` where there is none."""
        modules = (module for module in model.modules() if hasattr(module, "create_position_ids_from_input_ids"))
        return next(map(cls, modules), None)

    def __call__(self, tokens: torch.LongTensor, slots: torch.LongTensor) -> torch.LongTensor:
        """Positions `(R, T)` of tokens, each read alone behind as many slots as `slots` `(R, T)` says."""
        count = self.embedding.create_position_ids_from_input_ids
        return count(tokens.reshape(-1, 1), self.embedding.padding_idx, slots.reshape(-1, 1)).view(tokens.shape)


@contextmanager
def captured_states(model: torch.nn.Module, keys: tuple, joined: bool = False):
    """Collects hidden states of the forwards inside: yields the dict that each forward puts them into.

    Args:
        model (`PreTrainedModel`): A decoder-only model.
        keys (`tuple`): Which states, each of the shape `(R, T, H)`. A number is a boundary: i is the residual stream
            that enters decoder layer i, and the number of layers stands for what enters the final norm. "last" is the
            output of the decoder behind its final norm, which the head reads.
        joined (`bool`): The forwards of the model read one text in chunks; when the block ends, the dict holds the
            states of the whole. Otherwise it holds those of the last forward.

    Raises:
        UnsupportedModelError: The model has no such boundary, or its layers cannot be found.
    """
    with StateTaps(model, keys).captured(joined) as states:
        yield states


class StateTaps:
    """Where in a model the states of `captured_states` are found; for those who capture them again and again."""

    def __init__(self, model: torch.nn.Module, keys: tuple):
        self.model, self.keys = model, keys
        self._taps = [(key, module, enters) for key in keys for module, enters in _taps(model, key)]

    @contextmanager
    def captured(self, joined: bool = False):
        states: dict = {}
        chunks: dict[Any, list] = {key: [] for key in self.keys}
        handles = []
        try:
            for key, module, enters in self._taps:
                store = _Store(states, key)
                if enters:
                    handles.append(module.register_forward_pre_hook(store.on_entering, with_kwargs=True))
                else:
                    handles.append(module.register_forward_hook(store.on_leaving))
            if joined and self.keys:
                handles.append(self.model.register_forward_hook(_Collector(states, chunks)))
            yield states
            states |= {key: torch.cat(parts, dim=1) for key, parts in chunks.items() if len(parts) > 1}
        finally:
            for handle in handles:
                handle.remove()


class _Store:
    """Hooks that put a state into the dict under its key."""

    def __init__(self, states: dict, key):
        self.states, self.key = states, key
        # Another thread may run a call of its own on the same model.
        self.thread = get_ident()

    def on_entering(self, module, args, kwargs=None):
        # Without keyword arguments torch calls it in another thread, while this one takes it back.
        if get_ident() != self.thread:
            return
        state = kwargs.get("hidden_states")
        self._put(next(filter(torch.is_tensor, (*args, *kwargs.values()))) if state is None else state, module)

    def on_leaving(self, module, args, output):
        self._put(output if torch.is_tensor(output) else output[0], module)

    def _put(self, state: torch.Tensor, module: torch.nn.Module) -> None:
        if get_ident() != self.thread:
            return
        if state.dim() != 3:
            raise UnsupportedModelError(
                f"{type(module).__name__} works on states of the shape {list(state.shape)}, where a drafter reads one "
                "vector for every token. Use a drafter that reads no hidden states, such as spec_method='ngram'."
            )
        self.states[self.key] = state


class _Collector:
    """Hook behind a forward of the whole model, in which a layer may have run more than once."""

    def __init__(self, states: dict, chunks: dict):
        self.states, self.chunks, self.thread = states, chunks, get_ident()

    def __call__(self, module, args, output):
        if get_ident() == self.thread:
            for key, parts in self.chunks.items():
                parts.append(self.states[key])


def _taps(model: torch.nn.Module, key) -> list[tuple[torch.nn.Module, bool]]:
    """The modules that see a state, and whether it enters or leaves them; the last one to see it counts."""
    if key == "last":
        _check_head(model)
        return [(_decoder(model), False)]
    layers = decoder_layers(model)
    if not 0 <= key <= len(layers):
        raise UnsupportedModelError(
            f"{type(model).__name__} has {len(layers)} decoder layers, so its hidden states can be captured at the "
            f"boundaries 0 to {len(layers)}, and {key} was asked for. Use a drafter that was made for this model."
        )
    if key < len(layers):
        # What enters a layer, not what leaves the one before: some models add to the stream in between.
        return [(layers[key], True)]
    norms = (getattr(layers_owner(model, layers), name, None) for name in _FINAL_NORMS)
    return [(layers[-1], False), *((norm, True) for norm in norms if norm is not None)]


def _check_head(model: torch.nn.Module) -> None:
    """Refuses heads that are more than one matrix behind the decoder: what they read is not the decoder's output."""
    head = model.get_output_embeddings()
    is_plain = any(child is head for child in model.children()) and model.config.model_type not in _NOT_PLAIN_HEADS
    if not is_plain:
        raise UnsupportedModelError(
            f"{type(model).__name__} transforms its last hidden state before its output embeddings, and drafters that "
            "read this state are made for models that do not. Use a drafter that reads none, such as "
            "spec_method='ngram'."
        )


def _decoder(model: torch.nn.Module) -> torch.nn.Module:
    """The module whose output the head reads."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    # Some models take themselves or their head for it.
    has_head = any(module is head for module in decoder.modules())
    return layers_owner(model, decoder_layers(model)) if has_head else decoder


# Their output embeddings are a part of their own, with a transformation in front.
_NOT_PLAIN_HEADS = ("electra", "modernbert-decoder")

# What decoders call their final norm.
_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f", "layer_norm")
