"""Lookup on a device: the same drafts as those of [`~kernels.text.best_matches`], inside of a graph.

The text lies on the device, and the graph writes the tokens there that the verification in front of it has committed,
before the host knows them. Every place of the text is compared with its end.

Shapes: R rows, W committed tokens of a row, L places of a text, M matches, D depth of the drafts, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.matches import match_lengths
from ...target.store import padded_rows
from ...threads import Lock
from ...transfers import upload


# Longer matches count as this long, where no other limit is set.
LONGEST_MATCH = 64

# Tokens that a text may grow by before it is moved, and graphs are captured anew.
_ROOM = 1024


class FoundTrees(NamedTuple):
    """Attributes:
    tokens, parents (`torch.LongTensor` of shape `(R, N)`): Those of [`DraftTree`].
    num_nodes (`torch.LongTensor` of shape `(R,)`): Valid nodes of each row.
    """

    tokens: torch.LongTensor
    parents: torch.LongTensor
    num_nodes: torch.LongTensor


@dataclass(frozen=True)
class LookupRule:
    """Which places are drafted from, and how much.

    Args:
        num_matches (`int`): M.
        least, most (`int`): Shortest match, and the length that longer ones count as.
        takes_first (`bool`): Of equally long matches the first are the best, not the last.
        tokens_per_matched (`int`, *optional*): Most draft tokens for each token of a match; `None`: any number.
        depth (`int`), num_nodes (`int`): D and N.
    """

    num_matches: int
    least: int
    most: int
    takes_first: bool
    tokens_per_matched: int | None
    depth: int
    num_nodes: int

    def draft(self, texts: torch.LongTensor, lengths: torch.LongTensor, limits: torch.LongTensor) -> FoundTrees:
        """Merges what followed the best matches, as far as they begin alike.

        Args:
            texts (`torch.LongTensor` of shape `(R, L)`), lengths (`torch.LongTensor` of shape `(R,)`): As for
                [`match_lengths`].
            limits (`torch.LongTensor` of shape `(R,)`): Largest depth of each row.
        """
        matched, ends = self._best_matches(texts, lengths)
        most = limits[:, None]
        if self.tokens_per_matched is not None:
            most = torch.minimum(most, self.tokens_per_matched * matched)
        counts = torch.minimum(most, lengths[:, None] - ends) * (matched > 0)
        depths = torch.arange(self.depth, device=texts.device)
        places = (ends[..., None] + depths).clamp(max=texts.shape[1] - 1)
        tokens = texts.gather(1, places.flatten(1)).view(places.shape)
        return self._merged(tokens, depths < counts[..., None])

    def _best_matches(self, texts: torch.LongTensor, lengths: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengths `(R, M)` of the best matches, 0 where there are fewer, and the places `(R, M)` after them."""
        size = texts.shape[1]
        matches = match_lengths(texts, lengths, self.most)
        places = torch.arange(size, device=texts.device)
        keys = matches * size + (size - 1 - places if self.takes_first else places)
        best = keys.topk(min(self.num_matches, size), dim=1).values
        matched, place = best // size, best % size
        return matched * (matched >= self.least), (size - 1 - place if self.takes_first else place) + 1

    def _merged(self, tokens: torch.LongTensor, is_valid: torch.BoolTensor) -> FoundTrees:
        """Trees of chains `(R, M, D)`: the first one, then what the second does not share with it, and so on."""
        rows, num_chains, _ = tokens.shape
        # Nodes of two chains are one where all tokens up to them are the same: that of the first such chain.
        is_shared = (tokens[:, :, None] == tokens[:, None]) & is_valid[:, :, None] & is_valid[:, None]
        first = is_shared.long().cumprod(-1).argmax(2)
        is_new = is_valid & (first == torch.arange(num_chains, device=tokens.device)[:, None])
        number = is_new.flatten(1).cumsum(1).view(is_new.shape) - 1
        node = number.gather(1, first)
        parents = F.pad(node[..., :-1], (1, 0), value=-1)
        is_kept = is_new & (number < self.num_nodes)
        # What is left out goes to a place after all nodes.
        place = number.masked_fill(~is_kept, self.num_nodes).flatten(1)
        found = [
            values.new_full((rows, self.num_nodes + 1), filler).scatter_(1, place, values.flatten(1))
            for values, filler in ((tokens, 0), (parents, -1))
        ]
        found_tokens, found_parents = (values[:, : self.num_nodes].contiguous() for values in found)
        return FoundTrees(found_tokens, found_parents, is_kept.flatten(1).sum(1))


class DeviceTexts(nn.Module):
    """Memory for the texts of the call that has the graphs; it outlives calls, as graphs do.

    Args:
        device (`torch.device`): Where it lies.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        # Says where the module is, to those who ask modules for it.
        self.place = nn.Parameter(torch.empty(0, device=device), requires_grad=False)
        self._memory: dict[tuple[int, int], torch.LongTensor] = {}
        self.eval()

    def of_rows(self, rows: int, size: int) -> torch.LongTensor:
        """Texts `(R, L)` of graphs for so many rows and places, and one more place that nobody reads."""
        if (rows, size) not in self._memory:
            with torch.inference_mode(False):
                self._memory[rows, size] = torch.zeros((rows, size + 1), dtype=torch.long, device=self.place.device)
        return self._memory[rows, size]

    def append(self, tokens: torch.LongTensor, counts: torch.LongTensor, lengths: torch.LongTensor, size: int) -> None:
        """Writes `counts[r]` of the tokens `(R, W)` after `lengths[r]` others."""
        texts, index = self.of_rows(len(tokens), size), torch.arange(tokens.shape[1], device=tokens.device)
        places = (lengths[:, None] + index).masked_fill(index >= counts[:, None], size)
        texts.scatter_(1, places, tokens)


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
    """The texts of a call on the device, kept up with those that the host knows.

    Args:
        memory (`DeviceTexts`): Where they lie.

    Attributes:
        size (`int`): L.
        will_grow (`bool`): A graph has written tokens that the host does not know yet.
    """

    def __init__(self, memory: DeviceTexts):
        self.memory = memory
        self.size: int = 0
        self.will_grow: bool = False
        self._rows: list[int] = []
        self._written: list[int] = []  # tokens of each row that the device has

    def forget(self) -> None:
        """Lets all of them be written anew: rows have left or joined."""
        self._rows = []

    def have_room(self, length: int) -> None:
        """Makes room for rows of that length; a larger one is for texts that grow further."""
        if length > self.size:
            self.size, self._rows = 1 << (length + _ROOM - 1).bit_length(), []

    def write(self, rows: list[int], texts: list[list[int]]) -> None:
        """Writes what the device lacks of the rows' texts.

        Args:
            rows (`list[int]`): Number of each row in the call.
            texts (`list[Sequence[int]]`): Their tokens.
        """
        if self._rows != rows:
            self._rows, self._written = list(rows), [0] * len(rows)
        memory = self.memory.of_rows(padded_rows(len(rows)), self.size)
        for index, (text, written) in enumerate(zip(texts, self._written)):
            if written < len(text):
                memory[index, written : len(text)].copy_(upload(list(text[written:]), memory.device))
                self._written[index] = len(text)

    def have_grown(self, lengths: list[int]) -> None:
        """Takes note of what a graph has written: the rows have these lengths now."""
        self.will_grow, self._written = False, lengths
