"""Forwards of a model over slots as CUDA graphs.

A graph records the same functions that run eagerly, on a copy of the model whose slots, rows and limits are tensors:
the buffers of the graph. They are padded to more rows and nodes.

Shapes: R rows and T nodes of a graph, r and t of them in use, N = T - 1 draft nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any

import torch

from ..drafts import DraftTree, TreeTopology
from ..drafts.topology import chain_parents
from ..kernels.best import with_successors
from ..kernels.cache import move_slots
from ..logits.captured import CapturedJudge
from ..target_facts import vocabulary_size
from ..transfers import PackedTables, take_nodes
from .forward import SlotOutput
from .graphs import CallGraphs, Variant
from .inputs import NewNodes, NodeInputs
from .masks import RowState


if TYPE_CHECKING:
    from .model import SlotModel


# Scores of all nodes up to which they are judged in a graph, which holds on to the memory that this takes.
_MOST_SCORES = 1 << 26


class Graphed:
    """Runs forwards of a model over slots as graphs of its call; each method returns `None` where none can run."""

    def __init__(self, slots: SlotModel):
        self.slots = slots
        self.graphs: CallGraphs = slots.graphs

    def verify(self, anchors: torch.LongTensor, draft: DraftTree, judge: CapturedJudge | None) -> SlotOutput | None:
        """The output of [`SlotModel.verify`], of a draft that the graph judges if there is a judge."""
        return self._output(_new_nodes(anchors, draft, judge), judge)

    def verify_ahead(
        self, anchors: torch.LongTensor, draft: DraftTree, judge: CapturedJudge, counts: torch.LongTensor
    ) -> None:
        """As [`SlotModel.verify_ahead`]."""
        with self.graphs.ahead():
            self._tensors(_new_nodes(anchors, draft, judge, counts), judge)

    def forward(self, tokens: torch.Tensor, topology: TreeTopology, logits_from: int) -> SlotOutput | None:
        """The output of [`SlotModel.forward`]."""
        if tokens.is_floating_point():
            return None
        rows, nodes = tokens.shape
        parents = chain_parents(nodes - 1, tokens.device) if topology.is_chain else topology.parents[..., 1:] - 1
        output = self._output(NewNodes([tokens], parents, [nodes - 1] * rows), None)
        if output is not None:
            output.logits = output.logits[:, logits_from:]
        return output

    def run(
        self,
        key: tuple[Any, ...],
        new: NewNodes,
        make_inputs: Callable[[int], NodeInputs],
        read: Callable[[SlotModel, Any], tuple[Any, ...]],
        width: int,
    ) -> list[Any] | None:
        """What `read` returns of a model over the buffers of a graph; all else as for [`CallGraphs.run`]."""
        slots = self.slots

        def fill(inputs: NodeInputs, count: int) -> None:
            rows = RowState(slots.cache.lengths, slots.starts, slots.leads)
            inputs.fill_nodes(count, new, rows, slots.max_position)

        def recorded(inputs: NodeInputs, columns: int) -> tuple[Any, ...]:
            model, rows = copy(slots), inputs.rows
            model.graphs = None
            model.cache = model.forward_cache = slots.cache.in_a_graph(rows.lengths, columns)
            model.starts, model.leads, model.max_position = rows.starts, rows.leads, inputs.max_positions
            output = read(model, inputs)
            slots.attention_layers = model.attention_layers
            return *output, model.attention_layers

        captured = self.graphs.run(key, len(new.num_drafted), make_inputs, fill, recorded, slots.cache, width)
        if captured is None:
            return None
        *output, slots.attention_layers = captured.output
        return output

    def _output(self, new: NewNodes, judge: CapturedJudge | None) -> SlotOutput | None:
        """What a graph has computed, without rows and nodes of padding."""
        tensors = self._tensors(new, judge)
        if tensors is None:
            return None
        logits, states, outcome = tensors
        slots, rows, nodes = self.slots, len(new.num_drafted), new.parents.shape[-1] + 1
        slots.cache.plan_write(nodes)
        if outcome is None:
            states = {key: state[:rows, :nodes] for key, state in states.items()}
            return SlotOutput(logits[:rows, :nodes], states)
        # Whoever is told of a commit may read it when the graph has long run again.
        copies = () if states is None else states[:, :rows].clone().unbind()
        outcome, states = outcome.copy_of_rows(rows), dict(zip(slots.states, copies))
        successors = outcome["successors"].unflatten(1, (logits.shape[1], -1)) if slots.num_successors else None
        return SlotOutput(logits[:rows, :nodes], states, None, outcome, successors, judge.may_fail)

    def _tensors(self, new: NewNodes, judge: CapturedJudge | None) -> list[Any] | None:
        """Logits, states and outcome of a graph, which may have run ahead."""
        slots, rows, device = self.slots, len(new.num_drafted), new.parents.device
        size = self.graphs.padded_nodes(new.parents.shape[-1] + 1)
        if size is None:
            return None
        vocab_size = vocabulary_size(slots.model)
        if judge is not None and judge.may_fail and rows * size * vocab_size > _MOST_SCORES:
            judge = None
        key: tuple[Any, ...] = (size, slots.states)
        if judge is not None:
            # Whatever of judging is built into a graph.
            key += ((slots.most_committed, slots.num_successors, judge.is_drawn, judge.is_chain),)
            key += () if judge.settings is None else (Variant(judge.settings),)

        def make_inputs(rows: int) -> NodeInputs:
            shape = (rows, size - 1, vocab_size)
            probs = self.graphs.shared_floats(shape, device) if judge is not None and judge.is_drawn else None
            return NodeInputs(rows, size, device, judge=judge, probs=probs)

        width = size if new.more is None else size + slots.most_committed
        return self.run(key, new, make_inputs, _read_nodes if judge is None else _read_and_judge, width)


def _new_nodes(
    anchors: torch.LongTensor,
    draft: DraftTree,
    judge: CapturedJudge | None,
    more: torch.LongTensor | None = None,
) -> NewNodes:
    counts = draft.num_nodes if draft.node_counts is None else draft.node_counts
    keys = None if judge is None else judge.keys
    return NewNodes([anchors[:, None], draft.tokens], draft.parents, counts, draft.probs, keys, more)


def _read_nodes(slots: SlotModel, inputs: NodeInputs) -> tuple[Any, ...]:
    output = slots.forward(*inputs.read()[:2])
    return output.logits, output.hidden_states, None


def _read_and_judge(slots: SlotModel, inputs: NodeInputs) -> tuple[Any, ...]:
    tokens, topology, draft = inputs.read()
    output = slots.forward(tokens, topology)
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
    return output.logits, torch.stack(states) if states else None, PackedTables.of(tables)
