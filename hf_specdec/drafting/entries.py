"""Slots of networks that read entries, each a token and a state, and hand on a state of their own.

Entries with states of the target are kept. Those of drafted nodes, which have states of the network itself, are
forgotten at the end of the cycle. The last kept entry is the anchor's; its logits propose the first drafted tokens.

Shapes: R active rows, T entries, F nodes of a level that are read, h hidden size of the network, U its vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..kernels.tree_attention import SlotTree, own_bits
from ..target.attention import TreeMask
from ..target.masks import FULL, uniform_causal_mask
from ..transfers import RowNumbers, kept_tensor, last_of_each
from .slots import DraftSlots, Entries, Reading


# Key of a state that the network itself has handed on, in place of the target's states.
DRAFT_STATE = "draft"


class DraftEntries(DraftSlots):
    """Keys and values of a draft network: kept entries of each row, and after them the nodes of the current draft.

    Beside what [`DraftSlots`] needs the network has `span`, `fuse` and `logits`.
    """

    num_read: int = 0  # nodes of the current draft that have been read
    joins_read = False  # committed tokens have to be read before rows join

    def __init__(self, network: nn.Module, starts: list[int], leads: list[int], capacity: int, **options: Any):
        super().__init__(network, starts, leads, capacity, **options)
        self.dtype: torch.dtype = network.dtype
        self.span: Any = network.span

    # Kept entries

    def gather(self, new: Entries) -> Entries:
        """The entries that have to be read when there are new ones: these."""
        return new

    @property
    def gathers_ahead(self) -> bool:
        """They can be gathered when the host does not know the number of new ones."""
        return True

    def read_last(self, new: Entries) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads and keeps new entries; the states `(R, h)` that the last ones hand on, and the logits `(R, U)`."""
        new = self.gather(new)
        hidden, output = self.read(new.tokens, self.states_of(new), new.counts)
        return last_of_each(hidden, new.counts), self.network.logits(last_of_each(output, new.counts))

    def states_of(self, new: Entries) -> torch.Tensor:
        """States `(R, T, h)` as the network takes them: made from the target's, or its own."""
        return new.states[DRAFT_STATE] if DRAFT_STATE in new.states else self.network.fuse(new.states)

    def read(
        self, tokens: torch.LongTensor, hidden: torch.Tensor, counts: RowNumbers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads entries, `(R, T)` and `(R, T, h)`, after those of each row, and keeps the first `counts[r]` of them.

        Returns both outputs of the network, `(R, T, h)`: states to hand on, and what `logits` reads.
        """
        reading, tokens = self.plan_read(tokens.shape[1]), tokens.to(self.device)
        mask = self.causal_mask(reading)
        outputs = self.network(tokens, hidden, reading.positions, mask, self.cache, bound=reading.bound)
        self.cache.commit(counts)
        return outputs

    # Nodes of a draft

    def begin_draft(self, num_nodes: int) -> None:
        """Prepares for a draft of which at most `num_nodes` nodes are read."""
        self._draft = self.plan_read(num_nodes)
        self._ends: torch.Tensor = self.cache.plan.starts(self.device)
        self._is_chain = True  # so far
        self._bits: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None  # (R, F, columns), of the last level
        self._depths: tuple[int, ...] = ()  # of the nodes
        self._depth = self.num_read = 0

    def read_nodes(
        self, tokens: torch.LongTensor, hidden: torch.Tensor, parents: torch.LongTensor | slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads the next level: tokens `(R, F)` after states `(R, F, h)` that their parents have handed on.

        The parents, `(F,)`, `(R, F)` or a slice, are nodes of the level before; of the first level, the anchor.
        Returns both outputs of the network, `(R, F, h)`.
        """
        first, count = self.num_read, tokens.shape[1]
        self.num_read += count
        plan = self.cache.plan_write(count, ahead=first)
        self._is_chain = self._is_chain and count == 1
        self._depths += (self._depth,) * count
        places = slice(self._depth, self._depth + 1)  # of the first node of this depth in a chain
        self._depth += 1
        reading = self._draft._replace(
            slots=self._draft.slots[:, places], positions=self._draft.positions[:, places], columns=plan.columns
        )
        if self._is_chain and (self.has_kernel or self._draft.is_uniform):
            # The nodes of a chain that have been read are as good as kept.
            mask = self.causal_mask(reading)
        elif self.has_kernel or self.span != FULL:
            mask = self._mask_of(self._tree(first, parents))
        else:
            mask = self._grown_mask(first, parents)
        return self.network(tokens.to(self.device), hidden, reading.positions, mask, self.cache, bound=reading.bound)

    # Chains whose tokens are chosen one by one, each read as an entry that the caller takes back later

    def begin_chain(self, new: Entries, width: int, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Does what `read_last` does, as a graph if there is one.

        A cycle leaves at most `width` entries of a row to be read, and reads at most `num_nodes` tokens of a chain.
        """
        output = self.replay(("read",), new, width, num_nodes, type(self).read_last)
        return self.read_last(new) if output is None else output

    def read_next(
        self, tokens: torch.LongTensor, hidden: torch.Tensor, width: int, num_nodes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads the next tokens `(R,)` of the chains, after states `(R, h)`, as a graph if there is one.

        Returns states `(R, h)` handed on after them, and the logits `(R, U)` there.
        """
        node = Entries(tokens[:, None], {DRAFT_STATE: hidden[:, None]}, [1] * len(tokens))
        return self.begin_chain(node, 1, num_nodes)

    # Masks

    def causal_mask(self, reading: Reading) -> torch.Tensor | TreeMask | None:
        """Mask of entries that see those before them; `None` for none."""
        count = reading.slots.shape[1]
        if not self.has_kernel and self.span == FULL and reading.is_uniform:
            return None if count == 1 else uniform_causal_mask(count, reading.columns, self.dtype, self.device)
        return self._mask_of(SlotTree(self.cache.plan.starts(self.device), self.first_slots[:, 0], num_queries=count))

    def _mask_of(self, tree: SlotTree) -> torch.Tensor | TreeMask:
        """Content of a mask for the kernel, and elsewhere the additive mask `(R, 1, F, columns)`."""
        mask = TreeMask(tree, self.span)
        return mask if self.has_kernel else mask.additive(self.cache.plan.columns, self.dtype)

    def _grown_mask(self, first: int, parents: torch.LongTensor | slice) -> torch.Tensor:
        """Additive mask `(R, 1, F, columns)` of the last level, from node `first` on: its parents' one and itself."""
        slots = self._draft.slots[:, first : self.num_read]
        if self._mask is None:
            # At first what the last entry of each row sees, and a chain after it.
            last = SlotTree(slots[:, 0] - 1, self.first_slots[:, 0], num_queries=1)
            self._mask = TreeMask(last, FULL).additive(self._draft.columns, self.dtype)[:, 0]
        self._mask = pick_nodes(self._mask, parents).scatter_(2, slots[..., None], 0.0)
        return self._mask[:, None, :, : self.cache.plan.columns]

    def _tree(self, first: int, parents: torch.LongTensor | slice) -> SlotTree:
        """The nodes of the draft as the last level, from node `first` on, sees them: its parents' nodes and itself."""
        itself = own_bits(self._draft.slots.shape[1], self.device)
        bits = itself[None, first : self.num_read]
        if first:
            # The last node of what has been a chain so far sees all of it.
            before = itself[:first].sum(0)[None, None] if self._bits is None else self._bits
            bits = bits | pick_nodes(before, parents)
        self._bits = bits
        return SlotTree(self._ends, self.first_slots[:, 0], bits, kept_tensor(self._depths, self.device))


def pick_nodes(values: torch.Tensor, nodes: torch.LongTensor | slice) -> torch.Tensor:
    """Picks nodes `(F,)` or `(R, F)` from each row's values `(R | 1, F', X)`: `(R | 1, F, X)`."""
    if isinstance(nodes, slice):
        return values[:, nodes]
    if nodes.dim() == 1:
        return values.index_select(1, nodes)
    values = values.expand(len(nodes), -1, -1)
    return values.gather(1, nodes[..., None].expand(-1, -1, values.shape[-1]))
