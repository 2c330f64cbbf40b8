"""A causal language model as the loop sees it: it reads tokens into slots and returns logits for every node.

The target and a draft model are both driven through `SlotModel`. The model runs through its own forward with a
`SlotCache`, explicit positions and ready-made masks; nothing of it is copied, replaced or left changed.

Shapes: R active rows, T nodes (anchor included), P prompt length, H hidden size, V vocabulary. The buffers of a
captured forward are padded to more rows and nodes: there R and T are those of the buffers, r and t those in use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from ..drafts import DraftTree, TreeTopology
from ..drafts.topology import chain_parents
from ..errors import UnsupportedModelError
from ..kernels._triton import use_triton
from ..kernels.cache import move_slots
from ..kernels.products import fast_products
from ..kernels.tree_attention import MAX_NODES, Beginning, SlotTree
from ..logits.acceptance import with_successors
from ..logits.captured import CapturedJudge
from ..logits.verifier import take_nodes
from ..target_facts import vocabulary_size
from ..transfers import PackedTables, select_rows, upload
from .attention import TREE_KERNEL, AttentionSwitch, TreeMask, VerificationForward, attention_switch
from .cache import SlotCache
from .facts import MASK_OF_LAYER_TYPE, WITHOUT_ATTENTION, model_profile
from .graphs import CallGraphs, Variant
from .inputs import NewNodes, NodeInputs
from .masks import RowState, node_masks, node_positions, slot_tree
from .parts.adapters import ADAPTED_ROW, RowAdapters
from .parts.positions import PlacedNodes, PositionCounter
from .parts.recurrent import RecurrentLayers, mixers
from .parts.rotary import ChangingRotary
from .parts.source import Source
from .states import StateTaps
from .uncompiled import Uncompiled


if TYPE_CHECKING:
    from .facts import ModelProfile


# Scores of all nodes up to which they are judged in a graph, which holds on to the memory that this takes.
_MOST_SCORES = 1 << 26


@dataclass
class SlotOutput:
    """Result of a forward over slots.

    Attributes:
        logits (`torch.Tensor` of shape `(R, T, V)`): The logits.
        hidden_states (`dict`): The states asked for, each `(R, T, H)`; with an outcome `(R, M, H)`, along the path.
        all_hidden_states (`tuple`, *optional*): Those of all layers.
        outcome (`PackedTables`, *optional*): Of a graph that has judged the draft: M, the most tokens of a row;
            "accepted", "counts" `(R, 1)`, of the draft and in all; "committed", "path" `(R, M)`, tokens, their nodes;
            "readable" `(R, M)`, "anchor" `(R, 1)`, tokens that embeddings accept, and the last of each row;
            "num_nodes" `(R, 1)`, "tokens", "parents" `(R, N)`.
        successors (`torch.LongTensor` of shape `(R, T, 1 + K)`, *optional*): Of [`with_successors`], as asked for.
        may_fail (`bool`): Scores may leave no token to choose, so that the verdict is an error.
    """

    logits: torch.Tensor
    hidden_states: dict[int | str, torch.Tensor] = field(default_factory=dict)
    all_hidden_states: tuple[torch.Tensor, ...] | None = None
    outcome: PackedTables | None = None
    successors: torch.LongTensor | None = None
    may_fail: bool = True


class SlotModel:
    """Drives one model over one `SlotCache` during one call.

    Args:
        model (`PreTrainedModel`): Any model whose decoder has a key/value cache.
        cache (`SlotCache`): Its keys and values.
        states (`tuple`): Hidden states to return, see [`captured_states`].
        forward_kwargs (`dict`): Further arguments for every forward.

    Attributes:
        most_committed (`int`): M, tokens that a row may commit in a cycle.
        num_successors (`int`): K, the best tokens after each node that a graph returns.
        starts, leads (`list[int]`), beginning (`Beginning`, *optional*): Those of [`RowState`].
        max_position (`int`, *optional*): Last position id that a valid node of the call may have. Padding nodes lie
            after it in rows that are nearly full, and a table of positions may end there.
        row_inputs (`dict[str, torch.Tensor]`): Further arguments of the forwards over slots, each with one value for
            every row, `(R, 1)`, that goes for all its nodes.
        source (`Source`, *optional*): What the rows have in the encoder, of a model that has one.
        forward_cache: The cache as the model's forward takes it.
        attention_layers (`Counter`): What computed the attention of the last forward's layers, where kernels run.
        graphs (`CallGraphs`, *optional*): Run in the place of forwards whose shapes repeat.
        taps (`StateTaps`): Collect the asked-for hidden states of the model's forwards.
    """

    # Attention that the tree kernel cannot compute falls back to masks by itself.
    _fits_kernel = True
    beginning: Beginning | None = None
    uncompiled: Uncompiled | None = None
    # Contexts for forwards of the model itself that read prompts into the slots, and for all forwards.
    reading_prompts: Callable[[], AbstractContextManager[None]] = nullcontext
    adapting: Callable[[], AbstractContextManager[None]] = nullcontext

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
        self.starts: Any = []
        self.leads: Any = []
        self.hidden: torch.BoolTensor | None = None
        self.counter: PositionCounter | None = None
        self.rotary: ChangingRotary | None = None
        self.max_position: Any = None
        self.most_committed: int = 1
        self.num_successors: int = 0
        self.attention_layers: Counter[str] = Counter()
        self.graphs: CallGraphs | None = None
        self.recurrent: RecurrentLayers | None = None
        if self.profile.is_recurrent:
            cache.last_recurrent_layer, cache.has_slots = max(mixers(model).values()), self.profile.attends
        self.states = states
        self.taps: StateTaps = StateTaps(model, states)
        self.forward_kwargs: dict[str, Any] = forward_kwargs or {}
        self.row_inputs: dict[str, torch.Tensor] = {}
        self.source: Source | None = None
        self.forward_cache: Any = cache
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
        if self.rotary is not None:
            self.rotary.close()
        if self.uncompiled is not None:
            self.uncompiled.close()

    def check_prefilled(self) -> None:
        """Raises an `UnsupportedModelError` if the prompt has left nothing in the cache."""
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
        rotary: ChangingRotary | None = None,
    ) -> None:
        """Ends the prefill.

        Args:
            starts (`list[int]`): Each row's first slot that is not padding.
            offsets (`list[int]`, *optional*): Each row's position id at that slot, 0 if not given.
            hidden (`torch.BoolTensor`, *optional*): Of [`RowState`].
            counter (`PositionCounter`, *optional*): Says the positions, in the place of starts and offsets.
            rotary (`ChangingRotary`, *optional*): Rotary embeddings whose frequencies may change in the call.

        Raises:
            UnsupportedModelError: The prompt has left nothing in the cache.
        """
        self.check_prefilled()
        self.starts = list(starts)
        self.leads = [offset - start for start, offset in zip(starts, offsets or [0] * len(starts))]
        self.hidden, self.counter, self.rotary = hidden, counter, rotary
        if self.graphs is not None and hidden is not None:
            self.graphs.switch_off("tokens inside of the prompts are masked")
        elif self.graphs is not None and counter is not None:
            self.graphs.switch_off("its positions depend on the tokens")
        elif self.graphs is not None and rotary is not None:
            self.graphs.switch_off("its rotary embedding changes with the length of the text")
        self.cache.start_slots(len(starts))
        if self.profile.is_recurrent:
            self.recurrent = RecurrentLayers(self.model, self.cache)

    def prefill(self, input_ids: torch.LongTensor, starts: list[int]) -> None:
        """Reads left-padded prompts `(R, P)`, or their embeddings `(R, P, H)`, into empty slots, without logits."""
        positions, name = torch.arange(input_ids.shape[1], device=input_ids.device), self.profile.of_decoder
        inputs = self._inputs(input_ids)
        if any(starts):
            first = upload(starts, input_ids.device)[:, None]
            inputs[name("attention_mask")] = (positions >= first).long()
            positions = (positions - first).clamp_(min=0)
        if self.profile.takes_position_ids:
            # Some models view them.
            inputs[name("position_ids")] = positions.expand(input_ids.shape[:2]).contiguous()
        if self.profile.takes_logits_to_keep:
            inputs["logits_to_keep"] = 1
        with fast_products(self.model), self.reading_prompts():
            self.model(**inputs)
        # Padding is counted where slots are.
        self.start_slots(starts, None if self.profile.counted is None else starts)

    def forward(self, tokens: torch.LongTensor, topology: TreeTopology, logits_from: int = 0) -> SlotOutput:
        """Reads nodes after each row's committed slots.

        Args:
            tokens (`torch.LongTensor` of shape `(R, T)`): Anchor and draft tokens; or embeddings `(R, T, H)`.
            topology (`TreeTopology`): Who sees whom among them.
            logits_from (`int`): The first node whose logits are wanted.

        Returns:
            [`SlotOutput`] with the logits of these nodes, and the states of all.

        Raises:
            UnsupportedModelError: A tree for a model that can verify chains only.
        """
        if not (self.profile.supports_trees or topology.is_chain):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} tells positions from the order of its cache, so it can verify chains, "
                "and got a draft tree. Draft without branches."
            )
        if self.graphs is not None and (replayed := self._replay_nodes(tokens, topology, logits_from)) is not None:
            return replayed
        rows, tree = self._place(tokens, topology)
        forward = VerificationForward(tree, self.cache.plan.columns)
        positions = self._positions_of(tokens, topology, rows) if self._places_nodes else None
        masks = self._masks(topology, forward, rows)
        with ExitStack() as reading:
            if self.profile.counted is not None:
                nodes = PlacedNodes(tokens, positions, topology, rows, self.max_position)
                reading.enter_context(self.profile.counted.told(nodes))
            if self.recurrent is not None:
                reading.enter_context(self.recurrent.reading(topology))
            if self.rotary is not None:
                reading.enter_context(self.rotary.reading(positions))
            output = self._read(tokens, positions, masks, forward, tokens.shape[1] - logits_from)
        self.attention_layers = forward.layers
        return output

    def _place(self, tokens: torch.LongTensor, topology: TreeTopology) -> tuple[RowState, SlotTree | None]:
        """Plans what a forward writes: the rows as they stand before it, and its nodes where the tree kernel runs."""
        plan = self.cache.plan_write(tokens.shape[1])
        # Nodes go after the committed slots: one copy to the device serves both.
        places = self.cache.lengths, self.starts, self.leads, self.hidden, self.beginning
        rows = RowState(*places, plan.device_starts)
        fits = self._fits_kernel and tokens.shape[1] <= MAX_NODES and rows.hidden is None
        return rows, slot_tree(topology, rows) if fits and use_triton(tokens) else None

    def verify(self, anchors: torch.LongTensor, draft: DraftTree, judge: CapturedJudge | None = None) -> SlotOutput:
        """Reads anchors `(R,)` and drafts after each row's committed slots.

        Args:
            judge (`CapturedJudge`, *optional*): Judges the draft, where a graph runs.
        """
        if self.graphs is not None and (replayed := self._replay(_nodes(anchors, draft, judge), judge)) is not None:
            return replayed
        tokens = anchors[:, None] if draft.size == 0 else torch.cat([anchors[:, None], draft.tokens], dim=1)
        return self.forward(tokens, draft.topology)

    def verify_ahead(
        self, anchors: torch.LongTensor, draft: DraftTree, judge: CapturedJudge, counts: torch.LongTensor
    ) -> None:
        """Launches the graph of a verification before the host knows how many nodes of the last one stay.

        The verification that is asked for next finds its output, see [`CallGraphs.ahead`].

        Args:
            anchors, draft, judge: As for [`SlotModel.verify`].
            counts (`torch.LongTensor` of shape `(R,)`): Nodes that stay of each row, the anchor included.
        """
        with self.graphs.ahead():
            self._run_graph(_nodes(anchors, draft, judge, counts), judge)

    def _replay_nodes(self, tokens: torch.LongTensor, topology: TreeTopology, logits_from: int) -> SlotOutput | None:
        """The output of [`SlotModel.forward`] from a graph; `None` where the forward has to run without one."""
        if tokens.is_floating_point():
            return None
        rows, nodes = tokens.shape
        parents = chain_parents(nodes - 1, tokens.device) if topology.is_chain else topology.parents[..., 1:] - 1
        output = self._replay(NewNodes([tokens], parents, [nodes - 1] * rows))
        if output is not None:
            output.logits = output.logits[:, logits_from:]
        return output

    def _replay(self, new: NewNodes, judge: CapturedJudge | None = None) -> SlotOutput | None:
        """The output of a graph; `None` where there is none."""
        output = self._run_graph(new, judge)
        if output is None:
            return None
        rows, nodes = len(new.num_drafted), new.parents.shape[-1] + 1
        self.cache.plan_write(nodes)
        logits, states, outcome, self.attention_layers = output
        # Rows and nodes of padding are cut off.
        if outcome is None:
            states = {key: state[:rows, :nodes] for key, state in states.items()}
            return SlotOutput(logits[:rows, :nodes], states)
        # Whoever is told of a commit may read it when the graph has long run again.
        copies = () if states is None else states[:, :rows].clone().unbind()
        outcome, states = outcome.copy_of_rows(rows), dict(zip(self.states, copies))
        successors = outcome["successors"].unflatten(1, (logits.shape[1], -1)) if self.num_successors else None
        return SlotOutput(logits[:rows, :nodes], states, None, outcome, successors, judge.may_fail)

    def _run_graph(self, new: NewNodes, judge: CapturedJudge | None) -> tuple[Any, ...] | None:
        """The tensors of a graph, which may have run ahead; `None` where there is none."""
        rows, device = len(new.num_drafted), new.parents.device
        size = self.graphs.padded_nodes(new.parents.shape[-1] + 1)
        if size is None:
            return None
        vocab_size = vocabulary_size(self.model)
        if judge is not None and judge.may_fail and rows * size * vocab_size > _MOST_SCORES:
            judge = None

        def make_inputs(rows: int) -> NodeInputs:
            shape = (rows, size - 1, vocab_size)
            probs = self.graphs.shared_floats(shape, device) if judge is not None and judge.is_drawn else None
            return NodeInputs(rows, size, device, judge=judge, probs=probs)

        captured = self.graphs.run(
            (size, self.states, *(() if judge is None else self._judging(judge))),
            rows,
            make_inputs,
            partial(self.fill, new=new),
            partial(self.as_recorded, SlotModel._unjudged if judge is None else SlotModel._judged),
            self.cache,
            size if new.more is None else size + self.most_committed,
        )
        return None if captured is None else captured.output

    def _judging(self, judge: CapturedJudge) -> tuple[Any, ...]:
        """Whatever of judging is built into a graph."""
        settings = () if judge.settings is None else (Variant(judge.settings),)
        return (self.most_committed, self.num_successors, judge.is_drawn, judge.is_chain), *settings

    # What graphs run

    def as_recorded(
        self, read: Callable[[SlotModel, NodeInputs], tuple[Any, ...]], inputs: NodeInputs, columns: int
    ) -> tuple[Any, ...]:
        """The result of `read`, and the `attention_layers`, for a model to which tensors say where rows stand."""
        model = copy(self)
        model.graphs = None
        rows = inputs.rows
        model.cache = model.forward_cache = self.cache.in_a_graph(rows.lengths, columns)
        model.starts, model.leads, model.max_position = rows.starts, rows.leads, inputs.max_positions
        output = read(model, inputs)
        self.attention_layers = model.attention_layers
        return *output, model.attention_layers

    def see_ends(self, num_first: int, window: int) -> None:
        """Lets the nodes of a graph see the first slots of each text and the last committed ones, from now on."""
        texts, self.starts = self.starts, torch.maximum(self.starts, self.cache.lengths - window)
        self.beginning = Beginning(texts, num_first, num_first + window)

    def _unjudged(self, inputs: NodeInputs) -> tuple:
        output = self.forward(*inputs.read()[:2])
        return output.logits, output.hidden_states, None

    def fill(self, inputs: NodeInputs, count: int, new: NewNodes) -> None:
        """Copies in the nodes of the first rows."""
        inputs.fill_nodes(count, new, RowState(self.cache.lengths, self.starts, self.leads), self.max_position)

    def _judged(self, inputs: NodeInputs) -> tuple:
        tokens, topology, draft = inputs.read()
        output = self.forward(tokens, topology)
        accepted = inputs.judge.judge(draft, output.logits, inputs.keys)
        # Who drafts deeper than announced gets the tokens that there is room for; the last of them are the target's.
        counts = accepted.num_accepted[:, None].clamp(max=self.most_committed - 1)
        committed, path = (values[:, : self.most_committed] for values in (accepted.tokens, accepted.path))
        if path.shape[1] > 1:
            move_slots([buffer for layer in self.cache.layers for buffer in layer.buffers], self.cache.lengths, path)
        tables = {"accepted": counts, "counts": counts + 1, "committed": committed, "path": path}
        # Where no token could be chosen, the verdict will be an error, and none may be read that there is not.
        readable = committed.clamp(min=0)
        tables |= {"readable": readable, "anchor": readable.gather(1, counts), "num_nodes": draft.num_nodes[:, None]}
        tables |= {"tokens": draft.tokens, "parents": draft.parents}
        if self.num_successors:
            tables["successors"] = with_successors(tokens, output.logits, self.num_successors).flatten(1)
        states = [take_nodes(output.hidden_states[key], path) for key in self.states]
        return output.logits, torch.stack(states) if states else None, PackedTables.of(tables)

    @property
    def _places_nodes(self) -> bool:
        """Tells whether the model can be told the positions of nodes."""
        return self.profile.takes_position_ids or self.profile.counted is not None

    def _inputs(self, tokens: torch.LongTensor) -> dict[str, Any]:
        """Arguments that every forward of the model has, for these tokens or embeddings."""
        name = self.profile.of_decoder("inputs_embeds" if tokens.is_floating_point() else "input_ids")
        inputs = {name: tokens, "use_cache": True, "return_dict": True}
        inputs[self.profile.cache_name] = self.forward_cache
        return inputs if self.source is None else {**inputs, **self.source.inputs}

    def _read(self, tokens, positions, masks, forward: VerificationForward, num_logits: int) -> SlotOutput:
        inputs, name = self._inputs(tokens), self.profile.of_decoder
        inputs[name("attention_mask")] = masks
        if num_logits < tokens.shape[1] and self.profile.takes_logits_to_keep:
            inputs["logits_to_keep"] = num_logits
        if self.profile.takes_position_ids:
            inputs[name("position_ids")] = positions.contiguous()
        repeated = {name: values for name, values in self.row_inputs.items() if name != ADAPTED_ROW}
        inputs |= {name: values.expand(-1, tokens.shape[1]) for name, values in repeated.items()}
        with (
            self.adapting(),
            self.taps.captured() as states,
            self._attention(forward),
            fast_products(self.model),
        ):
            output = self.model(**inputs, **self.forward_kwargs)
        return SlotOutput(output.logits[:, -num_logits:], states, output.get(name("hidden_states")))

    def telling_adapters(self) -> AbstractContextManager[None]:
        """Tells adapted layers, inside the block, which adapters the rows have."""
        return RowAdapters.of(self.model).of_rows(self.row_inputs[ADAPTED_ROW][:, 0])

    def commit(self, counts: list[int], path: torch.LongTensor | None = None) -> None:
        """Keeps what was accepted of the last forward; the arguments are those of [`SlotCache.commit`]."""
        self.cache.commit(counts, path)
        if self.recurrent is not None:
            self.recurrent.commit(counts, path)
        if self.rotary is not None:
            self.rotary.commit(counts)

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
        if forward.tree is not None and not rows.are_known and self._looks_at_no_mask:
            masks = [TreeMask(forward.tree, span).stand_in(columns, self._mask_dtype) for span in self.profile.spans]
        else:
            masks = node_masks(topology, rows, columns, self.profile.spans, self._mask_dtype)
        # Some models insist on a mask for every row; one that all rows share is only seen so often, not copied.
        return self._named([mask.expand(len(rows.lengths), -1, -1, -1) for mask in masks], forward)

    @property
    def _looks_at_no_mask(self) -> bool:
        """The last forward has shown it. One runs at least before a forward is captured."""
        num_layers = sum(layer.is_initialized for layer in self.cache.layers)
        return set(self.attention_layers) == {TREE_KERNEL} and self.attention_layers.total() >= num_layers

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

    def keep_rows(self, keep: list[int], behind: Sequence[int] = ()) -> None:
        """Goes on with these rows; the arguments are those of [`SlotCache.keep_rows`]."""
        self.cache.keep_rows(keep, behind)
        if self.recurrent is not None:
            self.recurrent.keep_rows(keep)
        if self.rotary is not None:
            self.rotary.keep_rows(keep)
        self.starts = [self.starts[row] for row in keep]
        self.leads = [self.leads[row] for row in keep]
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
        self.leads = self.leads + [lead + start for lead, start in zip(other.leads, other.starts)]
        if self.max_position is not None:
            self.max_position = max(self.max_position, other.max_position)
        self.row_inputs = {
            name: torch.cat([values, other.row_inputs[name]]) for name, values in self.row_inputs.items()
        }


def _nodes(
    anchors: torch.LongTensor,
    draft: DraftTree,
    judge: CapturedJudge | None,
    more: torch.LongTensor | None = None,
) -> NewNodes:
    """Anchors and drafts as graphs take them."""
    counts = draft.num_nodes if draft.node_counts is None else draft.node_counts
    keys = None if judge is None else judge.keys
    return NewNodes([anchors[:, None], draft.tokens], draft.parents, counts, draft.probs, keys, more)
