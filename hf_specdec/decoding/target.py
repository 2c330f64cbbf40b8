"""A causal language model as the loop sees it: it reads tokens into slots and returns logits for every node.

The target and a draft model are both driven through `SlotModel`. The model runs through its own forward with a
`SlotCache`, explicit positions and ready-made masks; nothing of it is copied, replaced or left changed.

Shapes: R active rows, T nodes (anchor included), P prompt length, H hidden size, V vocabulary. The buffers of a
captured forward are padded to more rows and nodes: there R and T are those of the buffers, r and t those in use.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache

from ..drafts import TreeTopology
from ..errors import UnsupportedModelError
from ..kernels._triton import use_triton
from ..kernels.cache import WritePlan
from ..kernels.products import fast_products
from ..kernels.tree_attention import MAX_NODES, SlotTree
from ..threads import cached_property
from ..transfers import select_rows, upload
from .attention import (
    TREE_KERNEL,
    AttentionSwitch,
    TreeMask,
    VerificationForward,
    attention_switch,
)
from .cache import SlotCache, padded_rows
from .graphs import CallGraphs, graphs_for
from .masks import RowState, ancestor_bits, node_masks, node_positions, slot_tree
from .positions import Nodes, PositionCounter
from .profile import MASK_OF_LAYER_TYPE, WITHOUT_ATTENTION, model_profile
from .recurrent import RecurrentLayers, mixers
from .recurrent_state import RecurrentState
from .source import Source
from .states import StateTaps


if TYPE_CHECKING:
    from .profile import ModelProfile


@dataclass
class SlotOutput:
    """Result of a forward over slots: `logits` `(R, T, V)` and the states asked for, each `(R, T, H)`."""

    logits: torch.Tensor
    hidden_states: dict[int | str, torch.Tensor] = field(default_factory=dict)
    all_hidden_states: tuple[torch.Tensor, ...] | None = None


_NO_LIMIT = torch.iinfo(torch.long).max


class NodeInputs:
    """The buffers from which a captured forward reads what changes.

    Args:
        rows (`int`): R.
        nodes (`int`): T.
        device (`torch.device`): Where they lie.
    """

    def __init__(self, rows: int, nodes: int, device: torch.device):
        # A call may run in inference mode, and a later one outside of it.
        with torch.inference_mode(False):
            self.tokens: torch.Tensor
            self.ancestors: torch.Tensor
            self.depths: torch.Tensor
            self.tokens, self.ancestors, self.depths = (
                torch.zeros((rows, nodes), dtype=torch.long, device=device) for _ in range(3)
            )
            # Each part begins at a multiple of 16 bytes, for which kernels are compiled in any case.
            self._rows = torch.zeros((4, rows + rows % 2), dtype=torch.long, device=device)
        self.lengths: torch.Tensor
        self.starts: torch.Tensor
        self.lengths, self.starts, self._first_positions, self._last_positions = self._rows[:, :rows]

    def fill(
        self, tokens: torch.LongTensor, topology: TreeTopology, rows: RowState, max_position: int | None = None
    ) -> None:
        """Copies in the nodes `tokens` `(r, t)` of a forward; the other arguments are those of [`SlotModel`].

        Rows of padding are empty, and write to slots that no row uses. Nodes of padding see themselves and the
        committed slots, and lie after the nodes in use.
        """
        num_rows, num_nodes = self.tokens.shape
        missing = num_nodes - tokens.shape[1]
        self.tokens.copy_(_with_rows(F.pad(tokens, (0, missing)), num_rows))
        bits, depths = ancestor_bits(topology), topology.depths
        if missing:
            itself = 1 << torch.arange(tokens.shape[1], num_nodes, device=bits.device)
            bits = torch.cat([bits, itself.expand(*bits.shape[:-1], -1)], dim=-1)
            depths = F.pad(depths, (0, missing))
        self.ancestors.copy_(_with_rows(bits, num_rows))
        self.depths.copy_(_with_rows(depths, num_rows))
        first = [length - start + offset for length, start, offset in zip(rows.lengths, rows.starts, rows.offsets)]
        last = [_NO_LIMIT if max_position is None else max_position] * len(first)
        padding = [0] * (self._rows.shape[1] - len(first))
        table = torch.tensor([values + padding for values in (rows.lengths, rows.starts, first, last)])
        self._rows.copy_(table, non_blocking=True)

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [self.tokens, self.ancestors, self.depths, self._rows]

    @property
    def tree(self) -> SlotTree:
        return SlotTree(self.lengths, self.starts, self.ancestors, self.depths)

    @property
    def positions(self) -> torch.LongTensor:
        """Position ids `(R, T)`."""
        return torch.minimum(self._first_positions[:, None] + self.depths, self._last_positions[:, None])


def _with_rows(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Values `(r, T)` with copies of the first row after them; `(T,)` stand for all rows."""
    missing = rows - len(values)
    return values if values.dim() == 1 or not missing else torch.cat([values, values[:1].expand(missing, -1)])


class SlotModel:
    """Drives one model over one `SlotCache` during one call.

    Args:
        model (`PreTrainedModel`): Any model whose decoder has a key/value cache.
        cache (`SlotCache`): Its keys and values.
        states (`tuple`): Hidden states to return, see [`captured_states`].
        forward_kwargs (`dict`): Further arguments for every forward.

    Attributes:
        max_position (`int`, *optional*): Last position id that a valid node of the call may have. Padding nodes lie
            after it in rows that are nearly full, and a table of positions may end there.
        row_inputs (`dict[str, torch.Tensor]`): Further arguments of the forwards over slots, each with one value for
            every row, `(R, 1)`, that goes for all its nodes.
        source (`Source`, *optional*): What the rows have in the encoder, of a model that has one.
        forward_cache (`Cache`): The cache as the model's forward takes it.
        attention_layers (`Counter`): What computed the attention of the last forward's layers, where kernels run.
        graphs (`CallGraphs`, *optional*): Run in the place of forwards whose shapes repeat.
        taps (`StateTaps`): Collect the asked-for hidden states of the model's forwards.
    """

    # Attention that the tree kernel cannot compute falls back to masks by itself.
    _fits_kernel = True

    def __init__(
        self,
        model: torch.nn.Module,
        cache: SlotCache,
        states: tuple[int | str, ...] = (),
        forward_kwargs: dict[str, Any] | None = None,
    ):
        self.model = model
        self.cache = cache
        self.profile: ModelProfile = model_profile(model)
        self.starts: list[int] = []
        self.offsets: list[int] = []
        self.hidden: torch.BoolTensor | None = None
        self.counter: PositionCounter | None = None
        self.max_position: int | None = None
        self.attention_layers: Counter[str] = Counter()
        self.graphs: CallGraphs | None = None
        self.recurrent: RecurrentLayers | None = None
        if self.profile.is_recurrent:
            cache.last_recurrent_layer = max(module.layer_idx for module in mixers(model))
            cache.has_slots = self.profile.attends
        self.states = states
        self.taps: StateTaps = StateTaps(model, states)
        self.forward_kwargs: dict[str, Any] = forward_kwargs or {}
        self.row_inputs: dict[str, torch.Tensor] = {}
        self.source: Source | None = None
        self.forward_cache: Cache = cache
        self._needs_no_masks = False
        # That of the hidden states; a model's first parameter may belong to a vision tower of another type.
        embedding = model.get_input_embeddings().weight
        self._mask_dtype = embedding.dtype if embedding.is_floating_point() else model.dtype

    def see(self, source: Source | None) -> None:
        """Lets the decoder attend to these sources, one for each row, from now on."""
        self.source = source
        self.forward_cache = self.cache if source is None else source.with_slots(self.cache)

    @cached_property
    def _attention(self) -> AttentionSwitch:
        return attention_switch(self.model)

    def use_graphs(self, graphs: CallGraphs | None) -> None:
        """Lets forwards whose shapes repeat run as graphs from now on. To be called in front of the prefill."""
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
            remedy = "Leave the speculative arguments out to use plain generate()."
            if self.model.training and any(
                getattr(one, "gradient_checkpointing", False) for one in self.model.modules()
            ):
                remedy = (
                    "In training mode gradient checkpointing turns the cache off. Disable it, or call model.eval(), "
                    "for the time of the call."
                )
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has put no keys and values of the prompt into the cache it was given, "
                f"which speculation needs. {remedy}"
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
        positions, name = torch.arange(input_ids.shape[1], device=input_ids.device), self.profile.of_decoder
        inputs = self._inputs(input_ids)
        if any(starts):
            first = upload(starts, input_ids.device)[:, None]
            inputs[name("attention_mask")] = (positions >= first).long()
            positions = (positions - first).clamp_(min=0)
        if self.profile.takes_position_ids:
            inputs[name("position_ids")] = positions.expand(input_ids.shape)
        if self.profile.takes_logits_to_keep:
            inputs["logits_to_keep"] = 1
        with fast_products(self.model):
            self.model(**inputs)
        # Padding is counted where slots are.
        self.start_slots(starts, None if self.profile.counted is None else starts)

    def forward(self, tokens: torch.LongTensor, topology: TreeTopology, logits_from: int = 0) -> SlotOutput:
        """Reads nodes after each row's committed slots.

        Args:
            tokens (`torch.LongTensor` of shape `(R, T)`): Anchor and draft tokens.
            topology (`TreeTopology`): Who sees whom among them.
            logits_from (`int`): The first node whose logits are wanted.

        Returns:
            [`SlotOutput`] with the logits of these nodes, and the states of all.

        Raises:
            UnsupportedModelError: A tree for a model that can verify chains only.
        """
        if not (self.profile.supports_trees or topology.is_chain):
            why = (
                "has a recurrent state" if self.profile.is_recurrent else "tells positions from the order of its cache"
            )
            raise UnsupportedModelError(
                f"{type(self.model).__name__} {why}, so it can verify chains, and got a draft tree. Draft without "
                "branches."
            )
        replayed = None if self.graphs is None else self._replay(tokens, topology, logits_from)
        if replayed is not None:
            return replayed
        rows, tree = self._place(tokens, topology)
        forward = VerificationForward(tree, self.cache.plan.columns)
        positions = self._positions_of(tokens, topology, rows) if self._places_nodes else None
        masks = self._masks(topology, forward, rows)
        counted, nodes = self.profile.counted, Nodes(tokens, positions, topology, rows, self.max_position)
        with nullcontext() if counted is None else counted.told(nodes):
            output = self._read(tokens, positions, masks, forward, tokens.shape[1] - logits_from)
        self.attention_layers = forward.layers
        return output

    def _place(self, tokens: torch.LongTensor, topology: TreeTopology) -> tuple[RowState, SlotTree | None]:
        """Plans what a forward writes: the rows as they stand before it, and its nodes where the tree kernel runs."""
        plan = self.cache.plan_write(tokens.shape[1])
        # Nodes go after the committed slots: one copy to the device serves both.
        rows = RowState(self.cache.lengths, self.starts, self.offsets, self.hidden, plan.device_starts)
        fits = self._fits_kernel and tokens.shape[1] <= MAX_NODES and rows.hidden is None
        return rows, slot_tree(topology, rows) if fits and use_triton(tokens) else None

    def _replay(self, tokens: torch.LongTensor, topology: TreeTopology, logits_from: int) -> SlotOutput | None:
        """The output of [`SlotModel.forward`] from a graph; `None` where the forward has to run without one."""
        rows, nodes = tokens.shape
        if nodes > MAX_NODES:
            return None
        size = padded_rows(rows), self.graphs.padded_nodes(nodes)

        def fill(inputs: NodeInputs) -> None:
            inputs.fill(tokens, topology, RowState(self.cache.lengths, self.starts, self.offsets), self.max_position)
            self.cache.plan_write(nodes)

        def read(inputs: NodeInputs, columns: int) -> tuple:
            output, layers = self.read_static(inputs, columns)
            return output.logits, output.hidden_states, layers

        captured = self.graphs.run_on_slots(
            (*size, self.states),
            lambda: NodeInputs(*size, tokens.device),
            fill,
            read,
            self.cache,
            ahead=size[1],
        )
        if captured is None:
            return None
        logits, states, self.attention_layers = captured.output
        # Rows and nodes of padding are cut off.
        states = {key: state[:rows, :nodes] for key, state in states.items()}
        return SlotOutput(logits[:rows, logits_from:nodes], states)

    def read_static(self, nodes: NodeInputs, columns: int) -> tuple[SlotOutput, Counter[str]]:
        """Forward from tensors that stay where they are, for a capture; nothing else changes with the text.

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

    @property
    def _places_nodes(self) -> bool:
        """Tells whether the model can be told the positions of nodes."""
        return self.profile.takes_position_ids or self.profile.counted is not None

    def _inputs(self, tokens: torch.LongTensor) -> dict[str, Any]:
        """Arguments that every forward of the model has, for these tokens."""
        inputs = {self.profile.of_decoder("input_ids"): tokens, "use_cache": True, "return_dict": True}
        inputs[self.profile.cache_name] = self.forward_cache
        return inputs if self.source is None else {**inputs, **self.source.inputs}

    def _read(self, tokens, positions, masks, forward: VerificationForward, num_logits: int) -> SlotOutput:
        inputs, name = self._inputs(tokens), self.profile.of_decoder
        inputs[name("attention_mask")] = masks
        if num_logits < tokens.shape[1] and self.profile.takes_logits_to_keep:
            inputs["logits_to_keep"] = num_logits
        if self.profile.takes_position_ids:
            inputs[name("position_ids")] = positions
        inputs |= {name: values.expand(-1, tokens.shape[1]) for name, values in self.row_inputs.items()}
        with (
            self.taps.captured() as states,
            self._attention(forward),
            self._states_kept(tokens.shape[1]),
            fast_products(self.model),
        ):
            output = self.model(**inputs, **self.forward_kwargs)
        return SlotOutput(output.logits[:, -num_logits:], states, output.get(name("hidden_states")))

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
        if not self.profile.attends:
            return None
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
        named = {
            name: mask
            for layer_type, mask in zip(self.profile.layer_types, masks)
            for name in (layer_type, MASK_OF_LAYER_TYPE.get(layer_type, layer_type))
        }
        return {**named, **dict.fromkeys(WITHOUT_ATTENTION)} if self.profile.is_recurrent else named

    def keep_rows(self, keep: list[int]) -> None:
        self.cache.keep_rows(keep)
        if self.recurrent is not None:
            self.recurrent.keep_rows(keep)
        self.starts = [self.starts[row] for row in keep]
        self.offsets = [self.offsets[row] for row in keep]
        self.row_inputs = {name: select_rows(values, keep) for name, values in self.row_inputs.items()}
        if self.source is not None:
            self.see(self.source.of_rows(keep))
        if self.hidden is not None:
            self.hidden = self.hidden[keep]

    def join(self, other: SlotModel) -> None:
        """Takes over the rows of another call of the same model after its own, without the padding in front of them.

        Raises:
            UnsupportedModelError: Tokens inside of the prompts are masked.
        """
        if self.hidden is not None or other.hidden is not None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} masks tokens inside of the prompts, and rows that join others can be "
                "masked at their beginning only. Pass batch_size=1."
            )
        self.cache.join(other.cache, other.starts)
        if self.recurrent is not None:
            self.recurrent.join(other.recurrent)
        self.starts = self.starts + [0] * len(other.starts)
        self.offsets = self.offsets + other.offsets
        if self.max_position is not None:
            self.max_position = max(self.max_position, other.max_position)
        self.row_inputs = {
            name: torch.cat([values, other.row_inputs[name]]) for name, values in self.row_inputs.items()
        }


def call_graphs(
    model: torch.nn.Module,
    largest: int = 1,
    enforce_eager: bool = False,
    all_hidden_states: bool = False,
    row_inputs: tuple[str, ...] = (),
) -> CallGraphs | None:
    """Graphs of a causal language model for one call; `None` where its device has none.

    Args:
        largest (`int`): Nodes of a full draft, the anchor included.
        enforce_eager (`bool`): The user wants none.
        all_hidden_states (`bool`): The forwards return the hidden states of all layers.
        row_inputs (`tuple[str, ...]`): What the forwards read of each row beside its tokens.
    """
    profile = model_profile(model)
    reasons = {
        "enforce_eager=True": enforce_eager,
        "the hidden states of all layers are returned": all_hidden_states,
        f"it reads {', '.join(row_inputs)}": bool(row_inputs),
        "it has layers with a recurrent state": profile.is_recurrent,
        "it tells positions from the slots of its cache": profile.counts_slots or profile.counted is not None,
        "it reads an encoder's output": profile.has_encoder,
    }
    return graphs_for(model, reasons, largest=largest)
