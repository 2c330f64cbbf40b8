"""Slots of drafts that read the target's states: their keys and values, from the prompt on.

The ends of the rows are known on the host, or inside of a graph by tensors alone; masks and positions are made of them
in the same way.

Shapes: R active rows (of a graph: with those of padding), T tokens of a forward, C tokens of a chunk, th hidden size
of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..decoding.cache import SlotCache, SlotLayer, padded_rows
from ..decoding.graphs import CallGraphs
from ..kernels.cache import WritePlan
from ..protocol import Prompt, Session
from ..transfers import upload
from .graphs import begin_graphs, fill_front


if TYPE_CHECKING:
    from ..settings import SpeculativeConfig


# Positions of a prompt that one forward reads.
_CHUNK_SIZE = 1024


class Entries(NamedTuple):
    """Inputs of one draft forward.

    Attributes:
        tokens (`torch.LongTensor` of shape `(R, T)`): Tokens, padded on the right.
        states (`dict`): States that belong to them, each `(R, T, X)`.
        counts (`list[int]`): Valid entries of each row.
    """

    tokens: torch.LongTensor
    states: dict
    counts: list[int]


class DraftSlots:
    """A draft's keys and values of each row.

    Args:
        network (`nn.Module`): The draft, with `layers`, `device`.
        starts (`list[int]`): Slot of each row's first entry; slots before it are padding.
        offsets (`list[int]`): Position of that entry.
        capacity (`int`): Slots to allocate at first.
        graphs (`CallGraphs`, *optional*): Run in the place of forwards whose shapes repeat.
        num_layers (`int`, *optional*): Layers of the draft that are used; all by default.

    Attributes:
        rows (`HostRows` or `CapturedRows`): First slots and ends of the rows.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        starts: list[int],
        offsets: list[int],
        capacity: int,
        graphs: CallGraphs | None = None,
        num_layers: int | None = None,
    ):
        self.network, self.device, self.graphs = network, network.device, graphs
        self.cache = SlotCache(capacity)
        store = None if graphs is None else graphs.store
        layers = range(num_layers or len(network.layers))
        takes = [None if store is None else partial(store.take, layer) for layer in layers]
        self.cache.layers = [SlotLayer(capacity, take=take) for take in takes]
        self.cache.start_slots(len(starts))
        self.rows: HostRows | CapturedRows = HostRows(self.cache, starts, offsets, self.device)

    def replay(
        self,
        key: tuple,
        new: Entries,
        width: int,
        ahead: int,
        limits: list[int],
        read: Callable[[DraftInputs, int], Any],
        constants: Any = None,
    ) -> Any:
        """Reads entries, and maybe drafts after them, as a graph.

        Args:
            key (`tuple`): Constants of the graph beside the shapes.
            new (`Entries`): Entries that are read first, and kept.
            width (`int`): T, to which they are padded.
            ahead (`int`): Most slots that are written after them.
            limits (`list[int]`): Largest depth of each row's draft.
            read (`Callable`): Does it without a graph, from [`DraftInputs`] and in `static()` slots.
            constants (`Any`): Tensors that it reads beside them.

        Returns:
            The result of `read`, to be used before the next graph runs; `None` where there is none to run.
        """
        # A layer has its buffers when it has read for the first time.
        is_allocated = all(layer.is_initialized for layer in self.cache.layers)
        if self.graphs is None or not is_allocated or new.tokens.shape[1] > width:
            return None
        rows = padded_rows(len(new.tokens))
        captured = self.graphs.run_on_slots(
            (type(self), rows, width, *new.states, *key),
            lambda: DraftInputs(rows, width, new.states, self.device, constants),
            lambda inputs: inputs.fill(new, limits, self.rows),
            read,
            self.cache,
            ahead=width + ahead,
        )
        if captured is None:
            return None
        self.skip(new.counts)
        return captured.output

    def skip(self, counts: list[int]) -> None:
        """Keeps entries that a graph has read."""
        self.rows.commit(counts)

    def static(self, inputs: DraftInputs, columns: int) -> DraftSlots:
        """A copy for a capture, which reads all that changes from cycle to cycle from tensors.

        Args:
            inputs (`DraftInputs`): These tensors.
            columns (`int`): Slots to read, those in use among them.
        """
        static = copy(self)
        static.rows = CapturedRows(self.cache, inputs, columns)
        return static

    def keep_rows(self, keep: list[int]) -> None:
        self.cache.keep_rows(keep)
        self.rows.keep(keep)

    def close(self) -> None:
        """Ends the call; its graphs are free for the next one."""
        if self.graphs is not None:
            self.graphs.close()


class HostRows:
    """First slots and ends of the rows of a draft, known on the host.

    Columns are of the shape `(R, 1)`, or `(1, 1)` where the rows are equal.

    Args:
        cache (`SlotCache`): Has each row's length.
        starts, offsets (`list[int]`): As for [`DraftSlots`].
        device (`torch.device`): Of the columns.
    """

    is_captured = False

    def __init__(self, cache: SlotCache, starts: list[int], offsets: list[int], device: torch.device):
        self.cache, self.device = cache, device
        self.starts, self.offsets = list(starts), list(offsets)

    @property
    def is_uniform(self) -> bool:
        """All rows see the same slots."""
        lengths = self.cache.lengths
        return not any(self.starts) and lengths.count(lengths[0]) == len(lengths)

    @property
    def ends(self) -> torch.LongTensor:
        """The slot after each row, as a column."""
        return self._column(self.cache.lengths)

    @property
    def first_slots(self) -> torch.LongTensor:
        """The slot of each row's first entry, as a column."""
        return self._column(self.starts)

    @property
    def next_positions(self) -> list[int]:
        rows = zip(self.cache.lengths, self.starts, self.offsets)
        return [length - start + offset for length, start, offset in rows]

    @property
    def positions(self) -> torch.LongTensor:
        """The position after each row, as a column."""
        return self._column(self.next_positions)

    def _column(self, values: Sequence[int]) -> torch.LongTensor:
        values = values[:1] if len(set(values)) == 1 else values
        return upload(values, self.device)[:, None]

    def plan_write(self, count: int, ahead: int = 0) -> WritePlan:
        """Plans the slots of the next forward, as [`SlotCache.plan_write`]."""
        return self.cache.plan_write(count, ahead)

    def position_bound(self, columns: int) -> int | None:
        """Above the size of all positions of so many slots; `None` where it is not known."""
        # Those of padding count downwards from 0.
        return max(columns, *self.starts) + max(self.offsets)

    def columns(self, ahead: int) -> int:
        """Number of slots up to `ahead` after the longest row."""
        return max(self.cache.lengths) + ahead

    def commit(self, counts: list[int]) -> None:
        """Keeps the first `counts[r]` entries of the last forward."""
        self.cache.commit(counts)

    def keep(self, keep: list[int]) -> None:
        self.starts = [self.starts[row] for row in keep]
        self.offsets = [self.offsets[row] for row in keep]


class CapturedRows:
    """[`HostRows`] from tensors: columns are `(R, 1)`, and nothing is known on the host.

    Args:
        cache (`SlotCache`): Is told where to write.
        inputs (`DraftInputs`): First slots, ends and positions of the rows.
        columns (`int`): Slots to read.
    """

    is_captured = True
    is_uniform = False

    def __init__(self, cache: SlotCache, inputs: DraftInputs, columns: int):
        self.cache, self._columns = cache, columns
        self.ends, self.first_slots, self.positions = inputs.ends, inputs.first_slots, inputs.positions

    def plan_write(self, count: int, ahead: int = 0) -> WritePlan:
        self.cache.plan = WritePlan.on_device(self._columns, self.ends[:, 0] + ahead, count)
        return self.cache.plan

    def position_bound(self, columns: int) -> int | None:
        return None

    def columns(self, ahead: int) -> int:
        return self._columns

    def commit(self, counts: torch.LongTensor) -> None:
        self.ends, self.positions = self.ends + counts[:, None], self.positions + counts[:, None]


class DraftInputs:
    """The buffers from which a captured draft reads what changes.

    Args:
        rows (`int`): R.
        count (`int`): T, entries of a row that are read at first.
        states (`dict[Any, torch.Tensor]`): Tensors `(r, t, X)` of the widths and dtypes of the states.
        device (`torch.device`): Where the buffers lie.
        constants (`Any`): Tensors that the draft reads beside them: they must live as long as the graph.

    Attributes:
        tokens (`torch.LongTensor` of shape `(R, T)`): The entries' tokens.
        states (`dict[Any, torch.Tensor]`): Their states, each `(R, T, X)`.
        ends, first_slots, positions (`torch.LongTensor` of shape `(R, 1)`): As in [`HostRows`].
        counts (`torch.LongTensor` of shape `(R,)`): Entries of each row that count; from 1 to T.
        limits (`torch.LongTensor` of shape `(R,)`): Largest depth of each row's draft.
    """

    def __init__(self, rows: int, count: int, states: dict, device: torch.device, constants: Any = None):
        # A call may run in inference mode, and a later one outside of it.
        with torch.inference_mode(False):
            self.tokens = torch.zeros((rows, count), dtype=torch.long, device=device)
            self.states = {
                key: torch.zeros((rows, count, state.shape[-1]), dtype=state.dtype, device=device)
                for key, state in states.items()
            }
            self._rows = torch.zeros((5, rows), dtype=torch.long, device=device)
        self.ends, self.first_slots, self.positions = (values[:, None] for values in self._rows[:3])
        self.counts, self.limits = self._rows[3:]
        self._constants = constants

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [self.tokens, self._rows, *self.states.values()]

    def fill(self, new: Entries, limits: list[int], rows: HostRows) -> None:
        """Copies in what the rows read. Rows of padding are like the first one, in slots of their own."""
        fill_front(self.tokens, new.tokens)
        for key, buffer in self.states.items():
            fill_front(buffer, new.states[key])
        table = (rows.cache.lengths, rows.starts, rows.next_positions, new.counts, limits)
        missing = self._rows.shape[1] - len(limits)
        self._rows.copy_(upload([[*values, *values[:1] * missing] for values in table], self._rows.device))


class KnownPrompt:
    """The tokens of a prompt whose states are known, without the last state, which comes again with the first token.

    A continued cache or embeddings may have left the first ones unknown; drafts are weaker then.

    Args:
        prompt (`Prompt`): The prompt, with its states.
    """

    def __init__(self, prompt: Prompt):
        num_tokens = prompt.input_ids.shape[1]
        self.prompt = prompt
        self.count = min(prompt.num_states - 1, num_tokens)
        first = max(num_tokens - 1 - self.count, 0)
        self.starts = [max(start - first, 0) for start in prompt.starts]
        self.offsets = [max(first - start, 0) for start in prompt.starts]

    def slots(
        self, network: torch.nn.Module, config: SpeculativeConfig, session: Session, num_ahead: int
    ) -> dict[str, Any]:
        """Begins a call of a network: arguments of its [`DraftSlots`].

        Args:
            network (`nn.Module`): The draft, with `shared_modules`, those of the target that it goes through.
            config (`SpeculativeConfig`): The settings.
            session (`Session`): The call.
            num_ahead (`int`): Slots of a draft, after what is committed.
        """
        room = session.max_length - self.prompt.input_ids.shape[1]
        return {
            "starts": self.starts,
            "offsets": self.offsets,
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
            here = {key: value[:, first_state + begin : first_state + end] for key, value in states.items()}
            yield here, tokens[:, first_token + begin : first_token + end], [end - begin] * len(self.starts)
