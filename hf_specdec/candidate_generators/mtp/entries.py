"""Slots of a chain of MTP layers, of which layer j drafts token j + 1.

Layer j reads as its entry t the token t + 1 + j, so the last entries of all layers but the first contain drafted
tokens, and are wrong if these are not accepted. They are read again together with the next ones: the window.

Shapes: R active rows, T entries, W entries of the window, h hidden size, V vocabulary, K layers, L = K + 1 entries
that are kept, as many as a cycle commits at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...drafting.entries import DRAFT_STATE, DraftEntries
from ...drafting.slots import Entries
from ...target.graphs import GraphInputs
from ...transfers import RowNumbers, last_of_each, select_rows, upload, widened
from .network import MtpNetwork


class _OfLast(NamedTuple):
    """Key of what is kept of the last entries, among the states that a graph reads."""

    name: int | str


_TOKENS = "tokens"


class LayerEntries(DraftEntries):
    """Keys and values of a chain of layers.

    Used like the entries of one layer: `read` takes what was committed, and a level of the draft is read by the next
    layer, which has to read the whole window, all entries since the last that is right in all layers.

    Args:
        network (`MtpNetwork`): The layers.
        depth (`int`): K, the first layers, which are used.
        starts, leads, capacity, options: As for one layer.

    Attributes:
        layer (`int`): Layer that has read the window last.
    """

    def __init__(
        self, network: MtpNetwork, depth: int, starts: list[int], leads: list[int], capacity: int, **options: Any
    ):
        super().__init__(network, starts, leads, capacity, **options, num_layers=depth)
        self.depth = depth
        self.layer = depth - 1
        # The window, and the states that this layer has handed on.
        nothing = torch.zeros((len(starts), 0), dtype=torch.long, device=self.device)
        self._window = Entries(nothing, {}, [0] * len(starts))
        self._handed_on: torch.Tensor | None = None
        # Tokens `(R, L, 1)` and states `(R, L, X)` of the last entries of each row, zeros in front of a shorter text.
        self._last: dict[Any, torch.Tensor] = {}
        self._keys: tuple[int | str, ...] = network.target_hidden_states

    def gather(self, new: Entries) -> Entries:
        """The window that ends with the new entries, from the first entry on that some layer has read wrongly."""
        kept, added = self.depth + 1, new.counts
        both = self._with_last(new)
        # Entry t from the end, counted before these, was read by layer j with t - j drafted tokens too many.
        if isinstance(added, list):
            self._flush_deferred(new)
            known = [length - start for length, start in zip(self.cache.lengths, self.starts)]
            again = [max(min(self.depth - count, most), 0) for count, most in zip(added, known)]
            self._go_back(again)
            first, counts = [kept - count for count in again], [sum(both) for both in zip(again, added)]
            width = max(counts)
        else:
            known = self.cache.lengths - self.first_slots[:, 0]
            again = torch.minimum(self.depth - added, known).clamp(min=0)
            self._go_back(again)
            first, counts, width = kept - again, again + added, kept
        window = {key: _columns(values, first, width) for key, values in both.items()}
        self._last = self._last_of(both, added)
        self._window = Entries(window.pop(_TOKENS)[..., 0], window, counts)
        return self._window

    def _with_last(self, new: Entries) -> dict[Any, torch.Tensor]:
        """Tokens `(R, L + T, 1)` and states `(R, L + T, X)` of the entries that are kept, and of new ones."""
        states = {key: new.states[key] for key in self._keys}
        values = {key: part.to(self.device) for key, part in {_TOKENS: new.tokens[..., None], **states}.items()}
        before = self._last or {
            key: part.new_zeros((len(part), self.depth + 1, part.shape[2])) for key, part in values.items()
        }
        return {key: torch.cat((before[key], part), dim=1) for key, part in values.items()}

    def _last_of(self, both: dict[Any, torch.Tensor], added: RowNumbers) -> dict[Any, torch.Tensor]:
        """The entries that are kept next, of those that were kept and new ones, of which these many count."""
        return {key: _columns(values, added, self.depth + 1) for key, values in both.items()}

    def read(
        self, tokens: torch.LongTensor, hidden: torch.Tensor, counts: RowNumbers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads the window with the first layer; the arguments are those of one layer."""
        return self.read_window(0, tokens, hidden, counts)

    def read_window(
        self, layer: int, tokens: torch.LongTensor, hidden: torch.Tensor, counts: RowNumbers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads the window with a layer, after each row's length, and keeps it; the arguments are those of `read`."""
        self._begin_window(tokens, counts)
        outputs = self._read_layer(layer, tokens, hidden)
        self.cache.commit(counts)
        return outputs

    def shifted_window(self, tokens: torch.LongTensor) -> Entries:
        """The window as the next layer reads it, with the tokens `(R,)` at its end; it is taken back for that."""
        self._go_back(self._counts)
        return Entries(self._shift(self._tokens, tokens[:, None]), {DRAFT_STATE: self._handed_on}, self._counts)

    def keep_read(self, layer: int, window: Entries, handed_on: torch.Tensor) -> None:
        """Keeps the states that a layer has handed on in a graph, `(R, T, h)` with T at least W."""
        self._tokens, self._counts = window.tokens, window.counts
        self.layer, self._handed_on = layer, handed_on[:, : window.tokens.shape[1]]

    def skip(self, counts: list[int]) -> None:
        # A graph of a whole draft reads with all layers.
        self.layer = self.depth - 1
        super().skip(counts)

    def begin_draft(self, num_nodes: int) -> None:
        self._shifted = self._tokens
        self.num_read: int = 0

    def read_nodes(
        self, tokens: torch.LongTensor, hidden: torch.Tensor, parents: torch.LongTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads the window with the next layer; the arguments are those of one node after the one read before."""
        self.num_read += 1
        self._shifted = self._shift(self._shifted, tokens)
        outputs = self._read_layer(self.layer + 1, self._shifted, self._handed_on)
        return tuple(last_of_each(output, self._counts)[:, None] for output in outputs)

    def _shift(self, window: torch.LongTensor, tokens: torch.LongTensor) -> torch.LongTensor:
        """The window `(R, W)` one token on, which ends with the tokens `(R, 1)`."""
        last = upload(self._counts, self.device)[:, None] - 1
        return F.pad(window[:, 1:], (0, 1)).scatter(1, last, tokens.to(self.device))

    def keep_rows(self, keep: list[int]) -> None:
        super().keep_rows(keep)
        tokens, counts = self._window.tokens, self._window.counts
        self._window = Entries(select_rows(tokens, keep), {}, [counts[row] for row in keep])
        self._last = {key: select_rows(values, keep) for key, values in self._last.items()}
        if self._handed_on is not None:
            self._handed_on = select_rows(self._handed_on, keep)

    # The windows of both must have been read by the same layer.
    joins_read = True

    @property
    def gathers_ahead(self) -> bool:
        # Layers that no draft has needed are made up for by the host.
        return self.layer == self.depth - 1

    def join(self, other: LayerEntries) -> None:
        super().join(other)
        mine, theirs = self._window, other._window
        width = max(mine.tokens.shape[1], theirs.tokens.shape[1])

        def both(own: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            return torch.cat([widened(own, width), widened(new.to(own), width)])

        self._window = Entries(both(mine.tokens, theirs.tokens), {}, [*mine.counts, *theirs.counts])
        self._last = {key: torch.cat((values, other._last[key].to(values))) for key, values in self._last.items()}
        self._handed_on = both(self._handed_on, other._handed_on)
        # The rows read it again where it lies now.
        self._go_back(self._window.counts)
        self._begin_window(self._window.tokens, self._window.counts)
        self.cache.commit(self._window.counts)

    # Chains whose tokens are chosen one by one

    def replay(
        self,
        key: tuple[Any, ...],
        new: Entries,
        width: int,
        ahead: int,
        read: Callable[[Any, Entries], Any],
    ) -> Any:
        """Does what it does for one layer; the graph finds the window itself, by what was kept."""
        if isinstance(new.counts, list):
            self._flush_deferred(new)
        if not self._last:
            return None

        def with_last(entries: LayerEntries, inputs: Entries) -> tuple[Any, dict[Any, torch.Tensor]]:
            return read(entries, inputs), entries._last

        states = {**new.states, **{_OfLast(name): values for name, values in self._last.items()}}
        output = super().replay(key, new._replace(states=states), width, ahead, with_last)
        if output is None:
            return None
        output, last = output
        if isinstance(new.counts, list):
            # The next draft may run twice.
            self._last = {name: values.clone() for name, values in last.items()}
            self._handed_on = None
        return output

    def _in_a_graph(self, inputs: GraphInputs, columns: int) -> tuple[LayerEntries, Entries]:
        entries, new = super()._in_a_graph(inputs, columns)
        entries._last = {key.name: values for key, values in new.states.items() if isinstance(key, _OfLast)}
        return entries, new

    def begin_chain(self, new: Entries, width: int, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._replay_layer(0, self.gather(new), width)

    def read_next(
        self, tokens: torch.LongTensor, hidden: torch.Tensor, width: int, num_nodes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._replay_layer(self.layer + 1, self.shifted_window(tokens), width)

    def _replay_layer(self, layer: int, window: Entries, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """States `(R, h)` that a layer hands on after the window, and logits `(R, V)` there, from a graph if any."""

        def read(entries: LayerEntries, window: Entries) -> tuple[torch.Tensor, ...]:
            return entries._read_layer_last(layer, window)

        output = super().replay(("layer", layer), window, width, 0, read)
        if output is None:
            return read(self, window)[1:]
        handed_on, hidden, logits = output
        self.keep_read(layer, window, handed_on)
        return hidden, logits

    def _read_layer_last(self, layer: int, window: Entries) -> tuple[torch.Tensor, ...]:
        """States that a layer hands on in the window `(R, W, h)` and after it `(R, h)`, and logits `(R, V)` there."""
        handed_on, output = self.read_window(layer, window.tokens, self.states_of(window), window.counts)
        last, last_output = (last_of_each(values, window.counts) for values in (handed_on, output))
        return handed_on, last, self.network.logits(last_output)

    # Windows

    def _flush_deferred(self, new: Entries) -> None:
        """Reads the window with the layers that no draft has needed; tokens that they lack will be read again."""
        if self.layer == self.depth - 1:
            return
        tokens, counts = self._window.tokens, self._window.counts
        ends = self.cache.lengths
        self._go_back(counts)
        self._begin_window(tokens, counts)
        known, width = F.pad(self._with_new(tokens, counts, new), (0, self.depth)), tokens.shape[1]
        for layer in range(self.layer + 1, self.depth):
            self._read_layer(layer, known[:, layer : layer + width], self._handed_on)
        self.cache.lengths = ends

    def _with_new(self, tokens: torch.LongTensor, counts: list[int], new: Entries) -> torch.LongTensor:
        """Tokens of the window `(R, W)`, `counts[r]` of each row, and after them those of new entries."""
        both, width = torch.cat((tokens, new.tokens.to(tokens)), dim=1), tokens.shape[1]
        columns, ends = torch.arange(both.shape[1], device=both.device), upload(counts, both.device)[:, None]
        places = torch.where(columns < ends, columns, columns + width - ends)
        return both.gather(1, places.clamp(max=both.shape[1] - 1))

    def _go_back(self, counts: RowNumbers) -> None:
        self.cache.commit([-count for count in counts] if isinstance(counts, list) else -counts)

    def _begin_window(self, tokens: torch.LongTensor, counts: RowNumbers) -> None:
        """Prepares for reading the window after each row's length."""
        self._here = self.plan_read(tokens.shape[1])
        self._mask = self.causal_mask(self._here)
        self._tokens, self._counts = tokens, counts

    def _read_layer(
        self, layer: int, tokens: torch.LongTensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        here = self._here
        outputs = self.network(tokens, hidden, here.positions, self._mask, self.cache, layer, here.bound)
        self.layer: int = layer
        self._handed_on = outputs[0]
        return outputs


def _columns(values: torch.Tensor, first: RowNumbers, width: int) -> torch.Tensor:
    """Columns `first[r]` to `first[r] + width - 1` of each row of `(R, C, X)`; the last one where there are fewer."""
    if isinstance(first, list):
        if min(first) == max(first):
            return values[:, first[0] : first[0] + width]
        first = upload(first, values.device)
    columns = first[:, None] + torch.arange(width, device=values.device)
    return values[torch.arange(len(values), device=values.device)[:, None], columns.clamp(max=values.shape[1] - 1)]
