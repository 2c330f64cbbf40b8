"""Slots of drafts that read the target's states: their keys and values, from the prompt on.

Slots and positions follow each other alike, so a row's positions are its slots plus a number, its lead.

Shapes: R active rows (of a graph: with those of padding), T tokens of a forward, C tokens of a chunk, X size of a
state, th hidden size of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..logits.randomness import RowKeys
from ..protocol import Prompt, Session
from ..target.attention import takes_trees
from ..target.cache import SlotCache
from ..target.graphs import CallGraphs, GraphInputs
from ..transfers import RowNumbers, upload
from .graphs import begin_graphs


if TYPE_CHECKING:
    from ..settings import SpeculativeConfig


# Positions of a prompt that one forward reads.
_CHUNK_SIZE = 1024


class Entries(NamedTuple):
    """Inputs of one draft forward; in a graph all of them are tensors."""

    tokens: torch.LongTensor  # (R, T), padded on the right
    states: dict[Any, torch.Tensor]  # that belong to them, each (R, T, X)
    counts: RowNumbers  # (R,): valid entries of each row
    keys: RowKeys | None = None  # of the numbers that draw a draft; positions are those of the first entries' tokens
    limits: RowNumbers | None = None  # (R,): largest depth of each row's draft


# Integers of the rows that graphs read, and what rows of padding have: an entry in an empty text.
_NUMBERS = dict.fromkeys(("ends", "starts", "leads", "counts", "limits", "seeds", "row_numbers", "positions"), 0)
_NUMBERS["counts"] = 1


class Reading(NamedTuple):
    """Places of the entries that are read next."""

    slots: torch.LongTensor  # (R, T): where their keys and values go
    positions: torch.LongTensor  # (R, T)
    columns: int  # slots that attention reads
    bound: int | None  # above the size of all positions; unknown in a graph
    is_uniform: bool  # all rows are known to see the same slots


class DraftSlots:
    """A draft's keys and values of each row.

    The network has `layers`, `device`, `dtype` and `head_size`. `starts` are the slots of the rows' first entries,
    after padding.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        starts: list[int],
        leads: list[int],
        capacity: int,
        graphs: CallGraphs | None = None,
        num_layers: int | None = None,
    ):
        self.network = network
        self.device: torch.device = network.device
        self.graphs = graphs
        self.cache: SlotCache = SlotCache(capacity)
        self.cache.store = None if graphs is None else graphs.store
        self.cache.layer_at((num_layers or len(network.layers)) - 1)
        self.cache.start_slots(len(starts))
        self._place_rows(starts, leads)
        # Attention takes the content of masks, see [`TreeMask`].
        self.has_kernel: bool = takes_trees(self.first_slots, network.dtype, network.head_size)

    def _place_rows(self, starts: list[int], leads: list[int]) -> None:
        self.starts = starts
        self.leads = leads
        # (R, 1) each.
        self.first_slots: torch.Tensor
        self._leads: torch.Tensor
        self.first_slots, self._leads = upload([starts, leads], self.device)[..., None]

    @property
    def runs_graphs(self) -> bool:
        return self.graphs is not None and self.graphs.why_eager is None

    def plan_read(self, count: int) -> Reading:
        """Plans a forward of `count` entries after those of each row; it stays in force until the next plan."""
        plan = self.cache.plan_write(count)
        slots = plan.starts(self.device)[:, None] + torch.arange(count, device=self.device)
        # Positions of padding count downwards from 0.
        bound = plan.columns + max(map(abs, self.leads)) if self.cache.columns is None else None
        is_uniform = plan.offset is not None and not any(self.starts)
        return Reading(slots, slots + self._leads, plan.columns, bound, is_uniform)

    def replay(
        self, key: tuple[Any, ...], new: Entries, width: int, ahead: int, read: Callable[[Any, Entries], Any]
    ) -> Any:
        """Reads entries, and maybe drafts after them, as a graph; `None` where there is none to run.

        New entries are padded to `width`, read first and kept; where the host does not know how many, by whoever
        learns it. At most `ahead` slots are written after them. `read` does it, with slots and entries whose numbers
        are tensors, and returns tensors `(R, ...)`, nested or not, to be used before the next graph runs. The key has
        what is built into the graph beside the shapes.
        """
        # A layer has its buffers when it has read for the first time.
        is_allocated = all(layer.is_initialized for layer in self.cache.layers)
        if self.graphs is None or not is_allocated or new.tokens.shape[1] > width:
            return None
        limits = new.limits or [0] * len(new.tokens)
        tensors = {"tokens": new.tokens, **new.states}

        def fill(inputs: GraphInputs, count: int) -> None:
            keys = new.keys or ([0] * count,) * 3
            numbers = (self.cache.lengths, self.starts, self.leads, new.counts, limits, *keys)
            inputs.fill(count, dict(zip(_NUMBERS, numbers)), tensors)

        captured = self.graphs.run(
            (type(self), width, *new.states, *key),
            len(new.tokens),
            lambda rows: GraphInputs(rows, self.device, _NUMBERS, tensors, width),
            fill,
            lambda inputs, columns: read(*self._in_a_graph(inputs, columns)),
            self.cache,
            width + ahead,
            tuple(limits),
        )
        if captured is None:
            return None
        if isinstance(new.counts, list):
            self.skip(new.counts)
        return captured.of_rows(len(limits))

    def skip(self, counts: list[int]) -> None:
        """Keeps entries that a graph has read."""
        self.cache.commit(counts)

    def _in_a_graph(self, inputs: GraphInputs, columns: int) -> tuple[DraftSlots, Entries]:
        """The slots as a graph sees them that reads `columns` of them, those in use among them, and the entries."""
        ends, starts, leads, counts, limits, *keys = inputs.numbers.values()
        slots = copy(self)
        slots.graphs = None
        slots.cache = self.cache.in_a_graph(ends, columns)
        slots.first_slots, slots._leads = starts[:, None], leads[:, None]
        states = {name: values for name, values in inputs.tensors.items() if name != "tokens"}
        return slots, Entries(inputs.tensors["tokens"], states, counts, RowKeys(*keys), limits)

    def keep_rows(self, keep: list[int]) -> None:
        self.cache.keep_rows(keep)
        self._place_rows([self.starts[row] for row in keep], [self.leads[row] for row in keep])

    def join(self, other: DraftSlots) -> None:
        """Takes over the rows of another call after its own, without the padding in front of them."""
        self.cache.join(other.cache, other.starts)
        leads = [lead + start for lead, start in zip(other.leads, other.starts)]
        self._place_rows(self.starts + [0] * len(other.starts), self.leads + leads)

    def close(self) -> None:
        """Ends the call; its graphs are free for the next one."""
        if self.graphs is not None:
            self.graphs.close()


class KnownPrompt:
    """The tokens of a prompt whose states are known, without the last state, which comes again with the first token.

    A continued cache or embeddings may have left the first ones unknown; drafts are weaker then.
    """

    def __init__(self, prompt: Prompt):
        num_tokens = prompt.input_ids.shape[1]
        self.prompt = prompt
        self.count: int = min(prompt.num_states - 1, num_tokens)
        first = max(num_tokens - 1 - self.count, 0)
        self.starts: list[int] = [max(start - first, 0) for start in prompt.starts]
        self.leads: list[int] = [first - start for start in prompt.starts]

    def slots(
        self, network: torch.nn.Module, config: SpeculativeConfig, session: Session, num_ahead: int
    ) -> dict[str, Any]:
        """Arguments of a network's [`DraftSlots`], whose drafts take up to `num_ahead` slots after the committed ones.

        The network also has `shared_modules`, those of the target that it goes through.
        """
        room = session.max_length - self.prompt.input_ids.shape[1]
        return {
            "starts": self.starts,
            "leads": self.leads,
            "capacity": self.count + min(room, 1024) + num_ahead + 1,
            "graphs": begin_graphs(network, network.shared_modules, config, session),
        }

    def chunks(self) -> Iterator[tuple[dict[Any, torch.Tensor], torch.LongTensor, list[int]]]:
        """States `(R, C, th)`, the tokens `(R, C)` after them, and C for each row; as many as one forward reads."""
        tokens, states = self.prompt.input_ids, self.prompt.hidden_states
        first_token = tokens.shape[1] - self.count
        first_state = self.prompt.num_states - 1 - self.count
        for begin in range(0, self.count, _CHUNK_SIZE):
            end = min(begin + _CHUNK_SIZE, self.count)
            chunk = {key: value[:, first_state + begin : first_state + end] for key, value in states.items()}
            yield chunk, tokens[:, first_token + begin : first_token + end], [end - begin] * len(self.starts)
