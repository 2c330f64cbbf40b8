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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..drafts import chain_topology
from ..errors import UnsupportedModelError
from ..logits.randomness import RowKeys
from ..transfers import upload
from .cache import SlotCache
from .following import Choose, Continuing, Following
from .graphs import CallGraphs
from .lean import EnteredNodes, LeanModel, has_known_layers
from .model import SlotModel


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


NextLogits = Callable[[torch.LongTensor], torch.Tensor]


class OwnDrafts:
    """Runs a target's first layers, or all, for drafts in one call.

    With a window the first `num_sinks` slots of a text are seen, and those of the window at its end.
    """

    def __init__(self, num_layers: int | None = None, num_sinks: int = 0, window: int | None = None):
        self.num_layers: int | None = num_layers
        self.num_sinks: int = num_sinks
        self.window: int | None = window
        self._lean: LeanModel | None = None
        self._following: Following | None = None

    @contextmanager
    def begin(self, target: SlotModel, room: int) -> Iterator[NextLogits]:
        """Lends the layers for a draft of at most `room` tokens, between two verifications.

        The function takes tokens `(R,)`, which follow the committed ones and those that it has taken, and returns
        logits `(R, V)`.
        """
        model = self._layers_of(target)
        if self.window is not None:
            model.cache, model.leads = self._seen(target, model.num_layers, room)
            model.starts, model.hidden = [0] * len(target.starts), None
        can_go_on = self.window is None and isinstance(target, LeanModel) and target.graphs is None
        can_go_on = can_go_on and not target.states
        model.states = (model.num_layers,) if can_go_on else ()
        lengths, device = list(target.cache.lengths), model.model.device
        read: list[tuple[torch.LongTensor, torch.Tensor]] = []

        def next_logits(tokens: torch.LongTensor) -> torch.Tensor:
            output = model.forward(tokens.to(device)[:, None], chain_topology(0, device))
            model.commit([1] * len(tokens))
            if can_go_on:
                read.append((tokens.to(device)[:, None], output.hidden_states[model.num_layers]))
            return output.logits[:, -1]

        try:
            yield next_logits
        finally:
            target.cache.lengths = lengths
        if read:
            target.entered = EnteredNodes(model.num_layers, *(torch.cat(parts, dim=1) for parts in zip(*read)))

    def at_once(
        self,
        target: SlotModel,
        graphs: CallGraphs,
        anchors: torch.LongTensor,
        choose: Choose,
        count: int,
        keys: RowKeys | None,
        more: torch.LongTensor | None = None,
    ) -> Following | None:
        """Tokens that follow the anchors `(R,)`, from one graph of the target; `None` where there is none to run.

        The graphs are those of the target, for drafts; all else is as for [`Continuing`].
        """
        ends = None if self.window is None else (self.num_sinks, self.window)
        drafting = Continuing(count, choose, most_given=1, num_layers=self.num_layers, ends=ends)
        model, lengths, num_replays = self._layers_of(target), list(target.cache.lengths), graphs.num_replays
        model.states, model.graphs, model.most_committed = (), graphs, target.most_committed
        try:
            following = drafting.run(model, anchors[:, None], [1] * len(anchors), keys, more=more)
        finally:
            target.cache.lengths = lengths
        if following is None or graphs.num_replays == num_replays:
            # Of one that has run ahead the verification may have overwritten the output: they have the same memory.
            return following and self._following
        self._following = Following(*(None if values is None else values.clone() for values in following))
        return self._following

    def _layers_of(self, target: SlotModel) -> LeanModel:
        """The layers, over the target's slots."""
        driver = target
        if not isinstance(target, LeanModel) or target.states:
            if self._lean is None or self._lean.model is not target.model:
                self._lean = LeanModel(target.model, target.cache)
            driver = self._lean
        model = copy.copy(driver)
        model.starts, model.leads, model.hidden = target.starts, target.leads, target.hidden
        model.max_position, model.parts = target.max_position, target.parts
        # Graphs of single forwards are those of the whole target.
        model.graphs, model.cache = None, target.cache
        model.keep_layers(self.num_layers)
        return model

    def _seen(self, target: SlotModel, num_layers: int, room: int) -> tuple[SlotCache, list[int]]:
        """Copies of the slots that drafts see, and how far each row's positions lie from them."""
        spans = [
            _slots(start, length, self.num_sinks, self.window)
            for start, length in zip(target.starts, target.cache.lengths)
        ]
        counts = [sum(map(len, parts)) for parts in spans]
        longest, rows = max(counts), len(spans)
        cache = SlotCache(longest + room)
        is_uniform, index = spans.count(spans[0]) == rows, None
        layers: list[Any] = target.cache.layers[:num_layers]
        for number, layer in enumerate(layers):
            keys, values = layer.keys[:rows], layer.values[:rows]
            if is_uniform:
                parts = [slice(part.start, part.stop) for part in spans[0] if part]
                visible = [torch.cat([states[:, :, part] for part in parts], dim=2) for states in (keys, values)]
            else:
                if index is None:
                    # Shorter rows are padded: those slots lie after the row and are written again.
                    flat = [[*first, *last] for first, last in spans]
                    index = upload([row + [row[-1]] * (longest - len(row)) for row in flat], keys.device)
                places = index[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
                visible = [keys.gather(2, places), values.gather(2, places[..., : values.shape[3]])]
            cache.update(*visible, number)
        cache.start_slots(rows)
        cache.lengths = counts
        return cache, [
            lead + length - count for lead, length, count in zip(target.leads, target.cache.lengths, counts)
        ]


def _slots(start: int, length: int, num_sinks: int, window: int) -> tuple[range, range]:
    """The slots of a row that are seen: the first ones, and the last ones before `length`."""
    last = max(length - window, start)
    return range(start, min(start + num_sinks, last)), range(last, length)
