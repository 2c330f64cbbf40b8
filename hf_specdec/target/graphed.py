"""Forwards of a model over slots as CUDA graphs, and the buffers that these read.

A graph records the same functions that run eagerly, on a copy of the model whose slots, rows and limits are tensors:
the buffers of the graph. They are padded to more rows and nodes.

Shapes: R rows and T nodes of a graph, r and t of them in use, N = T - 1 draft nodes, V vocabulary.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import torch

from ..drafts import DraftTree, TreeTopology
from ..kernels.best import with_successors
from ..kernels.cache import move_slots
from ..kernels.tree_attention import MAX_NODES
from ..logits.randomness import RowKeys
from ..logits.rules import CapturedJudge
from ..target_facts import vocabulary_size
from ..transfers import PackedTables, take_nodes
from .forward import SlotOutput
from .graphs import GraphInputs, Variant
from .masks import GrownTopology, RowPlaces


if TYPE_CHECKING:
    from .model import SlotModel


# Integers of the rows beside their places.
_KEYS = ("seeds", "row_numbers", "positions")
_NUMBERS = (*RowPlaces([], [], []).numbers, "num_drafted", *_KEYS)


class NodeInputs(GraphInputs):
    """The buffers of a forward over slots, whose nodes a judge may judge."""

    def __init__(
        self,
        rows: int,
        nodes: int,
        device: torch.device,
        judge: CapturedJudge | None = None,
        probs: torch.FloatTensor | None = None,  # (R, T - 1, V): room for what nodes were drawn from, shared by graphs
    ):
        # Rows of padding are empty, and write to slots that no row uses.
        super().__init__(rows, device, dict.fromkeys(_NUMBERS, 0), {})
        self.num_nodes = nodes
        self.judge: CapturedJudge | None = judge
        self.probs: torch.FloatTensor | None = probs
        with torch.inference_mode(False):
            # The tokens of all nodes, the parents of those that were drafted, and tokens unknown to the host.
            self._nodes = torch.zeros((rows, 2 * nodes), dtype=torch.long, device=device)
            # Nodes of padding are children of the anchor after the nodes in use.
            self._padding_nodes = torch.zeros((2, 1, nodes), dtype=torch.long, device=device)
            self._padding_nodes[1] = -1

    def fill_nodes(
        self,
        count: int,
        anchors: torch.LongTensor,  # (r,)
        draft: DraftTree,
        rows: RowPlaces,
        keys: RowKeys | None = None,  # of the rows' random numbers
        more: torch.LongTensor | None = None,  # (r,): by how many tokens rows are longer than the host knows
    ) -> None:
        """Copies in the anchors and the drafts of the first rows."""
        integers = ([0] * count,) * 3 if keys is None else keys[:3]
        num_drafted = draft.num_nodes if draft.node_counts is None else draft.node_counts
        self.fill(count, {**rows.numbers, "num_drafted": num_drafted, **dict(zip(_KEYS, integers))}, {})
        if self.probs is not None and draft.probs is not None:
            # Those of padding may be any numbers.
            self.probs[:count, : draft.size].copy_(draft.probs[:count])
        zeros, no_parents = self._padding_nodes[..., : self.num_nodes - 1 - draft.size].expand(-1, count, -1)
        none = self._padding_nodes[0, :, :1]
        added = none.expand(count, -1) if more is None else more[:count, None]
        parents = draft.parents if draft.parents.dim() == 1 else draft.parents[:count]
        parts = [anchors[:count, None], draft.tokens[:count], zeros, parents.expand(count, -1), no_parents, added]
        torch.cat([part for part in parts if part.shape[1]], dim=1, out=self._nodes[:count])
        if count < len(self._nodes):
            self._nodes[count:] = self._nodes[:1]
            if more is not None:
                self._nodes[count:, -1:] = none

    # What the graph that runs reads

    @property
    def rows(self) -> RowPlaces:
        return RowPlaces.in_a_graph(self.numbers, self._nodes[:, -1])

    @property
    def keys(self) -> RowKeys:
        positions = self.numbers["positions"] + self._nodes[:, -1]
        return RowKeys(self.numbers["seeds"], self.numbers["row_numbers"], positions)

    def read(self) -> tuple[torch.LongTensor, TreeTopology, DraftTree]:
        """Tokens `(R, T)` of the nodes, who sees whom, and the drafted nodes."""
        split = self._nodes.tensor_split([self.num_nodes, 2 * self.num_nodes - 1], dim=1)
        tokens, parents = (part.contiguous() for part in split[:2])
        topology, draft = GrownTopology(parents), DraftTree(tokens[:, 1:], parents, self.numbers["num_drafted"])
        if self.judge is not None:
            draft.probs, draft.is_chain = self.probs, self.judge.is_chain
            # One of a chain would be that of no padding.
            draft.topology = topology
        return tokens, topology, draft


def in_a_graph(model: SlotModel, rows: RowPlaces, columns: int) -> SlotModel:
    """The model as a graph sees it that reads `columns` slots."""
    model = copy(model)
    model.graphs = None
    model.cache = model.forward_cache = model.cache.in_a_graph(rows.lengths, columns)
    model.starts, model.leads, model.max_position = rows.starts, rows.leads, rows.max_position
    return model


# Scores of all nodes up to which they are judged in a graph, which holds on to the memory that this takes.
_MOST_SCORES = 1 << 26


def graphed_verification(
    slots: SlotModel, anchors: torch.LongTensor, draft: DraftTree, judge: CapturedJudge | None
) -> SlotOutput | None:
    """The output of [`SlotModel.verify`] by a graph, if there is one; a judge judges the draft in it."""
    tensors = _run(slots, anchors, draft, judge)
    if tensors is None:
        return None
    logits, states, outcome = tensors
    rows, nodes = draft.batch_size, draft.size + 1
    slots.cache.plan_write(nodes)
    # Without rows and nodes of padding.
    if outcome is None:
        return SlotOutput(logits[:rows, :nodes], {key: state[:rows, :nodes] for key, state in states.items()})
    # Whoever is told of a commit may read it when the graph has long run again.
    copies = () if states is None else states[:, :rows].clone().unbind()
    outcome, states = outcome.copy_of_rows(rows), dict(zip(slots.states, copies))
    successors = outcome["successors"].unflatten(1, (logits.shape[1], -1)) if slots.num_successors else None
    return SlotOutput(logits[:rows, :nodes], states, None, outcome, successors, judge.settings is not None)


def graphed_forward(
    slots: SlotModel, tokens: torch.Tensor, topology: TreeTopology, logits_from: int
) -> SlotOutput | None:
    """The output of [`SlotModel.forward`] by a graph, if there is one."""
    if tokens.is_floating_point():
        return None
    draft = DraftTree(tokens[:, 1:], topology.draft_parents, [tokens.shape[1] - 1] * len(tokens))
    output = graphed_verification(slots, tokens[:, 0], draft, None)
    if output is not None:
        output.logits = output.logits[:, logits_from:]
    return output


def verify_ahead(
    slots: SlotModel, anchors: torch.LongTensor, draft: DraftTree, judge: CapturedJudge, counts: torch.LongTensor
) -> None:
    """Launches a verification before the host knows that `counts` `(R,)` nodes of the last one stay."""
    with slots.graphs.ahead():
        _run(slots, anchors, draft, judge, counts)


def _run(
    slots: SlotModel,
    anchors: torch.LongTensor,
    draft: DraftTree,
    judge: CapturedJudge | None,
    more: torch.LongTensor | None = None,
) -> list[Any] | None:
    """Logits, states and outcome of a graph, which may have run ahead."""
    graphs, rows, nodes, device = slots.graphs, draft.batch_size, draft.size + 1, draft.parents.device
    size = 1 if nodes == 1 else graphs.largest
    if not nodes <= size <= MAX_NODES:
        return None
    vocab_size = vocabulary_size(slots.model)
    if judge is not None and judge.settings is not None and rows * size * vocab_size > _MOST_SCORES:
        judge = None
    key: tuple[Any, ...] = (size, slots.states)
    if judge is not None:
        # Whatever of judging is built into a graph.
        key += ((slots.most_committed, slots.num_successors, judge.is_drawn, judge.is_chain),)
        key += () if judge.settings is None else (Variant(judge.settings),)

    def make_inputs(rows: int) -> NodeInputs:
        shape = (rows, size - 1, vocab_size)
        probs = graphs.shared_floats(shape, device) if judge is not None and judge.is_drawn else None
        return NodeInputs(rows, size, device, judge=judge, probs=probs)

    def fill(inputs: NodeInputs, count: int) -> None:
        inputs.fill_nodes(count, anchors, draft, slots.places, None if judge is None else judge.keys, more)

    def read(inputs: NodeInputs, columns: int) -> tuple[Any, ...]:
        model = in_a_graph(slots, inputs.rows, columns)
        tokens, topology, draft = inputs.read()
        output = model.forward(tokens, topology)
        # What has computed the attention, which decides about masks.
        slots.attention_layers = model.attention_layers
        states, outcome = output.hidden_states, None
        if judge is not None:
            states, outcome = _judged(model, inputs, tokens, draft, output)
        return output.logits, states, outcome, model.attention_layers

    width = size if more is None else size + slots.most_committed
    captured = graphs.run(key, rows, make_inputs, fill, read, slots.cache, width)
    if captured is None:
        return None
    *tensors, slots.attention_layers = captured.output
    return tensors


def _judged(
    slots: SlotModel, inputs: NodeInputs, tokens: torch.LongTensor, draft: DraftTree, output: SlotOutput
) -> tuple[torch.Tensor | None, PackedTables]:
    """States `(number of states, R, M, H)` along the accepted path, to which the slots are moved, and the outcome."""
    accepted = inputs.judge.judge(draft, output.logits, inputs.keys)
    # Who drafts deeper than announced gets the tokens that there is room for; the last of them are the target's.
    counts = accepted.num_accepted[:, None].clamp(max=slots.most_committed - 1)
    committed, path = (values[:, : slots.most_committed] for values in (accepted.tokens, accepted.path))
    if path.shape[1] > 1:
        move_slots([buffer for layer in slots.cache.layers for buffer in layer.buffers], slots.cache.lengths, path)
    tables = {"accepted": counts, "counts": counts + 1, "committed": committed, "path": path}
    # Where no token could be chosen, the verdict will be an error, and none may be read that there is not.
    readable = committed.clamp(min=0)
    tables |= {"readable": readable, "anchor": readable.gather(1, counts), "num_nodes": draft.num_nodes[:, None]}
    tables |= {"tokens": draft.tokens, "parents": draft.parents}
    if slots.num_successors:
        tables["successors"] = with_successors(tokens, output.logits, slots.num_successors).flatten(1)
    states = [take_nodes(output.hidden_states[key], path) for key in slots.states]
    return torch.stack(states) if states else None, PackedTables.of(tables)
