"""Texts of rows on the host, and on a device: what a graph looks up there are the drafts of `best_matches`.

On the device the graph writes the tokens that the verification in front of it has committed, before the host knows
them. Every place of the text is compared with its end.

Shapes: R rows, W committed tokens of a row, L places of a text, M matches, D depth of the drafts, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ...drafting.state import Entries
from ...kernels.matches import match_lengths
from ...target.cache import padded_rows
from ...threads import Lock
from ...transfers import RowNumbers, upload


class RowText:
    """The tokens of one row, in a buffer that grows; beyond `most` the newest three quarters of as many remain."""

    def __init__(self, tokens: Sequence[int], most: int):
        self._most = most
        self._buffer = np.empty(0, dtype=np.int32)
        self._size = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return self._size

    @property
    def tokens(self) -> np.ndarray:
        """The text, int32; valid until it is extended."""
        return self._buffer[: self._size]

    @property
    def num_bytes(self) -> int:
        return self._buffer.nbytes

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Adds tokens at the end."""
        if self._size + len(tokens) > self._most:
            kept = self._most - self._most // 4
            tokens, self._size = np.concatenate((self.tokens, tokens))[-kept:], 0
        size = self._size + len(tokens)
        if size > len(self._buffer):
            buffer = np.empty(min(2 * size, self._most), dtype=np.int32)
            buffer[: self._size] = self.tokens
            self._buffer = buffer
        self._buffer[self._size : size] = tokens
        self._size = size

    def followed_by(self, tokens: Sequence[int]) -> np.ndarray:
        """The text with others after it; nothing where it may not become as long."""
        if self._size + len(tokens) > self._most:
            return self._buffer[:0]
        return np.concatenate((self.tokens, np.array(tokens, dtype=np.int32))) if tokens else self.tokens


# Longer matches count as this long, where no other limit is set.
LONGEST_MATCH = 64

# Tokens that a text may grow by before it is moved, and graphs are captured anew.
_ROOM = 1024


# Tokens and parents `(R, N)` of trees, and how many of the nodes are valid, `(R,)`: what a [`DraftTree`] is made of.
FoundTrees = tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]


@dataclass(frozen=True)
class LookupRule:
    """Which places are drafted from, and how much."""

    min_match: int  # the shortest match that is drafted from
    max_match: int  # longer ones count as this long
    tokens_per_matched: int | None  # most draft tokens for each token of a match; `None`: any number
    num_matches: int  # M
    takes_first: bool  # the first occurrence of the longest match counts, not the last

    def draft(
        self, texts: torch.LongTensor, lengths: torch.LongTensor, limits: torch.LongTensor, depth: int, num_nodes: int
    ) -> FoundTrees:
        """Merges what followed the best matches to depths `limits` `(R,)`, in texts as for [`match_lengths`]."""
        size = texts.shape[1]
        places = torch.arange(size, device=texts.device)
        # Of equally long matches the first or the last place is the best.
        order = size - 1 - places if self.takes_first else places
        keys = match_lengths(texts, lengths, self.max_match) * size + order
        best = keys.topk(min(self.num_matches, size), dim=1).values
        matched, place = best // size, best % size
        matched = matched * (matched >= self.min_match)
        ends = (size - 1 - place if self.takes_first else place) + 1
        most = limits[:, None]
        if self.tokens_per_matched is not None:
            most = torch.minimum(most, self.tokens_per_matched * matched)
        counts = torch.minimum(most, lengths[:, None] - ends) * (matched > 0)
        depths = torch.arange(depth, device=texts.device)
        places = (ends[..., None] + depths).clamp(max=size - 1)
        tokens = texts.gather(1, places.flatten(1)).view(places.shape)
        return _merged(tokens, depths < counts[..., None], num_nodes)


def _merged(tokens: torch.LongTensor, is_valid: torch.BoolTensor, num_nodes: int) -> FoundTrees:
    """Trees of chains `(R, M, D)`: the first one, then what the second does not share with it, and so on."""
    rows, num_chains, _ = tokens.shape
    # Nodes of two chains are one where all tokens up to them are the same: that of the first such chain.
    is_shared = (tokens[:, :, None] == tokens[:, None]) & is_valid[:, :, None] & is_valid[:, None]
    first = is_shared.long().cumprod(-1).argmax(2)
    is_new = is_valid & (first == torch.arange(num_chains, device=tokens.device)[:, None])
    number = is_new.flatten(1).cumsum(1).view(is_new.shape) - 1
    node = number.gather(1, first)
    parents = F.pad(node[..., :-1], (1, 0), value=-1)
    is_kept = is_new & (number < num_nodes)
    # What is left out goes to a place after all nodes.
    place = number.masked_fill(~is_kept, num_nodes).flatten(1)
    tables = [
        values.new_full((rows, num_nodes + 1), filler).scatter_(1, place, values.flatten(1))
        for values, filler in ((tokens, 0), (parents, -1))
    ]
    found_tokens, found_parents = (values[:, :num_nodes].contiguous() for values in tables)
    return found_tokens, found_parents, is_kept.flatten(1).sum(1)


class DeviceTexts(nn.Module):
    """Memory for the texts of the call that has the graphs; it outlives calls, as graphs do."""

    def __init__(self, device: torch.device):
        super().__init__()
        # Says where the module is, to those who ask modules for it.
        self.place: nn.Parameter = nn.Parameter(torch.empty(0, device=device), requires_grad=False)
        self._memory: dict[tuple[int, int], torch.LongTensor] = {}
        self.eval()

    def of_rows(self, rows: int, size: int) -> torch.LongTensor:
        """Texts `(R, L)` of graphs for so many rows and places, and one more place that nobody reads."""
        if (rows, size) not in self._memory:
            with torch.inference_mode(False):
                self._memory[rows, size] = torch.zeros((rows, size + 1), dtype=torch.long, device=self.place.device)
        return self._memory[rows, size]


_memories: WeakKeyDictionary[nn.Module, DeviceTexts] = WeakKeyDictionary()
_lock = Lock()


def texts_of(target_model: nn.Module) -> DeviceTexts:
    """The memory for texts of a target, on its device."""
    device = next(target_model.parameters()).device
    with _lock:
        memory = _memories.get(target_model)
        if memory is None or memory.place.device != device:
            memory = _memories[target_model] = DeviceTexts(device)
        return memory


class CallTexts:
    """The texts of a call on the device, kept up with those that the host knows; what a graph has of the rows."""

    cache = None
    is_allocated = True

    def __init__(self, memory: DeviceTexts):
        self.memory = memory
        self.size: int = 0  # L
        self.lengths: RowNumbers = []  # tokens of each row that the device has
        self.will_grow: bool = False  # a graph has written tokens that the host does not know yet
        self._rows: list[int] = []

    def write(self, rows: list[int], texts: list[np.ndarray], num_more: int) -> None:
        """Writes what the device lacks of the texts of rows, these numbers of the call; they may grow by so much."""
        longest = max(map(len, texts)) + num_more
        if longest > self.size:
            # A larger size is for texts that grow further.
            self.size, self._rows = 1 << (longest + _ROOM - 1).bit_length(), []
        if self._rows != rows:
            self._rows, self.lengths = list(rows), [0] * len(rows)
        memory = self.memory.of_rows(padded_rows(len(rows)), self.size)
        for index, (text, written) in enumerate(zip(texts, self.lengths)):
            if written < len(text):
                memory[index, written : len(text)].copy_(upload(text[written:].tolist(), memory.device))
                self.lengths[index] = len(text)

    @property
    def numbers(self) -> dict[str, RowNumbers]:
        return {"ends": self.lengths}

    def in_a_graph(self, numbers: dict[str, torch.LongTensor], columns: int) -> CallTexts:
        texts = copy(self)
        texts.lengths = numbers["ends"]
        return texts

    def with_new(self, new: Entries) -> tuple[torch.LongTensor, torch.LongTensor]:
        """The texts `(R, L)` in a graph with what is new of them, and their lengths `(R,)`."""
        rows, width = new.tokens.shape
        lengths, counts = torch.as_tensor(self.lengths), torch.as_tensor(new.counts)
        texts, index = self.memory.of_rows(rows, self.size), torch.arange(width, device=lengths.device)
        # What is padding goes to the place that nobody reads.
        texts.scatter_(1, (lengths[:, None] + index).masked_fill(index >= counts[:, None], self.size), new.tokens)
        return texts, lengths + counts

    def select(self, keep: list[int]) -> CallTexts:
        """Lets all of them be written anew: rows have left or joined."""
        self._rows = []
        return self

    def cat(self, other: CallTexts) -> CallTexts:
        return self.select([])
