"""Runs what a draft network does in a cycle: eagerly, or recorded in a graph.

A network drafts by one function of the state of its rows and of what is new of them. It is the same function that runs
eagerly, that a graph records, and whose graph is launched ahead of the host. In a graph the numbers of the rows are
tensors, and the state has the graph's own: the slots as the graph sees them, and buffers in the place of kept tensors.
Those that the function leaves in their place are outputs, which the state gets where the host knows the verdict.

Shapes: R rows of a graph, r of them in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..logits.randomness import RowKeys
from ..protocol import Session
from ..target.graphs import CallGraphs, GraphInputs
from ..transfers import RowNumbers
from .state import Entries, NetworkState


# Depths of graphs that draft one token after the other.
_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48)

# Numbers that draw, among those of the rows.
_KEYS = ("seeds", "row_numbers", "positions")


def graph_depth(chosen: int | None, most: int) -> int:
    """Depth to which a graph drafts, one of few: each is a graph of its own. `None` chooses `most`."""
    return most if chosen is None else min(next((depth for depth in _DEPTHS if depth >= chosen), most), most)


# Buffers of a graph: what is new of the rows, and what was kept of them.
_Inputs = tuple[GraphInputs, GraphInputs]


@dataclass(eq=False)
class Runner:
    """The graphs of a draft network on a device, in one call."""

    graphs: CallGraphs
    device: torch.device

    @classmethod
    def of(cls, graphs: CallGraphs | None, device: torch.device, session: Session) -> Runner | None:
        """That of the graphs, which the statistics of the session count; `None` where there are none."""
        if graphs is None:
            return None
        session.draft_graphs.append(graphs)
        return cls(graphs, device)

    @property
    def has_graphs(self) -> bool:
        return self.graphs.why_eager is None

    def replay(
        self,
        read: Callable[[NetworkState, Entries], Any],
        state: NetworkState,
        new: Entries,
        key: tuple[Any, ...] = (),
        width: int = 1,
        ahead: int = 0,
    ) -> Any:
        """Lets a graph `read` new entries, and maybe draft after them; `None` where there is none to run.

        The tensors `(R, ...)` that `read` returns are to be used before the next graph runs. The slots keep the
        entries, where the host knows how many they are; else whoever learns it keeps them. The graph pads the entries
        of a row to `width`, and writes at most `ahead` slots after them; `key` is what else is built into it.
        """
        slots, kept = state.slots, dict(state.kept)
        tensors = new.states if new.tokens is None else {"tokens": new.tokens, **new.states}
        num_rows, num_new = next(iter(tensors.values())).shape[:2]
        if num_new > width or not (slots is None or slots.is_allocated):
            return None
        numbers: dict[str, RowNumbers] = {} if slots is None else slots.numbers
        if slots is not None or new.keys is not None:
            numbers = {**numbers, "counts": new.counts}
        if new.limits is not None:
            numbers["limits"] = new.limits
        if new.keys is not None:
            numbers.update(zip(_KEYS, new.keys))
        # Rows of padding have one entry in an empty text.
        padding = {name: int(name == "counts") for name in numbers}

        def make_inputs(rows: int) -> _Inputs:
            inputs = GraphInputs(rows, self.device, padding, tensors, width)
            return inputs, GraphInputs(rows, self.device, {}, kept)

        def fill(inputs: _Inputs, count: int) -> None:
            inputs[0].fill(count, numbers, tensors)
            inputs[1].fill(count, {}, kept)

        captured = self.graphs.run(
            (None if slots is None else type(slots), width, *tensors, *numbers, *kept, *key),
            num_rows,
            make_inputs,
            fill,
            partial(_recorded, read, slots),
            None if slots is None else slots.cache,
            width + ahead,
            tuple(new.limits or ()),
        )
        if captured is None:
            return None
        output, kept = captured.of_rows(num_rows)
        if isinstance(new.counts, list):
            if slots is not None:
                slots.skip(new.counts)
            # Another graph may run before they are read.
            state.kept = {name: values.clone() for name, values in kept.items()}
        return output


def _recorded(
    read: Callable[[NetworkState, Entries], Any], slots: Any, inputs: _Inputs, columns: int = 0
) -> tuple[Any, dict[Any, torch.Tensor]]:
    """The output of `read` on the buffers of a graph, with slots that it reads `columns` of, and what it keeps."""
    numbers, states, kept = inputs[0].numbers, dict(inputs[0].tensors), dict(inputs[1].tensors)
    state = NetworkState(None if slots is None else slots.in_a_graph(numbers, columns), kept)
    keys = RowKeys(*(numbers[name] for name in _KEYS)) if _KEYS[0] in numbers else None
    new = Entries(states.pop("tokens", None), states, numbers.get("counts"), keys, numbers.get("limits"))
    return read(state, new), state.kept
