"""Masks and positions of a verification: what each node of a draft may see among the slots.

A node sees the committed slots of its row and its own ancestors among the new ones. Sliding windows and chunks are
decided by position, so a branch of a tree is limited like the text it stands for. The same is said by additive masks,
and by a `SlotTree` and a span for attention that needs no mask.

Shapes: R rows, T nodes, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from ..drafts import TreeTopology
from ..kernels.ancestors import grow_ancestors
from ..kernels.tree_attention import Beginning, SlotTree, first_slots, pack_ancestors, unpack_ancestors
from ..threads import cached_property
from ..transfers import keepers, kept_on_device, kept_tensor, upload


@dataclass(frozen=True)
class Span:
    """Reach of a layer's attention: everything, the last `size` positions, or the current chunk of as many."""

    kind: str = "full"
    size: int = 0

    def hidden(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
        """Mask of the positions `key` that positions `query` may not see (broadcast), or `None` for none."""
        if self.kind == "sliding":
            return query - key >= self.size
        if self.kind == "chunked":
            return query // self.size != key // self.size
        return None

    @property
    def limits(self) -> dict[str, int]:
        """The span as arguments of [`tree_attention`]."""
        return {} if self.kind == "full" else {"window" if self.kind == "sliding" else "chunk": self.size}


FULL = Span()


@dataclass
class RowState:
    """Places of the active rows in the slots: lists, or in a graph tensors `(R,)`, of which the host knows nothing."""

    lengths: Any  # slots in use, left padding included
    starts: Any  # first real slot of each row
    leads: Any  # position id of a token less its slot
    # (R, S'): which of the first slots a row never sees, wherever they lie: masked tokens of the prompt. They count
    # where windows and chunks count slots.
    hidden: torch.BoolTensor | None = field(default=None, compare=False)
    beginning: Beginning | None = field(default=None, compare=False)  # that of [`SlotTree`]
    # The lengths on devices, which may be shared with others that need them there.
    device_lengths: dict[torch.device, torch.LongTensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def are_known(self) -> bool:
        """The host knows where they stand."""
        return not isinstance(self.lengths, torch.Tensor)

    @property
    def is_uniform(self) -> bool:
        """All are known to see the same slots."""
        is_alike = isinstance(self.lengths, list) and len(set(self.lengths)) == 1 and not any(self.starts)
        return is_alike and self.hidden is None

    def lengths_on(self, device: torch.device) -> torch.LongTensor:
        """The lengths `(R,)`, copied to a device once."""
        if device not in self.device_lengths:
            self.device_lengths[device] = upload(self.lengths, device)
        return self.device_lengths[device]

    def starts_on(self, device: torch.device) -> torch.LongTensor:
        """The starts `(R,)`, which stay the same from cycle to cycle."""
        return kept_tensor(tuple(self.starts), device) if self.are_known else self.starts

    def first_positions_on(self, device: torch.device) -> torch.LongTensor:
        """Position ids `(R,)` of the tokens after the slots in use."""
        # Only the lengths change from cycle to cycle.
        leads = kept_tensor(tuple(self.leads), device) if self.are_known else self.leads
        return self.lengths_on(device) + leads

    def visible(self, slots: torch.LongTensor, end: torch.LongTensor) -> torch.BoolTensor:
        """Mask `(R, S')` of the slots `(S',)` that each row sees before `end` `(R, 1)`."""
        visible = (slots >= self.starts_on(slots.device)[:, None]) & (slots < end)
        if self.hidden is None:
            return visible
        width = self.hidden.shape[1]
        hidden = self.hidden.to(slots.device)[:, slots.clamp(max=width - 1)]
        return visible & ~(hidden & (slots < width))


def node_positions(topology: TreeTopology, rows: RowState) -> torch.LongTensor:
    """Position ids `(R, T)`."""
    depths = topology.depths
    if rows.are_known:
        first = [length + lead for length, lead in zip(rows.lengths, rows.leads)]
        if len(set(first)) == 1:
            # The sum lies in memory row by row, as models want their inputs; of a sum they would share one row.
            return depths.expand(len(first), -1) + first[0]
    return rows.first_positions_on(depths.device)[:, None] + depths


def slot_tree(topology: TreeTopology, rows: RowState) -> SlotTree:
    """The nodes of a forward for the tree attention kernel."""
    device = topology.depths.device
    lengths, starts, bits = rows.lengths_on(device), rows.starts_on(device), ancestor_bits(topology)
    return SlotTree(lengths, starts, bits, topology.depths, beginning=rows.beginning)


class GrownTopology(TreeTopology):
    """A topology of at most 64 nodes in a graph, made by one kernel of draft parents `(R, T - 1)`.

    The host does not know the parents. `bits` `(R, T)` are the ancestors as [`SlotTree`] has them.
    """

    draft_parents: torch.LongTensor
    bits: torch.LongTensor

    def __init__(self, draft_parents: torch.LongTensor):
        bits, depths = grow_ancestors(draft_parents)
        # Not one by one: topologies are frozen.
        vars(self).update(draft_parents=draft_parents, bits=bits, depths=depths, max_depth=draft_parents.shape[-1])

    # Asked for where no kernel runs.

    @cached_property
    def parents(self) -> torch.LongTensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return F.pad(self.draft_parents + 1, (1, 0))

    @cached_property
    def ancestors(self) -> torch.BoolTensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return unpack_ancestors(self.bits)


def ancestor_bits(topology: TreeTopology) -> torch.LongTensor:
    """The ancestors of [`SlotTree`], `(T,)` or `(R, T)`."""
    bits = vars(topology).get("bits")
    if bits is None:
        # They live as long as the topology, which a graph that reads them holds on to.
        bits = vars(topology)["bits"] = pack_ancestors(topology.ancestors)
    return bits


def additive_mask(hidden: torch.BoolTensor, dtype: torch.dtype) -> torch.Tensor:
    """The lowest number of `dtype` where something is hidden, 0 elsewhere."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)


def uniform_causal_mask(count: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Additive mask `(1, 1, count, columns)` of tokens in the last slots that see all slots up to their own."""
    mask = torch.zeros((1, 1, count, columns), dtype=dtype, device=device)
    new_slots = mask[..., columns - count :]
    new_slots.copy_(torch.full_like(new_slots, torch.finfo(dtype).min).triu_(1))
    return mask


def node_masks(
    topology: TreeTopology,
    rows: RowState,
    columns: int,
    spans: tuple[Span, ...],
    dtype: torch.dtype,
    repeats: int = 1,
) -> list[torch.Tensor]:
    """Additive masks of S = `columns` slots, one for each span.

    The T rows of a mask follow each other `repeats` times, for query heads that are folded into nodes. Shapes are
    `(1, 1, repeats * T, S)` where all rows are known to be alike, else `(R, 1, repeats * T, S)`.
    """
    build = _ragged_mask
    if topology.depths.dim() == 1 and rows.is_uniform:
        build = _uniform_mask
    elif topology.depths.dim() == 1 and rows.hidden is None and rows.are_known:
        build = _shifted_mask
    return [build(topology, rows, columns, span, dtype, repeats) for span in spans]


@lru_cache(maxsize=256)
def _block(topology: TreeTopology, dtype: torch.dtype, repeats: int) -> torch.Tensor:
    """The `(repeats * T, T)` part of the mask among the new nodes."""
    return additive_mask(~topology.ancestors, dtype).repeat(repeats, 1)


def _uniform_mask(
    topology: TreeTopology, rows: RowState, columns: int, span: Span, dtype: torch.dtype, repeats: int
) -> torch.Tensor:
    length, nodes = rows.lengths[0], topology.depths.shape[0]
    device = topology.depths.device
    mask = torch.zeros((1, 1, repeats * nodes, columns), dtype=dtype, device=device)
    mask[..., length:] = _block(topology, dtype, repeats)
    if span.kind != "full":
        keys = torch.arange(columns, device=device)
        keys[length:] = topology.depths + length
        hidden = span.hidden((topology.depths + length)[:, None], keys)
        mask.masked_fill_(hidden.repeat(repeats, 1), torch.finfo(dtype).min)
    return mask


def _shifted_mask(
    topology: TreeTopology, rows: RowState, columns: int, span: Span, dtype: torch.dtype, repeats: int
) -> torch.Tensor:
    """Mask of rows that share a topology: one picture in all of them, at the end of each row's text."""
    padding_ends, text_ends = max(rows.starts), min(rows.lengths)
    if span.kind != "full" or padding_ends > text_ends:
        return _ragged_mask(topology, rows, columns, span, dtype, repeats)
    device, width = topology.depths.device, columns - text_ends
    num_rows, nodes = len(rows.lengths), topology.depths.shape[0]
    mask = torch.zeros((num_rows, 1, repeats * nodes, columns), dtype=dtype, device=device)
    if padding_ends:
        mask[..., :padding_ends] = _padding_mask(tuple(rows.starts), dtype, device)
    # A power of two: pictures are kept, and there are few then.
    margin = 1 << (width - 1).bit_length()
    shift = text_ends + margin - rows.lengths_on(device)
    places = shift[:, None] + torch.arange(width, device=device)
    picture = _picture(topology, dtype, repeats, margin).index_select(1, places.view(-1))
    mask[:, 0, :, text_ends:] = picture.view(-1, num_rows, width).transpose(0, 1)
    return mask


@lru_cache(maxsize=16)
def _picture(topology: TreeTopology, dtype: torch.dtype, repeats: int, margin: int) -> torch.Tensor:
    """`margin` slots of text, the new nodes, and as many slots after them, as the nodes see them."""
    block = _block(topology, dtype, repeats)
    text = block.new_zeros((block.shape[0], margin))
    return torch.cat((text, block, torch.full_like(text, torch.finfo(dtype).min)), dim=1)


keepers += [_block, _picture]


@kept_on_device
def _padding_mask(starts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`(R, 1, 1, slots)`: hides what lies in front of each row, for the slots up to the last start."""
    hidden = torch.arange(max(starts), device=device) < upload(starts, device)[:, None]
    return additive_mask(hidden, dtype)[:, None, None]


def _ragged_mask(
    topology: TreeTopology, rows: RowState, columns: int, span: Span, dtype: torch.dtype, repeats: int
) -> torch.Tensor:
    device = topology.depths.device
    mask = torch.zeros((len(rows.lengths), topology.depths.shape[-1], columns), dtype=dtype, device=device)
    # Ranges of slots that not every node of every row sees; of a long text most slots lie outside of them.
    mixed = [(0, columns)]
    if span.kind == "full" and rows.are_known:
        padding_ends = max(rows.starts) if rows.hidden is None else rows.hidden.shape[1]
        text_ends = min(rows.lengths)
        mixed = [(0, padding_ends), (text_ends, columns)] if padding_ends < text_ends else mixed
    for first, last in mixed:
        visible = _visible(topology, rows, torch.arange(first, last, device=device), span)
        mask[:, :, first:last].masked_fill_(~visible, torch.finfo(dtype).min)
    return mask[:, None].repeat(1, 1, repeats, 1) if repeats > 1 else mask[:, None]


def _visible(topology: TreeTopology, rows: RowState, slots: torch.LongTensor, span: Span) -> torch.BoolTensor:
    """Mask `(R, T, slots)` of the given slots that each node sees."""
    lengths, starts = rows.lengths_on(slots.device)[:, None], rows.starts_on(slots.device)[:, None]
    num_rows, nodes = len(rows.lengths), topology.depths.shape[-1]
    committed = rows.visible(slots, lengths)
    node_of_slot = (slots - lengths).clamp(0, nodes - 1)
    is_node = (slots >= lengths) & (slots < lengths + nodes)
    ancestors = topology.ancestors.expand(num_rows, nodes, nodes)
    among_nodes = ancestors.gather(2, node_of_slot[:, None].expand(-1, nodes, -1)) & is_node[:, None]
    if rows.beginning is not None:
        committed |= first_slots(rows.beginning, slots, starts)
    visible = committed[:, None] | among_nodes
    if span.kind == "full":
        return visible
    depths = topology.depths.expand(num_rows, nodes)
    first = lengths - starts
    keys = torch.where(is_node, first + depths.gather(1, node_of_slot), slots - starts)
    distant = span.hidden((first + depths)[:, :, None], keys[:, None])
    return visible if distant is None else visible & ~distant
