"""Tokens that follow a text by a model of their own, such as a draft model: all of them in a single graph.

They are chosen one after the other, each read before the next; or at once, by a model that was trained to predict them
in the places of mask tokens.

Shapes: R rows of a graph, t given tokens of a row, at most G, K tokens that follow, W logits of the model, V tokens of
which distributions are, X size of a state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..drafts.topology import chain_parents, chain_topology
from ..kernels.best import best_tokens
from ..kernels.tree_attention import MAX_NODES, Beginning
from ..logits.processors import ProcessorStack
from ..logits.randomness import RowKeys
from ..logits.sampling import CapturedSampler
from ..transfers import RowNumbers, kept_tensor, last_of_each, take_nodes
from .graphed import Graphed
from .graphs import Variant
from .inputs import NewNodes, NodeInputs
from .model import SlotModel


class Following(NamedTuple):
    """What follows each row, to be used before the next graph runs."""

    tokens: torch.LongTensor  # (R, K)
    probs: torch.FloatTensor | None  # (R, K, V): the distributions they were sampled from, if they were


@dataclass(frozen=True, eq=False)
class Translation:
    """Translates between a model's tokens and those of another vocabulary, among which it drafts."""

    sources: torch.LongTensor  # (V,): the model's token for each of these, W where it has none
    num_readable: int  # tokens that the model's embedding has

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `(R, V)` of a model's `(R, W)`; -inf for tokens that it lacks."""
        return F.pad(logits, (0, 1), value=float("-inf"))[:, self.sources]

    def inputs(self, tokens: torch.LongTensor) -> torch.LongTensor:
        """Drafted tokens of any shape as the model reads them."""
        return self.sources[tokens].clamp_(max=self.num_readable - 1)


@dataclass(frozen=True)
class Choose:
    """Chooses a token by a model's logits, and says what the model reads in its place."""

    width: int  # of the best tokens, those that may be chosen: the first ones
    num_readable: int  # tokens that the model's embedding has; others are read as token 0
    vocab_size: int  # V
    stack: ProcessorStack | None = field(default=None, compare=False)  # samples through these, else the best one
    translation: Translation | None = field(default=None, compare=False)  # of a model with another vocabulary

    @property
    def key(self) -> tuple[Any, ...]:
        """Whatever of it is built into a graph."""
        settings = None if self.stack is None else self.stack.signature
        return (self, *(Variant(part) for part in (settings, self.translation) if part is not None))

    def __call__(self, logits: torch.Tensor, uniforms: torch.Tensor | None, index: int) -> tuple[torch.Tensor, ...]:
        """Token `index` of each row `(R,)` by logits `(R, W)`; sampled by numbers `(R, K)`, with its distribution."""
        if self.translation is not None:
            logits = self.translation.logits(logits)
        if self.stack is None or uniforms is None:
            return (best_tokens(logits[:, : self.width]),)
        sampler = CapturedSampler(self.stack, uniforms, self.vocab_size)
        return sampler.draw(sampler.scores(logits, [], []), [], [], index)

    def readable(self, tokens: torch.LongTensor) -> torch.LongTensor:
        if self.translation is not None:
            return self.translation.inputs(tokens)
        return tokens.masked_fill(tokens >= self.num_readable, 0) if self.num_readable < self.width else tokens


# Embeds tokens `(R, T)` together with the states that belong to them, each `(R, T, X)`.
Embed = Callable[[torch.LongTensor, dict[Any, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Continuing:
    """Reads tokens after each row's committed slots, and chooses those that follow."""

    num_tokens: int  # K
    choose: Choose
    most_given: int  # G
    mask_token: int | None = None  # the token in whose places all are predicted at once
    num_layers: int | None = None  # the model's first layers, if it runs these alone
    # For a model that reads states beside the tokens: masks have those of the last given token. Of two that are equal
    # one graph serves both.
    embed: Embed | None = None
    # How many slots at the beginning and at the end of a text are seen, where not all are.
    ends: tuple[int, int] | None = None

    def run(
        self,
        model: SlotModel,
        tokens: torch.LongTensor,
        counts: RowNumbers,
        keys: RowKeys | None = None,
        states: Callable[[], dict[Any, torch.Tensor]] = dict,
        more: torch.LongTensor | None = None,
    ) -> Following | None:
        """Runs the graph; `None` where there is none to run.

        The given tokens are kept, where their number is known, and those that follow are not.

        Args:
            model (`SlotModel`): The model.
            tokens (`torch.LongTensor` of shape `(R, t)`): Tokens, padded on the right.
            counts (`RowNumbers`): Tokens of each row; in a tensor where the host does not know them.
            keys (`RowKeys`, *optional*): Of the numbers that draw the tokens; the positions are those of the first
                given tokens.
            states (`Callable`): Returns those of the given tokens, each `(R, t, X)`; asked for if the graph has not
                run ahead.
            more (`torch.LongTensor` of shape `(R,)`, *optional*): By how much rows are longer than the host knows.
        """
        (rows, num_given), device = tokens.shape, tokens.device
        width = self.most_given if self.mask_token is None else self.most_given + self.num_tokens - 1
        if model.graphs is None or num_given > self.most_given or width > MAX_NODES:
            return None
        padding = kept_tensor((0,) * (width - num_given), device).expand(rows, -1)
        num_more = [count - 1 for count in counts] if isinstance(counts, list) else counts - 1
        states = cache(states)
        parents = chain_parents(width - 1, device)
        new = NewNodes([tokens, padding], parents, num_more, keys=keys, more=more, states=states)
        embed = () if self.embed is None else (Variant(self.embed),)
        sizes = self.num_tokens, width, self.mask_token, self.num_layers, self.ends
        output = Graphed(model).run(
            ("continue", *sizes, *embed, *self.choose.key),
            new,
            lambda size: NodeInputs(size, width, device, states(), self.most_given),
            self._read,
            width + self.num_tokens - 1 + (0 if more is None else model.most_committed),
        )
        if output is None:
            return None
        (following,) = output
        if isinstance(counts, list):
            model.cache.plan_write(num_given)
            model.cache.commit(counts)
        return Following(*(None if values is None else values[:rows] for values in following))

    def _read(self, model: SlotModel, inputs: NodeInputs) -> tuple[Following]:
        tokens, topology, draft = inputs.read()
        count = draft.num_nodes + 1
        if self.ends is not None:
            # The first slots of each text and the last committed ones.
            num_first, window = self.ends
            texts, model.starts = model.starts, torch.maximum(model.starts, model.cache.lengths - window)
            model.beginning = Beginning(texts, num_first, num_first + window)
        uniforms = None if self.choose.stack is None else inputs.keys.drafts_after(count, self.num_tokens)
        if self.mask_token is not None:
            places = torch.arange(tokens.shape[1], device=count.device)
            tokens = torch.where(places >= count[:, None], self.mask_token, tokens)
            if self.embed is not None:
                # After the states of the given tokens come those of the last one.
                index = torch.minimum(places, count[:, None] - 1)
                states = {key: take_nodes(values, index) for key, values in inputs.tensors.items()}
                tokens = self.embed(tokens, states)
        output, chosen, read = model.forward(tokens, topology), [], count
        logits = last_of_each(output.logits, count)
        while True:
            chosen.append(self.choose(logits, uniforms, len(chosen)))
            if len(chosen) == self.num_tokens:
                break
            if self.mask_token is not None:
                logits = last_of_each(output.logits, count + len(chosen))
                continue
            model.cache.commit(read)
            token = self.choose.readable(chosen[-1][0])[:, None]
            logits, read = model.forward(token, chain_topology(0, token.device)).logits[:, -1], [1] * len(token)
        tokens, *probs = (torch.stack(parts, dim=1) for parts in zip(*chosen))
        return (Following(tokens, probs[0] if probs else None),)
