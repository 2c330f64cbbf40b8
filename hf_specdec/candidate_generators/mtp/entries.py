"""Slots of a chain of MTP layers, of which layer j drafts token j + 1.

Layer j reads as its entry t the token t + 1 + j, so the last entries of all layers but the first contain drafted
tokens, and are wrong if these are not accepted. They are read again together with the next ones: the window.

Shapes: R active rows, T entries, W entries of the window, h hidden size, V vocabulary, K layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...drafting.entries import DRAFT_STATE, DraftEntries
from ...drafting.slots import DraftInputs, Entries
from ...transfers import RowNumbers, last_of_each, select_rows, upload, widened
from .network import MtpNetwork


class LayerEntries(DraftEntries):
    """Keys and values of a chain of layers.

    Used like the entries of one layer: `read` takes what was committed, and a level of the draft is read by the next
    layer, which has to read the whole window, all entries since the last that is right in all layers.

    Args:
        network (`MtpNetwork`): The layers.
        depth (`int`): K, the first layers, which are used.
        starts, offsets, capacity, options: As for one layer.

    Attributes:
        layer (`int`): Layer that has read the window last.
    """

    def __init__(
        self, network: MtpNetwork, depth: int, starts: list[int], offsets: list[int], capacity: int, **options: Any
    ):
        super().__init__(network, starts, offsets, capacity, **options, num_layers=depth)
        self.depth = depth
        self.layer = depth - 1
        # The window, and the states that this layer has handed on.
        nothing = torch.zeros((len(starts), 0), dtype=torch.long, device=self.device)
        self._window = Entries(nothing, {}, [0] * len(starts))
        self._handed_on: torch.Tensor | None = None

    def gather(self, new: Entries) -> Entries:
        """The window that ends with the new entries, from the first entry on that some layer has read wrongly."""
        old = self._window
        self._flush_deferred(new)
        # Entry t from the end, counted before these, was read by layer j with t - j drafted tokens too many.
        again = [min(max(self.depth - added, 0), known) for added, known in zip(new.counts, old.counts)]
        self._go_back(again)
        self._window = new._replace(tokens=new.tokens.to(self.device))
        if any(again):
            first = [known - count for known, count in zip(old.counts, again)]
            places = _Places(first, old.counts, new.counts, self.device)
            states = {key: places.of(old.states[key], value) for key, value in new.states.items()}
            counts = [count + added for count, added in zip(again, new.counts)]
            self._window = Entries(places.of(old.tokens, new.tokens), states, counts)
        return self._window

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
        self._tokens, _, self._counts = window
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
        tokens, states, counts = self._window
        states = {key: select_rows(value, keep) for key, value in states.items()}
        self._window = Entries(select_rows(tokens, keep), states, [counts[row] for row in keep])
        if self._handed_on is not None:
            self._handed_on = select_rows(self._handed_on, keep)

    # The windows of both must have been read by the same layer.
    joins_read = True
    gathers_ahead = False

    def join(self, other: LayerEntries) -> None:
        super().join(other)
        mine, theirs = self._window, other._window
        width = max(mine.tokens.shape[1], theirs.tokens.shape[1])

        def both(own: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            return torch.cat([widened(own, width), widened(new.to(own), width)])

        states = {key: both(value, theirs.states[key]) for key, value in mine.states.items()}
        counts = [*mine.counts, *theirs.counts]
        self._window = Entries(both(mine.tokens, theirs.tokens), states, counts)
        self._handed_on = both(self._handed_on, other._handed_on)
        # The rows read it again where it lies now.
        self._go_back(self._window.counts)
        self._begin_window(self._window.tokens, self._window.counts)
        self.cache.commit(self._window.counts)

    # Chains whose tokens are chosen one by one

    def begin_chain(self, new: Entries, width: int, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._replay_layer(0, new, width)

    def read_next(
        self, tokens: torch.LongTensor, hidden: torch.Tensor, width: int, num_nodes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._replay_layer(self.layer + 1, self.shifted_window(tokens), width)

    def _replay_layer(self, layer: int, window: Entries, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """States `(R, h)` that a layer hands on after the window, and logits `(R, V)` there, from a graph if any."""

        def read(entries: LayerEntries, window: Entries | DraftInputs) -> tuple[torch.Tensor, ...]:
            return entries._read_layer_last(layer, window)

        output = self.replay(("layer", layer), window, width, 0, window.counts, read)
        if output is None:
            return read(self, window)[1:]
        handed_on, hidden, logits = output
        self.keep_read(layer, window, handed_on)
        return hidden, logits

    def _read_layer_last(self, layer: int, window: Entries | DraftInputs) -> tuple[torch.Tensor, ...]:
        """States that a layer hands on in the window `(R, W, h)` and after it `(R, h)`, and logits `(R, V)` there."""
        handed_on, output = self.read_window(layer, window.tokens, self.states_of(window), window.counts)
        last, last_output = (last_of_each(values, window.counts) for values in (handed_on, output))
        return handed_on, last, self.network.logits(last_output)

    # Windows

    def _flush_deferred(self, new: Entries) -> None:
        """Reads the window with the layers that no draft has needed; tokens that they lack will be read again."""
        if self.layer == self.depth - 1:
            return
        tokens, _, counts = self._window
        ends = self.cache.lengths
        self._go_back(counts)
        self._begin_window(tokens, counts)
        known = _Places([0] * len(counts), counts, new.counts, self.device).of(tokens, new.tokens)
        known, width = F.pad(known, (0, self.depth)), tokens.shape[1]
        for layer in range(self.layer + 1, self.depth):
            self._read_layer(layer, known[:, layer : layer + width], self._handed_on)
        self.cache.lengths = ends

    def _go_back(self, counts: list[int]) -> None:
        self.cache.lengths = [length - count for length, count in zip(self.cache.lengths, counts)]

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


class _Places:
    """Entries `first[r]` to `ends[r]` of each row of an old tensor, then the first `counts[r]` of a new one."""

    def __init__(self, first: list[int], ends: list[int], counts: list[int], device: torch.device):
        # Numbers from -1 downwards stand for entries of the new tensor.
        rows = [[*range(begin, end), *range(-1, -count - 1, -1)] for begin, end, count in zip(first, ends, counts)]
        self.size = max(map(len, rows))
        self.index = upload([row + [-1] * (self.size - len(row)) for row in rows], device)

    def of(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        places = torch.where(self.index < 0, old.shape[1] - 1 - self.index, self.index)
        rows = torch.arange(len(places), device=places.device)[:, None]
        return torch.cat((old, new.to(old)), dim=1)[rows, places]
