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
from ..kernels import tree_attention as kernels
from ..kernels.ancestors import grow_ancestors
from ..kernels.tree_attention import Beginning, SlotTree, pack_words, visible_slots
from ..threads import cached_property
from ..transfers import RowNumbers, keepers, kept_tensor, upload


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
        """The span as arguments of [`tree_attention_triton`]."""
        return {} if self.kind == "full" else {"window" if self.kind == "sliding" else "chunk": self.size}


FULL = Span()


_NO_LIMIT = torch.iinfo(torch.long).max


@dataclass
class RowPlaces:
    """Places of the active rows in the slots: lists, or in a graph tensors `(R,)`, of which the host knows nothing."""

    lengths: Any  # slots in use, left padding included
    starts: Any  # first real slot of each row
    leads: Any  # position id of a token less its slot
    # Last position id that a valid node may have. Padding nodes lie after it in rows that are nearly full, and a table
    # of positions may end there.
    max_position: Any = None
    beginning: Beginning | None = field(default=None, compare=False)  # that of [`SlotTree`]
    # The lengths on devices, which may be shared with others that need them there.
    device_lengths: dict[torch.device, torch.LongTensor] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.are_known: bool = isinstance(self.lengths, list)  # the host knows where they stand
        self.is_uniform: bool = self.are_known and len(set(self.lengths)) == 1 and not any(self.starts)

    @property
    def numbers(self) -> dict[str, RowNumbers]:
        """The integers of the rows, as a graph reads them."""
        limit = _NO_LIMIT if self.max_position is None else self.max_position
        limits = [limit] * len(self.lengths)
        return {"lengths": self.lengths, "starts": self.starts, "leads": self.leads, "max_positions": limits}

    @classmethod
    def in_a_graph(cls, numbers: dict[str, torch.LongTensor], more: torch.LongTensor | int = 0) -> RowPlaces:
        """The places by the integers that a graph reads, of rows that are by `more` longer than these say."""
        return cls(numbers["lengths"] + more, numbers["starts"], numbers["leads"], numbers["max_positions"][:, None])

    def lengths_on(self, device: torch.device) -> torch.LongTensor:
        """The lengths `(R,)`, copied to a device once."""
        if device not in self.device_lengths:
            self.device_lengths[device] = upload(self.lengths, device)
        return self.device_lengths[device]

    def starts_on(self, device: torch.device) -> torch.LongTensor:
        """The starts `(R,)`, which stay the same from cycle to cycle."""
        return kept_tensor(tuple(self.starts), device) if self.are_known else self.starts


def node_positions(topology: TreeTopology, rows: RowPlaces) -> torch.LongTensor:
    """Position ids `(R, T)`."""
    depths, leads = topology.depths, rows.leads
    firsts = [length + lead for length, lead in zip(rows.lengths, leads)] if rows.are_known else []
    if len(set(firsts)) == 1:
        # The sum lies in memory row by row, as models want their inputs; of a sum they would share one row.
        positions = depths.expand(len(firsts), -1) + firsts[0]
    else:
        # Only the lengths change from cycle to cycle.
        leads = kept_tensor(tuple(leads), depths.device) if rows.are_known else leads
        positions = (rows.lengths_on(depths.device) + leads)[:, None] + depths
    return positions if rows.max_position is None else positions.clamp(max=rows.max_position)


def slot_tree(topology: TreeTopology, rows: RowPlaces) -> SlotTree:
    """The nodes of a forward for the tree attention kernel."""
    device = topology.depths.device
    lengths, starts, words = rows.lengths_on(device), rows.starts_on(device), ancestor_words(topology)
    return SlotTree(lengths, starts, words, topology.depths, beginning=rows.beginning)


class GrownTopology(TreeTopology):
    """A topology of at most 64 nodes in a graph, by one kernel, of parents `(R, T - 1)` unknown to the host."""

    draft_parents: torch.LongTensor
    words: torch.LongTensor  # (R, T, 1): the ancestors as [`SlotTree`] has them

    def __init__(self, draft_parents: torch.LongTensor):
        bits, depths = grow_ancestors(draft_parents)
        # Not one by one: topologies are frozen.
        words, max_depth = bits[..., None], draft_parents.shape[-1]
        vars(self).update(draft_parents=draft_parents, words=words, depths=depths, max_depth=max_depth)

    # Asked for where no kernel runs.

    @cached_property
    def parents(self) -> torch.LongTensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return F.pad(self.draft_parents + 1, (1, 0))

    @cached_property
    def ancestors(self) -> torch.BoolTensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self.words >> torch.arange(self.words.shape[1], device=self.words.device) & 1).bool()


def ancestor_words(topology: TreeTopology) -> torch.LongTensor:
    """The ancestors of [`SlotTree`], `(R | 1, T, W)`."""
    words = vars(topology).get("words")
    if words is None:
        ancestors = topology.ancestors
        words = pack_words(ancestors if ancestors.dim() == 3 else ancestors[None])
        # They live as long as the topology, which a graph that reads them holds on to.
        vars(topology)["words"] = words
    return words


def additive_mask(hidden: torch.BoolTensor, dtype: torch.dtype) -> torch.Tensor:
    """The lowest number of `dtype` where something is hidden, 0 elsewhere."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)


@dataclass(frozen=True)
class TreeMask:
    """Content of an additive mask, for attention that needs none: the nodes of a forward, and a layer's span."""

    tree: SlotTree
    span: Span

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of shape `(R, T, H, D)`; the arguments are those of [`tree_attention_triton`]."""
        return kernels.tree_attention_triton(
            query, key, value, self.tree, scale, softcap=softcap or 0.0, sinks=sinks, **self.span.limits
        )

    def additive(self, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """The mask `(R, 1, T, columns)`, made of nothing but the tensors of the tree."""
        return additive_mask(~visible_slots(self.tree, columns, **self.span.limits), dtype)[:, None]

    def stand_in(self, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """A mask without numbers, to be handed over where all attention goes by the tree; reading it raises."""
        shape = (len(self.tree.lengths), 1, self.tree.num_queries, columns)
        return torch.empty(shape, dtype=dtype, device="meta")


def node_masks(
    topology: TreeTopology,
    rows: RowPlaces,
    columns: int,
    spans: tuple[Span, ...],
    dtype: torch.dtype,
    repeats: int = 1,
) -> list[torch.Tensor]:
    """Additive masks `(R | 1, 1, repeats * T, columns)`, one for each span, for nodes with `repeats` query heads."""
    are_alike = topology.depths.dim() == 1 and rows.is_uniform
    if are_alike:
        # They share a mask.
        rows = RowPlaces(rows.lengths[:1], rows.starts[:1], rows.leads[:1])
    device, num_nodes = topology.depths.device, topology.depths.shape[-1]
    masks: list[torch.Tensor] = []
    for span in spans:
        # Within a whole span all is seen.
        is_whole = span == FULL or columns <= span.size
        if not (are_alike or (rows.are_known and is_whole)):
            mask = TreeMask(slot_tree(topology, rows), span).additive(columns, dtype)
            masks.append(mask.repeat(1, 1, repeats, 1) if repeats > 1 else mask)
            continue
        # Of a long text most slots are seen by every node of every row: those in front of where the first row ends.
        text_ends = min(rows.lengths)
        mask = torch.zeros((len(rows.lengths), 1, repeats * num_nodes, columns), dtype=dtype, device=device)
        masks.append(mask)
        if are_alike:
            mask[..., text_ends:] = _block(topology, dtype, repeats)
            if not is_whole:
                positions, keys = topology.depths + text_ends, torch.arange(columns, device=device)
                keys[text_ends:] = positions
                hidden = span.hidden(positions[:, None], keys).repeat(repeats, 1)
                mask.masked_fill_(hidden, torch.finfo(dtype).min)
            continue
        lengths, starts = rows.lengths_on(device) - text_ends, rows.starts_on(device)
        if padding_ends := min(max(rows.starts), text_ends):
            is_padding = torch.arange(padding_ends, device=device) < starts[:, None]
            mask[..., :padding_ends].masked_fill_(is_padding[:, None, None], torch.finfo(dtype).min)
        if topology.depths.dim() == 1 and max(rows.starts) <= text_ends:
            # One picture in all rows, at the end of each row's text: slots of text, the nodes, and slots after them.
            width = columns - text_ends
            picture = F.pad(_block(topology, dtype, repeats), (width, 0))
            picture = F.pad(picture, (0, width), value=torch.finfo(dtype).min).unfold(1, width, 1)
            mask[:, 0, :, text_ends:] = picture[:, width - lengths].transpose(0, 1)
        else:
            after = SlotTree(lengths, (starts - text_ends).clamp(min=0), ancestor_words(topology), topology.depths)
            mask[..., text_ends:] = TreeMask(after, FULL).additive(columns - text_ends, dtype).repeat(1, 1, repeats, 1)
    return masks


@lru_cache(maxsize=256)
def _block(topology: TreeTopology, dtype: torch.dtype, repeats: int) -> torch.Tensor:
    """The `(repeats * T, T)` part of the mask among the new nodes."""
    return additive_mask(~topology.ancestors, dtype).repeat(repeats, 1)


keepers.append(_block)
