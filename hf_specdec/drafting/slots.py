"""Slots of draft networks: their keys and values of each row's text, from the prompt on, and of the current draft.

Networks read entries, each a token and a state. Those with states of the target are kept. Those of drafted nodes,
which have states of the network itself, are forgotten at the end of the cycle. The last kept entry is the anchor's;
its logits propose the first drafted tokens. Slots and positions follow each other alike, so a row's positions are its
slots plus a number, its lead.

Shapes: R active rows (of a graph: with those of padding), T entries of a forward, F nodes of a level that are read,
h hidden size of the network, U its vocabulary, C tokens of a chunk, X size of a state, th hidden size of the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import nn

from ..kernels.cache import WritePlan
from ..kernels.tree_attention import SlotTree, own_bits
from ..modules import kept_for
from ..protocol import Prompt
from ..target.attention import takes_trees
from ..target.cache import SlotCache, SlotStore
from ..target.masks import FULL, Span, TreeMask
from ..transfers import RowNumbers, kept_tensor, upload
from .growth import pick_nodes
from .state import Entries


# Positions of a prompt that one forward reads.
_CHUNK_SIZE = 1024

# Key of a state that the network itself has handed on, in place of the target's states.
DRAFT_STATE = "draft"


class Reading(NamedTuple):
    """Places of the entries that are read next."""

    plan: WritePlan
    slots: torch.LongTensor  # (R, T): where their keys and values go
    positions: torch.LongTensor  # (R, T)
    bound: int | None  # above the size of all positions; unknown in a graph
    is_uniform: bool  # all rows are known to see the same slots


class DraftSlots:
    """A draft's keys and values of each row, whose first entries are in the slots `starts`, after padding."""

    def __init__(
        self,
        network: nn.Module,
        starts: list[int],
        leads: list[int],
        capacity: int,
        store: SlotStore | None = None,
        num_layers: int | None = None,
    ):
        self.network = network
        self.device: torch.device = network.device
        self.cache: SlotCache = SlotCache(capacity)
        self.cache.store = store
        self.cache.plans = kept_for(network, *getattr(network, "shared_modules", ()))
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

    def plan_read(self, count: int) -> Reading:
        """Plans a forward of `count` entries after those of each row; it stays in force until the next plan."""
        plan = self.cache.plan_write(count)
        if plan.offset is None:
            slots = plan.starts(self.device)[:, None] + torch.arange(count, device=self.device)
        else:
            slots = torch.arange(plan.offset, plan.columns, device=self.device).expand(len(self.starts), -1)
        # Positions of padding count downwards from 0.
        bound = plan.columns + max(map(abs, self.leads)) if self.cache.columns is None else None
        is_uniform = plan.offset is not None and not any(self.starts)
        return Reading(plan, slots, slots + self._leads, bound, is_uniform)

    # What a graph reads of them

    @property
    def numbers(self) -> dict[str, RowNumbers]:
        """Integers of the rows."""
        return {"ends": self.cache.lengths, "starts": self.starts, "leads": self.leads}

    @property
    def is_allocated(self) -> bool:
        """Layers have their buffers when they have read for the first time."""
        return all(layer.is_initialized for layer in self.cache.layers)

    def in_a_graph(self, numbers: dict[str, torch.LongTensor], columns: int) -> DraftSlots:
        """The slots as a graph sees them that reads `columns` of them, those in use among them."""
        slots = copy(self)
        slots.cache = self.cache.in_a_graph(numbers["ends"], columns)
        slots.first_slots, slots._leads = numbers["starts"][:, None], numbers["leads"][:, None]
        return slots

    def skip(self, counts: list[int]) -> None:
        """Keeps entries that a graph has read."""
        self.cache.commit(counts)

    # The rows

    def select(self, keep: list[int]) -> DraftSlots:
        self.cache.keep_rows(keep)
        self._place_rows([self.starts[row] for row in keep], [self.leads[row] for row in keep])
        return self

    def cat(self, other: DraftSlots) -> DraftSlots:
        """Takes over the rows of another call after its own, without the padding in front of them."""
        self.cache.join(other.cache, other.starts)
        leads = [lead + start for lead, start in zip(other.leads, other.starts)]
        self._place_rows(self.starts + [0] * len(other.starts), self.leads + leads)
        return self


class DraftEntries(DraftSlots):
    """Slots of a network that hands on a state of its own: kept entries, and after them nodes of the current draft.

    Beside what [`DraftSlots`] needs the network has `spans`, those of its layers, `fuse` and `logits`. Of a draft at
    most `num_nodes` nodes are read.
    """

    def __init__(self, network: nn.Module, *, num_nodes: int = 0, **places: Any):
        super().__init__(network, **places)
        self.dtype: torch.dtype = network.dtype
        self.spans: tuple[Span, ...] = network.spans
        # An additive mask says all, and hides nothing that is before an entry.
        self._sees_all: bool = not self.has_kernel and self.spans == (FULL,)
        self.num_nodes = num_nodes
        self.num_read: int = 0  # nodes of the current draft that have been read

    # Kept entries

    def read(self, new: Entries, predicts: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads new entries, keeps `counts[r]` of them; returns both outputs of the network.

        If it predicts, these are the states `(R, h)` that the last ones hand on, and the logits `(R, U)` after them.
        """
        reading, tokens = self.plan_read(new.tokens.shape[1]), new.tokens.to(self.device)
        mask = self.causal_mask(reading)
        hidden = new.states[DRAFT_STATE] if DRAFT_STATE in new.states else self.network.fuse(new.states)
        how = {"bound": reading.bound, "counts": new.counts if predicts else None, "predicts": predicts}
        outputs = self.network(tokens, hidden, reading.positions, mask, self.cache, **how)
        self.cache.commit(new.counts)
        self.num_read = 0
        return outputs

    def causal_mask(self, reading: Reading) -> Any:
        """Mask of entries that see those before them, by the span where layers differ; `None` for none."""
        count = reading.slots.shape[1]
        if not (reading.is_uniform and self._sees_all):
            return self._chain_mask(reading.plan, count)
        if count == 1:
            return None
        mask = torch.zeros((1, 1, count, reading.plan.columns), dtype=self.dtype, device=self.device)
        mask[..., -count:].fill_(torch.finfo(self.dtype).min).triu_(1)
        return mask

    # Nodes of a draft

    def step(
        self, tokens: torch.LongTensor, hidden: torch.Tensor, parents: torch.LongTensor | slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads the next level of a draft, see [`~drafting.growth.Step`]; the first one follows the anchor."""
        if not self.num_read:
            self._draft = self.plan_read(self.num_nodes)  # a chain of all nodes
            self._depths: tuple[int, ...] = ()  # of the nodes
            # What the last level sees, where it was asked for: bits of nodes, or the mask `(R, F, columns)`.
            self._seen: torch.Tensor | None = None
        first, count = self.num_read, tokens.shape[1]
        depth = len(set(self._depths))
        self._depths += (depth,) * count
        self.num_read += count
        positions, is_chain = self._draft.positions[:, depth : depth + 1], self.num_read == depth + 1
        self.cache.plan_write(count, ahead=first)
        sees_all = is_chain and self._draft.is_uniform and self._sees_all
        mask = None if sees_all else self._level_mask(first, parents, is_chain)
        tokens, bound = tokens.to(self.device), self._draft.bound
        return self.network(tokens, hidden, positions, mask, self.cache, bound=bound, predicts=True)

    # Masks

    def _level_mask(self, first: int, parents: torch.LongTensor | slice, is_chain: bool) -> Any:
        """Mask of the last level, from node `first` on: its parents', nodes of the level before, and each node."""
        draft, starts, before = self._draft, self.first_slots[:, 0], self._seen
        if is_chain and (self.has_kernel or draft.is_uniform):
            # The nodes of a chain that have been read are as good as kept.
            return self._chain_mask(self.cache.plan, 1)
        if self._sees_all:
            slots = draft.slots[:, first : self.num_read]
            if before is None:
                # At first what the last entry of each row sees, and a chain after it.
                last = SlotTree(slots[:, 0] - 1, starts, num_queries=1)
                before = TreeMask(last, FULL).additive(draft.plan.columns, self.dtype)[:, 0]
            self._seen = seen = pick_nodes(before, parents).scatter_(2, slots[..., None], 0.0)
            return seen[:, None, :, : self.cache.plan.columns]
        itself = own_bits(draft.slots.shape[1], self.device)
        bits = itself[None, first : self.num_read]
        if first:
            # The last node of what has been a chain so far sees all of it.
            before = itself[:first].sum(0)[None, None] if before is None else before
            bits = bits | pick_nodes(before, parents)
        self._seen = bits
        depths = kept_tensor(self._depths, self.device)
        return self._mask_of(SlotTree(draft.plan.starts(self.device), starts, bits, depths))

    def _chain_mask(self, plan: WritePlan, count: int) -> Any:
        """Mask of `count` planned entries that see those before them."""
        return self._mask_of(SlotTree(plan.starts(self.device), self.first_slots[:, 0], num_queries=count))

    def _mask_of(self, tree: SlotTree) -> Any:
        """Content of a mask for the kernel, and elsewhere the additive mask `(R, 1, F, columns)`; for each span."""
        masks: Any = {span: TreeMask(tree, span) for span in self.spans}
        if not self.has_kernel:
            masks = {span: mask.additive(self.cache.plan.columns, self.dtype) for span, mask in masks.items()}
        return masks if len(masks) > 1 else masks[self.spans[0]]


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

    def places(self, max_length: int, num_ahead: int) -> dict[str, Any]:
        """Arguments of [`DraftSlots`] for rows of that length, whose drafts take up to `num_ahead` slots after it."""
        room = max_length - self.prompt.input_ids.shape[1]
        capacity = self.count + min(room, 1024) + num_ahead + 1
        return {"starts": self.starts, "leads": self.leads, "capacity": capacity}

    def chunks(self) -> Iterator[Entries]:
        """As many entries as one forward reads: tokens `(R, C)`, and the states `(R, C, th)` before them."""
        tokens, states = self.prompt.input_ids, self.prompt.hidden_states
        first_token = tokens.shape[1] - self.count
        first_state = self.prompt.num_states - 1 - self.count
        for begin in range(0, self.count, _CHUNK_SIZE):
            end = min(begin + _CHUNK_SIZE, self.count)
            chunk = {key: value[:, first_state + begin : first_state + end] for key, value in states.items()}
            counts = [end - begin] * len(self.starts)
            yield Entries(tokens[:, first_token + begin : first_token + end], chunk, counts)
