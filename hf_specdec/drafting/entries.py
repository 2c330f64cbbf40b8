"""Slots of networks that read entries, each a token and a state, and hand on a state of their own.

Entries with states of the target are kept. Those of drafted nodes, which have states of the network itself, are
forgotten at the end of the cycle. The last kept entry is the anchor's; its logits propose the first drafted tokens.

Shapes: R active rows, T entries, F nodes of a level that are read, S slots, h hidden size of the network, U its
vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..kernels.tree_attention import SlotTree, own_bits
from ..target.attention import TreeMask
from ..target.masks import FULL, causal_mask, uniform_causal_mask
from ..transfers import RowNumbers, kept_tensor, last_of_each
from .slots import DraftSlots, Entries, Reading


# Key of a state that the network itself has handed on, in place of the target's states.
DRAFT_STATE = "draft"


class DraftEntries(DraftSlots):
    """Keys and values of a draft network: kept entries of each row, and after them the nodes of the current draft.

    Args:
        network (`nn.Module`): The draft; beside what [`DraftSlots`] needs it has `span`, `fuse` and `logits`.
        starts, offsets, capacity, options: As for [`DraftSlots`].

    Attributes:
        num_read (`int`): Nodes of the current draft that have been read.
    """

    num_read: int = 0
    # True if committed tokens have to be read before rows join.
    joins_read = False

    def __init__(self, network: nn.Module, starts: list[int], offsets: list[int], capacity: int, **options: Any):
        super().__init__(network, starts, offsets, capacity, **options)
        self.dtype: torch.dtype = network.dtype
        self.span: Any = network.span

    # Kept entries

    def gather(self, new: Entries) -> Entries:
        """The entries that have to be read when there are new ones: these."""
        return new

    @property
    def gathers_ahead(self) -> bool:
        """Tells whether they can be gathered when the host does not know the number of new ones."""
        return True

    def read_last(self, new: Entries) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads and keeps what has to be read when there are new entries.

        Returns:
            The states `(R, h)` that the last ones hand on, and the logits `(R, U)`.
        """
        new = self.gather(new)
        hidden, output = self.read(new.tokens, self.states_of(new), new.counts)
        return last_of_each(hidden, new.counts), self.network.logits(last_of_each(output, new.counts))

    def states_of(self, new: Entries) -> torch.Tensor:
        """States `(R, T, h)` as the network takes them: made from the target's, or its own."""
        return new.states[DRAFT_STATE] if DRAFT_STATE in new.states else self.network.fuse(new.states)

    def read(
        self, tokens: torch.LongTensor, hidden: torch.Tensor, counts: RowNumbers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads entries after those of each row and keeps the first `counts[r]` of them.

        Args:
            tokens (`torch.LongTensor` of shape `(R, T)`): Tokens, padded on the right.
            hidden (`torch.Tensor` of shape `(R, T, h)`): States.
            counts (`list[int]` or `torch.LongTensor` of shape `(R,)`): Entries of each row.

        Returns:
            Both outputs of the network, of shape `(R, T, h)`: states to hand on, and what `logits` reads.
        """
        here = self.plan_read(tokens.shape[1])
        mask = self.causal_mask(here)
        outputs = self.network(tokens.to(self.device), hidden, here.positions, mask, self.cache, bound=here.bound)
        self.cache.commit(counts)
        return outputs

    # Nodes of a draft

    def begin_draft(self, num_nodes: int) -> None:
        """Prepares for a draft of which at most `num_nodes` nodes are read."""
        self._draft = self.plan_read(num_nodes)
        if self.has_kernel:
            self._ends: torch.Tensor = self.cache.plan.starts(self.device)
        self._is_chain = True  # so far
        self._mask: torch.Tensor | None = None
        self._bits: torch.Tensor | None = None
        self._depths: tuple[int, ...] = ()  # of the nodes
        self._depth = self.num_read = 0

    def read_nodes(
        self, tokens: torch.LongTensor, hidden: torch.Tensor, parents: torch.LongTensor | slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads the next level of the draft.

        Args:
            tokens (`torch.LongTensor` of shape `(R, F)`): The nodes' tokens.
            hidden (`torch.Tensor` of shape `(R, F, h)`): States that their parents have handed on.
            parents (`torch.LongTensor` of shape `(F,)` or `(R, F)`, or `slice`): Their parents among the nodes of the
                level before; of the first level, the anchor.

        Returns:
            Both outputs of the network, of shape `(R, F, h)`.
        """
        first, self.num_read = self.num_read, self.num_read + tokens.shape[1]
        self.cache.plan_write(tokens.shape[1], ahead=first)
        self._is_chain = self._is_chain and tokens.shape[1] == 1
        self._depths += (self._depth,) * tokens.shape[1]
        # Everything, where nothing else lies in the slots.
        sees_all = self._is_chain and self.span == FULL and self._draft.is_uniform and not self.has_kernel
        mask = None if sees_all else self._node_mask(first, parents)
        self._depth += 1
        positions = self._draft.positions[:, self._depth - 1 : self._depth]  # of the first node there
        return self.network(tokens.to(self.device), hidden, positions, mask, self.cache, bound=self._draft.bound)

    # Chains whose tokens are chosen one by one, each read as an entry that the caller takes back later

    def begin_chain(self, new: Entries, width: int, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Does what `read_last` does, as a graph if there is one.

        Args:
            new (`Entries`): Entries, which are kept.
            width (`int`): Most entries of a row that a cycle leaves to be read.
            num_nodes (`int`): Most tokens of a chain that are read.
        """
        output = self.replay(("read",), new, width, num_nodes, type(self).read_last)
        return self.read_last(new) if output is None else output

    def read_next(
        self, tokens: torch.LongTensor, hidden: torch.Tensor, width: int, num_nodes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads the next token of each row's chain, as a graph if there is one.

        Args:
            tokens (`torch.LongTensor` of shape `(R,)`): The tokens.
            hidden (`torch.Tensor` of shape `(R, h)`): States that were handed on before them.
            width, num_nodes (`int`): As for `begin_chain`.

        Returns:
            States `(R, h)` handed on after them, and the logits `(R, U)` there.
        """
        node = Entries(tokens[:, None], {DRAFT_STATE: hidden[:, None]}, [1] * len(tokens))
        return self.begin_chain(node, 1, num_nodes)

    # Masks

    def causal_mask(self, here: Reading) -> torch.Tensor | TreeMask | None:
        """Mask of entries, additive of shape `(R | 1, 1, T, columns)` where there is no kernel; `None` for none."""
        if self.has_kernel:
            return self._chain_mask(here.slots.shape[1])
        if self.span == FULL and here.is_uniform:
            count = here.slots.shape[1]
            return None if count == 1 else uniform_causal_mask(count, here.columns, self.dtype, self.device)
        return causal_mask(here.slots, self.first_slots, here.columns, self.span, self.dtype)

    def _node_mask(self, first: int, parents: torch.LongTensor | slice) -> torch.Tensor | TreeMask:
        """Mask of the next level, nodes `first` to `num_read` of the draft."""
        if self.has_kernel:
            # The nodes of a chain that have been read are as good as kept.
            return self._chain_mask(1) if self._is_chain else TreeMask(self._tree(first, parents), self.span)
        return self._additive_mask(first, parents)[:, None, :, : self.cache.plan.columns]

    def _chain_mask(self, count: int) -> TreeMask:
        """Content of the mask of so many entries, in the slots that are written next."""
        tree = SlotTree(self.cache.plan.starts(self.device), self.first_slots[:, 0], num_queries=count)
        return TreeMask(tree, self.span)

    def _tree(self, first: int, parents: torch.LongTensor | slice) -> SlotTree:
        """The nodes as the next level sees them."""
        own = own_bits(self._draft.slots.shape[1], self.device)
        bits = own[None, first : self.num_read]
        if first:
            # The last node of what has been a chain so far sees all of it.
            before = own[:first].sum(0)[None, None] if self._bits is None else self._bits
            bits = bits | pick_nodes(before, parents)
        self._bits = bits
        return SlotTree(self._ends, self.first_slots[:, 0], bits, kept_tensor(self._depths, self.device))

    def _additive_mask(self, first: int, parents: torch.LongTensor | slice) -> torch.Tensor:
        """Additive mask `(R, F, columns)` of the next level."""
        slots, columns = self._draft.slots[:, first : self.num_read], self._draft.columns
        if self._mask is None:
            # A node sees what its parent sees, and itself. At first, that is what the last entry of each row sees, and
            # a chain after it.
            self._mask = causal_mask(slots[:, :1] - 1, self.first_slots, columns, self.span, self.dtype)[:, 0]
            self._keys = torch.arange(columns, device=self.device).expand(len(slots), -1)
        self._mask = pick_nodes(self._mask, parents)
        self._mask.scatter_(2, slots[..., None], 0.0)
        if self.span != FULL:
            # Nodes of a level have equal positions.
            query = self._draft.slots[:, self._depth : self._depth + 1]
            self._keys = self._keys.scatter(1, slots, query.expand_as(slots))
            distant = self.span.hidden(query, self._keys)
            self._mask.masked_fill_(distant[:, None], torch.finfo(self._mask.dtype).min)
        return self._mask


def pick_nodes(values: torch.Tensor, nodes: torch.LongTensor | slice) -> torch.Tensor:
    """Picks nodes `(F,)` or `(R, F)` from each row's values `(R | 1, F', X)`: `(R | 1, F, X)`."""
    if isinstance(nodes, slice):
        return values[:, nodes]
    if nodes.dim() == 1:
        return values.index_select(1, nodes)
    values = values.expand(len(nodes), -1, -1)
    return values.gather(1, nodes[..., None].expand(-1, -1, values.shape[-1]))
