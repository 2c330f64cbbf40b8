"""CUDA graphs of draft networks during a call, and graphs of networks without a cache.

Networks that keep keys and values of the text have [`DraftSlots`].

Shapes: R rows of a graph, r of them in use; B rows of the call, H hidden size of the target.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ..protocol import Commit, Session
from ..target.graphs import CallGraphs, GraphInputs, graphs_for
from ..transfers import select_rows


if TYPE_CHECKING:
    from ..settings import SpeculativeConfig


def begin_graphs(
    network: torch.nn.Module, shared: tuple[torch.nn.Module, ...], config: SpeculativeConfig, session: Session
) -> CallGraphs | None:
    """The graphs of a draft network for this call; `None` where its device has none.

    It goes through `shared` modules of the target. The session's statistics count the graphs.
    """
    graphs = graphs_for(network, {"enforce_eager=True": config.enforce_eager}, shared)
    if graphs is not None:
        session.draft_graphs.append(graphs)
    return graphs


# Depths of graphs that draft one token after the other.
_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48)


def graph_depth(chosen: int | None, most: int) -> int:
    """Depth to which a graph drafts, one of few: each is a graph of its own. `None` chooses `most`."""
    return most if chosen is None else min(next((depth for depth in _DEPTHS if depth >= chosen), most), most)


class RowGraphs:
    """The graphs of a network that keeps nothing from cycle to cycle, during one call."""

    def __init__(self, network: torch.nn.Module, shared: tuple[torch.nn.Module, ...] = ()):
        self._network, self._shared = network, shared
        self._graphs: CallGraphs | None = None

    def begin(self, config: SpeculativeConfig, session: Session) -> None:
        """Lets what comes up repeatedly run as a graph from now on; the arguments are those of [`begin_graphs`]."""
        self._graphs = begin_graphs(self._network, self._shared, config, session)

    @property
    def are_on(self) -> bool:
        return self._graphs is not None and self._graphs.why_eager is None

    def run(
        self,
        key: tuple[Any, ...],
        rows: int,
        read: Callable[..., Any],
        values: Callable[[], dict[str, torch.Tensor]],
        limits: tuple[int, ...] = (),
    ) -> Any:
        """Runs the network on tensors `(r, ...)`, in a graph of R rows where there is one.

        `read` takes the tensors by name, and returns tensors, nested or not, to be used before the next graph runs.
        `values` returns them; it is asked if the graph has not run ahead. The others are those of [`CallGraphs.run`].
        """
        values = cache(values)
        captured = None
        if self._graphs is not None:
            device = next(self._network.parameters()).device
            captured = self._graphs.run(
                key,
                rows,
                lambda size: GraphInputs(size, device, {}, values()),
                lambda inputs, count: inputs.fill(count, {}, values()),
                lambda inputs: read(**inputs.tensors),
                limits=limits,
            )
        return read(**values()) if captured is None else captured.of_rows(rows)

    def has_run_ahead(self, key: tuple[Any, ...], rows: int, limits: tuple[int, ...]) -> bool:
        """A run with these arguments has been made ahead."""
        return self.are_on and self._graphs.has_run_ahead(key, rows, limits)

    def close(self) -> None:
        """Ends the call; its graphs are free for the next one."""
        if self._graphs is not None:
            self._graphs.close()


# Returns the states `(B, H)` from which anchors were predicted, for whoever needs them.
States = Callable[[], torch.Tensor]


class AnchorStates:
    """The target's states `(B, H)` from which each row's anchor was predicted, taken when somebody asks for them.

    They are all that a network without a cache knows of the text.
    """

    def __init__(self):
        self._take: States | None = None

    def __call__(self) -> torch.Tensor:
        if self._take is None:
            raise RuntimeError("the states of no commit")
        return self._take()

    def observe(self, commit: Commit) -> None:
        self._take = cache(lambda: commit.anchor_states("last"))

    def keep_rows(self, keep: list[int]) -> None:
        if self._take is not None:
            self._set(select_rows(self(), keep))

    def join(self, other: AnchorStates) -> None:
        self._set(torch.cat([self(), other()]))

    def _set(self, states: torch.Tensor) -> None:
        self._take = lambda: states

    def forget(self) -> None:
        self._take = None
