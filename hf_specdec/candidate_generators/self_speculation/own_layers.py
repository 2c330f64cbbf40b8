"""The target as its own draft model: some of its layers, over its own slots or over a few of them.

The first layers of a model compute the same keys and values whatever comes after them, so a draft of these layers
alone reads those of the committed text where they lie, and writes its own to the slots after it. The verification goes
on from what these layers have made of the anchor and the drafted tokens, as in LayerSkip (Elhoushi et al. 2024,
arXiv:2404.16710); of the last token alone they have made nothing yet. Forwards that are graphs, and those of a model's
own code, read all again. A draft that sees the first slots of a text and its last ones reads copies of these, in a
graph the slots themselves. Keys are rotated when they are written, so each keeps its position.

Shapes: R rows, H key/value heads, C slots that are seen, D head size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...errors import UnsupportedModelError
from ...kernels.tree_attention import Beginning
from ...layers.known import has_known_layers
from ...target.cache import SlotCache
from ...target.forward import SlotOutput
from ...target.lean import EnteredNodes, LeanModel
from ...target.model import SlotModel
from ...target.model_slots import ModelSlots
from ...transfers import RowNumbers, upload


def check_can_draft(model: torch.nn.Module) -> None:
    """Refuses models whose layers cannot be run one by one."""
    # Quantised and adapted linear layers run by their own calls. Other hooks and the like are passed over, which costs
    # acceptance at most.
    reason = None
    if not has_known_layers(model):
        reason = "its layers are not those of a known model of the Llama family"
    elif any(weight.is_meta for weight in model.parameters()):
        reason = "its weights are loaded for each forward (offloaded)"
    if reason:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot draft for itself: {reason}. Use a method that leaves its layers alone, "
            "such as 'recycling'."
        )


class OwnSlots(ModelSlots):
    """A target's slots for its first or all layers; with a window drafts see that and the first `num_sinks` slots."""

    def __init__(self, target: SlotModel, num_layers: int | None, num_sinks: int = 0, window: int | None = None):
        # States that are asked for are those of whole forwards.
        drives = isinstance(target, LeanModel) and not target.states
        super().__init__(target if drives else LeanModel(target.model, target.cache))
        self.target = target
        self.num_layers = num_layers
        self.num_sinks = num_sinks
        self.window = window
        # Graphs read all again.
        self._goes_on: bool = window is None and drives and target.graphs is None
        self._read: list[tuple[torch.LongTensor, torch.Tensor]] = []

    def of_rows(self, lengths: list[int]) -> OwnSlots:
        """The slots of the target's rows as they are now, of these lengths."""
        slots, target, model = copy.copy(self), self.target, copy.copy(self.model)
        model.starts, model.leads = target.starts, target.leads
        model.max_position, model.parts = target.max_position, target.parts
        # Graphs of single forwards are those of the whole target.
        model.graphs, model.states = None, ()
        model.cache = copy.copy(target.cache)
        model.cache.lengths = lengths
        model.keep_layers(self.num_layers)
        slots.model = slots._host_model = model
        slots._read = []
        return slots

    def begin(self, counts: RowNumbers, room: int) -> None:
        """Counts what the target has read in the meantime, and lets a draft of at most `room` tokens see its slots."""
        model = self.model
        model.cache.commit(counts)
        if self.window is None:
            model.states = (model.num_layers,) if self._goes_on else ()
        elif model.cache.columns is None:
            self._copy_seen(room)
        else:
            texts, model.starts = model.starts, torch.maximum(model.starts, model.cache.lengths - self.window)
            model.beginning = Beginning(texts, self.num_sinks, self.num_sinks + self.window)

    def read(self, tokens: torch.Tensor, counts: RowNumbers, logits_from: int = 0) -> SlotOutput:
        output = super().read(tokens, counts, logits_from)
        if self.model.states:
            self._read.append((tokens.to(output.logits.device), output.hidden_states[self.model.num_layers]))
        return output

    @contextmanager
    def drafting(self) -> Iterator[None]:
        with super().drafting():
            yield
        if self._read:
            parts = (torch.cat(parts, dim=1) for parts in zip(*self._read))
            self.target.entered = EnteredNodes(self.model.num_layers, *parts)

    def _copy_seen(self, room: int) -> None:
        """Goes on with copies of the slots that are seen."""
        model, seen = self.model, []
        for start, length in zip(model.starts, model.cache.lengths):
            last = max(length - self.window, start)
            seen.append([*range(start, min(start + self.num_sinks, last)), *range(last, length)])
        counts = list(map(len, seen))
        longest, rows = max(counts), len(seen)
        cache = SlotCache(longest + room)
        cache.plans = model.cache.plans
        is_uniform = seen.count(seen[0]) == rows
        all_layers: list[Any] = model.cache.layers[: model.num_layers]
        # Shorter rows are padded: those slots lie after the row and are written again.
        index = upload([row + [row[-1]] * (longest - len(row)) for row in seen], all_layers[0].keys.device)
        for number, layer in enumerate(all_layers):
            copies = []
            for states in (layer.keys[:rows], layer.values[:rows]):
                places = index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
                copies.append(states.index_select(2, index[0]) if is_uniform else states.gather(2, places))
            cache.update(*copies, number)
        cache.lengths = counts
        lengths = zip(model.leads, model.cache.lengths, counts)
        model.leads = [lead + length - count for lead, length, count in lengths]
        model.cache, model.starts = cache, [0] * rows
